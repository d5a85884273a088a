//! Finds numbers that are infinite or NaN, or would be infinite in another dtype.

use std::cmp::Ordering;
use std::ops::Range;

use half::{bf16, f16};

use super::DType;

/// Cuts elements into ranges of at most 1 MiB of f64, so that a reader needs memory for one range at a time.
pub(crate) fn ranges_to_read(elements: Range<usize>) -> impl Iterator<Item = Range<usize>> {
    /// The number of elements: 1 MiB of f64 stays in the cache.
    const LENGTH: usize = 1 << 17;
    let end = elements.end;
    elements
        .step_by(LENGTH)
        .map(move |start| start..end.min(start + LENGTH))
}

/// The first number that is infinite or NaN, or that `dtype` rounds to infinity, with its index.
pub(crate) fn first_non_finite(numbers: impl IntoIterator<Item = f64>, dtype: DType) -> Option<(usize, f64)> {
    let limit = overflow_limit(dtype);
    // `>=` would be false for NaN.
    let is_beyond = |number: f64| number.abs().partial_cmp(&limit) != Some(Ordering::Less);
    numbers
        .into_iter()
        .enumerate()
        .find(|(_, number)| is_beyond(*number))
}

/// [`first_non_finite`] of little-endian numbers of the dtype `from`, which are to be rounded to the dtype
/// `to`. `None` if `from` is a dtype of integers.
pub(super) fn first_non_finite_in(bytes: &[u8], from: DType, to: DType) -> Option<(usize, f64)> {
    fn first<const N: usize>(
        bytes: &[u8],
        [from, to]: [DType; 2],
        is_finite: impl Fn([u8; N]) -> bool,
        decode: impl Fn([u8; N]) -> f64,
    ) -> Option<(usize, f64)> {
        let encoded_numbers = bytes.as_chunks().0;
        // The fold has no early exit, so that the compiler vectorises it.
        if from == to
            && encoded_numbers
                .iter()
                .fold(true, |all, encoded| all & is_finite(*encoded))
        {
            return None;
        }
        first_non_finite(encoded_numbers.iter().map(|encoded| decode(*encoded)), to)
    }
    let dtypes = [from, to];
    match from {
        DType::F16 => first(
            bytes,
            dtypes,
            |n| f16::from_le_bytes(n).is_finite(),
            |n| f16::from_le_bytes(n).into(),
        ),
        DType::BF16 => first(
            bytes,
            dtypes,
            |n| bf16::from_le_bytes(n).is_finite(),
            |n| bf16::from_le_bytes(n).into(),
        ),
        DType::F32 => first(
            bytes,
            dtypes,
            |n| f32::from_le_bytes(n).is_finite(),
            |n| f32::from_le_bytes(n).into(),
        ),
        DType::F64 => first(
            bytes,
            dtypes,
            |n| f64::from_le_bytes(n).is_finite(),
            f64::from_le_bytes,
        ),
        _ => None,
    }
}

/// The first number below 0 among little-endian numbers of a dtype, with its index.
pub(super) fn first_negative_in(bytes: &[u8], dtype: DType) -> Option<(usize, f64)> {
    fn first<const N: usize>(bytes: &[u8], decode: impl Fn([u8; N]) -> f64) -> Option<(usize, f64)> {
        let encoded_numbers = bytes.as_chunks().0;
        // The fold has no early exit, so that the compiler vectorises it.
        if !encoded_numbers
            .iter()
            .fold(false, |any, encoded| any | (decode(*encoded) < 0.0))
        {
            return None;
        }
        encoded_numbers
            .iter()
            .map(|encoded| decode(*encoded))
            .enumerate()
            .find(|(_, number)| *number < 0.0)
    }
    match dtype {
        DType::F16 => first(bytes, |n| f16::from_le_bytes(n).into()),
        DType::BF16 => first(bytes, |n| bf16::from_le_bytes(n).into()),
        DType::F32 => first(bytes, |n| f32::from_le_bytes(n).into()),
        DType::F64 => first(bytes, f64::from_le_bytes),
        _ => None,
    }
}

/// The smallest number that the dtype rounds to infinity: half a unit in the last place
/// above the largest finite number.
fn overflow_limit(dtype: DType) -> f64 {
    let limit = |exponent: i32, digits: i32| (2.0 - 2f64.powi(-digits)) * 2f64.powi(exponent);
    match dtype {
        DType::F16 => limit(15, 11),
        DType::BF16 => limit(127, 8),
        DType::F32 => limit(127, 24),
        _ => f64::INFINITY,
    }
}
