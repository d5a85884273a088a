//! Reduces the elements of a leaf (a parameter with its state) to one number.
//!
//! The number has the same bits for any number of threads and any instruction set, because the order of the
//! elements depends on the length of the leaf alone. All sums are in f64:
//!
//! ```text
//! reduce_block        element i of a chunk goes to accumulator i mod 16
//! join_accumulators   the 16 accumulators, in order, become the total of the chunk
//! ReduceOp::total     the totals of the chunks, in order, become the total of the leaf
//! ```
//!
//! `unsafe` is in the macro `per_isa!`, which calls a loop that is compiled for vector instructions. Only
//! some processors have such instructions. An [`Isa`] proves that this processor has them.
#![allow(unsafe_code)]

use smallvec::SmallVec;

use super::Isa;
use super::lanes::{BLOCK, per_isa};
use crate::numbers::DType;
use crate::numbers::value::Compute;

/// How many partial sums a norm has. The number is fixed, so that results do not depend on the vector width.
pub(in crate::engine) const ACCUMULATORS: usize = 16;

/// The number of elements in a chunk of a leaf with `length` elements.
///
/// A leaf has at most 1024 chunks, which bounds its list of totals. A chunk has at least 16 384 elements, so
/// a smaller leaf is a single chunk. The length of a chunk depends on nothing else, so that a norm has the
/// same bits with any number of threads.
pub(crate) fn chunk_length(length: usize) -> usize {
    length.div_ceil(1024).next_multiple_of(BLOCK).max(1 << 14)
}

/// The totals of chunks, in the order of the elements.
pub(crate) type ChunkTotals = SmallVec<[f64; 2]>;

/// How elements are reduced to one number, in f64.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum ReduceOp {
    /// `Σ g`
    Sum,
    /// `Σ |g|`
    AbsSum,
    /// `Σ g²`
    SquareSum,
    /// `max |g|`, NaN if any `g` is NaN
    AbsMax,
    /// The number of elements that are not 0
    NonZeros,
    /// `Σ (|g| / unit)^p`
    PowerSum,
}

/// A [`ReduceOp`] with the numbers that some operations need.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Reducer {
    pub(crate) op: ReduceOp,
    /// The exponent of the norm.
    pub(crate) p: f64,
    /// A power of two near the largest size, so that powers neither over- nor underflow.
    pub(crate) unit: f64,
}

impl ReduceOp {
    /// Joins two totals, or a total and an element.
    #[inline(always)]
    pub(in crate::engine) fn join(self, a: f64, b: f64) -> f64 {
        match self {
            ReduceOp::AbsMax => larger(a, b),
            _ => a + b,
        }
    }

    pub(in crate::engine) fn total(self, chunks: &[f64]) -> f64 {
        chunks.iter().fold(0.0, |total, chunk| self.join(total, *chunk))
    }
}

impl Reducer {
    pub(crate) fn sum() -> Self {
        Reducer { op: ReduceOp::Sum, p: 1.0, unit: 1.0 }
    }

    pub(crate) fn abs_sum() -> Self {
        Reducer { op: ReduceOp::AbsSum, ..Self::sum() }
    }

    /// The first reduction for a p-norm. If p is 0, 1, 2 or infinite, there is no second.
    ///
    /// For any other p the first reduction finds the largest size. [`Reducer::with_unit`] makes the second
    /// reduction from that size: the sum of powers.
    pub(crate) fn norm(p: f64) -> Self {
        let op = match p {
            0.0 => ReduceOp::NonZeros,
            1.0 => ReduceOp::AbsSum,
            2.0 => ReduceOp::SquareSum,
            _ => ReduceOp::AbsMax,
        };
        Reducer { op, p, unit: 1.0 }
    }

    /// The second reduction for a norm. `None` if the first reduction is enough.
    ///
    /// `largest` is the result of the first reduction.
    pub(in crate::engine) fn with_unit(self, largest: f64) -> Option<Self> {
        let needs_second =
            self.op == ReduceOp::AbsMax && self.p.is_finite() && largest.is_finite() && largest > 0.0;
        // The unit is a normal power of two, hence from 2^-1022 to 2^1023. An element above 2^1023 is less
        // than twice the unit, so that its power stays below 2^p. Elements far below 2^-1022 may have powers
        // of 0.
        let unit = 2f64.powi((largest.log2().ceil() as i32).clamp(-1022, 1023));
        needs_second.then_some(Reducer { op: ReduceOp::PowerSum, unit, ..self })
    }

    /// Whether a reduction of finite numbers of a compute dtype can be infinite.
    pub(in crate::engine) fn can_overflow(self, compute: DType) -> bool {
        match self.op {
            ReduceOp::AbsMax | ReduceOp::NonZeros | ReduceOp::PowerSum => false,
            // Sums are in F64, where no sum of F32 numbers or of their squares overflows.
            ReduceOp::Sum | ReduceOp::AbsSum | ReduceOp::SquareSum => compute == DType::F64,
        }
    }

