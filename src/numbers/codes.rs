//! Numbers in 8 bits, for state tensors in [`Q8`](crate::Q8): blocks of small floats with a common scale.
//!
//! A block of [`BLOCK`] numbers is stored as a record of [`RECORD`] bytes: the scale, a little-endian f32,
//! and a code for each number. The scale is the largest size (absolute value) in the block. A code is a part
//! of the bits of the f32 `y = number / scale`, so no table is needed:
//!
//! ```text
//! bits of y       31    30 .. 23    22 .. 0
//!                 sign  exponent    fraction
//! Signed          31,   26 .. 23,   22 .. 20     sign, 4 bits of exponent, 3 of fraction
//! NonNegative           27 .. 23,   22 .. 20           5 bits of exponent, 3 of fraction
//! ```
//!
//! The upper bits of the exponent are the same for all y from 1.0 down to the smallest code, so they need not
//! be stored. 1.0 has the largest code of all finite numbers, each octave below has eight codes, and 0 has
//! code 0.
//!
//! The steps of encoding follow. Each has the same bits on every processor. `engine/cpu/avx2.rs` and
//! `engine/codegen/codes.cu` repeat these steps, so all three files must change together.
//!
//! 1. The bits of the largest size give the scale and its reciprocal ([`BlockScale`]).
//! 2. y = size · reciprocal.
//! 3. A hash of y is added to the bits of y, so that cutting the lowest bits off rounds y up or down.
//!    Otherwise a decayed mean that moves by a thousandth in a step would always be rounded back to its old
//!    value.
//! 4. The sum is limited to the range of codes and shifted. Among numbers without a sign only 0 gets the code
//!    0, because rules divide by the roots of such numbers.
//!
//! Infinity and NaN have the largest and the second largest code, which no finite number has. The scale is
//! that of the finite numbers, so a number that is not finite changes no other number in its block.

/// How many numbers share a scale.
pub(crate) const BLOCK: usize = 128;

/// How many blocks are encoded together. The doc comment of `encode_all` has the reason.
pub(crate) const BLOCKS_TOGETHER: usize = 4;

/// The bytes of a block.
pub(crate) const RECORD: usize = SCALE + BLOCK;

/// The bytes of a scale.
const SCALE: usize = size_of::<f32>();

/// How many of the lowest bits of an f32 a code lacks.
pub(crate) const CUT_BITS: u32 = 20;

/// The bits of 1.0 without the lowest [`CUT_BITS`]. The lowest eight bits of `ONE` are the code of 1.0
/// without a sign, the lowest seven bits are the code with a sign.
pub(crate) const ONE: u32 = 0x3f8;

/// The largest sum of y and its hash with the code of 1.0.
pub(crate) const LARGEST_ROUNDED: u32 = ((ONE + 1) << CUT_BITS) - 1;

/// The bits of y for code 0 with a sign. A smaller y also has code 0.
pub(crate) const SIGNED_ZERO: u32 = (ONE & !SIGNED_SIZE_MASK) << CUT_BITS;

/// The bits of the smallest y above 0 that has a code without a sign: code 1.
pub(crate) const SMALLEST: u32 = ((ONE & !0xff) + 1) << CUT_BITS;

/// The factor of the hash: the upper bits of `HASH * y` depend on all bits of y. The factor is odd, so that
/// different y have different products.
pub(crate) const HASH: u32 = 0x9e37_79b1;

/// The mask for the bits of an f32 without the sign.
pub(crate) const SIZE_MASK: u32 = 0x7fff_ffff;
const INFINITY: u32 = 0x7f80_0000;

/// How far the code of NaN is below the code of infinity, which has all bits of the size set.
pub(crate) const NAN: u32 = 1;

/// The place of the highest fraction bit of an f32. This bit, set in an infinity, makes a NaN.
const QUIET_BIT: u32 = 22;

/// The mask for the bits of a signed code without the sign.
pub(crate) const SIGNED_SIZE_MASK: u32 = 0x7f;

/// The format of a code.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Code {
    /// Sign, 4 bits of exponent, 3 bits of fraction.
    Signed,
    /// 5 bits of exponent, 3 bits of fraction.
    NonNegative,
}

