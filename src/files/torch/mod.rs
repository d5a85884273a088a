//! Optimiser states from and to torch: a run can change over in the middle. Needs the feature `torch`.
//!
//! [`TorchState`] reads the content of `optimizer.state_dict()` into a [`StateTree`](crate::StateTree), by
//! the names of the parameters. [`StateTree::save_torch`](crate::StateTree::save_torch) writes a state for
//! torch. For the parameters themselves use [`Weights`](crate::Weights) and
//! [`StateTree::save_masters`](crate::StateTree::save_masters).
//!
//! # From torch
//!
//! The state is in a safetensors file with a tensor `<parameter>/<key>` for each entry of torch's state. Its
//! metadata has the groups as JSON, with names instead of the numbers that a `state_dict` has for parameters.
//! The first of these functions writes such a file. Put both into `save_state.py`:
//!
//! ```python
#![doc = include_str!("save_state.py")]
//!
//! save_state(optimizer, model.named_parameters(), "optimizer.safetensors")
//! ```
//!
//! If there is only a file of `torch.save`, the following function converts that file. Put the function into
//! the same folder as `save_state.py`:
//!
//! ```python
#![doc = include_str!("convert.py")]
//!
//! # With one group of parameters. With several, the names of the first group, then those of the second.
//! convert("checkpoint.pt", ".", names=[name for name, _ in model.named_parameters()])
//! # The parameters, for `Weights::load_into` before `setup`.
//! weights = torch.load("checkpoint.pt", map_location="cpu", weights_only=True)["model"]
//! safetensors.torch.save_file(weights, "model.safetensors")   # import safetensors.torch
//! ```
//!
//! The file may be the `state_dict` of an optimiser, or a dict with the keys `optimizer`, `scheduler` and
//! `scaler`; if the dict has other keys, write these into `convert`. `names` has a name for each parameter,
//! in the order of the optimiser's groups. `names` is not needed if the dict has the names as `param_names`,
//! or if the optimiser was made with `model.named_parameters()`, because torch then saves the names.
//! `training.json` has the rest that a run needs: `last_epoch` of the [scheduler](self#with-a-scheduler), and
//! the state of the [`GradScaler`](crate::LossScaler#from-torch).
//!
//! ```
//! use candle_core::{Device, Tensor, Var};
//! use optimisers::{AdamW, ClipGlobalNorm, OptimiserChain, setup, torch::TorchState};
//! use std::collections::{BTreeMap, HashMap};
//!
//! # let folder = tempfile::tempdir()?;
//! # let path = folder.path().join("optimizer.safetensors");
//! // What `save_state` writes after 7 steps.
//! let [m, v] = [[0.5f32, -0.5], [0.25, 0.25]].map(|values| Tensor::new(&values, &Device::Cpu));
//! let step = Tensor::new(7f32, &Device::Cpu)?;
//! let tensors = HashMap::from([("fc.bias/exp_avg", m?), ("fc.bias/exp_avg_sq", v?), ("fc.bias/step", step)]);
//! let groups = r#"[{"lr": 0.001, "betas": [0.9, 0.999], "eps": 1e-08, "weight_decay": 0.01, "amsgrad": false, "maximize": false,
//!     "decoupled_weight_decay": true, "params": ["fc.bias"]}]"#;
//! let metadata = HashMap::from([("param_groups".to_string(), groups.to_string())]);
//! safetensors::serialize_to_file(tensors, Some(metadata), &path)?;
//!
//! let model = BTreeMap::from([("fc.bias", Var::new(&[1f32, 2.0], &Device::Cpu)?)]);
//! let rule = OptimiserChain::new((ClipGlobalNorm::new(1.0), AdamW::new(1e-3)));
//! let mut state = setup(rule, &model)?;
//! TorchState::open(&path)?.restore(&mut state)?;
//! let leaf = state.leaf("fc.bias").expect("the bias");
//! assert_eq!(leaf.tensor("1.m")?.to_vec1::<f32>()?, [0.5, -0.5]);
//! assert_eq!(leaf.steps(), 7);
//!
//! state.save_torch(&path)?;
//! # TorchState::open(&path)?.restore(&mut state)?;
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! # To torch
//!
//! [`StateTree::save_torch`](crate::StateTree::save_torch) writes a file of this format. An optimiser over
//! the same parameters can load it, whatever its groups and their order, if all parameters of a group have
//! the same hyper-parameters in the file:
//!
//! ```python
#![doc = include_str!("load_state.py")]
//!
//! load_state(optimizer, model.named_parameters(), "optimizer.safetensors")
//! ```
//!
//! # With a scheduler
//!
//! A restore sets the state's count of steps, by which schedules go, to the largest `step` of the file,
//! unless the program has set the count by [`set_steps`](crate::StateTree::set_steps). SGD and Lion have no
//! `step`: then call `set_steps` before the restore. A schedule here counts steps. For a scheduler of torch's
//! that counts epochs, give the schedule the epochs times the steps of an epoch.
//!
//! `optimizer.state_dict()` does not contain torch's schedulers. A scheduler only adds to each group the rate
//! with which the group began, as `initial_lr`. So before the restore give the state the
//! [schedule](crate::StateTree::schedule) of the run. The restore compares
//! `lr` with the rate of the schedule in that step, up to the rounding of another program. Under a relative
//! schedule `initial_lr` is the leaf's own rate. `LambdaLR` is a [relative](crate::Schedule::relative)
//! schedule, and so is a `CosineAnnealingLR` that ends at 0. If `CosineAnnealingLR` ends above 0, use one
//! [`Schedule`](crate::Schedule) for each group.
//!
//! `ReduceLROnPlateau` has reduced the rates of the file, and its `last_epoch` counts evaluations. Restore by
//! [`taking_over_fields`](TorchState::taking_over_fields), and give
//! [`ReduceOnPlateau`](crate::ReduceOnPlateau#from-torch) its counts.
//!
//! If the state has no schedule, the leaf's own rate is `lr`, the current rate, and does not change. If the
//! file has an `initial_lr`, a [warning](crate::Warning::ScheduleDiffers) reports the missing schedule.
//!
//! `OneCycleLR` begins at a 25th of its peak, and this start is its `initial_lr`. The schedule here is
//! `Schedule::one_cycle(25.0, total_steps).relative()`. By default `OneCycleLR` also moves the momentum or β₁
//! in each step, and so does `CyclicLR`. Such a file is refused unless a schedule drives that number here
//! too, as [`Schedule::one_cycle`](crate::Schedule::one_cycle) shows. To keep the momentum of the file
//! instead, remove `max_momentum` and `base_momentum` from the groups before saving.
//!
//! ```
//! use candle_core::{Device, Tensor, Var};
//! use optimisers::{Descent, Schedule, setup, torch::TorchState};
//! use std::collections::{BTreeMap, HashMap};
//!
//! # let folder = tempfile::tempdir()?;
//! # let path = folder.path().join("optimizer.safetensors");
//! // What torch has after 5 of 10 steps of `CosineAnnealingLR(optimizer, 10)`, with two groups.
//! let group = |lr: f64, name: &str| {
//!     format!(r#"{{"lr": {}, "initial_lr": {lr}, "momentum": 0, "dampening": 0, "weight_decay": 0, "nesterov": false, "params": ["{name}"]}}"#, lr / 2.0)
//! };
//! let metadata = HashMap::from([("param_groups".to_string(), format!("[{}, {}]", group(0.5, "weight"), group(0.25, "bias")))]);
//! safetensors::serialize_to_file(HashMap::<String, Tensor>::new(), Some(metadata), &path)?;
//!
//! let model = BTreeMap::from(["bias", "weight"].map(|name| (name, Var::new(&[1f32, 2.0], &Device::Cpu).expect("a variable"))));
//! let mut state = setup(Descent::new(0.5), &model)?;
//! state.schedule(Schedule::cosine(1.0, 0.0, 10).relative())?;
//! state.set_steps(5)?;
//! TorchState::open(&path)?.taking_over_fields().restore(&mut state)?;
//! assert_eq!(state.leaves().map(|leaf| leaf.field("eta")).collect::<Vec<_>>(), [0.25, 0.5].map(|eta| Some(eta.into())));
//! state.set_steps(10)?;
//! assert_eq!(state.leaves().map(|leaf| leaf.learning_rate()).collect::<Vec<_>>(), [Some(0.0), Some(0.0)]);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! In the other direction, [`save_torch`](crate::StateTree::save_torch) writes the rate of the next step as
//! `lr` and, for a leaf under a relative schedule, the leaf's own rate as `initial_lr`. With `initial_lr`
//! make torch's `LambdaLR` or `CosineAnnealingLR` after loading the state. The scheduler sets the rates of
//! step `last_epoch + 1`:
//!
//! ```python
//! load_state(optimizer, model.named_parameters(), "optimizer.safetensors")
//! scheduler = CosineAnnealingLR(optimizer, 10, last_epoch=steps - 1)   # `steps` is what `StateTree::steps` was
//! ```
//!
//! Without `initial_lr`, and for any other scheduler, make the scheduler before loading the state, with an
//! optimiser that has the initial rates, and call the scheduler's `step` as often as the run has made steps.
//! Loading then sets the current rates.
//!
//! # An average
//!
//! In torch an average of the weights is a second model: `AveragedModel` of `torch.optim.swa_utils`, or an
//! exponential average by hand. Save that model as weights, under the names of the parameters:
//!
//! ```python
//! safetensors.torch.save_file(averaged.module.state_dict(), "average.safetensors")   # and note averaged.n_averaged
//! ```
//!
//! Here an average is the state of an [`Ema`](crate::Ema) or a [`UniformAverage`](crate::UniformAverage). Set
//! that state by name after the restore; otherwise the average begins anew. The average's count of steps is
//! the number of models in the average:
//!
//! ```
//! use candle_core::{Device, Tensor, Var};
//! use optimisers::{AdamW, Ema, OptimiserChain, StateValue, setup};
//! use std::collections::{BTreeMap, HashMap};
//!
//! # let folder = tempfile::tempdir()?;
//! # let path = folder.path().join("average.safetensors");
//! # candle_core::safetensors::save(&HashMap::from([("fc.bias", Tensor::new(&[0.25f32, 4.0], &Device::Cpu)?)]), &path)?;
//! let model = BTreeMap::from([("fc.bias", Var::new(&[1f32, 2.0], &Device::Cpu)?)]);
//! let average = Ema { start: 1, ..Ema::new(0.999) }; // as `get_ema_avg_fn(0.999)` has it
//! let mut state = setup(OptimiserChain::new((AdamW::new(1e-3), average)), &model)?;
//! // TorchState::open("optimizer.safetensors")?.restore(&mut state)?;
//! let (averages, models) = (candle_core::safetensors::load(&path, &Device::Cpu)?, 7);
//! let tensors = averages.iter().map(|(name, average)| (name, "1.average", StateValue::Tensor(average)));
//! let counts = averages.keys().map(|name| (name, "1.t", StateValue::Counter(models)));
//! state.set_entries(tensors.chain(counts))?;
//! # let steps = averages.keys().map(|name| (name, "leaf.steps", StateValue::Counter(models)));
//! # state.set_entries(steps)?;
//! assert_eq!(state.averages(&model)?["fc.bias"].to_vec1::<f32>()?, [0.25, 4.0]);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! # What is what
//!
//! | torch | rule here | state: torch → here | hyper-parameters: torch → here |
//! | --- | --- | --- | --- |
//! | `AdamW` | [`AdamW`](crate::AdamW) | `exp_avg` → `m`, `exp_avg_sq` → `v`, `step` → `t` | `lr` → `eta`, `betas` → `beta`, `eps` → `epsilon`, `weight_decay` → `lambda` |
//! | `Adam` | [`Adam`](crate::Adam) | the same | `weight_decay` → the `lambda` of a [`WeightDecay`](crate::WeightDecay) in front |
//! | either with `amsgrad` | [`AMSGradW`](crate::AMSGradW) | and `max_exp_avg_sq` → `largest_v` | as in `AdamW` or `Adam` |
//! | `SGD` | [`Descent`](crate::Descent) | | `lr` → `eta`, `weight_decay` as in `Adam` |
//! | `SGD(momentum)` | [`Momentum`](crate::Momentum) | `momentum_buffer`·η → `velocity` | and `momentum` → `rho` |
//! | `SGD(nesterov)` | [`Nesterov`](crate::Nesterov) | -`momentum_buffer`·η → `displacement` | the same |
//! | `RMSprop` | [`RMSProp`](crate::RMSProp) | `square_avg` → `v`, `step` → `t`; centred also `grad_avg` → `m` | `lr` → `eta`, `alpha` → `rho`, `eps` → `epsilon`, `weight_decay` as in `Adam` |
//! | `RMSprop(momentum)` | a chain of `RMSProp` and `Momentum` with η = 1 each, and `Descent` | and `momentum_buffer` → `velocity` | `lr` → the `eta` of `Descent`, `momentum` → `rho` |
//! | `Adagrad` | [`AdaGrad`](crate::AdaGrad) | `sum` → `sum_of_squares`, `step` → `t` | `lr` → `eta`, `eps` → `epsilon`, `weight_decay` as in `Adam` |
//! | `Lion` (lion-pytorch, pytorch_optimizer) | [`Lion`](crate::Lion) | `exp_avg` → `m` | `lr` → `eta`, `betas` → `beta`, `weight_decay` → `lambda` |
//!
//! The rule may be anywhere in a chain and inside wrappers, as long as it is the only one with a counterpart.
//! Other members of the chain (clipping, averages) are ignored, because torch has these outside of its
//! optimisers. Three parts of torch's optimisers are separate rules or wrappers here:
//!
//! - `maximize` is a [`Scale`](crate::Scale) with a negative factor before the rule. A `WeightDecay` comes
//!   after such a `Scale` and after clips, right before the rule.
//! - If a `Descent` follows the rule, `lr` is the product of both rates. torch has the learning rate outside
//!   of SGD's velocity: in torch a schedule rescales the whole velocity, here the velocity keeps the old
//!   rates. `Momentum` with η = 1, followed by `Descent`, is exactly torch's SGD.
//! - [`DecoupledDecay`](crate::DecoupledDecay) around the rule is the decay of torch's `AdamW`, or of Lion.
//!
//! `foreach`, `fused`, `capturable` and `differentiable` decide how torch computes, and are ignored, like
//! `initial_accumulator_value`, which the sum already contains. If a file or a rule has one of the following,
//! an error names the parameter and the difference:
//!
//! - `dampening`, `lr_decay`, or another option that is switched on and unknown here;
//! - a momentum that a torch scheduler moves, if no schedule drives it here;
//! - a `WeightDecay` after the rule, or before a rule that changes the gradient, such as a `Scale` or a clip;
//!   `couple = false` of `AdamW` or a corrected `DecoupledDecay`, with a decay;
//! - `bias_correction = false` of `Adam` or `AdamW`; the rule [`AMSGrad`](crate::AMSGrad), which corrects no
//!   moments;
//! - torch's `RAdam`, which adds ε to another root than [`RAdam`](crate::RAdam).
//!
//! torch does not save the class of an optimiser, so the names of the hyper-parameters decide. `Adam` and
//! `AdamW` differ in `decoupled_weight_decay` (since torch 2.7); if a file lacks this key, the rule here
//! decides. pytorch_optimizer's key is `weight_decouple`, for every rule.
//!
//! A velocity that contains a learning rate of 0 has lost torch's velocity. So a file with `lr` 0 and a
//! velocity that is not 0 is refused, unless the rate is in a `Descent` after the rule. A `step` in bf16 is
//! refused from 256 on, in f16 from 2048 on, because these dtypes round the next sum with 1 back.
//!
//! SGD and Lion do not count steps in torch, so `t` and [`Leaf::steps`](crate::Leaf::steps) stay as they are.
//! `save_torch` does not write wrappers that change the step, such as [`Cautious`](crate::Cautious).
//!
//! # Precision
//!
//! torch keeps a state in the parameter's dtype, and on loading converts the state to that dtype. Here the
//! moments of 16-bit parameters are in F32, unless [`StoreAs`](crate::StoreAs) sets another dtype. Moments of
//! a torch model in bf16 are taken over as they are; in the other direction torch rounds them.
//!
//! A parameter under [`MixedPrecision`](crate::MixedPrecision) has the moments of its master, which
//! correspond to a run in torch with parameters in F32 and arithmetic under `autocast`.
//! [`StateTree::set_masters`](crate::StateTree::set_masters) with [`Weights`](crate::Weights) sets the
//! masters to the unrounded parameters of that run.

