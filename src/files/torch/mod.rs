//! Optimiser states from and to torch: a run can change over in the middle. Needs the feature `torch`.
//!
//! [`TorchState`] reads the content of `optimizer.state_dict()` into a [`StateTree`](crate::StateTree), by
//! the names of the parameters. [`StateTree::save_torch`](crate::StateTree::save_torch) writes it. For the
//! parameters themselves use [`Weights`](crate::Weights) and
//! [`StateTree::save_masters`](crate::StateTree::save_masters).
//!
//! # From torch
//!
//! There are two kinds of file. One is a safetensors file with an entry `<parameter>/<key>` for each tensor
//! of the state. Its metadata has the groups as JSON, with names in place of parameter numbers:
//!
//! ```python
#![doc = include_str!("save_state.py")]
//!
//! save_state(optimizer, model.named_parameters(), "optimizer.safetensors")
//! ```
//!
//! The other is a file of `torch.save`: a `state_dict` anywhere in a dict, such as a checkpoint of a whole
//! training. It numbers the parameters, so save their names along, or give them here ([`TorchState::named`]):
//!
//! ```python
//! names = [name for name, _ in model.named_parameters()]   # as they were passed to the optimiser
//! torch.save({"optimizer": optimizer.state_dict(), "param_names": names}, "optimizer.pt")
//! ```
//!
//! Neither is needed if the optimiser was made with `model.named_parameters()`, as torch saves these names,
//! nor for the dicts by names of `torch.distributed.checkpoint.state_dict.get_optimizer_state_dict`.
//!
//! ```
//! use candle_core::{Device, Tensor, Var};
//! use optimisers::{AdamW, ClipGlobalNorm, OptimiserChain, setup, torch::TorchState};
//! use std::collections::{BTreeMap, HashMap};
//!
//! # let folder = tempfile::tempdir()?;
//! # let path = folder.path().join("optimizer.safetensors");
//! // What the snippet above writes after 7 steps.
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
//! assert_eq!(leaf.tensor("1.m")?.expect("the first moment").to_vec1::<f32>()?, [0.5, -0.5]);
//! assert_eq!(leaf.steps(), 7);
//!
//! state.save_torch(&path)?;
//! # TorchState::open(&path)?.restore(&mut state)?;
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! # To torch
//!
//! [`StateTree::save_torch`](crate::StateTree::save_torch) writes a file of the first kind. An optimiser over
//! the same parameters can load it, whatever its groups and their order, if the parameters of each have the
//! same hyper-parameters in the file:
//!
//! ```python
#![doc = include_str!("load_state.py")]
//!
//! load_state(optimizer, model.named_parameters(), "optimizer.safetensors")
//! ```
//!
//! # With a scheduler
//!
//! torch's schedulers are in no `optimizer.state_dict()`. They write into each group the rate that it began
//! with, as `initial_lr`. So give the state the [schedule](crate::StateTree::schedule) of the run and torch's
//! `last_epoch`, the number of steps of its scheduler, before the restore. Then `lr` is compared with the
//! schedule's rate in that step, up to the rounding of another program. Under a relative schedule
//! `initial_lr` is the leaf's own rate. `LambdaLR` is a [relative](crate::Schedule::relative) schedule, and
//! so is `CosineAnnealingLR` down to 0. If that ends above 0, use a [`Schedule`](crate::Schedule) for each
//! group.
//!
//! Without a schedule here, the leaf's own rate is `lr`, the rate of the moment, and a
//! [warning](crate::Warning::ScheduleDiffers) tells of it where the file has an `initial_lr`.
//!
//! `OneCycleLR` begins at a 25th of its peak, which is its `initial_lr`: the schedule is
//! `Schedule::one_cycle(25.0, total_steps).relative()`. By default it moves the momentum or β₁ in each step
//! as well, and so does `CyclicLR`. Such a file is refused unless a schedule drives that number here too, as
//! [`Schedule::one_cycle`](crate::Schedule::one_cycle) shows. To go on with the momentum of the moment,
//! remove `max_momentum` and `base_momentum` from the groups before saving.
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
//! that state by name after the restore. Its count of steps is the number of models in the average:
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
//! The state of a `GradScaler` is on the page of [`LossScaler`](crate::LossScaler#from-torch).
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
//! state.set_steps(5);
//! TorchState::open(&path)?.taking_over_fields().restore(&mut state)?;
//! assert_eq!(state.leaves().map(|leaf| leaf.field("eta")).collect::<Vec<_>>(), [0.25, 0.5].map(|own| Some(own.into())));
//! state.set_steps(10);
//! assert_eq!(state.leaves().map(|leaf| leaf.learning_rate()).collect::<Vec<_>>(), [Some(0.0), Some(0.0)]);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! In the other direction, [`save_torch`](crate::StateTree::save_torch) writes the rate of the next step as
//! `lr`, and the own rate of leaves under a schedule as `initial_lr`. Make torch's scheduler after loading
//! the state. The scheduler sets the rates of step `last_epoch + 1`:
//!
//! ```python
//! load_state(optimizer, model.named_parameters(), "optimizer.safetensors")
//! scheduler = CosineAnnealingLR(optimizer, 10, last_epoch=steps - 1)   # `steps` is what `StateTree::steps` was
//! ```
//!
//! # What is what
//!
//! | torch | rule here | state: torch → here | hyper-parameters: torch → here |
//! | --- | --- | --- | --- |
//! | `AdamW` | [`AdamW`](crate::AdamW) | `exp_avg` → `m`, `exp_avg_sq` → `v`, `step` → `t` | `lr` → `eta`, `betas` → `beta`, `eps` → `epsilon`, `weight_decay` → `lambda` |
//! | `Adam` | [`Adam`](crate::Adam) | the same | `weight_decay` → the `lambda` of a [`WeightDecay`](crate::WeightDecay) in front |
//! | either with `amsgrad` | [`AMSGradW`](crate::AMSGradW) | and `max_exp_avg_sq` → `largest_v` | as of the one or the other |
//! | `SGD` | [`Descent`](crate::Descent) | | `lr` → `eta`, `weight_decay` as in `Adam` |
//! | `SGD(momentum)` | [`Momentum`](crate::Momentum) | `momentum_buffer`·η → `velocity` | and `momentum` → `rho` |
//! | `SGD(nesterov)` | [`Nesterov`](crate::Nesterov) | -`momentum_buffer`·η → `displacement` | the same |
//! | `RMSprop` | [`RMSProp`](crate::RMSProp) | `square_avg` → `v`, `step` → `t`; centred also `grad_avg` → `m` | `lr` → `eta`, `alpha` → `rho`, `eps` → `epsilon`, `weight_decay` as in `Adam` |
//! | `RMSprop(momentum)` | a chain of `RMSProp` and `Momentum` with η = 1 each, and `Descent` | and `momentum_buffer` → `velocity` | `lr` → the `eta` of `Descent`, `momentum` → `rho` |
//! | `Adagrad` | [`AdaGrad`](crate::AdaGrad) | `sum` → `sum_of_squares`, `step` → `t` | `lr` → `eta`, `eps` → `epsilon`, `weight_decay` as in `Adam` |
//! | `Lion` (lion-pytorch, pytorch_optimizer) | [`Lion`](crate::Lion) | `exp_avg` → `m` | `lr` → `eta`, `betas` → `beta`, `weight_decay` → `lambda` |
//!
//! The rule may be anywhere in a chain and inside wrappers, as long as it is the only one with a counterpart.
//! Other members of the chain (clipping, averages) are ignored: torch has these outside of the optimiser.
//! Inside of its optimisers torch also has:
//!
//! - `maximize`: a [`Scale`](crate::Scale) with a negative factor in front.
//! - A `lr` that is a product: a `Descent` behind the rule is multiplied in. torch has the learning rate
//!   outside of SGD's velocity: there a schedule rescales the whole velocity, here it keeps the old rates.
//!   `Momentum` with η = 1 and `Descent` behind it is exactly torch's.
//! - [`DecoupledDecay`](crate::DecoupledDecay), for Adam and Lion.
//!
//! `foreach`, `fused`, `capturable` and `differentiable` are about how torch computes, and are ignored; so is
//! `initial_accumulator_value`, which is in the sum by then. Refused, with the parameter and what differs,
//! are `dampening`, `lr_decay`, and any other option that is switched on and unknown here; a momentum that a
//! scheduler moves and no schedule here; `couple = false` of `AdamW` and a corrected `DecoupledDecay` if
//! there is a decay; a `WeightDecay` after the rule; `Adam` and `AdamW` with `bias_correction = false`; the
//! rule [`AMSGrad`](crate::AMSGrad), which has no bias correction. torch's `RAdam` has no counterpart: it
//! adds ε to another root than [`RAdam`](crate::RAdam).
//!
//! torch does not save the class of an optimiser. Its hyper-parameters tell it; for `Adam` and `AdamW` it is
//! `decoupled_weight_decay` (since torch 2.7), and without that the rule here decides.
//!
//! A velocity with a learning rate of 0 inside has lost torch's: a file with `lr` 0 and such a velocity is
//! refused, unless the rate is in a `Descent` behind. A `step` in bf16 is refused from 256 on, in f16 from
//! 2048 on: torch adds 1 to it there, and the sum is rounded back.
//!
//! SGD and Lion do not count steps in torch, so `t` and [`Leaf::steps`](crate::Leaf::steps) stay as they are.
//! Wrappers that change the step, such as [`Cautious`](crate::Cautious), are not written.
//!
//! # Precision
//!
//! torch keeps a state in the parameter's dtype, and converts it to that on loading. Here moments are in F32
//! for 16-bit parameters, or as [`StoreAs`](crate::StoreAs) says. A parameter under
//! [`MixedPrecision`](crate::MixedPrecision) has the moments of its master. They correspond to a run in torch
//! with parameters in F32 and arithmetic under `autocast`;
//! [`StateTree::set_masters`](crate::StateTree::set_masters) with [`Weights`](crate::Weights) sets the
//! masters to that run's parameters, unrounded. Moments of a torch model in bf16 are taken over as they are;
//! in the other direction torch rounds them.