/// How many bytes the records of this many numbers take. The last record is whole.
pub(crate) const fn stored_bytes(numbers: usize) -> usize {
    numbers.div_ceil(BLOCK) * RECORD
}

impl Code {
    /// Encodes values as records. `read` converts a value to a number.
    #[inline(always)]
    pub(crate) fn encode<T>(
        self,
        values: &[T],
        read: impl Fn(&T) -> f32 + Copy,
        records: &mut [[u8; RECORD]],
    ) {
        match self {
            Code::Signed => encode_all::<true, T>(values, read, records),
            Code::NonNegative => encode_all::<false, T>(values, read, records),
        }
    }

    /// Decodes the numbers of a record from `first` on. `make` converts a number to a value.
    #[inline(always)]
    pub(crate) fn decode<T>(
        self,
        record: &[u8; RECORD],
        first: usize,
        values: &mut [T],
        make: impl Fn(f32) -> T,
    ) {
        // A whole block is passed as an array, so that the loop has a known length.
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
        self.encode(numbers, |number| *number, records.as_chunks_mut().0);
        records
    }

    /// The first `length` numbers of records.
    pub(crate) fn numbers_of(self, records: &[u8], length: usize) -> Vec<f32> {
        let mut numbers = vec![0.0; length];
        for (numbers, record) in numbers.chunks_mut(BLOCK).zip(records.as_chunks().0) {
            self.decode(record, 0, numbers, |number| number);
        }
        numbers
    }
}

/// The scale of a record if it is finite and negative (-0 included), as only in a damaged record.
pub(super) fn negative_scale(record: &[u8; RECORD]) -> Option<f32> {
    let scale = scale_of(record);
    (scale.is_finite() && scale.is_sign_negative()).then_some(scale)
}

impl Code {
    /// The first number of a record that is infinite or NaN, with its index. An infinite or NaN scale, which
    /// only a damaged record has, counts as the first number.
    pub(super) fn first_non_finite(self, record: &[u8; RECORD]) -> Option<(usize, f32)> {
        let scale = scale_of(record);
        if !scale.is_finite() {
            return Some((0, scale));
        }
        let (size_mask, codes) = (self.size_mask(), &record[SCALE..]);
        if !has_non_finite(codes, size_mask) {
            return None;
        }
        let index = codes
            .iter()
            .position(|code| has_non_finite(&[*code], size_mask))?;
        let mut number = [0.0];
        self.decode(record, index, &mut number, |number| number);
        Some((index, number[0]))
    }

    /// The mask for the bits of a code without the sign.
    fn size_mask(self) -> u8 {
        if self == Code::Signed {
            SIGNED_SIZE_MASK as u8
        } else {
            u8::MAX
        }
    }
}

#[inline(always)]
fn scale_of(record: &[u8; RECORD]) -> f32 {
    record
        .first_chunk()
        .map_or(0.0, |bytes| f32::from_le_bytes(*bytes))
}

/// Encodes values, [`BLOCKS_TOGETHER`] blocks at a time: the division of a block has to wait for the block's
/// maximum, and the processor can work on the maxima of the other blocks meanwhile.
#[inline(always)]
fn encode_all<const SIGNED: bool, T>(
    values: &[T],
    read: impl Fn(&T) -> f32 + Copy,
    records: &mut [[u8; RECORD]],
) {
    let (blocks, rest) = values.as_chunks::<BLOCK>();
    let (whole_records, last_record) = records.split_at_mut(blocks.len().min(records.len()));
    for (blocks, records) in blocks
        .chunks(BLOCKS_TOGETHER)
        .zip(whole_records.chunks_mut(BLOCKS_TOGETHER))
    {
        let mut scales = [None; BLOCKS_TOGETHER];
        for (scale, block) in scales.iter_mut().zip(blocks) {
            *scale = BlockScale::from_largest(largest_size(block, read));
        }
        for ((scale, block), record) in scales.into_iter().zip(blocks).zip(records) {
            // `block` is an array, so that the loop in `encode` has a known length.
            encode::<SIGNED, T>(block, scale, read, record);
        }
    }
    if let [record, ..] = last_record {
        encode::<SIGNED, T>(
            rest,
            BlockScale::from_largest(largest_size(rest, read)),
            read,
            record,
        );
    }
}

