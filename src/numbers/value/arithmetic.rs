//! [`Arithmetic`]: the formula of an elementwise step together with its scalars.

use super::{Prologue, Value};

/// An array `[T; N]`.
///
/// Stable Rust has no `[T; Self::N]` in traits, so a rule names the array type: `type Slots<T> = [T; 2]`. The
/// trait cannot be named outside of the crate, because the loops over elements trust the length.
pub trait Array<T>: AsRef<[T]> + AsMut<[T]> {
    /// The length.
    const LEN: usize;
    /// An array whose elements are made from their indices.
    fn from_fn(make: impl FnMut(usize) -> T) -> Self;
}

impl<T, const N: usize> Array<T> for [T; N] {
    const LEN: usize = N;

    #[inline(always)]
    fn from_fn(make: impl FnMut(usize) -> T) -> Self {
        std::array::from_fn(make)
    }
}

/// Elementwise arithmetic together with its scalars, which a [`Rule`](crate::Rule) plans with
/// [`Gradient::map`](crate::Gradient::map).
///
/// If a rule consists of elementwise arithmetic only, implement [`Elementwise`](crate::Elementwise) instead,
/// which is less to write.
///
/// ```
/// use optimisers::{Arithmetic, value::Value};
///
/// /// m = β·m + (1 - β)·dx, dx' = m.
/// #[derive(Clone, Copy)]
/// struct Mean {
///     beta: f64,
/// }
///
/// impl Arithmetic for Mean {
///     type Slots<T> = [T; 1];
///
///     fn step<V: Value>(self, _x: V, dx: V, [m]: &mut [V; 1]) -> V {
///         *m = *m * self.beta + dx * (1.0 - self.beta);
///         *m
///     }
/// }
/// ```
pub trait Arithmetic: Copy + Send + Sync + 'static {
    /// The state of an element: `[T; N]` if the state has N numbers.
    type Slots<T>: Array<T>;

    /// Whether the result is infinite or NaN exactly if dx is, given a finite state and no overflow.
    ///
    /// If so, a norm after this arithmetic also serves as the check that the gradient is finite, and the
    /// gradient is read once less.
    const KEEPS_NON_FINITE: bool = false;

    /// Whether a second loop is compiled, in which a [`Prologue`] comes first. True for arithmetic that is
    /// often the last of a chain.
    #[doc(hidden)]
    const TAKES_PROLOGUE: bool = false;

    /// This arithmetic as a prologue, if a prologue can express it. The loop of the next step of the chain
    /// can then do the arithmetic, too.
    #[doc(hidden)]
    fn as_prologue(self) -> Option<Prologue> {
        None
    }

    /// The formula for one element: returns the new gradient from the parameter x and the gradient dx, and
    /// updates the slots.
    fn step<V: Value>(self, x: V, dx: V, slots: &mut Self::Slots<V>) -> V;
}

/// Multiplication by a number.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ScaleBy(pub(crate) f64);

impl Arithmetic for ScaleBy {
    type Slots<T> = [T; 0];
    const KEEPS_NON_FINITE: bool = true;

    fn as_prologue(self) -> Option<Prologue> {
        Some(Prologue::scale(self.0))
    }

    #[inline(always)]
    fn step<V: Value>(self, _: V, dx: V, _: &mut [V; 0]) -> V {
        dx * self.0
    }
}

/// Division by a number, rounded once.
#[derive(Clone, Copy, Debug)]
pub(crate) struct DivideBy(pub(crate) f64);

impl Arithmetic for DivideBy {
    type Slots<T> = [T; 0];
    const KEEPS_NON_FINITE: bool = true;

    #[inline(always)]
    fn step<V: Value>(self, _: V, dx: V, _: &mut [V; 0]) -> V {
        dx / self.0
    }
}
