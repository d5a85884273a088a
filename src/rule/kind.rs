//! What a step depends on.

use std::fmt;

/// What the step of one element of a parameter depends on, and so what a rule costs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Kind {
    /// On that element alone: part of the one pass over memory.
    Elementwise,
    /// On the whole parameter, or on the element's place in it: one more read of the gradient at least.
    WholeTensor,
    /// On other parameters, too.
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
