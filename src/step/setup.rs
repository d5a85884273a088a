//! From a model to its state.

mod broadcast;
mod divided;

use std::sync::Arc;

pub use broadcast::broadcast;
use divided::{OptimiserChoices, Wire};

use crate::error::Result;
use crate::model::{Model, Variable, empty_model, in_path_order};
use crate::numbers::DType;
use crate::ranks::{Call, Communicator, StateWorld};
use crate::rule::{Optimiser, Parameter};
use crate::tree::{ChoiceCache, StateTree, chosen, expect_patterns, is_trainable};

/// Makes the state of `optimiser` for every trainable parameter of `model`.
///
/// A parameter of 16 bits needs a master, or another way to keep what rounding loses: see
/// [`Warning::LowPrecision`](crate::Warning::LowPrecision), which is in [`StateTree::warnings`] otherwise.
///
/// # Errors
/// If a hyper-parameter is out of range, the model has no trainable parameter, or the device has no memory
/// left.
///
/// ```
/// use candle_core::{DType, Device};
/// use candle_nn::{VarBuilder, VarMap, linear};
/// use optimisers::{AdamW, setup};
///
/// let variables = VarMap::new();
/// let _layer = linear(4, 2, VarBuilder::from_varmap(&variables, DType::F32, &Device::Cpu).pp("layer"))?;
/// let state = setup(AdamW::new(1e-3), &variables)?;
/// let paths: Vec<_> = state.leaves().map(|leaf| leaf.path()).collect();
/// assert_eq!(paths, ["layer.bias", "layer.weight"]);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub fn setup<O: Optimiser, M: Model + ?Sized>(optimiser: O, model: &M) -> Result<StateTree> {
    Setup::default().setup(optimiser, model)
}

/// Makes a state with an optimiser for each trainable parameter, or none, as `choose` says.
///
/// `choose` gets the path and what there is to know of the [`Parameter`](crate::Parameter) but its values.
///
/// A parameter without optimiser costs nothing: no state, and updates pass it over. That is the place of the
/// frozen base of a LoRA model, and of BatchNorm's running statistics in a `VarMap` (which are left alone
/// anyway, as they never get a gradient, but would have state). To mix optimisers of different types return
/// boxes.
///
/// `choose` is asked for every path of a parameter that has several (a tied weight), and has to give the same
/// answer for all: an optimiser of the same name with the same hyper-parameters, or none.
///
/// # Errors
/// As [`setup`]; a model of which everything was left out is an error, too, and so are different answers for
/// the paths of one parameter.
///
/// ```
/// use candle_core::{DType, Device, Var};
/// use optimisers::{AdamW, setup_with};
/// use std::collections::BTreeMap;
///
/// let variable = |n: usize| Var::zeros(n, DType::F32, &Device::Cpu);
/// let model = BTreeMap::from([("fc.weight", variable(6)?), ("fc.bias", variable(2)?), ("bn.running_mean", variable(2)?)]);
/// let state = setup_with(&model, |path, _| match path {
///     _ if path.contains("running_") => None,
///     _ if path.ends_with("bias") => Some(AdamW { lambda: 0.0, ..AdamW::new(1e-3) }),
///     _ => Some(AdamW::new(1e-3)),
/// })?;
/// assert_eq!(state.len(), 2);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub fn setup_with<O, M>(model: &M, choose: impl FnMut(&str, Parameter<'_>) -> Option<O>) -> Result<StateTree>
where
    O: Optimiser,
    M: Model + ?Sized,
{
    Setup::default().setup_with(model, choose)
}

