//! A parameter has one master.

use candle_core::{DType::F32, DType::F64, Var};
use optimisers::{Adam, MixedPrecision, Result, StateTree, setup};

pub fn misplaced(model: &Var) -> Result<StateTree> {
    setup(MixedPrecision::new(F64, MixedPrecision::new(F32, Adam::new(1e-3))), model)
}
