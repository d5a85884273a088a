//! Numbers in 8 bits: small floats in blocks, each block with one f32 as its unit. State tensors in [`Q8`](crate::Q8) are made of them.
//!
//! A block is a record of [`RECORD`] bytes: the largest size among its [`BLOCK`] numbers as a little-endian f32, the scale, and a code for each number. A code
//! is what is left of the f32 `y = number / scale` when its exponent is cut to 4 bits (5 without a sign) and its fraction to 3: the bits 20 to 27 of y. 1.0 has the
//! largest code, each octave below has eight, and 0 is 0. All of it is integer arithmetic on bits, the same on every processor.
//!
//! Of a number that is not negative no code is 0 but that of 0 itself: a root of it is divided by. It is rounded up or down by a hash of y.
//! To nearest, a mean that moves by a thousandth in a step would stand still. Numbers with a sign are rounded to nearest.

/// How many numbers share a scale.
pub(crate) const BLOCK: usize = 128;

/// The bytes of a block.
pub(crate) const RECORD: usize = SCALE + BLOCK;

/// The bytes of a scale.
const SCALE: usize = size_of::<f32>();

/// The bits of an f32 that a code lacks.
const CUT: u32 = 20;

/// The bits of 1.0 without those; the lowest eight, or seven beside a sign, are its code.
const ONE: u32 = 0x3f8;

/// Any number that is not 0 times this is above all codes' smallest.
const LARGE: f32 = f32::MAX;

const SIZE: u32 = 0x7fff_ffff;
const INFINITY: u32 = 0x7f80_0000;

/// The bits of a code that are a size, where it has a sign.
const SIGNED_SIZE: u32 = 0x7f;

/// What a code says of a number.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Code {
    /// Sign, 4 bits of exponent, 3 of fraction.
    Signed,
    /// 5 bits of exponent, 3 of fraction.
    NonNegative,
}

/// The bytes of so many numbers.
pub(crate) const fn stored_bytes(numbers: usize) -> usize {
    numbers.div_ceil(BLOCK) * RECORD
}

impl Code {
    /// The codes of at most [`BLOCK`] numbers and their scale, each of which `read` makes of one of these values. A record with a number that is infinite or
    /// NaN is NaN throughout.
    #[inline(always)]
    pub(crate) fn encode<T>(self, values: &[T], read: impl Fn(&T) -> f32, record: &mut [u8; RECORD]) {
        match (self, <&[T; BLOCK]>::try_from(values).ok()) {
            // Loops of known length.
            (Code::Signed, Some(block)) => encode::<true, T>(block, read, record),
            (Code::NonNegative, Some(block)) => encode::<false, T>(block, read, record),
            (Code::Signed, None) => encode::<true, T>(values, read, record),
            (Code::NonNegative, None) => encode::<false, T>(values, read, record),
        }
    }

    /// The numbers of a record from `first` on, each as `make` makes a value of it.
    #[inline(always)]
    pub(crate) fn decode<T>(self, record: &[u8; RECORD], first: usize, values: &mut [T], make: impl Fn(f32) -> T) {
        match (self, first, <&mut [T; BLOCK]>::try_from(&mut *values).ok()) {
            (Code::Signed, 0, Some(block)) => decode::<true, T>(record, 0, block, make),
            (Code::NonNegative, 0, Some(block)) => decode::<false, T>(record, 0, block, make),
            (Code::Signed, ..) => decode::<true, T>(record, first, values, make),
            (Code::NonNegative, ..) => decode::<false, T>(record, first, values, make),
        }
    }

    /// The records of numbers.
    pub(crate) fn records_of(self, numbers: &[f32]) -> Vec<u8> {
        let mut records = vec![0; stored_bytes(numbers.len())];
        for (numbers, record) in numbers.chunks(BLOCK).zip(records.as_chunks_mut().0) {
            self.encode(numbers, |number| *number, record);
        }
        records
    }

    /// The first so many numbers of records.
    pub(crate) fn numbers_of(self, records: &[u8], length: usize) -> Vec<f32> {
        let mut numbers = vec![0.0; length];
        for (numbers, record) in numbers.chunks_mut(BLOCK).zip(records.as_chunks().0) {
            self.decode(record, 0, numbers, |number| number);
        }
        numbers
    }
}

/// The scales of records.
pub(crate) fn scales(records: &[u8]) -> impl Iterator<Item = f32> {
    records.as_chunks().0.iter().map(scale_of)
}