/// The bits of the largest size. Bits without the sign have the order of the sizes, with infinity and NaN
/// above all others.
#[inline(always)]
fn largest_size<T>(values: &[T], read: impl Fn(&T) -> f32) -> u32 {
    values.iter().fold(0, |largest, value| {
        u32::max(largest, read(value).to_bits() & SIZE_MASK)
    })
}

/// Encodes at most a block with this scale, which is `None` if a value is not finite.
#[inline(always)]
fn encode<const SIGNED: bool, T>(
    values: &[T],
    scale: Option<BlockScale>,
    read: impl Fn(&T) -> f32 + Copy,
    record: &mut [u8; RECORD],
) {
    let (Some(BlockScale { unit, inverse }), Some((scale, codes))) =
        (scale, record.split_first_chunk_mut::<SCALE>())
    else {
        return encode_non_finite::<SIGNED, T>(values, read, record);
    };
    *scale = unit.to_le_bytes();
    for (code, value) in codes.iter_mut().zip(values) {
        *code = code_of::<SIGNED>(read(value), inverse);
    }
}

/// The scale of a record.
#[derive(Clone, Copy)]
pub(crate) struct BlockScale {
    /// The scale as it is stored.
    pub(crate) unit: f32,
    /// The factor that numbers are multiplied by. The factor is slightly above the reciprocal of `unit`,
    /// because otherwise the largest y could be below 1, and the largest number would not come back exactly.
    pub(crate) inverse: f32,
}

impl BlockScale {
    /// The scale of numbers whose largest size has these bits. `None` if that size is infinite or NaN.
    #[inline(always)]
    pub(crate) fn from_largest(largest: u32) -> Option<Self> {
        if largest >= INFINITY {
            return None;
        }
        if largest == 0 {
            return Some(BlockScale {
                unit: 0.0,
                inverse: 0.0,
            });
        }
        // The unit is at least the smallest normal number, because the reciprocal of a subnormal number could
        // be infinite.
        let unit = f32::from_bits(largest).max(f32::MIN_POSITIVE);
        Some(BlockScale {
            unit,
            inverse: f32::from_bits((1.0 / unit).to_bits() + 2),
        })
    }
}

/// Encodes values of which at least one is infinite or NaN.
#[cold]
fn encode_non_finite<const SIGNED: bool, T>(
    values: &[T],
    read: impl Fn(&T) -> f32 + Copy,
    record: &mut [u8; RECORD],
) {
    let finite_or = |other: f32, number: f32| if number.is_finite() { number } else { other };
    // Infinity and NaN are replaced by the smallest number. With 0 instead the scale could be 0, and decoding
    // would make NaN of infinity.
    let mut numbers = [f32::from_bits(1); BLOCK];
    numbers
        .iter_mut()
        .zip(values)
        .for_each(|(number, value)| *number = finite_or(*number, read(value)));
    let numbers = &numbers[..values.len()];
    encode::<SIGNED, f32>(
        numbers,
        BlockScale::from_largest(largest_size(numbers, f32::clone)),
        f32::clone,
        record,
    );
    let size_mask = if SIGNED { SIGNED_SIZE_MASK } else { 0xff };
    for (code, number) in record[SCALE..].iter_mut().zip(values.iter().map(read)) {
        if number.is_nan() {
            *code = (size_mask - NAN) as u8;
        } else if number.is_infinite() {
            *code = (size_mask | number.to_bits() >> 24 & !size_mask) as u8;
        }
    }
}

