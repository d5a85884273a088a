//! State tensors that are stored as records of bytes instead of numbers of a dtype.

use super::codes::{BLOCK, Code, RECORD};
use super::low_bits::{LOW_RECORD, distances_of, records_of};

/// The format of a state tensor's records. Each [block](super::codes::BLOCK) of elements has one record.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Records {
    /// Numbers in 8 bits.
    Codes(Code),
    /// The low bits of f32s that are split into a bf16 and low bits, as whole numbers.
    LowBits,
}

impl Records {
    /// The bytes of a record.
    pub(crate) const fn bytes(self) -> usize {
        match self {
            Records::Codes(_) => RECORD,
            Records::LowBits => LOW_RECORD,
        }
    }

    /// The number of records for this many numbers, and the bytes of a record.
    pub(crate) const fn shape(self, numbers: usize) -> (usize, usize) {
        (numbers.div_ceil(BLOCK), self.bytes())
    }

    /// The records of numbers.
    pub(crate) fn encode(self, numbers: &[f32]) -> Vec<u8> {
        match self {
            Records::Codes(code) => code.records_of(numbers),
            Records::LowBits => records_of(numbers),
        }
    }

    /// The first `length` numbers of records.
    pub(crate) fn decode(self, records: &[u8], length: usize) -> Vec<f32> {
        match self {
            Records::Codes(code) => code.numbers_of(records, length),
            Records::LowBits => distances_of(records, length),
        }
    }
}
