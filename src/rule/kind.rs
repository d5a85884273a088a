//! How much of a model a step depends on.

use std::fmt;

/// What the step of one element of a parameter depends on, from the cheapest kind of rule to the dearest.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Kind {
    /// That element alone. The rule is a part of the one pass over memory.
    Elementwise,
    /// The whole parameter, or the element's place in it. Costs at least one more read of the gradient.
    WholeTensor,
    /// Other parameters, too.
    WholeModel,
}

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Kind::Elementwise => "elementwise",
            Kind::WholeTensor => "whole tensor",
            Kind::WholeModel => "whole model",
        })
    }
}
