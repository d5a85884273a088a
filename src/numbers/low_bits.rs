//! Splits an f32 into the nearest bf16 and the low bits, for [`SplitMaster`](crate::SplitMaster).
//!
//! The bf16 is rounded to nearest, ties to even, so the f32 is at most half a unit of the bf16 away, upwards
//! or downwards. The low bits are this distance, counted in units of the f32's last place:
//!
//! ```text
//! distance = bits of the f32 - bits of the bf16 << 16        -0x8000 ..= 0x8000, which needs 17 bits
//! half     = lower 16 bits of the f32                        the distance as an i16, except 0x8000
//! further  = 1 if the distance is 0x8000                     which would be -0x8000 as an i16
//! ```
//!
//! Bits of floats are ordered by size, so for a negative number a positive distance goes away from 0.
//!
//! A block of [`BLOCK`] numbers is stored as a record of [`LOW_RECORD`] bytes: first the halves,
//! little-endian, then the further bits, from the lowest bit of the first byte on. Only ties have a further
//! bit, and ties are rare. Loops over a block therefore ignore the further bits, and a second loop corrects
//! the block if one is set.

use half::bf16;

use super::codes::BLOCK;
use super::nearest_bf16;

/// How many low bits are stored in addition to the bf16.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum LowBits {
    /// All, in records: the f32 comes back exactly.
    All,
    /// 8 bits: bf16 and byte are a number of 24 bits.
    Byte,
}

/// The bytes of a block.
pub(crate) const LOW_RECORD: usize = LOW_HALVES + BLOCK / 8;

/// The bytes of the halves of a block.
const LOW_HALVES: usize = BLOCK * size_of::<u16>();

/// Half a unit of the bf16: the only distance that does not fit an i16.
const HALF_UNIT: i32 = 0x8000;

/// How many bytes the records of this many numbers take. The last record is whole.
pub(crate) const fn stored_bytes(numbers: usize) -> usize {
    numbers.div_ceil(BLOCK) * LOW_RECORD
}

/// The bits of a number. All NaNs get one pattern with lower half 0, because rounding could make an infinity
/// or a number of another NaN.
#[inline(always)]
fn bits_of(value: f32) -> u32 {
    if value.is_nan() {
        0x7fc0_0000
    } else {
        value.to_bits()
    }
}

/// Whether a number is half a unit above its bf16: a tie that is rounded down, because its upper half is
/// even.
#[inline(always)]
fn is_tie_above(bits: u32) -> bool {
    bits & 0x1_ffff == 0x8000
}

/// The nearest bf16, and the distance. A NaN loses its sign and payload.
pub(crate) fn split(value: f32) -> (bf16, i32) {
    let bits = bits_of(value);
    let low = i32::from(bits as i16);
    (nearest_bf16(bits), if is_tie_above(bits) { -low } else { low })
}

/// The f32 at this distance from a bf16.
#[inline(always)]
pub(crate) fn joined(high: bf16, low: i32) -> f32 {
    f32::from_bits((u32::from(high.to_bits()) << 16).wrapping_add_signed(low))
}

/// The distance of a number from a bf16 that need not be the nearest, limited to half a unit of the bf16. 0
/// if the number is more than a unit away.
pub(crate) fn distance_from(high: bf16, value: f32) -> i32 {
    let distance = i64::from(bits_of(value)) - (i64::from(high.to_bits()) << 16);
    let is_near = distance.abs() <= 2 * i64::from(HALF_UNIT);
    if is_near {
        (distance as i32).clamp(-HALF_UNIT, HALF_UNIT)
    } else {
        0
    }
}

/// [`split`] for at most a block of numbers. `read` converts a value to a number.
#[inline(always)]
pub(crate) fn split_block<T>(
    values: &[T],
    read: impl Fn(&T) -> f32,
    high: &mut [bf16],
    record: &mut [u8; LOW_RECORD],
) {
    let Some((halves, further)) = record.split_first_chunk_mut::<LOW_HALVES>() else {
        return;
    };
    let mut tie_flag = 0;
    for ((value, high), half) in values.iter().zip(high).zip(halves.as_chunks_mut().0) {
        let bits = bits_of(read(value));
        *high = nearest_bf16(bits);
        *half = (bits as u16).to_le_bytes();
        // There is no branch, so that the compiler can vectorise the loop. If there are ties, the code after
        // the loop finds them again.
        tie_flag |= u32::from(is_tie_above(bits));
    }
    further.fill(0);
    if tie_flag != 0 {
        let ties = values.iter().map(|value| is_tie_above(bits_of(read(value))));
        set_further(further, ties);
    }
}

