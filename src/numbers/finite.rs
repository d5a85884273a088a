//! Finds numbers that are infinite or NaN, or would be infinite in another dtype.

use std::cmp::Ordering;
use std::ops::Range;

use super::DType;

/// Cuts elements into ranges of at most 1 MiB, so that a reader needs memory for one range at a time.
pub(crate) fn ranges(elements: Range<usize>) -> impl Iterator<Item = Range<usize>> {
    /// In elements. 1 MiB of f64 stays in the cache.
    const LENGTH: usize = 1 << 17;
    let end = elements.end;
    elements.step_by(LENGTH).map(move |start| start..end.min(start + LENGTH))
}

/// The first number that is infinite or NaN, or that `dtype` rounds to infinity, with its index.
pub(crate) fn first_non_finite(numbers: impl IntoIterator<Item = f64>, dtype: DType) -> Option<(usize, f64)> {
    let limit = infinity(dtype);
    // Not by `>=`, which is false for NaN.
    let is_bad = |number: f64| number.abs().partial_cmp(&limit) != Some(Ordering::Less);
    numbers.into_iter().enumerate().find(|(_, number)| is_bad(*number))
}

/// The smallest number that the dtype rounds to infinity: half a unit above the largest finite one.
fn infinity(dtype: DType) -> f64 {
    let above = |exponent: i32, digits: i32| (2.0 - 2f64.powi(-digits)) * 2f64.powi(exponent);
    match dtype {
        DType::F16 => above(15, 11),
        DType::BF16 => above(127, 8),
        DType::F32 => above(127, 24),
        _ => f64::INFINITY,
    }
}
