//! The rules of [`optimisers`] for burn's modules on the CPU: [`ModuleOptimizer`] stands where burn's own
//! stands.
//!
//! A step moves the parameters out of the module, lends their memory to the update, and moves them back. No
//! element is copied, unless somebody else holds a parameter's tensor (a clone of the module, say) or a
//! gradient is not contiguous.
//!
//! ```
//! use burn::nn::LinearConfig;
//! use burn::optim::GradientsParams;
//! use burn::tensor::{Device, Tensor};
//! use burn_optimisers::ModuleOptimizer;
//! use optimisers::{AdamW, ClipGlobalNorm, OptimiserChain};
//!
//! let device = Device::flex().autodiff();
//! let mut module = LinearConfig::new(4, 2).init(&device);
//! let mut optimizer = ModuleOptimizer::new(OptimiserChain::new((ClipGlobalNorm::new(1.0), AdamW::new(0.05))), &module)?;
//! let loss = |module: &burn::nn::Linear| (module.forward(Tensor::<2>::ones([8, 4], &device)) - 1.0).square().mean();
//! for _ in 0..100 {
//!     let gradients = GradientsParams::from_grads(loss(&module).backward(), &module);
//!     optimizer.step(&mut module, gradients)?;
//! }
//! assert!(loss(&module).into_scalar::<f32>() < 1e-2);
//! # Ok::<(), burn_optimisers::Error>(())
//! ```

mod lend;

use std::collections::HashSet;
use std::path::Path;

use burn::module::Module;
use burn::optim::GradientsParams;
use burn::tensor::DType;
use optimisers::{Checkpoint, CheckpointFile, IntoOptimiser, Outcome, StateTree, Warning, setup, update};

use lend::lend;

/// Why a call was refused. The module is as it was.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The optimiser refused it.
    #[error(transparent)]
    Optimiser(#[from] optimisers::Error),

    /// No parameter requires gradients.
    #[error(
        "no parameter of the module requires gradients; make it on a device with `autodiff()`, or bring it \
         back by `train()`"
    )]
    NothingToTrain,

    /// A parameter or gradient of a dtype without a rule.
    #[error("{path:?} is {dtype:?}, expected F64, F32, F16 or BF16")]
    DType {
        /// The parameter.
        path: String,
        /// Its dtype, or that of its gradient.
        dtype: DType,
    },
}

/// An optimiser for one module: state for each parameter that required gradients at the start, by its path
/// (`hidden.weight`).
#[derive(Debug)]
pub struct ModuleOptimizer {
    state: StateTree,
}

impl ModuleOptimizer {
    /// State for a module, with any rule, chain and way of storing:
    /// `MixedPrecision::new(F32, AdamW::new(1e-3))` keeps f32 masters of bf16 parameters.
    ///
    /// # Errors
    /// If the module has no parameter that requires gradients, or one of a dtype that is no float.
    pub fn new<M: Module>(optimiser: impl IntoOptimiser + Clone, module: &M) -> Result<Self, Error> {
        let set_up = lend(&mut module.clone(), None, &HashSet::new(), |parameters, _| {
            if parameters.is_empty() {
                Ok(None)
            } else {
                setup(optimiser, &*parameters).map(Some)
            }
        });
        Ok(ModuleOptimizer {
            state: set_up?.ok_or(Error::NothingToTrain)?,
        })
    }

    /// One step, in place. Parameters without a gradient stay as they are.
    ///
    /// # Errors
    /// If the module is another than that of [`ModuleOptimizer::new`], or has a new parameter to train; and
    /// whatever the rules refuse. Nothing has changed then.
    pub fn step<M: Module>(&mut self, module: &mut M, gradients: GradientsParams) -> Result<Outcome, Error> {
        let known = self.paths();
        lend(module, Some(gradients), &known, |parameters, gradients| {
            update(&mut self.state, parameters, gradients)
        })
    }

    /// The state, to read, adjust (`state_mut().adjust(1e-4)`), freeze, schedule.
    pub fn state(&self) -> &StateTree {
        &self.state
    }

    /// The state, to change.
    pub fn state_mut(&mut self) -> &mut StateTree {
        &mut self.state
    }

    /// Writes the state and its parameters to one file, at once or not at all. What is not trained (frozen
    /// layers, running statistics) is for burn's `save_file`.
    ///
    /// It returns a warning where something in it is infinite or NaN.
    ///
    /// # Errors
    /// If the file cannot be written.
    pub fn save<M: Module>(&self, module: &M, path: impl AsRef<Path>) -> Result<Vec<Warning>, Error> {
        lend(&mut module.clone(), None, &self.paths(), |parameters, _| {
            Checkpoint::new(&self.state).model(&*parameters).save(path)
        })
    }

    /// Goes on from such a file: the next step has the bits that it would have had.
    ///
    /// # Errors
    /// If the file is damaged or of another module or optimiser. Nothing has changed then.
    pub fn load<M: Module>(&mut self, module: &mut M, path: impl AsRef<Path>) -> Result<(), Error> {
        let file = CheckpointFile::open(path)?;
        let known = self.paths();
        lend(module, None, &known, |parameters, _| {
            file.restore_with_model(&mut self.state, &*parameters).map(drop)
        })
    }

    fn paths(&self) -> HashSet<String> {
        self.state.leaves().map(|leaf| leaf.path().to_string()).collect()
    }
}