/// Sets the further bits of the numbers that are `ties`.
#[cold]
fn set_further(further: &mut [u8], ties: impl Iterator<Item = bool>) {
    for (index, _) in ties.enumerate().filter(|(_, is_tie)| *is_tie) {
        further[index / 8] |= 1 << (index % 8);
    }
}

/// [`joined`] for numbers of a record from `first` on. `make` converts a number to a value.
#[inline(always)]
pub(crate) fn join_block<T>(
    high: &[bf16],
    record: &[u8; LOW_RECORD],
    first: usize,
    values: &mut [T],
    make: impl Fn(f32) -> T,
) {
    let Some((halves, further)) = record.split_first_chunk::<LOW_HALVES>() else {
        return;
    };
    let halves = &halves.as_chunks().0[first..];
    for ((value, high), half) in values.iter_mut().zip(high).zip(halves) {
        *value = make(joined(*high, i16::from_le_bytes(*half).into()));
    }
    // For a number half a unit above its bf16, the loop has used the distance -0x8000 instead of 0x8000.
    if further.iter().fold(0, |any, byte| any | byte) != 0 {
        join_ties_above(high, further, first, values, make);
    }
}

/// Whether the further bit of a number is set.
fn has_further_bit(further: &[u8], index: usize) -> bool {
    further[index / 8] >> (index % 8) & 1 == 1
}

/// Joins again the numbers whose further bit is set.
#[cold]
fn join_ties_above<T>(
    high: &[bf16],
    further: &[u8],
    first: usize,
    values: &mut [T],
    make: impl Fn(f32) -> T,
) {
    for (index, (value, high)) in (first..).zip(values.iter_mut().zip(high)) {
        if has_further_bit(further, index) {
            *value = make(joined(*high, HALF_UNIT));
        }
    }
}

/// The records of these distances.
pub(crate) fn records_of(lows: &[f32]) -> Vec<u8> {
    let mut records = vec![0; stored_bytes(lows.len())];
    for (lows, record) in lows.chunks(BLOCK).zip(records.as_chunks_mut::<LOW_RECORD>().0) {
        let (halves, further) = record.split_at_mut(LOW_HALVES);
        for (low, half) in lows.iter().zip(halves.as_chunks_mut().0) {
            *half = (*low as i32 as u16).to_le_bytes();
        }
        set_further(further, lows.iter().map(|low| *low as i32 == HALF_UNIT));
    }
    records
}

/// The first `length` distances of records.
pub(crate) fn distances_of(records: &[u8], length: usize) -> Vec<f32> {
    let mut lows = vec![0.0; length];
    for (lows, record) in lows.chunks_mut(BLOCK).zip(records.as_chunks::<LOW_RECORD>().0) {
        let (halves, further) = record.split_at(LOW_HALVES);
        for (index, (low, half)) in lows.iter_mut().zip(halves.as_chunks().0).enumerate() {
            *low = if has_further_bit(further, index) {
                HALF_UNIT as f32
            } else {
                f32::from(i16::from_le_bytes(*half))
            };
        }
    }
    lows
}

/// [`split`] for a number that is rounded to 24 bits first, ties to even.
///
/// The byte is the distance in units of the number of 24 bits, as an i8. The bf16 is rounded with ties away
/// from zero, because a tie then always has the distance -0x80. With ties to even the distance could also be
/// 0x80, which an i8 lacks.
#[inline(always)]
pub(crate) fn split_24(value: f32) -> (bf16, u8) {
    let exact = bits_of(value);
    let bits = exact.wrapping_add(0x7f + (exact >> 8 & 1)) & !0xff;
    (
        bf16::from_bits((bits.wrapping_add(0x8000) >> 16) as u16),
        (bits >> 8) as u8,
    )
}

/// [`distance_from`] for a number that is rounded to 24 bits first, ties to even.
pub(crate) fn byte_distance_from(high: bf16, value: f32) -> u8 {
    let low = distance_from(high, value);
    let rounded = (low + 0x7f + (low >> 8 & 1)) >> 8;
    rounded.clamp(i8::MIN.into(), i8::MAX.into()) as u8
}