mod archive;
mod container;
mod content;
mod continuation;
mod counterpart;
mod flat;
mod objects;
mod pickled;
mod restore;
mod save;
mod settings;

use std::path::{Path, PathBuf};

use archive::{Archive, MAGIC};
use container::Container;
use content::Content;
use objects::damaged;

use super::tensor_file::{Source, TensorFile};
use crate::error::{Error, Result};

/// A file with the state of torch's optimiser, see [the module](self).
///
/// It holds the open file; tensors are read when they are taken over. A file that is changed in its place
/// meanwhile is refused, as far as its length and its time of modification show.
///
/// candle reads a pickle: it makes only dicts, lists and numbers of it, and runs nothing. Its recursion is as
/// deep as the pickle's: use files that you trust.
#[must_use = "reading a state changes nothing: call `restore`"]
#[derive(Debug)]
pub struct TorchState {
    path: PathBuf,
    container: Container,
    content: Content,
    takes_over: bool,
    accepts_non_finite: bool,
}

impl TorchState {
    /// Opens a safetensors file, or a file of `torch.save`, as [the module](self) describes them.
    ///
    /// A file of `torch.save` has to have exactly one `state_dict` of an optimiser, anywhere in it.
    ///
    /// # Errors
    /// If it cannot be read, has another format, is damaged, or has no state of an optimiser or several.
    pub fn open(path: impl AsRef<Path>) -> Result<Self> {
        Self::read(path.as_ref(), Source::open(path.as_ref()), None)
    }