#[inline(always)]
fn scale_of(record: &[u8; RECORD]) -> f32 {
    record.first_chunk().map_or(0.0, |bytes| f32::from_le_bytes(*bytes))
}

#[inline(always)]
fn encode<const SIGNED: bool, T>(values: &[T], read: impl Fn(&T) -> f32, record: &mut [u8; RECORD]) {
    // Sizes of floats are in the order of their bits, with infinity and NaN above all others.
    let largest = values.iter().fold(0, |largest, value| u32::max(largest, read(value).to_bits() & SIZE));
    let Some((scale, codes)) = record.split_first_chunk_mut::<SCALE>() else { return };
    let codes = codes.iter_mut().zip(values);
    if largest >= INFINITY {
        *scale = f32::NAN.to_le_bytes();
        return codes.for_each(|(code, _)| *code = 1);
    }
    // The reciprocal of a number below the normal ones could be infinite.
    let unit = if largest == 0 { 0.0 } else { f32::from_bits(largest).max(f32::MIN_POSITIVE) };
    *scale = unit.to_le_bytes();
    // Enough above the reciprocal that the largest number times it is not below 1.
    let inverse = if largest == 0 { 0.0 } else { f32::from_bits((1.0 / unit).to_bits() + 2) };
    for (code, value) in codes {
        *code = code_of::<SIGNED>(read(value), inverse);
    }
}

#[inline(always)]
fn code_of<const SIGNED: bool>(number: f32, inverse: f32) -> u8 {
    let abs = f32::from_bits(number.to_bits() & SIZE);
    let y = abs * inverse;
    if SIGNED {
        let near = (y.to_bits() + (1 << (CUT - 1))).max((ONE & !SIGNED_SIZE) << CUT);
        return (near >> CUT & SIGNED_SIZE | number.to_bits() >> 24 & !SIGNED_SIZE) as u8;
    }
    // 0 for 0, and no less than the smallest code for anything else. All numbers, the hash as well: a selection would be one among bytes, which takes longer.
    let smallest = f32::from_bits(((ONE & !0xff) + 1) << CUT);
    let least = if abs * LARGE < smallest { abs * LARGE } else { smallest };
    let size = if y > least { y } else { least }.to_bits();
    let up = size.wrapping_mul(0x9e37_79b1) >> (32 - CUT);
    ((size + up).min(((ONE + 1) << CUT) - 1) >> CUT) as u8
}

