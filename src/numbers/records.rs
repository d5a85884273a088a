//! How state is stored that is no array of numbers.

use super::DType;
use super::codes::{Code, RECORD};
use super::low_bits::{LOW_RECORD, lows_of, records_of};

/// What the records of a state tensor are: bytes, some for each [block](super::codes::BLOCK) of elements.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Records {
    /// Numbers in 8 bits.
    Codes(Code),
    /// What bf16s lack of f32s, in units of the last place of these.
    LowBits,
    /// Nothing: each number is 0, in this dtype.
    Zeros(DType),
}

impl Records {
    /// The dtype of the numbers.
    pub(crate) fn dtype(self) -> DType {
        if let Records::Zeros(dtype) = self { dtype } else { DType::F32 }
    }

    /// The bytes of a record.
    pub(crate) const fn bytes(self) -> usize {
        match self {
            Records::Codes(_) => RECORD,
            Records::LowBits => LOW_RECORD,
            Records::Zeros(_) => 0,
        }
    }

    /// The records of numbers.
    pub(crate) fn of(self, numbers: &[f32]) -> Vec<u8> {
        match self {
            Records::Codes(code) => code.records_of(numbers),
            Records::LowBits => records_of(numbers),
            Records::Zeros(_) => Vec::new(),
        }
    }

    /// The first `length` numbers of records.
    pub(crate) fn numbers(self, records: &[u8], length: usize) -> Vec<f32> {
        match self {
            Records::Codes(code) => code.numbers_of(records, length),
            Records::LowBits => lows_of(records, length),
            Records::Zeros(_) => vec![0.0; length],
        }
    }
}
