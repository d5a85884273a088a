//! One elementwise step with its scalars bound.

use super::{Prologue, Value};

/// A fixed number of things of one type: `[T; N]`.
///
/// Stable Rust cannot write `[T; Self::N]` in a trait, so a rule names the array type instead: `type Slots<T>
/// = [T; 2]`. The loops over elements trust the length, so nobody else can name or implement the trait.
pub trait Array<T>: AsRef<[T]> + AsMut<[T]> {
    /// How many.
    const LEN: usize;
    /// The same number of things, each made from its index.
    fn from_fn(make: impl FnMut(usize) -> T) -> Self;
}

impl<T, const N: usize> Array<T> for [T; N] {
    const LEN: usize = N;

    #[inline(always)]
    fn from_fn(make: impl FnMut(usize) -> T) -> Self {
        std::array::from_fn(make)
    }
}

/// Elementwise arithmetic together with its scalars, for a [`Rule`](crate::Rule) that plans it with
/// [`Gradient::map`](crate::Gradient::map).
///
/// A rule that is nothing but elementwise arithmetic implements [`Elementwise`](crate::Elementwise) instead,
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
    /// The state: `[T; N]` for N numbers per element.
    type Slots<T>: Array<T>;

    /// Whether a dx that is infinite or NaN always gives a result that is infinite or NaN.
    ///
    /// A finite dx with a finite state must then give a finite result (overflow aside). A norm behind such
    /// arithmetic can stand for the check of the gradient, which saves a read of it.
    const KEEPS_NON_FINITE: bool = false;

    /// Whether its loop is compiled a second time, with a [`Prologue`]. That is for what often stands last in
    /// a chain.
    #[doc(hidden)]
    const TAKES_PROLOGUE: bool = false;

    /// This arithmetic as a prologue of the one behind it, if it is no more than that.
    #[doc(hidden)]
    fn as_prologue(self) -> Option<Prologue> {
        None
    }

    /// The formula for one element: from the parameter x and the gradient dx to the new gradient.
    ///
    /// It also updates the slots.
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
