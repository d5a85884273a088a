//! What a training loop needs, for a glob import together with candle's.
//!
//! ```
//! use candle_core::{DType, Device, Result, Tensor};
//! use candle_nn::{Linear, Module, VarBuilder, VarMap, linear, loss::mse};
//! use optimisers::{AdamW, ClipGlobalNorm, Muon, prelude::*};
//!
//! struct Mlp {
//!     hidden: Linear,
//!     output: Linear,
//! }
//! model!(Mlp { hidden, output });
//!
//! fn train(mlp: &Mlp, inputs: &Tensor, targets: &Tensor) -> Result<f32> {
//!     let rule = OptimiserChain::new((ClipGlobalNorm::new(1.0), Muon::new(0.02).with_fallback(AdamW::new(0.02))));
//!     let mut state = setup(MixedPrecision::new(DType::F32, rule), mlp)?;
//!     state.schedule(Schedule::cosine(0.02, 0.0, 100))?;
//!     let loss = || mse(&mlp.output.forward(&mlp.hidden.forward(inputs)?.tanh()?)?, targets);
//!     for _ in 0..100 {
//!         update(&mut state, mlp, &loss()?.backward()?)?;
//!     }
//!     loss()?.to_scalar()
//! }
//!
//! let variables = VarMap::new();
//! let vb = VarBuilder::from_varmap(&variables, DType::F32, &Device::Cpu);
//! let mlp = Mlp { hidden: linear(2, 8, vb.pp("hidden"))?, output: linear(8, 1, vb.pp("output"))? };
//! let (inputs, targets) = (Tensor::ones((4, 2), DType::F32, &Device::Cpu)?, Tensor::ones((4, 1), DType::F32, &Device::Cpu)?);
//! assert!(train(&mlp, &inputs, &targets)? < 0.01);
//! # Ok::<(), candle_core::Error>(())
//! ```
//!
//! No name here is also a name of the standard library's prelude, of candle-core or of candle-nn, so nothing
//! (such as `Result`) is shadowed or ambiguous. Import rules by name, because candle-nn also has an `AdamW`.

pub use crate::{
    Adjust, Checkpoint, CheckpointFile, IntoOptimiser, LossScaler, MixedPrecision, Model, Optimiser,
    OptimiserChain, Outcome, Rule, Schedule, StateTree, Status, Update, model, setup, setup_with, update,
};
#[cfg(feature = "candle")]
pub use crate::{CandleOptimizer, trainables};