#[inline(always)]
fn decode<const SIGNED: bool, T>(record: &[u8; RECORD], first: usize, values: &mut [T], make: impl Fn(f32) -> T) {
    let scale = scale_of(record);
    let sizes = if SIGNED { SIGNED_SIZE } else { 0xff };
    for (value, code) in values.iter_mut().zip(&record[SCALE + first..]) {
        let code = u32::from(*code);
        let sign = (code & !sizes) << 24;
        let number = f32::from_bits((code & sizes | ONE & !sizes) << CUT | sign) * scale;
        *value = make(if code & sizes == 0 { 0.0 } else { number });
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const CODES: [Code; 2] = [Code::Signed, Code::NonNegative];

    fn through(code: Code, numbers: &[f32]) -> Vec<f32> {
        code.numbers_of(&code.records_of(numbers), numbers.len())
    }

    #[test]
    fn every_code_is_a_number_of_its_own_and_comes_back() {
        for code in CODES {
            let mut record = [0; RECORD];
            record[..SCALE].copy_from_slice(&3.0f32.to_le_bytes());
            let mut all = Vec::new();
            let top = if code == Code::Signed { 0x78 } else { 0xf8 };
            let is_one = |byte: &u8| if code == Code::Signed { byte & 0x7f <= top && *byte != 0x80 } else { *byte <= top };
            for codes in (0..=255u8).filter(is_one).collect::<Vec<_>>().chunks(BLOCK / 2) {
                // The scale is the largest size in its block, so each block has to have it.
                record[SCALE..SCALE + codes.len()].copy_from_slice(codes);
                record[SCALE + codes.len()..].fill(top);
                let numbers = code.numbers_of(&record, BLOCK);
                let again = code.records_of(&numbers);
                assert_eq!(again, record);
                all.extend(numbers[..codes.len()].iter().map(|number| number.to_bits()));
            }
            let numbers: Vec<f32> = all.iter().map(|bits| f32::from_bits(*bits)).collect();
            assert!(numbers.windows(2).all(|pair| pair[0].abs() < pair[1].abs() || pair == [3.0, -numbers[1]]), "{numbers:?}");
            assert_eq!(numbers.iter().fold(0f32, |largest, size| largest.max(*size)), 3.0);
        }
    }

    #[test]
    fn what_is_not_finite_takes_its_block_along_and_no_other() {
        for code in CODES {
            for bad in [f32::NAN, -f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
                let mut numbers = vec![1.0; 3 * BLOCK];
                numbers[BLOCK + 5] = bad;
                let records = code.records_of(&numbers);
                let back = code.numbers_of(&records, numbers.len());
                assert!(back[..BLOCK].iter().chain(&back[2 * BLOCK..]).all(|number| *number == 1.0));
                assert!(back[BLOCK..2 * BLOCK].iter().all(|number| number.is_nan()));
                assert!(scales(&records).map(f32::is_nan).eq([false, true, false]));
                // The same bytes for every NaN.
                assert_eq!(records[RECORD..2 * RECORD], code.records_of(&[f32::NAN; BLOCK]));
            }
        }
        assert!(scales(&Code::Signed.records_of(&[-2.0; 2 * BLOCK])).eq([2.0; 2]));
    }

    #[test]
    fn a_mean_of_squares_that_moves_by_a_thousandth_moves() {
        // The mean starts ten times too low beside a number that does not move, and ten times too high.
        for start in [0.1f32, 10.0] {
            let mut v = vec![100.0; BLOCK];
            v[1..].fill(start);
            let mut salt = 0u32;
            for _ in 0..10_000 {
                for v in &mut v[1..] {
                    salt = salt.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
                    let square = 2.0 * (salt >> 8) as f32 / (1 << 24) as f32;
                    *v = *v * 0.999 + square * 0.001;
                }
                v = through(Code::NonNegative, &v);
            }
            let mean = v[1..].iter().sum::<f32>() / (BLOCK - 1) as f32;
            assert!((mean - 1.0).abs() < 0.1, "{mean} from {start}");
        }
    }

    proptest! {
        #[test]
        fn the_error_is_below_half_a_code_or_a_code(
            numbers in prop::collection::vec((-60f32..60.0, any::<bool>()), 1..3 * BLOCK),
        ) {
            let numbers: Vec<f32> = numbers.iter().map(|(power, negative)| power.exp2() * if *negative { -1.0 } else { 1.0 }).collect();
            for code in CODES {
                let numbers: Vec<f32> = if code == Code::Signed { numbers.clone() } else { numbers.iter().map(|number| number.abs()).collect() };
                let (back, octaves) = (through(code, &numbers), if code == Code::Signed { 14.9 } else { 30.8 });
                for (numbers, back) in numbers.chunks(BLOCK).zip(back.chunks(BLOCK)) {
                    let largest = numbers.iter().fold(0f32, |largest, number| largest.max(number.abs()));
                    for (number, back) in numbers.iter().zip(back) {
                        let is_seen = number.abs() >= largest * (-octaves as f32).exp2();
                        let most = if code == Code::Signed { 1.0 / 16.0 } else { 1.0 / 8.0 };
                        prop_assert!(!is_seen || (back - number).abs() <= number.abs() * most * 1.0001, "{number} {back} of {largest}");
                        prop_assert!(is_seen || back.abs() <= largest * (-octaves as f32).exp2() * 1.2);
                        prop_assert!(code == Code::Signed || *back > 0.0, "what is divided by is not 0");
                        prop_assert!(number.abs() < largest || back == number, "the largest is exact");
                    }
                }
            }
        }

        #[test]
        fn no_size_is_out_of_range(bits in prop::collection::vec(0u32..0x7f80_0000, 1..BLOCK)) {
            let numbers: Vec<f32> = bits.iter().map(|bits| f32::from_bits(*bits)).collect();
            for code in CODES {
                let back = through(code, &numbers);
                let largest = numbers.iter().fold(0f32, |largest, number| largest.max(*number));
                prop_assert!(back.iter().all(|number| number.is_finite() && *number <= largest.max(f32::MIN_POSITIVE)));
                if code == Code::NonNegative {
                    prop_assert!(numbers.iter().zip(&back).all(|(number, back)| (*number > 0.0) == (*back > 0.0)));
                }
            }
        }
    }
}
