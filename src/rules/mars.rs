//! The gradient corrected by its change, which the rules of MARS share.

use super::gradient::clip_norm::clip_factor;
use crate::numbers::value::{Arithmetic, Value};
use crate::rule::{Gradient, Norm, Slot, Slots};

/// The slot with the gradient of the step before, which starts at 0 as in the authors' code.
pub(super) fn last_gradient() -> Slot {
    Slot::zeros("last_gradient")
}

/// `dx + weight·(dx - last)`
#[derive(Clone, Copy)]
struct Corrected {
    weight: f64,
}

impl Arithmetic for Corrected {
    type Slots<T> = [T; 1];

    #[inline(always)]
    fn step<V: Value>(self, _x: V, dx: V, [last]: &mut [V; 1]) -> V {
        let change = dx - *last;
        *last = dx;
        dx + change * self.weight
    }
}

/// The gradient plus γ·β / (1 - β) of its change, scaled down to a 2-norm of at most 1.
pub(super) fn corrected<'a>(dx: Gradient<'a>, gamma: f64, beta: f64, last: Slots<'a>) -> Gradient<'a> {
    let unclipped = dx.map(
        Corrected {
            weight: gamma * beta / (1.0 - beta),
        },
        last,
    );
    unclipped.scale_by_norm(Norm::new(2.0), clip_factor(1.0))
}
