//! The trait [`Value`], over which a rule's arithmetic is written, and the types that implement it.
//!
//! A rule writes its update once, generic over [`Value`]. Each engine calls the update with its own type: the
//! numbers of a vector loop on the CPU, or a recorder. A recording is evaluated with candle's tensor
//! operations, or printed as code for a device. [`Lane`] is a single number, with which a program can try out
//! a formula.

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
/// The second operand of `+ - * /` is another `Value` or an `f64` scalar of the rule (a learning rate, a bias
/// correction). A scalar is rounded to the compute type once, when it is combined with a value.
///
/// The trait is sealed, because arithmetic must give the same bits in all types that implement the trait.
/// Tests compare these bits.
///
/// NaN passes through every operation, [`min`](Value::min), [`max`](Value::max), [`clamp`](Value::clamp) and
/// [`sign`](Value::sign) included. A formula cannot branch on a value; use a comparison and
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
    /// The result of a comparison, one truth value per element.
    type Mask: Copy;

    /// The scalar `value` as a number of this type. `self` only supplies the type and the recording.
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

    /// The smaller of two numbers; NaN if either is NaN; `self` if they are equal.
    #[inline(always)]
    #[must_use]
    fn min(self, other: Self) -> Self {
        let smaller = Self::select(self.le(other), self, other);
        // Only NaN is not equal to itself, so the line below selects `self` if `self` is NaN. The line above
        // selects `other` if `other` is NaN.
        Self::select(self.equal(self), smaller, self)
    }

    /// The larger of two numbers; NaN if either is NaN; `self` if they are equal.
    #[inline(always)]
    #[must_use]
    fn max(self, other: Self) -> Self {
        let larger = Self::select(other.le(self), self, other);
        Self::select(self.equal(self), larger, self)
    }

    /// The number limited to `low..=high`. NaN stays NaN, and a bound that is NaN limits nothing.
    #[inline(always)]
    #[must_use]
    fn clamp(self, low: f64, high: f64) -> Self {
        let (low, high) = (self.constant(low), self.constant(high));
        // The selections for NaN in `max` and `min` are left out, so that a clamp is two instructions on most
        // processors.
        let raised = Self::select(self.lt(low), low, self);
        Self::select(raised.gt(high), high, raised)
    }

    /// -1 or 1 by the sign of the number; the number itself if it is 0 or NaN.
    #[inline(always)]
    #[must_use]
    fn sign(self) -> Self {
        let zero = self.constant(0.0);
        let positive = Self::select(self.gt(zero), self.constant(1.0), self);
        Self::select(self.lt(zero), self.constant(-1.0), positive)
    }
}

/// The ε to add to a root before a division: at least the smallest normal number of F32, so that no rule
/// divides 0 by 0.
///
/// For a root other than 0, adding the smallest normal number of F32 changes no bit: a root in F32 is above
/// 1e-23, and a root in F64 changes only below 1e-22.
pub(crate) fn above_zero(epsilon: f64) -> f64 {
    epsilon.max(f32::MIN_POSITIVE.into())
}

mod sealed {
    /// Implemented only by types of this crate.
    pub trait Sealed {}

    impl<T> Sealed for super::Lane<T> {}
}