/// The code of a number: steps 2 to 4 of the head of the file.
#[inline(always)]
fn code_of<const SIGNED: bool>(number: f32, inverse: f32) -> u8 {
    let abs = f32::from_bits(number.to_bits() & SIZE_MASK);
    let y = (abs * inverse).to_bits();
    // Without a sign 0 is selected before the hash, because the hash of 0 is 0, and a selection among bytes
    // takes longer.
    let size = if SIGNED {
        y
    } else if abs.to_bits() == 0 {
        0
    } else {
        y.max(SMALLEST)
    };
    // The hash has 20 bits, below the cut. If the sum carries into the code, the code is rounded up.
    let hash = size.wrapping_mul(HASH) >> (32 - CUT_BITS);
    // The sum is limited, because the largest y is slightly above 1 and must not be rounded up beyond the
    // code of 1.
    let rounded = (size + hash).min(LARGEST_ROUNDED);
    if SIGNED {
        let size = rounded.max(SIGNED_ZERO) >> CUT_BITS & SIGNED_SIZE_MASK;
        return (size | number.to_bits() >> 24 & !SIGNED_SIZE_MASK) as u8;
    }
    (rounded >> CUT_BITS) as u8
}

#[inline(always)]
fn decode<const SIGNED: bool, T>(
    record: &[u8; RECORD],
    first: usize,
    values: &mut [T],
    make: impl Fn(f32) -> T,
) {
    let (scale, codes) = (scale_of(record), &record[SCALE + first..][..values.len()]);
    let size_mask = if SIGNED { SIGNED_SIZE_MASK } else { 0xff };
    if has_non_finite(codes, size_mask as u8) {
        return decode_non_finite(codes, scale, size_mask, values, make);
    }
    for (value, code) in values.iter_mut().zip(codes) {
        let code = u32::from(*code);
        let sign = (code & !size_mask) << 24;
        let number = f32::from_bits((code & size_mask | ONE & !size_mask) << CUT_BITS | sign) * scale;
        *value = make(if code & size_mask == 0 { 0.0 } else { number });
    }
}

/// Whether one of these codes is that of infinity or NaN. A maximum and one comparison take far less time
/// than a comparison for each code.
#[inline(always)]
fn has_non_finite(codes: &[u8], size_mask: u8) -> bool {
    codes
        .iter()
        .fold(0, |largest, code| u8::max(largest, code & size_mask))
        >= size_mask - NAN as u8
}

