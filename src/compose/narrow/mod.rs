//! Optimisers that train a low-precision parameter without a whole high-precision copy.

mod kahan;
mod split;
mod stochastic;

pub use kahan::Kahan;
pub use split::SplitMaster;
pub use stochastic::StochasticRounding;
