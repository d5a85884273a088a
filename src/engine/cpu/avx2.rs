//! Converts numbers in 8, 16 and 24 bits by AVX2 and F16C instructions that the compiler does not find.
//! `unsafe` is for loads and stores of vectors.
//!
//! All results have the bits of the portable loops. Three tricks are used:
//!
//! 1. If NaN or infinity needs other code, a loop only detects such numbers. If a call has such a number,
//!    portable code converts all numbers of the call.
//! 2. Rounding adds a number from a table, which `permutevar` indexes by the last bit that stays.
//! 3. Pack and unpack instructions work on each half of a vector by itself. So one permutation, after packing
//!    or before unpacking, puts all numbers in order.
#![allow(unsafe_code)]

use std::arch::x86_64::*;

use half::{bf16, f16};

use crate::numbers::Code;
use crate::numbers::codes::{
    BLOCK, BLOCKS_TOGETHER, BlockScale, CUT_BITS, HASH, LARGEST_ROUNDED, NAN, ONE, RECORD, SIGNED_SIZE_MASK,
    SIGNED_ZERO, SIZE_MASK, SMALLEST,
};

/// Calls `row` for N neighbours at a time, and `portable` for each number after the last row.
#[inline(always)]
fn convert_rows<const N: usize, S: Copy, D>(
    src: &[S],
    dst: &mut [D],
    mut row: impl FnMut(&[S; N], &mut [D; N]),
    portable: impl Fn(S) -> D,
) {
    let (rows, rest) = src.as_chunks::<N>();
    let (dst_rows, dst_rest) = dst.as_chunks_mut::<N>();
    rows.iter().zip(dst_rows).for_each(|(src, dst)| row(src, dst));
    rest.iter()
        .zip(dst_rest)
        .for_each(|(src, dst)| *dst = portable(*src));
}

#[target_feature(enable = "avx2,f16c")]
pub(super) fn widen_f16(src: &[f16], dst: &mut [f32]) {
    // SAFETY: both arrays hold eight elements, and the instructions allow any alignment.
    let row = |src: &[f16; 8], dst: &mut [f32; 8]| unsafe {
        _mm256_storeu_ps(
            dst.as_mut_ptr(),
            _mm256_cvtph_ps(_mm_loadu_si128(src.as_ptr().cast())),
        )
    };
    convert_rows(src, dst, row, f16::to_f32_const);
}

#[target_feature(enable = "avx2,f16c")]
pub(super) fn narrow_f16(src: &[f32], dst: &mut [f16]) {
    // SAFETY: both arrays hold eight elements, and the instructions allow any alignment.
    let row = |src: &[f32; 8], dst: &mut [f16; 8]| unsafe {
        let halves = _mm256_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(_mm256_loadu_ps(src.as_ptr()));
        _mm_storeu_si128(dst.as_mut_ptr().cast(), halves)
    };
    convert_rows(src, dst, row, f16::from_f32_const);
}

/// Rounds sixteen numbers at once, in sixteen instructions.
///
/// `portable` rounds the numbers after the last sixteen, and all numbers if any is NaN.
#[target_feature(enable = "avx2,f16c")]
pub(super) fn narrow_bf16(src: &[f32], dst: &mut [bf16], portable: impl Fn(f32) -> bf16) {
    // Rounding to nearest adds just under half of the last bit that stays, or half if that bit is odd.
    let halves = _mm256_castsi256_ps(_mm256_set1_epi64x(0x8000_0000_7fff));
    let round = |values| {
        let bits = _mm256_castps_si256(values);
        let half = _mm256_castps_si256(_mm256_permutevar_ps(halves, _mm256_srli_epi32::<16>(bits)));
        _mm256_srli_epi32::<16>(_mm256_add_epi32(bits, half))
    };
    let mut is_nan = _mm256_setzero_ps();
    let row = |src: &[f32; 16], dst: &mut [bf16; 16]| {
        // SAFETY: the array holds sixteen elements, and the instruction allows any alignment.
        let [low, high] = [0, 8].map(|first| unsafe { _mm256_loadu_ps(src.as_ptr().add(first)) });
        is_nan = _mm256_or_ps(is_nan, _mm256_cmp_ps::<_CMP_UNORD_Q>(low, high));
        // The permutation undoes the order of the halves.
        let packed = _mm256_permute4x64_epi64::<0b11_01_10_00>(_mm256_packus_epi32(round(low), round(high)));
        // SAFETY: the array holds sixteen elements, and the instruction allows any alignment.
        unsafe { _mm256_storeu_si256(dst.as_mut_ptr().cast(), packed) };
    };
    convert_rows(src, dst, row, &portable);
    if _mm256_movemask_ps(is_nan) != 0 {
        src.iter().zip(dst).for_each(|(src, dst)| *dst = portable(*src));
    }
}

