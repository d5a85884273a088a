//! Rules made of rules.

mod cautious;
mod chain;
mod decoupled_decay;
mod fallback;
#[cfg(feature = "candle")]
mod matrices_only;
mod option;

pub use cautious::Cautious;
pub use chain::OptimiserChain;
pub use decoupled_decay::DecoupledDecay;
pub use fallback::Fallback;
