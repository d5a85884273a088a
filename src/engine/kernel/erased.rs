//! Arithmetic whose type is forgotten, with the loop that runs it.

use smallbox::{SmallBox, smallbox};

use super::lanes::{LaneBlock, run_lanes};
use crate::numbers::value::{self, Arithmetic, Array};

/// [`Arithmetic`] behind a pointer. One call handles a block of elements, so the indirection costs nothing
/// measurable.
pub(crate) trait Kernel: Send + Sync {
    /// Runs over a block on the CPU.
    fn run(&self, block: &mut LaneBlock<'_>);
    /// How many state slots it works on.
    fn slots(&self) -> usize;
    /// See [`Arithmetic::KEEPS_NON_FINITE`].
    fn keeps_non_finite(&self) -> bool;
    /// See [`Arithmetic::exact_scale`].
    fn exact_scale(&self) -> Option<f64>;
    /// Records the arithmetic.
    #[cfg(feature = "candle")]
    fn trace<'g>(&self, x: value::Expr<'g>, dx: value::Expr<'g>, slots: &mut [value::Expr<'g>]) -> value::Expr<'g>;
}

/// A kernel of any type. The scalars of most need no allocation.
pub(crate) type ErasedKernel = SmallBox<dyn Kernel, [usize; 6]>;

/// A kernel whose type is forgotten.
pub(crate) fn erased(kernel: impl Kernel + 'static) -> ErasedKernel {
    smallbox!(kernel)
}

impl<A: Arithmetic> Kernel for A {
    fn run(&self, block: &mut LaneBlock<'_>) {
        run_lanes(*self, block);
    }

    fn slots(&self) -> usize {
        A::Slots::<f64>::LEN
    }

    fn keeps_non_finite(&self) -> bool {
        A::KEEPS_NON_FINITE
    }

    fn exact_scale(&self) -> Option<f64> {
        Arithmetic::exact_scale(*self)
    }

    #[cfg(feature = "candle")]
    fn trace<'g>(&self, x: value::Expr<'g>, dx: value::Expr<'g>, slots: &mut [value::Expr<'g>]) -> value::Expr<'g> {
        let mut values = A::Slots::<value::Expr<'g>>::from_fn(|slot| slots[slot]);
        let out = self.step(x, dx, &mut values);
        slots.copy_from_slice(values.as_ref());
        out
    }
}