/// Rounds numbers to 24 bits and splits them into two parts, 32 at once.
///
/// `portable` splits the numbers after the last 32, and all numbers if any is NaN.
#[target_feature(enable = "avx2")]
pub(super) fn split_24(src: &[f32], high: &mut [bf16], low: &mut [u8], portable: impl Fn(f32) -> (bf16, u8)) {
    // This is the table of `narrow_bf16`, for other bits.
    let halves = _mm256_castsi256_ps(_mm256_set1_epi64x(0x80_0000_007f));
    let round = |values| {
        let bits = _mm256_castps_si256(values);
        let half = _mm256_castps_si256(_mm256_permutevar_ps(halves, _mm256_srli_epi32::<8>(bits)));
        _mm256_add_epi32(bits, half)
    };
    let upper = |rounded| _mm256_srli_epi32::<16>(_mm256_add_epi32(rounded, _mm256_set1_epi32(0x8000)));
    let lower = |rounded| _mm256_and_si256(rounded, _mm256_set1_epi32(0xff00));
    let mut is_nan = _mm256_setzero_ps();
    let (rows, rest) = src.as_chunks::<CODES>();
    let ((high_rows, high_rest), (low_rows, low_rest)) =
        (high.as_chunks_mut::<CODES>(), low.as_chunks_mut::<CODES>());
    for ((row, high), low) in rows.iter().zip(high_rows).zip(low_rows) {
        // SAFETY: the array holds four times eight elements, and the instruction allows any alignment.
        let values = [0, 8, 16, 24].map(|first| unsafe { _mm256_loadu_ps(row.as_ptr().add(first)) });
        let unordered = |a, b| _mm256_cmp_ps::<_CMP_UNORD_Q>(values[a], values[b]);
        is_nan = _mm256_or_ps(is_nan, _mm256_or_ps(unordered(0, 1), unordered(2, 3)));
        let rounded = values.map(round);
        let [a, b, c, d] = rounded.map(upper);
        let packed = [_mm256_packus_epi32(a, b), _mm256_packus_epi32(c, d)]
            .map(|pair| _mm256_permute4x64_epi64::<0b11_01_10_00>(pair));
        let [a, b, c, d] = rounded.map(lower);
        let low_halves =
            [_mm256_packus_epi32(a, b), _mm256_packus_epi32(c, d)].map(|pair| _mm256_srli_epi16::<8>(pair));
        let bytes = _mm256_permutevar8x32_epi32(
            _mm256_packus_epi16(low_halves[0], low_halves[1]),
            _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7),
        );
        // SAFETY: the arrays hold 32 elements, and the instructions allow any alignment.
        unsafe {
            _mm256_storeu_si256(high.as_mut_ptr().cast(), packed[0]);
            _mm256_storeu_si256(high.as_mut_ptr().add(16).cast(), packed[1]);
            _mm256_storeu_si256(low.as_mut_ptr().cast(), bytes);
        }
    }
    let one_by_one = |src: &[f32], high: &mut [bf16], low: &mut [u8]| {
        src.iter()
            .zip(high)
            .zip(low)
            .for_each(|((src, high), low)| (*high, *low) = portable(*src));
    };
    one_by_one(rest, high_rest, low_rest);
    if _mm256_movemask_ps(is_nan) != 0 {
        one_by_one(src, high, low);
    }
}

