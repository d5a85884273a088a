//! Finds numbers that may not be written, in bytes on their way to a file or a state. So a save reads each
//! tensor only once, and the check of a file needs no memory for a whole tensor.
//!
//! The bytes come in pieces of any length. If a piece ends within a number or record (128 numbers in 8 bits
//! with their scale), the bytes of that number or record are stored until the rest comes.

use std::io::{self, Write};

use super::codes::{BLOCK, RECORD, negative_scale};
use super::finite::{first_negative_in, first_non_finite_in};
use super::{Code, DType, is_supported};

/// The encoding of the bytes of a tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Encoding {
    /// Numbers of a dtype. Only F16, BF16, F32 and F64 are searched.
    Numbers(DType),
    /// Records, each of 128 numbers in 8 bits with their scale.
    Records(Code),
}

/// Finds the first number of a kind in the bytes of a tensor or a part of one.
#[derive(Debug)]
pub(crate) struct Watch {
    encoding: Encoding,
    /// The dtype to which numbers are rounded; for records, any dtype. `None` if infinities and NaN are not
    /// looked for.
    rounds_to: Option<DType>,
    /// Whether negative numbers are looked for; in records, finite negative scales (-0 included).
    finds_negative: bool,
    /// The index of the next number, or of the first number of the next record.
    next: usize,
    /// The beginning of a number or record that is not whole yet.
    incomplete: Vec<u8>,
    /// The index and value of the first of these numbers. Infinities include finite numbers that round to
    /// one.
    ///
    /// A negative scale has the index of the first number of its record. All other numbers of records are
    /// infinite or NaN.
    pub(crate) first_unfit: Option<(usize, f64)>,
}

impl Watch {
    /// A watch for infinities and NaN in the bytes of a tensor from `element` on. If the tensor has records,
    /// its elements are bytes.
    pub(crate) fn new(encoding: Encoding, element: usize) -> Self {
        let (dtype, next) = match encoding {
            Encoding::Records(_) => (DType::F32, element / RECORD * BLOCK),
            Encoding::Numbers(dtype) => (dtype, element),
        };
        Watch {
            encoding,
            rounds_to: Some(dtype),
            finds_negative: false,
            next,
            incomplete: Vec::new(),
            first_unfit: None,
        }
    }

    /// Looks for these numbers: see the fields.
    pub(super) fn look_for(self, rounds_to: Option<DType>, finds_negative: bool) -> Self {
        Watch {
            rounds_to,
            finds_negative,
            ..self
        }
    }

    /// Adds the next bytes.
    pub(crate) fn add(&mut self, mut bytes: &[u8]) {
        let width = match self.encoding {
            _ if self.first_unfit.is_some() => return,
            Encoding::Numbers(dtype) if is_supported(dtype) => dtype.size_in_bytes(),
            Encoding::Numbers(_) => return,
            Encoding::Records(_) => RECORD,
        };
        if !self.incomplete.is_empty() {
            let (completion, rest) = bytes.split_at(bytes.len().min(width - self.incomplete.len()));
            self.incomplete.extend(completion);
            bytes = rest;
            if self.incomplete.len() < width {
                return;
            }
            let completed = std::mem::take(&mut self.incomplete);
            self.search(&completed, width);
        }
        let (whole, rest) = bytes.split_at(bytes.len() - bytes.len() % width);
        // Pieces of 256 KiB stay in the cache, because two searches read them.
        for piece in whole.chunks((1 << 18) / width * width) {
            self.search(piece, width);
        }
        self.incomplete.extend(rest);
    }

    /// Searches whole numbers or records of `width` bytes each.
    fn search(&mut self, bytes: &[u8], width: usize) {
        if self.first_unfit.is_some() {
            return;
        }
        let non_finite = |rounds_to| match self.encoding {
            Encoding::Numbers(from) => first_non_finite_in(bytes, from, rounds_to),
            Encoding::Records(code) => first_in_records(bytes, |record| code.first_non_finite(record)),
        };
        let negative = || match self.encoding {
            Encoding::Numbers(from) => first_negative_in(bytes, from),
            Encoding::Records(_) => first_in_records(bytes, |record| Some((0, negative_scale(record)?))),
        };
        // Of two equal indices, `min_by_key` takes the first: the number -inf counts as negative.
        let firsts = [
            self.finds_negative.then(negative).flatten(),
            self.rounds_to.and_then(non_finite),
        ];
        let first = firsts.into_iter().flatten().min_by_key(|(index, _)| *index);
        self.first_unfit = first.map(|(index, value)| (self.next + index, value));
        let numbers_each = if let Encoding::Records(_) = self.encoding {
            BLOCK
        } else {
            1
        };
        self.next += bytes.len() / width * numbers_each;
    }
}

