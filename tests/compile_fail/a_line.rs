//! Compiles, until the test puts a line into it that must not.
#![allow(unused)]

use candle_core::{DType::F32, DType::F64, Tensor, Var};
use optimisers::{
    Adam, AdamW, ClipGrad, MixedPrecision, Optimiser, OptimiserChain, StateTree, model, setup, update,
};

pub struct Net {
    pub hidden: Var,
    pub units: usize,
}

pub fn line(
    net: Net,
    model: Var,
    mut state: StateTree,
    loss: Tensor,
) -> Result<(), Box<dyn std::error::Error>> {
    // The line
    Ok(())
}
