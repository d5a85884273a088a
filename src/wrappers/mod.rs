//! Rules that run other rules.

mod cautious;
mod chain;
mod decoupled_decay;
mod fallback;
mod hyperball;
#[cfg(feature = "candle")]
mod matrices_only;
mod option;
mod store_as;

pub use cautious::Cautious;
pub use chain::OptimiserChain;
pub use decoupled_decay::DecoupledDecay;
pub use fallback::Fallback;
pub use hyperball::Hyperball;
pub use store_as::StoreAs;
