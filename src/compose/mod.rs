//! Rules made of rules, and the optimisers that decide how a parameter is stored.

mod cautious;
mod chain;
mod decoupled_decay;
mod fallback;
mod mixed;
mod narrow;
mod offload;
mod option;
mod store_as;

pub use cautious::Cautious;
pub use chain::OptimiserChain;
pub use decoupled_decay::DecoupledDecay;
pub use fallback::Fallback;
pub use mixed::MixedPrecision;
pub use narrow::{Kahan, SplitMaster, StochasticRounding};
pub use offload::Offload;
pub use store_as::StoreAs;
