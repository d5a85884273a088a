//! Compiles where the crate has candle.

pub use optimisers::CandleOptimizer;