/// Joins the two parts of numbers of 24 bits, 32 at once. `portable` joins the parts after the last 32.
#[target_feature(enable = "avx2")]
pub(super) fn join_24(high: &[bf16], low: &[u8], dst: &mut [f32], portable: impl Fn(bf16, u8) -> f32) {
    let zero = _mm256_setzero_si256();
    let (rows, rest) = dst.as_chunks_mut::<CODES>();
    let ((high_rows, high_rest), (low_rows, low_rest)) =
        (high.as_chunks::<CODES>(), low.as_chunks::<CODES>());
    for ((row, high), low) in rows.iter_mut().zip(high_rows).zip(low_rows) {
        // SAFETY: the array holds 32 elements, and the instruction allows any alignment.
        let low = unsafe { _mm256_loadu_si256(low.as_ptr().cast()) };
        // SAFETY: the array holds twice sixteen elements, and the instruction allows any alignment.
        let high = [0, 16].map(|first| unsafe { _mm256_loadu_si256(high.as_ptr().add(first).cast()) });
        let low = _mm256_permute4x64_epi64::<0b11_01_10_00>(low);
        let lower = [_mm256_unpacklo_epi8(zero, low), _mm256_unpackhi_epi8(zero, low)];
        for ((high, lower), row) in high.into_iter().zip(lower).zip(row.as_chunks_mut::<16>().0) {
            // The low bits are signed, because the bf16 is rounded. If the low bits are negative, the bits of
            // the bf16 are one too large.
            let upper = _mm256_add_epi16(high, _mm256_srai_epi16::<15>(lower));
            let (a, b) = (
                _mm256_unpacklo_epi16(lower, upper),
                _mm256_unpackhi_epi16(lower, upper),
            );
            // SAFETY: the array holds sixteen elements, and the instructions allow any alignment.
            unsafe {
                _mm256_storeu_si256(row.as_mut_ptr().cast(), _mm256_permute2x128_si256::<0x20>(a, b));
                _mm256_storeu_si256(
                    row.as_mut_ptr().add(8).cast(),
                    _mm256_permute2x128_si256::<0x31>(a, b),
                );
            }
        }
    }
    rest.iter_mut()
        .zip(high_rest)
        .zip(low_rest)
        .for_each(|((dst, high), low)| *dst = portable(*high, *low));
}

/// The number of codes in a vector.
const CODES: usize = 32;

/// How many numbers a vector has.
const NUMBERS: usize = 8;

/// Decodes a record. If its scale or a number is infinite or NaN, returns `false` and writes nothing.
#[target_feature(enable = "avx2")]
pub(super) fn decode(code: Code, record: &[u8; RECORD], numbers: &mut [f32; BLOCK]) -> bool {
    match code {
        Code::Signed => decode_signed::<true>(record, numbers),
        Code::NonNegative => decode_signed::<false>(record, numbers),
    }
}

/// [`decode`] for codes with or without a sign.
///
/// Before the multiplication by the scale, the upper half of a number is its code shifted by 4 bits, with the
/// sign on top and the bits of the exponent that all codes share.
#[target_feature(enable = "avx2")]
fn decode_signed<const SIGNED: bool>(record: &[u8; RECORD], numbers: &mut [f32; BLOCK]) -> bool {
    let Some((scale, codes)) = record.split_first_chunk() else {
        return false;
    };
    let (scale, (codes, _)) = (f32::from_le_bytes(*scale), codes.as_chunks::<CODES>());
    let sizes = _mm256_set1_epi8(if SIGNED { 0x7f } else { -1 });
    // SAFETY: the array holds as many codes as the vector, and the instruction allows any alignment.
    let load = |codes: &[u8; CODES]| unsafe { _mm256_loadu_si256(codes.as_ptr().cast()) };
    let zero = _mm256_setzero_si256();
    let largest = codes.iter().fold(zero, |largest, codes| {
        _mm256_max_epu8(largest, _mm256_and_si256(load(codes), sizes))
    });
    let nan = _mm256_sub_epi8(sizes, _mm256_set1_epi8(NAN as i8));
    let is_nan = _mm256_cmpeq_epi8(_mm256_max_epu8(largest, nan), largest);
    if _mm256_movemask_epi8(is_nan) != 0 || !scale.is_finite() {
        return false;
    }
    let scale = _mm256_set1_ps(scale);
    let (code_bits, shared_bits) = if SIGNED {
        (0x87f0u16, (ONE & !SIGNED_SIZE_MASK) << 4)
    } else {
        (0x0ff0, (ONE & !0xff) << 4)
    };
    let (code_mask, shared) = (
        _mm256_set1_epi16(code_bits as i16),
        _mm256_set1_epi16(shared_bits as i16),
    );
    // Codes are unpacked twice, within each half of the vector. So runs of four codes go to the two halves
    // in turn.
    let order = _mm256_setr_epi32(0, 2, 4, 6, 1, 3, 5, 7);
    for (codes, numbers) in codes.iter().zip(numbers.as_chunks_mut::<CODES>().0) {
        let codes = _mm256_permutevar8x32_epi32(load(codes), order);
        let is_zero = _mm256_cmpeq_epi8(_mm256_and_si256(codes, sizes), zero);
        let upper = |codes, is_zero| {
            let shifted = if SIGNED {
                _mm256_srai_epi16::<4>(codes)
            } else {
                _mm256_srli_epi16::<4>(codes)
            };
            _mm256_andnot_si256(
                is_zero,
                _mm256_or_si256(_mm256_and_si256(shifted, code_mask), shared),
            )
        };
        let low = upper(
            _mm256_unpacklo_epi8(zero, codes),
            _mm256_unpacklo_epi8(is_zero, is_zero),
        );
        let high = upper(
            _mm256_unpackhi_epi8(zero, codes),
            _mm256_unpackhi_epi8(is_zero, is_zero),
        );
        let bits = [
            _mm256_unpacklo_epi16(zero, low),
            _mm256_unpackhi_epi16(zero, low),
            _mm256_unpacklo_epi16(zero, high),
            _mm256_unpackhi_epi16(zero, high),
        ];
        for (bits, numbers) in bits.into_iter().zip(numbers.as_chunks_mut::<NUMBERS>().0) {
            let number = _mm256_mul_ps(_mm256_castsi256_ps(bits), scale);
            // SAFETY: the array holds as many numbers as the vector, and the instruction allows any
            // alignment.
            unsafe { _mm256_storeu_ps(numbers.as_mut_ptr(), number) };
        }
    }
    true
}

