//! The rule that moves a model up along its gradient, for [`Sam`](super::Sam).

// `hyper_parameters!` writes `pub` in this private module.
#![allow(unreachable_pub)]

use crate::error::Result;
use crate::numbers::value::Value;
use crate::rule::{Arithmetic, Flow, Gradient, Kind, NonFinite, Norm, Parameter, Rule, Slots, State, range};

crate::hyper_parameters! {
    /// dx' = -ρ·dx / ‖all dx‖₂; if adaptive, dx' = -ρ·x²·dx / ‖all x·dx‖₂.
    pub(super) struct Climb {
        /// ρ: the size of the step up.
        rho: f64 = 0.05 => range::non_negative,
        /// Whether elements move in proportion to their size.
        adaptive: bool = false => range::any,
    }
}

/// dx' = |x|·dx.
#[derive(Clone, Copy)]
struct BySize;

impl Arithmetic for BySize {
    type Slots<T> = [T; 0];

    #[inline(always)]
    fn step<V: Value>(self, x: V, dx: V, _: &mut [V; 0]) -> V {
        x.abs() * dx
    }
}

impl Rule for Climb {
    fn apply<'a>(&'a self, _state: &'a mut State, _x: Parameter<'a>, dx: Gradient<'a>) -> Result<Flow<'a>> {
        let (rho, norm) = (
            self.rho,
            Norm::new(2.0).of_group(0).on_non_finite(NonFinite::Error),
        );
        let by_size = |dx: Gradient<'a>| {
            if self.adaptive {
                dx.map(BySize, Slots::none())
            } else {
                dx
            }
        };
        // If the norm is 0, also because the squares have vanished, there is no direction to climb in.
        let factor = move |norm: f64| if norm == 0.0 { -0.0 } else { -(rho / norm) };
        let scaled = by_size(dx).scale_by_norm(norm, move |norms| factor(norms.gradient));
        Ok(Flow::Step(by_size(scaled)))
    }

    fn kind(&self) -> Kind {
        Kind::WholeModel
    }

    fn is_divisible(&self) -> bool {
        true
    }
}
