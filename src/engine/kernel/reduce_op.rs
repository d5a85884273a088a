//! Reduces the elements of a leaf (a parameter with its state) to one number.
//!
//! The number has the same bits for any number of threads and any instruction set, because the order in
//! which elements are joined depends on the length of the leaf alone. All sums are in f64:
//!
//! ```text
//! reduce_block      element i of a chunk goes to accumulator i mod 16
//! ReduceOp::total   the 16 accumulators, in order, become the total of the chunk,
//!                   and the totals of the chunks, in order, the total of the leaf
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

/// The number of accumulators to which the elements of a chunk are distributed. The number is fixed, so that
/// results do not depend on the vector width.
pub(in crate::engine) const ACCUMULATORS: usize = 16;

/// The number of elements in a chunk of a leaf with `length` elements.
///
/// A leaf has at most 1024 chunks, so that the list of their totals is short. A chunk has room for at least
/// 16 384 elements, so a smaller leaf is a single chunk. The result depends on `length` alone, so that a norm
/// has the same bits with any number of threads.
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
    /// A power of two near the largest absolute value. Elements are divided by this unit, so that their
    /// powers neither overflow nor underflow.
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

    /// Joins accumulators or totals, in their order.
    pub(in crate::engine) fn total(self, totals: &[f64]) -> f64 {
        totals.iter().fold(0.0, |joined, total| self.join(joined, *total))
    }
}

impl Reducer {
    pub(crate) fn sum() -> Self {
        Reducer {
            op: ReduceOp::Sum,
            p: 1.0,
            unit: 1.0,
        }
    }

    pub(crate) fn abs_sum() -> Self {
        Reducer {
            op: ReduceOp::AbsSum,
            ..Self::sum()
        }
    }

    /// The first reduction for a p-norm. If p is 0, 1, 2 or infinite, there is no second.
    ///
    /// For any other p the first reduction finds the largest absolute value. From that value
    /// [`Reducer::second_reduction`] makes the second reduction, which is the sum of powers.
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
    pub(in crate::engine) fn second_reduction(self, largest: f64) -> Option<Self> {
        let needs_power_sum =
            self.op == ReduceOp::AbsMax && self.p.is_finite() && largest.is_finite() && largest > 0.0;
        // The unit is limited to normal numbers, from 2^-1022 to 2^1023. If `largest` is above 2^1023, it is
        // less than twice the unit, so the power of its quotient stays below 2^p. If `largest` is far below
        // 2^-1022, the powers of all quotients may be 0.
        let unit = 2f64.powi((largest.log2().ceil() as i32).clamp(-1022, 1023));
        needs_power_sum.then_some(Reducer {
            op: ReduceOp::PowerSum,
            unit,
            ..self
        })
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
    /// A sum of powers cannot be scaled, because the unit was chosen for the scaled elements, but the
    /// reduction would divide the unscaled elements by it.
    pub(in crate::engine) fn can_be_scaled(self) -> bool {
        self.op != ReduceOp::PowerSum
    }

    /// The total of elements that are multiplied by `scale`, from the `total` of the unscaled elements.
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
            // A subnormal sum of squares has lost digits, so its root could be far too small, and a quotient
            // by this root far too large.
            ReduceOp::SquareSum if total < f64::MIN_POSITIVE => 0.0,
            ReduceOp::SquareSum => total.sqrt(),
            ReduceOp::PowerSum => total.powf(self.p.recip()) * self.unit,
        }
    }
}

/// The larger number, or NaN if a number is NaN. `f64::max` would drop the NaN.
#[inline(always)]
fn larger(a: f64, b: f64) -> f64 {
    let larger_or_b = if a >= b { a } else { b };
    if a.is_nan() { a } else { larger_or_b }
}

#[inline(always)]
fn accumulate<T: Compute>(sums: &mut [f64; ACCUMULATORS], gs: &[T], fold: impl Fn(f64, f64) -> f64) {
    let (rows, rest) = gs.as_chunks::<ACCUMULATORS>();
    let mut local_sums = *sums;
    for row in rows {
        for (sum, g) in local_sums.iter_mut().zip(row) {
            *sum = fold(*sum, g.as_());
        }
    }
    // `local_sums` is stored before the second loop. Otherwise that loop would make the compiler keep
    // `local_sums` in memory, not in registers.
    *sums = local_sums;
    for (sum, g) in sums.iter_mut().zip(rest) {
        *sum = fold(*sum, g.as_());
    }
}

per_isa! {
    /// Reduces a block into the accumulators: element i of a chunk goes to accumulator i mod 16.
    pub(in crate::engine) fn reduce_block<T: Compute>(isa, reducer: Reducer, gs: &[T], sums: &mut [f64; ACCUMULATORS]) {
        match reducer.op {
            ReduceOp::Sum => accumulate(sums, gs, |sum, g| sum + g),
            ReduceOp::AbsSum => accumulate(sums, gs, |sum, g| sum + g.abs()),
            ReduceOp::SquareSum => accumulate(sums, gs, |sum, g| sum + g * g),
            ReduceOp::AbsMax => accumulate(sums, gs, |sum, g| larger(sum, g.abs())),
            ReduceOp::NonZeros => accumulate(sums, gs, |sum, g| sum + f64::from(u8::from(g != 0.0))),
            ReduceOp::PowerSum => accumulate(sums, gs, |sum, g| sum + (g.abs() / reducer.unit).powf(reducer.p)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::reference::reduce_chunk;

    fn norm(p: f64, values: &[f64]) -> f64 {
        let first = Reducer::norm(p);
        let largest = reduce_chunk(first, values);
        let reducer = first.second_reduction(largest).unwrap_or(first);
        reducer.finish(reduce_chunk(reducer, values))
    }

    #[test]
    fn norms_of_any_exponent_neither_overflow_nor_vanish() {
        for size in [1e-300, 1e-6, 1.0, 3.0, 1e5, 1e300] {
            for p in [0.5, 3.0, 64.0, 1000.0] {
                let expected = 3f64.powf(1.0 / p) * size;
                let actual = norm(p, &[size, -size, 0.0, size]);
                assert!(
                    (actual / expected - 1.0).abs() < 1e-12,
                    "{actual:e} for {expected:e}, p = {p}"
                );
            }
        }
        assert_eq!(norm(3.0, &[0.0, 0.0]), 0.0);
        assert_eq!(norm(3.0, &[1.0, f64::INFINITY]), f64::INFINITY);
        assert!(norm(3.0, &[1.0, f64::NAN]).is_nan());
        assert_eq!(
            (norm(0.0, &[0.0, 5.0]), norm(f64::INFINITY, &[-7.0, 5.0])),
            (1.0, 7.0)
        );
    }
}
