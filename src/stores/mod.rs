//! Optimisers that decide how a parameter is stored, and in how many bits its state.

mod kahan;
mod mixed_precision;
mod offload;
mod split_master;
mod stochastic_rounding;
mod store_as;

pub use kahan::Kahan;
pub use mixed_precision::MixedPrecision;
pub use offload::Offload;
pub use split_master::SplitMaster;
pub use stochastic_rounding::StochasticRounding;
pub use store_as::StoreAs;
