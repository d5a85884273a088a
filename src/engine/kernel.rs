//! One elementwise step with its scalars bound, and its type-erased form.

use smallbox::{SmallBox, smallbox};

use super::cpu::{Block, run_lanes};
use crate::value::{Expr, Lane, Value};

/// A fixed number of things of one type: `[T; N]`, for N up to 8 and beyond.
///
/// Stable Rust cannot write `[T; Self::N]` in a trait, so a rule names the array type instead:
/// `type Slots<T> = [T; 2]`.
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

/// The arithmetic of a step together with this step's scalars.
pub(crate) trait Arithmetic: Copy + Send + Sync {
    /// State slots, one value each.
    type Slots<T>: Array<T>;
    /// Whether a dx that is infinite or NaN always gives a result that is infinite or NaN, and a finite one with a finite state a finite one
    /// (overflow aside).
    const KEEPS_NON_FINITE: bool = false;
    /// The factor, if this is a multiplication by a power of two, which is exact.
    fn exact_scale(self) -> Option<f64> {
        None
    }
    /// From the parameter x and the gradient dx to the gradient, updating the slots.
    fn step<V: Value>(self, x: V, dx: V, slots: &mut Self::Slots<V>) -> V;
}

/// [`Arithmetic`] behind a pointer. One call handles a block of elements, so the indirection costs nothing measurable.
pub(crate) trait Kernel: Send + Sync {
    /// Runs over a block on the CPU.
    fn run(&self, block: &mut Block<'_>);
    /// See [`Arithmetic::KEEPS_NON_FINITE`].
    fn keeps_non_finite(&self) -> bool;
    /// See [`Arithmetic::exact_scale`].
    fn exact_scale(&self) -> Option<f64>;
    /// Records the arithmetic.
    fn trace<'g>(&self, x: Expr<'g>, dx: Expr<'g>, slots: &mut [Expr<'g>]) -> Expr<'g>;
}

/// A kernel of any type. The scalars of most need no allocation.
pub(crate) type ErasedKernel = SmallBox<dyn Kernel, [usize; 6]>;

/// A kernel whose type is forgotten.
pub(crate) fn erased(kernel: impl Kernel + 'static) -> ErasedKernel {
    smallbox!(kernel)
}

impl<A: Arithmetic> Kernel for A {
    fn run(&self, block: &mut Block<'_>) {
        run_lanes(*self, block);
    }

    fn keeps_non_finite(&self) -> bool {
        A::KEEPS_NON_FINITE
    }

    fn exact_scale(&self) -> Option<f64> {
        Arithmetic::exact_scale(*self)
    }

    fn trace<'g>(&self, x: Expr<'g>, dx: Expr<'g>, slots: &mut [Expr<'g>]) -> Expr<'g> {
        traced::<A::Slots<Expr<'g>>>(slots, |slots| self.step(x, dx, slots))
    }
}

/// Records a step that works on an array of slots.
fn traced<'g, S: Array<Expr<'g>>>(slots: &mut [Expr<'g>], step: impl FnOnce(&mut S) -> Expr<'g>) -> Expr<'g> {
    let mut values = S::from_fn(|slot| slots[slot]);
    let out = step(&mut values);
    slots.copy_from_slice(values.as_ref());
    out
}

/// The norms that a factor follows from.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Norms<T = f64> {
    /// Of what the arithmetic calls x; 0 if it was not asked for.
    pub(crate) parameter: T,
    /// Of the gradient.
    pub(crate) gradient: T,
}

/// The arithmetic from norms to the factor that a gradient is multiplied by, in f64.
pub(crate) trait FromNorms: Copy + Send + Sync {
    /// The factor.
    fn factor<V: Value>(self, norms: Norms<V>) -> V;
}