mod content;
mod continuation;
mod counterpart;
mod file_tensor;
mod restore;
mod save;
mod settings;

use std::path::{Path, PathBuf};

use content::Content;

use super::tensor_file::{Source, read_error};
use crate::error::{Error, Result};

/// A file with the state of torch's optimiser, see [the module](self).
///
/// The file stays open, and tensors are read when they are taken over. If the content of the open file is
/// modified, the restore refuses the file, as far as length and time of modification show the change.
#[must_use = "reading a state changes nothing: call `restore`"]
#[derive(Debug)]
pub struct TorchState {
    path: PathBuf,
    content: Content,
    takes_over: bool,
    accepts_non_finite: bool,
}

impl TorchState {
    /// Opens a safetensors file, as [the module](self) describes it.
    ///
    /// # Errors
    /// If the file cannot be read, has another format, such as that of `torch.save`, is damaged, or has no
    /// state of an optimiser.
    pub fn open(path: impl AsRef<Path>) -> Result<Self> {
        Self::read(path.as_ref(), Source::open(path.as_ref()))
    }

    /// Reads the bytes of a file, and keeps the bytes. Errors have `name` instead of a path.
    ///
    /// # Errors
    /// As [`TorchState::open`].
    pub fn from_bytes(name: impl Into<PathBuf>, bytes: Vec<u8>) -> Result<Self> {
        Self::read(&name.into(), Ok(Source::Memory(bytes)))
    }

