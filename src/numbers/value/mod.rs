//! The abstract number over which a rule's arithmetic is written, and its interpreters.
//!
//! A rule writes its update once, generically over [`Value`]. The engines put in what they compute with:
//! numbers of a vector loop on the CPU, or a recorder. What is recorded is evaluated with candle's tensor
//! operations, or printed as code for a device. [`Lane`] is a single number, to try out a formula.

mod arithmetic;
mod expr;
mod lane;
mod prologue;

pub use arithmetic::Arithmetic;
pub(crate) use arithmetic::{Array, DivideBy, ScaleBy};
pub(crate) use expr::{Binary, Comparison, Expr, Graph, Node, Unary};
pub(crate) use lane::Compute;
pub use lane::Lane;
#[doc(hidden)]
pub use prologue::Prologue;

use std::ops::{Add, Div, Mul, Neg, Sub};

/// A number in a rule's arithmetic: an element of the parameter, the gradient or a state slot.
///
/// The second operand of `+ - * /` is another `Value` or an `f64` scalar that belongs to the rule (a learning
/// rate, a bias correction). Scalars stay `f64` until they meet a value and are then rounded once to the
/// compute type.
///
/// The trait is sealed: what arithmetic means, down to the last bit, is the same for all that implement it,
/// and tested to be.
///
/// NaN passes through every operation, [`min`](Value::min), [`max`](Value::max), [`clamp`](Value::clamp) and
/// [`sign`](Value::sign) included. There are no branches on values; use a comparison and
/// [`select`](Value::select).
///
/// ```
/// use optimisers::value::Value;
///
/// /// max(0, x), written once for every device and dtype.
/// fn relu<V: Value>(x: V) -> V {
///     V::select(x.gt(x.constant(0.0)), x, x * 0.0)
/// }
/// ```
pub trait Value:
    sealed::Sealed
    + Copy
    + Neg<Output = Self>
    + Add<Output = Self>
    + Sub<Output = Self>
    + Mul<Output = Self>
    + Div<Output = Self>
    + Add<f64, Output = Self>
    + Sub<f64, Output = Self>
    + Mul<f64, Output = Self>
    + Div<f64, Output = Self>
{
    /// The outcome of a comparison, one truth value per element.
    type Mask: Copy;

    /// The scalar `value` as a number of this kind.
    #[must_use]
    fn constant(self, value: f64) -> Self;
    /// The square root, correctly rounded.
    #[must_use]
    fn sqrt(self) -> Self;
    /// The absolute value.
    #[must_use]
    fn abs(self) -> Self;
    /// `self < other`; false if either is NaN.
    #[must_use]
    fn lt(self, other: Self) -> Self::Mask;
    /// `self <= other`; false if either is NaN.
    #[must_use]
    fn le(self, other: Self) -> Self::Mask;
    /// `self == other`; false if either is NaN.
    #[must_use]
    fn equal(self, other: Self) -> Self::Mask;
    /// `yes` where the mask holds, `no` elsewhere.
    fn select(mask: Self::Mask, yes: Self, no: Self) -> Self;

    /// `self > other`; false if either is NaN.
    #[inline(always)]
    #[must_use]
    fn gt(self, other: Self) -> Self::Mask {
        other.lt(self)
    }

    /// `self >= other`; false if either is NaN.
    #[inline(always)]
    #[must_use]
    fn ge(self, other: Self) -> Self::Mask {
        other.le(self)
    }

    /// The smaller of two numbers; NaN if either is NaN; `self` where they compare equal.
    #[inline(always)]
    #[must_use]
    fn min(self, other: Self) -> Self {
        let smaller = Self::select(self.le(other), self, other);
        Self::select(self.equal(self), smaller, self)
    }

    /// The larger of two numbers; NaN if either is NaN; `self` where they compare equal.
    #[inline(always)]
    #[must_use]
    fn max(self, other: Self) -> Self {
        let larger = Self::select(other.le(self), self, other);
        Self::select(self.equal(self), larger, self)
    }

    /// The number limited to `low..=high`; NaN stays NaN, and a bound that is NaN limits nothing.
    #[inline(always)]
    #[must_use]
    fn clamp(self, low: f64, high: f64) -> Self {
        let (low, high) = (self.constant(low), self.constant(high));
        // Two instructions of most processors.
        let raised = Self::select(self.lt(low), low, self);
        Self::select(raised.gt(high), high, raised)
    }

    /// -1, 0 or 1 by the sign of the number; the number itself where it is 0 or NaN.
    #[inline(always)]
    #[must_use]
    fn sign(self) -> Self {
        let zero = self.constant(0.0);
        let positive = Self::select(self.gt(zero), self.constant(1.0), self);
        Self::select(self.lt(zero), self.constant(-1.0), positive)
    }
}

/// ε for a divisor: the smallest normal number of F32 in place of 0, so that 0 is never divided by 0.
///
/// Added to a root that is not 0 it changes no bit: in F32 such a root is above 1e-23, and in F64 it has to
/// be below 1e-22 to notice.
pub(crate) fn above_zero(epsilon: f64) -> f64 {
    epsilon.max(f32::MIN_POSITIVE.into())
}

mod sealed {
    /// What only this crate's numbers implement.
    pub trait Sealed {}

    impl<T> Sealed for super::Lane<T> {}
}
