//! Arithmetic with an erased type, and the loop that runs it.

use smallbox::{SmallBox, smallbox};

use super::Isa;
use super::lanes::{Lanes, run_lanes};
use crate::numbers::value::{self, Arithmetic, Array, Prologue, Value};

/// [`Arithmetic`] as a trait object. One call runs a whole block of elements, so the indirection costs
/// nothing measurable.
pub(crate) trait Kernel: Send + Sync {
    /// Runs over elements on the CPU. A prologue changes each gradient before the arithmetic.
    fn run(&self, isa: Isa, prologue: Option<&Prologue>, lanes: &mut Lanes<'_>);
    /// See [`Arithmetic::TAKES_PROLOGUE`].
    fn takes_prologue(&self) -> bool;
    /// See [`Arithmetic::as_prologue`].
    fn as_prologue(&self) -> Option<Prologue>;
    /// How many slots (state tensors) the arithmetic has.
    fn slots(&self) -> usize;
    /// See [`Arithmetic::KEEPS_NON_FINITE`].
    fn keeps_non_finite(&self) -> bool;
    /// Records the arithmetic as a graph. The graph is printed as source code for devices, or evaluated by
    /// the reference engine. Replaces `slots` by their next values.
    fn trace<'g>(
        &self,
        x: value::Expr<'g>,
        dx: value::Expr<'g>,
        slots: &mut [value::Expr<'g>],
    ) -> value::Expr<'g>;
}

/// A kernel of any type. Up to six words of scalars are stored inline, so most kernels need no allocation.
pub(crate) type ErasedKernel = SmallBox<dyn Kernel, [usize; 6]>;

pub(crate) fn erased(kernel: impl Kernel + 'static) -> ErasedKernel {
    smallbox!(kernel)
}

impl<A: Arithmetic> Kernel for A {
    fn run(&self, isa: Isa, prologue: Option<&Prologue>, lanes: &mut Lanes<'_>) {
        debug_assert!(A::TAKES_PROLOGUE || prologue.is_none());
        match prologue {
            // `TAKES_PROLOGUE` is a constant. If it is false, the compiler drops this arm, and with it a
            // second loop that would apply the prologue.
            Some(prologue) if A::TAKES_PROLOGUE => run_lanes(isa, Behind(*prologue, *self), lanes),
            _ => run_lanes(isa, *self, lanes),
        }
    }

    fn takes_prologue(&self) -> bool {
        A::TAKES_PROLOGUE
    }

    fn as_prologue(&self) -> Option<Prologue> {
        Arithmetic::as_prologue(*self)
    }

    fn slots(&self) -> usize {
        A::Slots::<f64>::LEN
    }

    fn keeps_non_finite(&self) -> bool {
        A::KEEPS_NON_FINITE
    }

    fn trace<'g>(
        &self,
        x: value::Expr<'g>,
        dx: value::Expr<'g>,
        slots: &mut [value::Expr<'g>],
    ) -> value::Expr<'g> {
        let mut values = A::Slots::<value::Expr<'g>>::from_fn(|slot| slots[slot]);
        let out = self.step(x, dx, &mut values);
        slots.copy_from_slice(values.as_ref());
        out
    }
}

/// Arithmetic with a prologue before it.
#[derive(Clone, Copy)]
struct Behind<A>(Prologue, A);

impl<A: Arithmetic> Arithmetic for Behind<A> {
    type Slots<T> = A::Slots<T>;

    #[inline(always)]
    fn step<V: Value>(self, x: V, dx: V, slots: &mut A::Slots<V>) -> V {
        let Behind(prologue, arithmetic) = self;
        arithmetic.step(x, prologue.apply(x, dx), slots)
    }
}
