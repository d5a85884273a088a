//! Finds numbers that are not finite in bytes on their way to a file, so that a save reads each tensor only
//! once.
//!
//! The bytes come in pieces of any length. If a piece ends within a number or record (128 numbers in 8 bits
//! with their scale), the bytes of that number or record are stored until the rest comes.

use crate::numbers::codes::{BLOCK, RECORD};
use crate::numbers::{Code, DType, first_non_finite_in, is_supported};

/// The encoding of the bytes of a tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Encoding {
    /// Numbers of a dtype.
    Numbers(DType),
    /// Records, each of 128 numbers in 8 bits with their scale.
    Records(Code),
}

/// Finds the first number that is not finite in the bytes of a tensor, or a part of one.
#[derive(Debug)]
pub(super) struct Watch {
    encoding: Encoding,
    /// The index of the next number, or of the first number of the next record.
    next: usize,
    /// The beginning of a number or record that is not whole yet.
    incomplete: Vec<u8>,
    /// The index and value of the first number that is not finite.
    pub(super) first_non_finite: Option<(usize, f64)>,
}

impl Watch {
    /// A watch over the bytes of the file's tensor from `element` on. If the tensor has records, its elements
    /// are bytes.
    pub(super) fn new(encoding: Encoding, element: usize) -> Self {
        let next = if let Encoding::Records(_) = encoding {
            element / RECORD * BLOCK
        } else {
            element
        };
        Watch {
            encoding,
            next,
            incomplete: Vec::new(),
            first_non_finite: None,
        }
    }

    /// Adds the next bytes.
    pub(super) fn add(&mut self, mut bytes: &[u8]) {
        let (width, numbers) = match self.encoding {
            _ if self.first_non_finite.is_some() => return,
            Encoding::Numbers(dtype) if is_supported(dtype) => (dtype.size_in_bytes(), 1),
            // Integers are always finite.
            Encoding::Numbers(_) => return,
            Encoding::Records(_) => (RECORD, BLOCK),
        };
        if !self.incomplete.is_empty() {
            let (completion, rest) = bytes.split_at(bytes.len().min(width - self.incomplete.len()));
            self.incomplete.extend(completion);
            bytes = rest;
            if self.incomplete.len() < width {
                return;
            }
            let completed = std::mem::take(&mut self.incomplete);
            self.search(&completed, numbers);
        }
        let (whole, rest) = bytes.split_at(bytes.len() - bytes.len() % width);
        self.search(whole, numbers * (whole.len() / width));
        self.incomplete.extend(rest);
    }

    /// Searches whole numbers or records, `numbers` numbers in all.
    fn search(&mut self, bytes: &[u8], numbers: usize) {
        let non_finite = match self.encoding {
            Encoding::Numbers(dtype) => first_non_finite_in(bytes, dtype, dtype),
            Encoding::Records(code) => bytes
                .as_chunks()
                .0
                .iter()
                .enumerate()
                .find_map(|(block, record)| {
                    let (offset, value) = code.first_non_finite(record)?;
                    Some((block * BLOCK + offset, value.into()))
                }),
        };
        let first = non_finite.map(|(index, value)| (self.next + index, value));
        self.first_non_finite = self.first_non_finite.or(first);
        self.next += numbers;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The first number that is not finite in these bytes, read in pieces of `piece_length` bytes.
    fn first_non_finite(
        encoding: Encoding,
        element: usize,
        bytes: &[u8],
        piece_length: usize,
    ) -> Option<(usize, f64)> {
        let mut watch = Watch::new(encoding, element);
        bytes.chunks(piece_length).for_each(|bytes| watch.add(bytes));
        watch.first_non_finite
    }

    #[test]
    fn the_first_number_that_is_not_finite_is_found_however_the_bytes_come() {
        let bytes_of = |dtype: DType, values: &[f64]| -> Vec<u8> {
            match dtype {
                DType::F16 => values
                    .iter()
                    .flat_map(|value| half::f16::from_f64(*value).to_le_bytes())
                    .collect(),
                DType::BF16 => values
                    .iter()
                    .flat_map(|value| half::bf16::from_f64(*value).to_le_bytes())
                    .collect(),
                DType::F32 => values
                    .iter()
                    .flat_map(|value| (*value as f32).to_le_bytes())
                    .collect(),
                _ => values.iter().flat_map(|value| value.to_le_bytes()).collect(),
            }
        };
        for dtype in [DType::F16, DType::BF16, DType::F32, DType::F64] {
            let encoding = Encoding::Numbers(dtype);
            for piece_length in [1, 3, 8, 1000] {
                let mut values: Vec<f64> = (0..100).map(|i| f64::from(i) - 60000.0).collect();
                assert_eq!(
                    first_non_finite(encoding, 7, &bytes_of(dtype, &values), piece_length),
                    None,
                    "{dtype:?}"
                );
                (values[41], values[42]) = (f64::NEG_INFINITY, f64::NAN);
                assert_eq!(
                    first_non_finite(encoding, 7, &bytes_of(dtype, &values), piece_length),
                    Some((48, f64::NEG_INFINITY)),
                    "{dtype:?}"
                );
                values[3] = f64::NAN;
                let (index, value) =
                    first_non_finite(encoding, 0, &bytes_of(dtype, &values), piece_length).expect("NaN");
                assert!(index == 3 && value.is_nan(), "{dtype:?}");
            }
        }
        assert_eq!(
            first_non_finite(Encoding::Numbers(DType::U32), 0, &[0xff; 64], 8),
            None
        );
    }

    #[test]
    fn records_are_looked_at_as_numbers() {
        for code in [Code::Signed, Code::NonNegative] {
            let mut numbers: Vec<f32> = (0..3 * BLOCK).map(|i| i as f32 * 0.37).collect();
            for piece_length in [1, 100, RECORD, 1000] {
                assert_eq!(
                    first_non_finite(
                        Encoding::Records(code),
                        0,
                        &code.records_of(&numbers),
                        piece_length
                    ),
                    None
                );
            }
            numbers[BLOCK + 9] = f32::INFINITY;
            for piece_length in [1, 100, RECORD, 1000] {
                let expected = Some((2 * BLOCK + 9, f64::INFINITY));
                assert_eq!(
                    first_non_finite(
                        Encoding::Records(code),
                        RECORD,
                        &code.records_of(&numbers),
                        piece_length
                    ),
                    expected
                );
            }
        }
    }
}