    fn read(path: &Path, source: std::io::Result<Source>) -> Result<Self> {
        let content = source
            .map_err(read_error)
            .and_then(Content::from_source)
            .map_err(|error| in_file(path, error))?;
        Ok(TorchState {
            path: path.to_path_buf(),
            content,
            takes_over: false,
            accepts_non_finite: false,
        })
    }

    /// Renames every parameter by `rename`, because torch's wrappers put `module.` or `_orig_mod.` in front.
    ///
    /// ```no_run
    /// # use optimisers::torch::TorchState;
    /// let state = TorchState::open("optimizer.safetensors")?;
    /// let state = state.renamed(|name| name.trim_start_matches("module.").to_string());
    /// # Ok::<(), optimisers::Error>(())
    /// ```
    pub fn renamed(mut self, mut rename: impl FnMut(&str) -> String) -> Self {
        self.content
            .names
            .iter_mut()
            .for_each(|name| *name = rename(name));
        self
    }

    /// Also takes over hyper-parameters into the fields here. By default a difference is an error.
    ///
    /// A hyper-parameter that follows a schedule is compared nevertheless. If a relative schedule drives the
    /// rate, the leaf's own rate is taken over: see [the module](self#with-a-scheduler).
    pub fn taking_over_fields(mut self) -> Self {
        self.takes_over = true;
        self
    }

    /// Accepts infinities and NaN, which are refused by default.
    pub fn accepting_non_finite(mut self) -> Self {
        self.accepts_non_finite = true;
        self
    }
}

/// Adds the path of the file to an error.
fn in_file(path: &Path, error: Error) -> Error {
    error.in_file("torch state", path)
}