/// Encodes at most [`BLOCKS_TOGETHER`] blocks.
///
/// If a number is infinite or NaN, returns `false` and writes nothing.
#[target_feature(enable = "avx2")]
pub(super) fn encode(code: Code, blocks: &[[f32; BLOCK]], records: &mut [[u8; RECORD]]) -> bool {
    // All scales are computed first, because each is a division that waits for the end of a maximum.
    let mut scales = [BlockScale {
        unit: 0.0,
        inverse: 0.0,
    }; BLOCKS_TOGETHER];
    for (scale, block) in scales.iter_mut().zip(blocks) {
        let Some(block_scale) = BlockScale::from_largest(largest_size(block)) else {
            return false;
        };
        *scale = block_scale;
    }
    for ((scale, block), record) in scales.iter().zip(blocks).zip(records) {
        encode_block(code, block, scale, record);
    }
    true
}

/// The bits of a vector of numbers.
#[inline]
#[target_feature(enable = "avx2")]
fn load_bits(numbers: &[f32; NUMBERS]) -> __m256i {
    // SAFETY: the array holds as many numbers as the vector, and the instruction allows any alignment.
    unsafe { _mm256_loadu_si256(numbers.as_ptr().cast()) }
}

/// The bits of the largest size, by a maximum of integers, because sizes are in the order of their bits.
#[inline]
#[target_feature(enable = "avx2")]
fn largest_size(numbers: &[f32; BLOCK]) -> u32 {
    let sizes = _mm256_set1_epi32(SIZE_MASK as i32);
    let size = |numbers: &[f32; NUMBERS]| _mm256_and_si256(load_bits(numbers), sizes);
    let larger = |largest: [__m256i; 2], [a, b]: &[[f32; NUMBERS]; 2]| {
        [
            _mm256_max_epi32(largest[0], size(a)),
            _mm256_max_epi32(largest[1], size(b)),
        ]
    };
    let pairs = numbers.as_chunks().0.as_chunks().0;
    let [a, b] = pairs.iter().fold([_mm256_setzero_si256(); 2], larger);
    let eight = _mm256_max_epi32(a, b);
    let four = _mm_max_epi32(
        _mm256_castsi256_si128(eight),
        _mm256_extracti128_si256::<1>(eight),
    );
    let two = _mm_max_epi32(four, _mm_shuffle_epi32::<0b11_10_11_10>(four));
    let one = _mm_max_epi32(two, _mm_shuffle_epi32::<0b01_01_01_01>(two));
    _mm_cvtsi128_si32(one) as u32
}