    /// Opens one of several states in a file of `torch.save`.
    ///
    /// `place` has the keys on the way to it, and indices in lists, with dots between: `optimizers.0`.
    ///
    /// # Errors
    /// As [`TorchState::open`]. Also if there is no state at this place.
    pub fn open_at(path: impl AsRef<Path>, place: &str) -> Result<Self> {
        Self::read(path.as_ref(), Source::open(path.as_ref()), Some(place))
    }

    /// Reads the bytes of a file, and holds them; `name` is for errors.
    ///
    /// # Errors
    /// As [`TorchState::open`].
    pub fn from_bytes(name: impl Into<PathBuf>, bytes: Vec<u8>) -> Result<Self> {
        Self::read(&name.into(), Ok(Source::Memory(bytes)), None)
    }

    fn read(path: &Path, source: std::io::Result<Source>, at: Option<&str>) -> Result<Self> {
        let read = source.map_err(container::read_error).and_then(|source| parse(source, at));
        let (container, content) = read.map_err(|error| in_file(path, error))?;
        Ok(TorchState {
            path: path.to_path_buf(),
            container,
            content,
            takes_over: false,
            accepts_non_finite: false,
        })
    }

    /// Names the parameters in the order of torch's optimiser.
    ///
    /// That is the order of its groups, or of `model.named_parameters()` if all were passed at once.
    pub fn named<N: Into<String>>(mut self, names: impl IntoIterator<Item = N>) -> Self {
        self.content.names = Some(names.into_iter().map(Into::into).collect());
        self
    }

    /// Renames every parameter by `rename`: torch's wrappers put `module.` or `_orig_mod.` in front.
    ///
    /// # Errors
    /// If the parameters have no names yet.
    ///
    /// ```no_run
    /// # use optimisers::torch::TorchState;
    /// let state = TorchState::open("optimizer.pt")?.renamed(|name| name.trim_start_matches("module.").to_string())?;
    /// # Ok::<(), optimisers::Error>(())
    /// ```
    pub fn renamed(mut self, rename: impl FnMut(&str) -> String) -> Result<Self> {
        let names = self.content.check_names().map_err(|error| self.refused(error))?;
        self.content.names = Some(names.iter().map(String::as_str).map(rename).collect());
        Ok(self)
    }

    /// Also takes over the hyper-parameters that a field here has. By default one that differs is an error.
    ///
    /// Of a rate that follows a schedule it is the own one, see [the module](self#with-a-scheduler).
    pub fn taking_over_fields(mut self) -> Self {
        self.takes_over = true;
        self
    }

    /// Accepts infinities and NaN, which are refused by default.
    pub fn accepting_non_finite(mut self) -> Self {
        self.accepts_non_finite = true;
        self
    }

    /// The names of the parameters in their order, if the file has them or [`TorchState::named`] gave them.
    pub fn names(&self) -> Option<&[String]> {
        self.content.names.as_deref()
    }
}

fn in_file(path: &Path, error: Error) -> Error {
    error.in_file("torch state", path)
}

fn parse(source: Source, at: Option<&str>) -> Result<(Container, Content)> {
    let mut buffer = Vec::new();
    let is_archive = source.length() >= MAGIC.len() as u64
        && source.read(0, MAGIC.len(), &mut buffer).map_err(container::read_error)? == MAGIC;
    if is_archive {
        let archive = Archive::read(source).map_err(damaged)?;
        let content = pickled::content(&archive, at)?;
        return Ok((Container::Archive(archive), content));
    }
    let (file, said) = TensorFile::of(source).map_err(damaged)?;
    let content = flat::content(&file, said)?;
    Ok((Container::Flat(file), content))
}