/// The number of 24 bits with these parts.
#[inline(always)]
pub(crate) fn joined_24(high: bf16, low: u8) -> f32 {
    joined(high, i16::from_be_bytes([low, 0]).into())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Every upper half of an f32 with lower halves around each tie.
    fn samples() -> Vec<f32> {
        let lows = [0u32, 1, 0x7fff, 0x8000, 0x8001, 0xffff];
        (0..=u32::from(u16::MAX))
            .flat_map(|high| lows.map(|low| f32::from_bits(high << 16 | low)))
            .collect()
    }

    fn is_same(a: f32, b: f32) -> bool {
        a.to_bits() == b.to_bits() || a.is_nan() && b.is_nan()
    }

    #[test]
    fn a_split_number_comes_back_and_its_bf16_is_the_nearest() {
        for value in samples() {
            let (high, low) = split(value);
            assert!(is_same(joined(high, low), value), "{value:e}");
            assert!(
                is_same(high.to_f32(), bf16::from_f32(value).to_f32()),
                "{value:e}"
            );
            assert!(low.abs() <= HALF_UNIT, "{value:e}");
        }
    }

    #[test]
    fn blocks_and_records_are_those_of_the_numbers() {
        // The blocks are of other numbers each time, and the last is short.
        for values in samples().chunks(BLOCK - 3) {
            let (mut high, mut record) = (vec![bf16::ZERO; values.len()], [0xff; LOW_RECORD]);
            record[2 * values.len()..LOW_HALVES].fill(0);
            split_block(values, f32::clone, &mut high, &mut record);
            let (highs, lows): (Vec<bf16>, Vec<i32>) = values.iter().copied().map(split).unzip();
            assert_eq!(
                high.iter().map(|high| high.to_bits()).collect::<Vec<_>>(),
                highs.iter().map(|high| high.to_bits()).collect::<Vec<_>>()
            );
            let lows: Vec<f32> = lows.into_iter().map(|low| low as f32).collect();
            assert_eq!(records_of(&lows), record);
            assert_eq!(distances_of(&record, values.len()), lows);
            for first in [0, 1, 77] {
                let mut back = vec![0.0; values.len() - first.min(values.len())];
                join_block(
                    &high[first.min(values.len())..],
                    &record,
                    first.min(values.len()),
                    &mut back,
                    |number| number,
                );
                assert!(
                    back.iter()
                        .zip(&values[first.min(values.len())..])
                        .all(|(back, value)| is_same(*back, *value))
                );
            }
        }
    }

    /// The distance from the nearest bf16 is the low bits; that from its neighbours is limited to half a
    /// unit.
    #[test]
    fn low_bits_beside_a_given_number_reach_half_a_unit() {
        for value in samples().into_iter().filter(|value| value.is_finite()) {
            let (high, low) = split(value);
            assert_eq!(distance_from(high, value), low, "{value:e}");
            let (high_24, low_24) = split_24(value);
            assert_eq!(
                joined_24(high_24, byte_distance_from(high_24, value)).to_bits(),
                joined_24(high_24, low_24).to_bits(),
                "{value:e}"
            );
            for bits in [high.to_bits().wrapping_sub(1), high.to_bits() + 1] {
                let (high, unit) = (bf16::from_bits(bits), 1 << 16);
                let distance = i64::from(value.to_bits()) - (i64::from(bits) << 16);
                if distance.abs() > unit {
                    assert_eq!(distance_from(high, value), 0, "{value:e} beside {high}");
                    continue;
                }
                assert_eq!(
                    i64::from(distance_from(high, value)),
                    distance.clamp(-unit / 2, unit / 2),
                    "{value:e} beside {high}"
                );
            }
        }
    }

    #[test]
    fn a_number_of_24_bits_is_the_nearest_and_comes_back() {
        for value in samples() {
            let (high, low) = split_24(value);
            let back = joined_24(high, low);
            if value.is_nan() {
                assert!(back.is_nan());
                continue;
            }
            let unit = f64::from(value.abs()).log2().floor().max(-126.0).exp2() * 2f64.powi(-15);
            assert!(
                (f64::from(back) - f64::from(value)).abs() <= unit / 2.0 || back.is_infinite(),
                "{value:e} {back:e}"
            );
            assert_eq!(back.to_bits() & 0xff, 0, "{value:e} {back:e}");
            if back.is_infinite() {
                continue;
            }
            let again = split_24(back);
            assert_eq!(joined_24(again.0, again.1).to_bits(), back.to_bits());
            assert!(
                (back - high.to_f32()).abs() <= (back - bf16::from_f32(back).to_f32()).abs(),
                "the bf16 is the nearest to it"
            );
        }
    }
}