#[inline]
#[target_feature(enable = "avx2")]
fn encode_block(code: Code, numbers: &[f32; BLOCK], scale: &BlockScale, record: &mut [u8; RECORD]) {
    let Some((scale_bytes, codes)) = record.split_first_chunk_mut() else {
        return;
    };
    *scale_bytes = scale.unit.to_le_bytes();
    let inverse = _mm256_set1_ps(scale.inverse);
    let vectors = numbers.as_chunks().0.as_chunks().0;
    for (vectors, codes) in vectors.iter().zip(codes.as_chunks_mut::<CODES>().0) {
        let vectors = vectors.each_ref().map(|numbers| load_bits(numbers));
        let packed = match code {
            Code::Signed => signed_codes(vectors, inverse),
            Code::NonNegative => codes_of_sizes(vectors, inverse),
        };
        let packed = _mm256_permutevar8x32_epi32(packed, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
        // SAFETY: the array holds as many codes as the vector, and the instruction allows any alignment.
        unsafe { _mm256_storeu_si256(codes.as_mut_ptr().cast(), packed) };
    }
}

/// The sizes of numbers, times the inverse of the scale.
#[inline]
#[target_feature(enable = "avx2")]
fn scaled_sizes(numbers: __m256i, inverse: __m256) -> __m256i {
    let size = _mm256_and_si256(numbers, _mm256_set1_epi32(SIZE_MASK as i32));
    _mm256_castps_si256(_mm256_mul_ps(_mm256_castsi256_ps(size), inverse))
}

/// The hashes of sizes, below the cut.
#[inline]
#[target_feature(enable = "avx2")]
fn hash_of(sizes: __m256i) -> __m256i {
    _mm256_srli_epi32::<{ 32 - CUT_BITS as i32 }>(_mm256_mullo_epi32(sizes, _mm256_set1_epi32(HASH as i32)))
}

/// `code_of::<true>` in `numbers/codes.rs` for 32 numbers. [`encode_block`] puts the codes in order.
#[inline]
#[target_feature(enable = "avx2")]
fn signed_codes(numbers: [__m256i; 4], inverse: __m256) -> __m256i {
    let [largest, zero] = [LARGEST_ROUNDED, SIGNED_ZERO].map(|bits| _mm256_set1_epi32(bits as i32));
    let code = |numbers| {
        let size = scaled_sizes(numbers, inverse);
        let rounded = _mm256_min_epi32(_mm256_add_epi32(size, hash_of(size)), largest);
        let above_zero = _mm256_sub_epi32(_mm256_max_epi32(rounded, zero), zero);
        _mm256_srli_epi32::<{ CUT_BITS as i32 }>(above_zero)
    };
    // Packing saturates and so keeps the sign of a number. Of `pack(numbers)` only these signs are used.
    let pack =
        |[a, b, c, d]: [__m256i; 4]| _mm256_packs_epi16(_mm256_packs_epi32(a, b), _mm256_packs_epi32(c, d));
    _mm256_or_si256(
        pack(numbers.map(code)),
        _mm256_and_si256(pack(numbers), _mm256_set1_epi8(-0x80)),
    )
}

/// `code_of::<false>` for 32 numbers, with codes in the order of [`signed_codes`].
#[inline]
#[target_feature(enable = "avx2")]
fn codes_of_sizes(numbers: [__m256i; 4], inverse: __m256) -> __m256i {
    let round = |numbers| {
        let is_zero = _mm256_cmpeq_epi32(
            _mm256_and_si256(numbers, _mm256_set1_epi32(SIZE_MASK as i32)),
            _mm256_setzero_si256(),
        );
        let at_least_smallest =
            _mm256_max_epi32(scaled_sizes(numbers, inverse), _mm256_set1_epi32(SMALLEST as i32));
        let size = _mm256_andnot_si256(is_zero, at_least_smallest);
        _mm256_srli_epi32::<{ CUT_BITS as i32 }>(_mm256_add_epi32(size, hash_of(size)))
    };
    let [a, b, c, d] = numbers.map(round);
    let (largest, shared) = (
        _mm256_set1_epi16(ONE as i16),
        _mm256_set1_epi16((ONE & !0xff) as i16),
    );
    let code = |pair| _mm256_subs_epu16(_mm256_min_epu16(pair, largest), shared);
    _mm256_packus_epi16(code(_mm256_packus_epi32(a, b)), code(_mm256_packus_epi32(c, d)))
}
