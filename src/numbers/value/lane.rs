//! `f32` and `f64` as [`Value`]s, for the fused CPU loop.

use std::ops::{Add, Div, Mul, Neg, Sub};

use num_traits::{AsPrimitive, Float};

use super::Value;

/// The floating-point types of arithmetic. Storage may be narrower.
pub(crate) trait Compute: Float + AsPrimitive<f64> + Default + Send + Sync {
    /// Rounds to the nearest number of this type, ties to even.
    fn rounded(value: f64) -> Self;
}

impl Compute for f32 {
    #[inline(always)]
    fn rounded(value: f64) -> f32 {
        value as f32
    }
}

impl Compute for f64 {
    #[inline(always)]
    fn rounded(value: f64) -> f64 {
        value
    }
}

/// One element in the compute type `T`, `f32` or `f64`, in the fused CPU loop.
///
/// The type is a newtype, because Rust does not let a crate define `f32 * f64`, which a rule needs for its
/// scalars.
#[derive(Clone, Copy, Debug, PartialEq, PartialOrd)]
#[repr(transparent)]
pub struct Lane<T>(pub T);

impl<T: Compute> Neg for Lane<T> {
    type Output = Self;
    #[inline(always)]
    fn neg(self) -> Self {
        Lane(-self.0)
    }
}

macro_rules! operators {
    ($($trait:ident $method:ident $op:tt)*) => {$(
        impl<T: Compute> $trait for Lane<T> {
            type Output = Self;
            #[inline(always)]
            fn $method(self, other: Self) -> Self {
                Lane(self.0 $op other.0)
            }
        }

        impl<T: Compute> $trait<f64> for Lane<T> {
            type Output = Self;
            #[inline(always)]
            fn $method(self, other: f64) -> Self {
                Lane(self.0 $op T::rounded(other))
            }
        }
    )*};
}

operators!(Add add + Sub sub - Mul mul * Div div /);

impl<T: Compute> Value for Lane<T> {
    type Mask = bool;

    #[inline(always)]
    fn constant(self, value: f64) -> Self {
        Lane(T::rounded(value))
    }

    #[inline(always)]
    fn sqrt(self) -> Self {
        Lane(self.0.sqrt())
    }

    #[inline(always)]
    fn abs(self) -> Self {
        Lane(self.0.abs())
    }

    #[inline(always)]
    fn lt(self, other: Self) -> bool {
        self.0 < other.0
    }

    #[inline(always)]
    fn le(self, other: Self) -> bool {
        self.0 <= other.0
    }

    #[inline(always)]
    fn equal(self, other: Self) -> bool {
        self.0 == other.0
    }

    #[inline(always)]
    fn select(mask: bool, yes: Self, no: Self) -> Self {
        if mask { yes } else { no }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nan_passes_through_the_choosing_operations() {
        let (nan, one) = (Lane(f32::NAN), Lane(1f32));
        for result in [
            nan.min(one),
            one.min(nan),
            nan.max(one),
            one.max(nan),
            nan.clamp(-1.0, 1.0),
            nan.sign(),
        ] {
            assert!(result.0.is_nan());
        }
    }

    #[test]
    fn sign_has_three_values() {
        assert_eq!(Lane(-3f64).sign().0, -1.0);
        assert_eq!(Lane(0f64).sign().0, 0.0);
        assert_eq!(Lane(f64::INFINITY).sign().0, 1.0);
    }
}