/// Decodes codes of which at least one is that of infinity or NaN.
#[cold]
fn decode_non_finite<T>(codes: &[u8], scale: f32, size_mask: u32, values: &mut [T], make: impl Fn(f32) -> T) {
    for (value, code) in values.iter_mut().zip(codes) {
        let code = u32::from(*code);
        let (sign, size) = ((code & !size_mask) << 24, code & size_mask);
        let bits = if size >= size_mask - NAN {
            INFINITY | (size_mask - size) << QUIET_BIT
        } else {
            (size | ONE & !size_mask) << CUT_BITS
        };
        let number = f32::from_bits(bits | sign) * scale;
        *value = make(if size == 0 { 0.0 } else { number });
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn scales(records: &[u8]) -> impl Iterator<Item = f32> {
        records.as_chunks().0.iter().map(scale_of)
    }

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
            let is_code = |byte: &u8| {
                if code == Code::Signed {
                    byte & 0x7f <= top && *byte != 0x80
                } else {
                    *byte <= top
                }
            };
            for codes in (0..=255u8).filter(is_code).collect::<Vec<_>>().chunks(BLOCK / 2) {
                // The scale is the largest size in its block, so each block has to have it.
                record[SCALE..SCALE + codes.len()].copy_from_slice(codes);
                record[SCALE + codes.len()..].fill(top);
                let numbers = code.numbers_of(&record, BLOCK);
                let again = code.records_of(&numbers);
                assert_eq!(again, record);
                all.extend(numbers[..codes.len()].iter().map(|number| number.to_bits()));
            }
            let numbers: Vec<f32> = all.iter().map(|bits| f32::from_bits(*bits)).collect();
            assert!(
                numbers
                    .windows(2)
                    .all(|pair| pair[0].abs() < pair[1].abs() || pair == [3.0, -numbers[1]]),
                "{numbers:?}"
            );
            assert_eq!(numbers.iter().fold(0f32, |largest, size| largest.max(*size)), 3.0);
        }
    }

    #[test]
    fn infinity_and_nan_change_no_other_number_of_their_block() {
        let finite: Vec<f32> = (0..3 * BLOCK).map(|i| (i as f32 - 200.0) * 0.37).collect();
        for code in CODES {
            let finite: Vec<f32> = if code == Code::Signed {
                finite.clone()
            } else {
                finite.iter().map(|number| number.abs()).collect()
            };
            for bad in [f32::NAN, -f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
                for (zeroed, place) in [(false, BLOCK + 5), (false, 3 * BLOCK - 1), (true, BLOCK)] {
                    let mut without = if zeroed {
                        vec![0.0; finite.len()]
                    } else {
                        finite.clone()
                    };
                    without[place] = 0.0;
                    let mut with = without.clone();
                    with[place] = bad;
                    let mut expected = through(code, &without);
                    expected[place] = if bad.is_nan() || code == Code::Signed {
                        bad
                    } else {
                        f32::INFINITY
                    };
                    let records = code.records_of(&with);
                    let back = code.numbers_of(&records, with.len());
                    let is_same =
                        |(a, b): (&f32, &f32)| a.to_bits() == b.to_bits() || a.is_nan() && b.is_nan();
                    assert!(
                        back.iter().zip(&expected).all(is_same),
                        "{bad} at {place}: {:?}",
                        &back[place..]
                    );
                    assert!(scales(&records).all(f32::is_finite));
                    let firsts: Vec<_> = records
                        .as_chunks()
                        .0
                        .iter()
                        .map(|record| code.first_non_finite(record))
                        .collect();
                    let (block, in_block) = (place / BLOCK, place % BLOCK);
                    for (index, first) in firsts.into_iter().enumerate() {
                        let got = first.map(|(place, number)| (place, number.is_nan(), number > 0.0));
                        let is_positive = expected[place] > 0.0;
                        assert_eq!(
                            got,
                            (index == block).then_some((in_block, bad.is_nan(), is_positive)),
                            "{bad} at {place}"
                        );
                    }
                    // The same bytes again.
                    assert_eq!(records, code.records_of(&back), "{bad} at {place}");
                }
            }
        }
        let [one, other] = [f32::NAN, -f32::NAN].map(|nan| Code::Signed.records_of(&[nan; BLOCK]));
        assert_eq!(one, other, "the same bytes for every NaN");
        assert!(scales(&Code::Signed.records_of(&[-2.0; 2 * BLOCK])).eq([2.0; 2]));
    }

    #[test]
    fn a_mean_that_moves_by_a_thousandth_moves() {
        // The means start ten times too low, and ten times too high. The first number keeps the scale fixed.
        for (code, start) in CODES.into_iter().flat_map(|code| [(code, 0.1f32), (code, 10.0)]) {
            let mut v = vec![100.0; BLOCK];
            v[1..].fill(start);
            let mut salt = 0u32;
            for _ in 0..10_000 {
                for v in &mut v[1..] {
                    salt = salt.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
                    let square = 2.0 * (salt >> 8) as f32 / (1 << 24) as f32;
                    *v = *v * 0.999 + square * 0.001;
                }
                v = through(code, &v);
            }
            let mean = v[1..].iter().sum::<f32>() / (BLOCK - 1) as f32;
            assert!((mean - 1.0).abs() < 0.1, "{mean} from {start} with {code:?}");
        }
    }

    proptest! {
        #[test]
        fn the_error_is_below_a_code(
            numbers in prop::collection::vec((-60f32..60.0, any::<bool>()), 1..3 * BLOCK),
        ) {
            let numbers: Vec<f32> = numbers.iter().map(|(power, negative)| power.exp2() * if *negative { -1.0 } else { 1.0 }).collect();
            for code in CODES {
                let numbers: Vec<f32> = if code == Code::Signed { numbers.clone() } else { numbers.iter().map(|number| number.abs()).collect() };
                let (back, octaves) = (through(code, &numbers), if code == Code::Signed { 14.8 } else { 30.8 });
                for (numbers, back) in numbers.chunks(BLOCK).zip(back.chunks(BLOCK)) {
                    let largest = numbers.iter().fold(0f32, |largest, number| largest.max(number.abs()));
                    for (number, back) in numbers.iter().zip(back) {
                        let is_seen = number.abs() >= largest * (-octaves as f32).exp2();
                        prop_assert!(!is_seen || (back - number).abs() <= number.abs() / 8.0 * 1.0001, "{number} {back} of {largest}");
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