    /// Whether an infinite or NaN element makes the result infinite or NaN. A count is always finite.
    pub(in crate::engine) fn keeps_non_finite(self) -> bool {
        self.op != ReduceOp::NonZeros
    }

    /// Whether [`Reducer::scaled`] can compute the total of scaled elements.
    ///
    /// A sum of powers cannot be scaled: its unit was chosen for the scaled elements, while the unscaled
    /// elements would be reduced.
    pub(in crate::engine) fn can_be_scaled(self) -> bool {
        self.op != ReduceOp::PowerSum
    }

    /// Converts the total of some elements to the total of these elements times `scale`.
    pub(in crate::engine) fn scaled(self, total: f64, scale: f64) -> f64 {
        match self.op {
            ReduceOp::Sum => total * scale,
            // A scale does not change a count. A sum of powers is never scaled, see `can_be_scaled`.
            ReduceOp::NonZeros | ReduceOp::PowerSum => total,
            ReduceOp::AbsSum | ReduceOp::AbsMax => total * scale.abs(),
            ReduceOp::SquareSum => total * scale * scale,
        }
    }

    /// The norm or sum that follows from a total.
    pub(in crate::engine) fn finish(self, total: f64) -> f64 {
        match self.op {
            ReduceOp::Sum | ReduceOp::AbsSum | ReduceOp::AbsMax | ReduceOp::NonZeros => total,
            // Subnormal squares have lost digits, and a quotient by their root could be far too large.
            ReduceOp::SquareSum if total < f64::MIN_POSITIVE => 0.0,
            ReduceOp::SquareSum => total.sqrt(),
            ReduceOp::PowerSum => total.powf(self.p.recip()) * self.unit,
        }
    }
}

/// The larger number, or NaN if a number is NaN. `f64::max` would drop the NaN.
#[inline(always)]
fn larger(a: f64, b: f64) -> f64 {
    let larger = if a >= b { a } else { b };
    if a.is_nan() { a } else { larger }
}

#[inline(always)]
fn accumulate<T: Compute>(sums: &mut [f64; ACCUMULATORS], dx: &[T], fold: impl Fn(f64, f64) -> f64) {
    let (rows, rest) = dx.as_chunks::<ACCUMULATORS>();
    let mut local = *sums;
    for row in rows {
        for (sum, g) in local.iter_mut().zip(row) {
            *sum = fold(*sum, g.as_());
        }
    }
    // `local` is stored before the second loop. Otherwise that loop would make the compiler keep `local` in
    // memory, not in registers.
    *sums = local;
    for (sum, g) in sums.iter_mut().zip(rest) {
        *sum = fold(*sum, g.as_());
    }
}

per_isa! {
    /// Reduces a block into the accumulators: element i of a chunk goes to accumulator i mod 16.
    pub(in crate::engine) fn reduce_block<T: Compute>(isa, reducer: Reducer, dx: &[T], sums: &mut [f64; ACCUMULATORS]) {
        match reducer.op {
            ReduceOp::Sum => accumulate(sums, dx, |sum, g| sum + g),
            ReduceOp::AbsSum => accumulate(sums, dx, |sum, g| sum + g.abs()),
            ReduceOp::SquareSum => accumulate(sums, dx, |sum, g| sum + g * g),
            ReduceOp::AbsMax => accumulate(sums, dx, |sum, g| larger(sum, g.abs())),
            ReduceOp::NonZeros => accumulate(sums, dx, |sum, g| sum + f64::from(u8::from(g != 0.0))),
            ReduceOp::PowerSum => accumulate(sums, dx, |sum, g| sum + (g.abs() / reducer.unit).powf(reducer.p)),
        }
    }
}

pub(in crate::engine) fn join_accumulators(op: ReduceOp, sums: &[f64; ACCUMULATORS]) -> f64 {
    sums.iter().fold(0.0, |total, &sum| op.join(total, sum))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::reference::reduce_chunk;

    fn norm(p: f64, values: &[f64]) -> f64 {
        let first = Reducer::norm(p);
        let largest = reduce_chunk(first, values);
        let reducer = first.with_unit(largest).unwrap_or(first);
        reducer.finish(reduce_chunk(reducer, values))
    }

    #[test]
    fn norms_of_any_exponent_neither_overflow_nor_vanish() {
        for size in [1e-300, 1e-6, 1.0, 3.0, 1e5, 1e300] {
            for p in [0.5, 3.0, 64.0, 1000.0] {
                let expected = 3f64.powf(1.0 / p) * size;
                let actual = norm(p, &[size, -size, 0.0, size]);
                assert!((actual / expected - 1.0).abs() < 1e-12, "{actual:e} for {expected:e}, p = {p}");
            }
        }
        assert_eq!(norm(3.0, &[0.0, 0.0]), 0.0);
        assert_eq!(norm(3.0, &[1.0, f64::INFINITY]), f64::INFINITY);
        assert!(norm(3.0, &[1.0, f64::NAN]).is_nan());
        assert_eq!((norm(0.0, &[0.0, 5.0]), norm(f64::INFINITY, &[-7.0, 5.0])), (1.0, 7.0));
    }
}
