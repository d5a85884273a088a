//! Conversions of 16-bit numbers by AVX2 and F16C instructions that the compiler does not find. `unsafe`:
//! loads and stores of vectors.
#![allow(unsafe_code)]

use std::arch::x86_64::*;

use half::{bf16, f16};

/// Calls `row` for N neighbours at a time, and `one` for each of the rest.
#[inline(always)]
fn by_rows<const N: usize, S: Copy, D>(src: &[S], dst: &mut [D], mut row: impl FnMut(&[S; N], &mut [D; N]), one: impl Fn(S) -> D) {
    let (rows, rest) = src.as_chunks::<N>();
    let (dst_rows, dst_rest) = dst.as_chunks_mut::<N>();
    rows.iter().zip(dst_rows).for_each(|(src, dst)| row(src, dst));
    rest.iter().zip(dst_rest).for_each(|(src, dst)| *dst = one(*src));
}

#[target_feature(enable = "avx2,f16c")]
pub(super) fn widen_f16(src: &[f16], dst: &mut [f32]) {
    // SAFETY: both arrays hold eight elements, and the instructions allow any alignment.
    let row = |src: &[f16; 8], dst: &mut [f32; 8]| unsafe {
        _mm256_storeu_ps(dst.as_mut_ptr(), _mm256_cvtph_ps(_mm_loadu_si128(src.as_ptr().cast())))
    };
    by_rows(src, dst, row, f16::to_f32_const);
}

#[target_feature(enable = "avx2,f16c")]
pub(super) fn narrow_f16(src: &[f32], dst: &mut [f16]) {
    // SAFETY: both arrays hold eight elements, and the instructions allow any alignment.
    let row = |src: &[f32; 8], dst: &mut [f16; 8]| unsafe {
        let halves = _mm256_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(_mm256_loadu_ps(src.as_ptr()));
        _mm_storeu_si128(dst.as_mut_ptr().cast(), halves)
    };
    by_rows(src, dst, row, f16::from_f32_const);
}

/// Rounds sixteen numbers in sixteen instructions, as if none were NaN. If one is, all are done once more.
#[target_feature(enable = "avx2,f16c")]
pub(super) fn narrow_bf16(src: &[f32], dst: &mut [bf16], one: impl Fn(f32) -> bf16) {
    // What rounding to nearest adds if the last kept bit is even, and if it is odd.
    let halves = _mm256_castsi256_ps(_mm256_set1_epi64x(0x8000_0000_7fff));
    let rounded = |values| {
        let bits = _mm256_castps_si256(values);
        let half = _mm256_castps_si256(_mm256_permutevar_ps(halves, _mm256_srli_epi32::<16>(bits)));
        _mm256_srli_epi32::<16>(_mm256_add_epi32(bits, half))
    };
    let mut is_nan = _mm256_setzero_ps();
    let row = |src: &[f32; 16], dst: &mut [bf16; 16]| {
        // SAFETY: the array holds sixteen elements, and the instruction allows any alignment.
        let [low, high] = [0, 8].map(|first| unsafe { _mm256_loadu_ps(src.as_ptr().add(first)) });
        is_nan = _mm256_or_ps(is_nan, _mm256_cmp_ps::<_CMP_UNORD_Q>(low, high));
        // Both halves of a register are packed by themselves.
        let packed = _mm256_permute4x64_epi64::<0b11_01_10_00>(_mm256_packus_epi32(rounded(low), rounded(high)));
        // SAFETY: the array holds sixteen elements, and the instruction allows any alignment.
        unsafe { _mm256_storeu_si256(dst.as_mut_ptr().cast(), packed) };
    };
    by_rows(src, dst, row, &one);
    if _mm256_movemask_ps(is_nan) != 0 {
        src.iter().zip(dst).for_each(|(src, dst)| *dst = one(*src));
    }
}