/// A [`setup`] with more to say about how it is done.
///
/// ```
/// use candle_core::{Device, Var};
/// use optimisers::{AdamW, Setup, ranks, update};
///
/// // Two ranks, which are threads here, train one model on data of their own.
/// let train = |world: optimisers::LocalRank| -> optimisers::Result<(usize, Vec<f32>)> {
///     let x = Var::new(vec![1f32; 40_000], &Device::Cpu)?;
///     let mut state = Setup::over(&world).setup(AdamW::new(0.1), &x)?;
///     let loss = (x.as_tensor() * (world.rank() as f64 + 1.0))?.sum_all()?;
///     update(&mut state, &x, &loss.backward()?)?;
///     Ok((state.bytes(), x.to_vec1()?))
/// };
/// # use optimisers::Communicator;
/// let threads: Vec<_> = ranks(2).into_iter().map(|rank| std::thread::spawn(move || train(rank))).collect();
/// let results: Vec<_> = threads.into_iter().map(|thread| thread.join().unwrap()).collect::<Result<_, _>>()?;
/// // Each has a part of the moments, and all parameters.
/// assert_eq!(results[0].0 + results[1].0, 2 * 4 * 40_000);
/// assert_eq!(results[0].1, results[1].1);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[must_use = "it does nothing until `setup` or `setup_with` is called"]
#[derive(Clone, Debug, Default)]
pub struct Setup {
    world: Option<StateWorld>,
    wire: Wire,
}

