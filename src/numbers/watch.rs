//! Finds numbers that are not finite, or below 0, in bytes on their way to a file or a state, so that nobody
//! reads a tensor twice or needs memory for a copy of a whole one.
//!
//! The bytes come in pieces of any length. If a piece ends within a number or record (128 numbers in 8 bits
//! with their scale), the bytes of that number or record are stored until the rest comes.

use std::io::{self, Write};

use super::codes::{BLOCK, RECORD, negative_scale};
use super::{Code, DType, first_negative_in, first_non_finite_in, is_supported};

/// The encoding of the bytes of a tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Encoding {
    /// Numbers of a dtype.
    Numbers(DType),
    /// Records, each of 128 numbers in 8 bits with their scale.
    Records(Code),
}

/// Finds the first number that is not finite, and the first below 0, in the bytes of a tensor or a part of one.
#[derive(Debug)]
pub(crate) struct Watch {
    encoding: Encoding,
    /// The dtype to which the numbers are rounded.
    dtype: DType,
    /// Whether numbers below 0 are looked for. Scales of records below 0 always are.
    finds_negative: bool,
    /// The index of the next number, or of the first number of the next record.
    next: usize,
    /// The beginning of a number or record that is not whole yet.
    incomplete: Vec<u8>,
    /// The index and value of the first number that is infinite or NaN, or that rounds to infinity.
    pub(crate) first_non_finite: Option<(usize, f64)>,
    /// The index and value of the first number below 0, or of the first scale below 0. The index of a scale
    /// is that of the first number of its record.
    pub(crate) first_negative: Option<(usize, f64)>,
}

impl Watch {
    /// A watch over the bytes of the file's tensor from `element` on. If the tensor has records, its elements
    /// are bytes.
    pub(crate) fn new(encoding: Encoding, element: usize) -> Self {
        let (dtype, next) = match encoding {
            Encoding::Records(_) => (DType::F32, element / RECORD * BLOCK),
            Encoding::Numbers(dtype) => (dtype, element),
        };
        Watch {
            encoding,
            dtype,
            finds_negative: false,
            next,
            incomplete: Vec::new(),
            first_non_finite: None,
            first_negative: None,
        }
    }

    /// Also finds numbers that become infinite in `dtype` and, if `finds_negative`, numbers below 0.
    pub(super) fn before_rounding(self, dtype: DType, finds_negative: bool) -> Self {
        Watch {
            dtype,
            finds_negative,
            ..self
        }
    }

    /// Adds the next bytes.
    pub(crate) fn add(&mut self, mut bytes: &[u8]) {
        let (width, numbers) = match self.encoding {
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
        let (encoding, start) = (self.encoding, self.next);
        let in_tensor = |(index, value)| (start + index, value);
        self.first_non_finite = self.first_non_finite.or_else(|| {
            match encoding {
                Encoding::Numbers(from) => first_non_finite_in(bytes, from, self.dtype),
                Encoding::Records(code) => first_in_records(bytes, |record| code.first_non_finite(record)),
            }
            .map(in_tensor)
        });
        self.first_negative = self.first_negative.or_else(|| {
            match encoding {
                Encoding::Numbers(_) if !self.finds_negative => None,
                Encoding::Numbers(from) => first_negative_in(bytes, from),
                Encoding::Records(_) => first_in_records(bytes, |record| Some((0, negative_scale(record)?))),
            }
            .map(in_tensor)
        });
        self.next += numbers;
    }
}

/// The first number that `find` returns for a record, with its index among all numbers.
fn first_in_records(
    bytes: &[u8],
    find: impl Fn(&[u8; RECORD]) -> Option<(usize, f32)>,
) -> Option<(usize, f64)> {
    let mut records = bytes.as_chunks().0.iter().enumerate();
    let number = |(block, record)| {
        let (index, value) = find(record)?;
        Some((block * BLOCK + index, value.into()))
    };
    records.find_map(number)
}

/// Adds all bytes.
impl Write for Watch {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.add(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
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

    /// The first number below 0 in these bytes, read in pieces of `piece_length` bytes.
    fn first_negative(encoding: Encoding, bytes: &[u8], piece_length: usize) -> Option<(usize, f64)> {
        let mut watch = Watch::new(encoding, 0).before_rounding(DType::F32, true);
        bytes.chunks(piece_length).for_each(|bytes| watch.add(bytes));
        watch.first_negative
    }

    #[test]
    fn the_first_number_below_0_is_found_however_the_bytes_come() {
        for piece_length in [1, 3, 1000] {
            let find = |numbers: &[f32]| {
                let bytes: Vec<u8> = numbers.iter().flat_map(|number| number.to_le_bytes()).collect();
                first_negative(Encoding::Numbers(DType::F32), &bytes, piece_length)
            };
            // Squares that round to -0, and NaN, are not below 0.
            assert_eq!(find(&[0.0, -0.0, f32::NAN, 1.0]), None);
            let smallest = -f32::from_bits(1);
            assert_eq!(find(&[1.0, f32::NAN, smallest, -2.0]), Some((2, smallest.into())));
        }
    }

    #[test]
    fn the_first_record_with_a_scale_below_0_is_found() {
        for code in [Code::Signed, Code::NonNegative] {
            let mut records = code.records_of(&[1.0; 3 * BLOCK]);
            for piece_length in [1, 100, 1000] {
                assert_eq!(
                    first_negative(Encoding::Records(code), &records, piece_length),
                    None
                );
            }
            records[RECORD..][..4].copy_from_slice(&(-0.0f32).to_le_bytes());
            for piece_length in [1, 100, 1000] {
                let negative = first_negative(Encoding::Records(code), &records, piece_length);
                assert_eq!(negative, Some((BLOCK, -0.0)));
            }
        }
    }

    #[test]
    fn numbers_that_become_infinite_are_found() {
        let bytes: Vec<u8> = [1f32, 65519.0, 65520.0]
            .iter()
            .flat_map(|number| number.to_le_bytes())
            .collect();
        for (dtype, expected) in [
            (DType::F16, Some((2, 65520.0))),
            (DType::BF16, None),
            (DType::F64, None),
        ] {
            let mut watch = Watch::new(Encoding::Numbers(DType::F32), 0).before_rounding(dtype, false);
            bytes.chunks(5).for_each(|bytes| watch.add(bytes));
            assert_eq!(watch.first_non_finite, expected, "{dtype}");
        }
    }
}