/// [`FromNorms`] behind a pointer: a host evaluates it, and a device engine prints it.
pub(crate) trait Factor: Send + Sync {
    /// The factor.
    fn of(&self, norms: Norms) -> f64;
    /// Records the arithmetic.
    fn trace<'g>(&self, norms: Norms<Expr<'g>>) -> Expr<'g>;
}

impl<F: FromNorms> Factor for F {
    fn of(&self, Norms { parameter, gradient }: Norms) -> f64 {
        self.factor(Norms { parameter: Lane(parameter), gradient: Lane(gradient) }).0
    }

    fn trace<'g>(&self, norms: Norms<Expr<'g>>) -> Expr<'g> {
        self.factor(norms)
    }
}

/// What follows from sums.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Summed<T = f64> {
    /// What the state remembers.
    pub(crate) numbers: [T; 2],
    /// What the step needs.
    pub(crate) scalar: T,
}

/// A step that depends on two sums.
pub(crate) trait FromSums: Copy + Send + Sync + 'static {
    /// State slots, one value each.
    type Slots<T>: Array<T>;
    /// The arithmetic from the sums to what follows from them, in f64.
    fn summed<V: Value>(self, sums: [V; 2]) -> Summed<V>;
    /// See [`Arithmetic::step`].
    fn step<V: Value>(self, scalar: V, x: V, dx: V, slots: &mut Self::Slots<V>) -> V;
}

/// [`FromSums`] behind a pointer: a host evaluates it, and a device engine prints it.
pub(crate) trait Following: Send + Sync {
    /// What follows from the sums.
    fn summed(&self, sums: [f64; 2]) -> Summed;
    /// The step with this scalar.
    fn kernel(&self, scalar: f64) -> ErasedKernel;
    /// Records the arithmetic from the sums to the scalar.
    fn trace_scalar<'g>(&self, sums: [Expr<'g>; 2]) -> Expr<'g>;
    /// Records the step.
    fn trace<'g>(&self, scalar: Expr<'g>, x: Expr<'g>, dx: Expr<'g>, slots: &mut [Expr<'g>]) -> Expr<'g>;
}

impl<F: FromSums> Following for F {
    fn summed(&self, sums: [f64; 2]) -> Summed {
        let Summed { numbers, scalar } = FromSums::summed(*self, sums.map(Lane));
        Summed { numbers: numbers.map(|number| number.0), scalar: scalar.0 }
    }

    fn kernel(&self, scalar: f64) -> ErasedKernel {
        erased(WithScalar { step: *self, scalar })
    }

    fn trace_scalar<'g>(&self, sums: [Expr<'g>; 2]) -> Expr<'g> {
        FromSums::summed(*self, sums).scalar
    }

    fn trace<'g>(&self, scalar: Expr<'g>, x: Expr<'g>, dx: Expr<'g>, slots: &mut [Expr<'g>]) -> Expr<'g> {
        traced::<F::Slots<Expr<'g>>>(slots, |slots| self.step(scalar, x, dx, slots))
    }
}

/// A step with the scalar that it depends on.
#[derive(Clone, Copy)]
struct WithScalar<F> {
    step: F,
    scalar: f64,
}

impl<F: FromSums> Arithmetic for WithScalar<F> {
    type Slots<T> = F::Slots<T>;

    #[inline(always)]
    fn step<V: Value>(self, x: V, dx: V, slots: &mut F::Slots<V>) -> V {
        self.step.step(x.constant(self.scalar), x, dx, slots)
    }
}

/// Multiplication by a number other than 0.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Scale(pub(crate) f64);

impl Arithmetic for Scale {
    type Slots<T> = [T; 0];
    const KEEPS_NON_FINITE: bool = true;

    fn exact_scale(self) -> Option<f64> {
        const FRACTION: u64 = (1 << 52) - 1;
        (self.0.is_normal() && self.0.to_bits() & FRACTION == 0).then_some(self.0)
    }

    #[inline(always)]
    fn step<V: Value>(self, _: V, dx: V, _: &mut [V; 0]) -> V {
        dx * self.0
    }
}