/// The first number that `find` returns for a record, with its index among all numbers.
fn first_in_records(
    bytes: &[u8],
    find: impl Fn(&[u8; RECORD]) -> Option<(usize, f32)>,
) -> Option<(usize, f64)> {
    let number = |(block, record)| {
        let (index, value) = find(record)?;
        Some((block * BLOCK + index, value.into()))
    };
    bytes.as_chunks().0.iter().enumerate().find_map(number)
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
        watch.first_unfit
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

    /// The first number that is negative, infinite or NaN in these bytes, read in pieces of `piece_length`
    /// bytes.
    fn first_unfit(encoding: Encoding, bytes: &[u8], piece_length: usize) -> Option<(usize, f64)> {
        let mut watch = Watch::new(encoding, 0).look_for(Some(DType::F32), true);
        bytes.chunks(piece_length).for_each(|bytes| watch.add(bytes));
        watch.first_unfit
    }

    fn bytes_of(numbers: &[f32]) -> Vec<u8> {
        numbers.iter().flat_map(|number| number.to_le_bytes()).collect()
    }

    #[test]
    fn the_first_of_negative_numbers_infinities_and_nan() {
        let smallest = -f32::from_bits(1);
        for piece_length in [1, 3, 1000] {
            let first = |numbers: &[f32]| {
                first_unfit(Encoding::Numbers(DType::F32), &bytes_of(numbers), piece_length)
            };
            // Squares that round to -0 are not negative.
            assert_eq!(first(&[0.0, -0.0, 1.0]), None);
            assert_eq!(
                first(&[1.0, smallest, f32::NAN, -2.0]),
                Some((1, smallest.into()))
            );
            assert_eq!(first(&[1.0, f32::INFINITY, -2.0]), Some((1, f64::INFINITY)));
            assert_eq!(
                first(&[1.0, f32::NEG_INFINITY, -2.0]),
                Some((1, f64::NEG_INFINITY))
            );
        }
    }

    #[test]
    fn the_first_of_negative_scales_infinities_and_nan() {
        for code in [Code::Signed, Code::NonNegative] {
            let mut numbers = [1.0; 4 * BLOCK];
            numbers[3 * BLOCK + 5] = f32::INFINITY;
            let mut records = code.records_of(&numbers);
            for (block, expected) in [(3, -0.0), (1, -0.0), (0, f64::NEG_INFINITY)] {
                let scale = (expected as f32).to_le_bytes();
                records[block * RECORD..][..4].copy_from_slice(&scale);
                for piece_length in [1, 100, 1000] {
                    let first = first_unfit(Encoding::Records(code), &records, piece_length);
                    assert_eq!(first, Some((block * BLOCK, expected)), "{piece_length}");
                }
            }
        }
    }

    #[test]
    fn numbers_that_become_infinite_are_found() {
        let bytes = bytes_of(&[1.0, 65519.0, 65520.0]);
        for (dtype, expected) in [
            (DType::F16, Some((2, 65520.0))),
            (DType::BF16, None),
            (DType::F64, None),
        ] {
            let mut watch = Watch::new(Encoding::Numbers(DType::F32), 0).look_for(Some(dtype), false);
            bytes.chunks(5).for_each(|bytes| watch.add(bytes));
            assert_eq!(watch.first_unfit, expected, "{dtype}");
        }
    }

    /// More than one piece of those in which whole numbers are searched.
    #[test]
    fn indices_are_right_in_long_memory() {
        let mut numbers = vec![1.0; 200_000];
        numbers[150_000] = -1.0;
        let long = Encoding::Numbers(DType::F32);
        assert_eq!(
            first_unfit(long, &bytes_of(&numbers), usize::MAX),
            Some((150_000, -1.0))
        );
        let mut records = Code::Signed.records_of(&numbers);
        records[1200 * RECORD..][..4].copy_from_slice(&(-1f32).to_le_bytes());
        let first = first_unfit(Encoding::Records(Code::Signed), &records, usize::MAX);
        assert_eq!(first, Some((1200 * BLOCK, -1.0)));
    }
}
