//! Optimisers that decide how a parameter is stored.

mod kahan;
mod mixed_precision;
mod offload;
mod split_master;
mod stochastic_rounding;

pub use kahan::Kahan;
pub use mixed_precision::MixedPrecision;
pub use offload::Offload;
pub use split_master::SplitMaster;
pub use stochastic_rounding::StochasticRounding;