impl Setup {
    /// Divides the state among the ranks of a data-parallel job (ZeRO, Rajbhandari et al. 2020,
    /// [arXiv 1910.02054](https://arxiv.org/abs/1910.02054), stages 1 and 2): each keeps the masters, moments
    /// and accumulators of a part of the elements, updates that part, and gets the others' parts of the
    /// parameters from them. The model and its gradients are whole on every rank.
    ///
    /// The state carries the world: [`update`](crate::update), [`LossScaler`](crate::LossScaler) and
    /// [`Scheduler`](crate::Scheduler) are used as in one process, by all ranks in the same order. An error
    /// on one rank is an error on all, before anything has moved, and the next call works. A parameter that
    /// was changed outside of `update` is noticed by the rank that has its elements; on others the change is
    /// overwritten.
    ///
    /// # What is computed
    /// The gradient is the mean over the ranks, `Σ w·g / Σ w` with the [weight](crate::Update::weight) of
    /// each rank's call (divided by what they have in common, so that equal weights are 1), added up in the
    /// dtype of the arithmetic, pairs of neighbouring ranks first. A parameter without a gradient on some
    /// ranks counts as zeros there; without one on all it is missing. Norms, checks and sums are those of all
    /// parts together.
    ///
    /// The bits do not depend on how many ranks there are, where the sum of the gradients is exact (equal
    /// gradients on a power of two of ranks), and else on the gradients in the order of ranks alone: not on
    /// how the state is divided, on threads or instruction sets. Micro-batches that are
    /// [added up pairwise](crate::AccumGrad#order-of-the-sum) on each rank have the same bits on any power of
    /// two of ranks.
    ///
    /// # What is divided
    /// Parameters lie one after another, in the order of paths, and each rank has about as many elements. A
    /// rule that is not [divisible](crate::Rule::is_divisible) (functions of whole tensors, rules of one's
    /// own by default), and [`StochasticRounding`](crate::StochasticRounding), keep a parameter whole on one
    /// rank. [`Leaf::part`](crate::Leaf::part) says which elements are here.
    ///
    /// # Where gradients are collected
    /// With [`AccumGrad`](crate::AccumGrad) in the chain each rank keeps a part of the sum, and gradients
    /// travel in every call (stage 2); with an [`Accumulator`](crate::Accumulator) each keeps all of its own,
    /// which travels once per step (stage 1). The latter has a table of what both cost, in either dtype.
    /// [`Setup::wire`] narrows what travels.
    ///
    /// # Checkpoints
    /// All ranks call [`Checkpoint::save`](crate::Checkpoint::save),
    /// [`CheckpointFile::restore`](crate::CheckpointFile::restore) and their kin, with one path. The file
    /// does not know how many ranks wrote it: a run goes on with another number of ranks, or in one process,
    /// and a run of one process over ranks.
    ///
    /// # Not over ranks yet
    /// `add`, `resize_rows`, [`Update::functional`](crate::Update::functional), [`Twin`](crate::Twin) and
    /// [`Offload`](crate::Offload) need the whole state, and are refused where there is more than one rank.
    ///
    /// # Errors of `setup`
    /// On all ranks, if their models, initial values or rules are not the same: the error names the first
    /// parameter and the rank. Also if a parameter is not on the [device](crate::Communicator::device) of a
    /// transport that has one.
    pub fn over<C: Communicator + Clone + 'static>(world: &C) -> Self {
        Setup { world: Some(StateWorld::new(Arc::new(world.clone()))), wire: Wire::default() }
    }

    /// Chooses for each parameter the dtype in which its gradients travel between ranks.
    ///
    /// `None` is their own, and so is it for all parameters if nothing is said, which loses nothing; a dtype
    /// that is no narrower than that of a gradient is passed over.
    ///
    /// Every rank's gradient, also that of the owner, is rounded once to this dtype; they are added up in the
    /// dtype of the arithmetic all the same. That is exact for a parameter in F32 that
    /// [`Autocast`](crate::Autocast) computes with in BF16 and that is used once: its gradient has values of
    /// that dtype.
    ///
    /// What overflows in F16 makes the call a skipped one where all numbers have to be
    /// [finite](crate::Update::finite_only), as under a [`LossScaler`](crate::LossScaler), and is an error
    /// otherwise.
    ///
    /// # Departures
    /// DeepSpeed's `communication_data_type` also widens. Here that would change nothing but the bytes.
    pub fn wire<D: Into<DType>>(self, choose: impl Fn(&str, Parameter<'_>) -> Option<D> + Send + Sync + 'static) -> Self {
        Setup { wire: Wire::new(move |path, x| choose(path, x).map(Into::into)), ..self }
    }

    /// As [`setup`].
    ///
    /// # Errors
    /// As [`setup`], and those of [`Setup::over`].
    pub fn setup<O: Optimiser, M: Model + ?Sized>(self, optimiser: O, model: &M) -> Result<StateTree> {
        let choices = || {
            optimiser.check()?;
            let optimiser: Arc<dyn Optimiser> = Arc::new(optimiser);
            Ok(variables(model)?.into_iter().map(|variable| (variable, Some(optimiser.clone()))).collect())
        };
        self.build(choices())
    }

    /// As [`setup_with`].
    ///
    /// # Errors
    /// As [`setup_with`], and those of [`Setup::over`].
    pub fn setup_with<O, M>(self, model: &M, mut choose: impl FnMut(&str, Parameter<'_>) -> Option<O>) -> Result<StateTree>
    where
        O: Optimiser,
        M: Model + ?Sized,
    {
        self.build(variables(model).and_then(|variables| chosen(variables, &mut choose)))
    }

    /// The state of variables with their optimisers; those without one are left out.
    pub(crate) fn build(self, choices: Result<OptimiserChoices<'_>>) -> Result<StateTree> {
        let choices = choices.and_then(|choices| expect_patterns(&choices).and_then(|()| ChoiceCache::all(choices)));
        let choices = match &self.world {
            Some(world) => divided::divided(world, &self.wire, choices)?,
            None => choices?.into_iter().map(|(variable, optimiser)| (variable, optimiser.map(|own| (own, None)))).collect(),
        };
        let mut state = StateTree::new(Vec::new(), Vec::new());
        state.world.clone_from(&self.world);
        let made = state.extend(choices).and_then(|_| if state.is_empty() { Err(empty_model()) } else { Ok(state) });
        StateWorld::settle(self.world.as_ref(), Call::Setup, made)
    }
}

/// The model's trainable variables.
pub(crate) fn variables<M: Model + ?Sized>(model: &M) -> Result<Vec<Variable<'_>>> {
    in_path_order(model, is_trainable)
}
