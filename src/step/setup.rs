//! `setup`: from a model to its state.
//!
//! All ways to a state lead to `Setup::assemble`, which gets the choices as a `Result`, because a rank whose
//! choices have failed must still take part in the agreement.
//!
//! All ranks compare model, values and rules before they divide the state (`Setup::assemble`). The values are
//! equal after `broadcast`, which gives all ranks those of rank 0.

use std::fmt;
use std::sync::Arc;

#[cfg(feature = "candle")]
use super::wire::wire_of_layers;
use crate::error::{Error, ErrorKind, Result, comma_separated, first_names};
use crate::model::lent::check_parameter;
use crate::model::{Model, Variable, empty_model_error, in_path_order};
use crate::numbers::{DType, check_supported};
use crate::ranks::{Aspect, Call, Communicator, Divisible, LeafParts, StateWorld, divide, share};
use crate::rule::{Adjust, IntoOptimiser, Optimiser, Parameter};
use crate::tensors::Tensor;
use crate::tree::{
    ChoiceCache, ChosenOptimisers, StateTree, check_offload, check_patterns, choose_optimisers, is_trainable,
    optimiser_aspects, values_aspect,
};

/// Makes the state of `optimiser` for every trainable parameter of `model`.
///
/// A parameter of 16 bits needs a master, or another way to keep what rounding loses. Otherwise
/// [`StateTree::warnings`] has a [`Warning::LowPrecision`](crate::Warning::LowPrecision).
///
/// # Errors
/// If a hyper-parameter is out of range, the model has no trainable parameter, an owner of [lent
/// memory](crate::Lend) lends other memory than it has described, or the device has no memory left.
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
pub fn setup<O: IntoOptimiser, M: Model + ?Sized>(optimiser: O, model: &M) -> Result<StateTree> {
    Setup::default().build(optimiser, model)
}

/// Makes a state with the optimiser, or none, that `choose` returns for each trainable parameter.
///
/// `choose` gets the path and the [`Parameter`](crate::Parameter): shape, dtype and device, not values.
///
/// A parameter without an optimiser has no state, and updates pass over such a parameter. Use this for the
/// frozen base of a LoRA model, and for BatchNorm's running statistics in a `VarMap` (which never get a
/// gradient, but would have state). To mix rules of different types, return an
/// [`Optimiser`](crate::Optimiser) for each.
///
/// For a tied weight `choose` is called with every path, and must return the same for all: an optimiser of
/// the same name with the same hyper-parameters, or none.
///
/// # Errors
/// As [`setup`]. Also if every parameter was left out, or if the results for the paths of one parameter
/// differ.
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
    O: IntoOptimiser,
    M: Model + ?Sized,
{
    Setup::default().build_with(model, choose)
}

/// A [`setup`] with options: ranks, and the dtype in which gradients travel between them.
///
/// ```
/// use candle_core::{Device, Var};
/// use optimisers::{AdamW, Setup, ranks, update};
///
/// // Two ranks, which are threads here, train one model on data of their own.
/// let train = |world: optimisers::LocalRank| -> optimisers::Result<(usize, Vec<f32>)> {
///     let x = Var::new(vec![1f32; 40_000], &Device::Cpu)?;
///     let mut state = Setup::over(&world).build(AdamW::new(0.1), &x)?;
///     let loss = (x.as_tensor() * (world.rank() as f64 + 1.0))?.sum_all()?;
///     update(&mut state, &x, &loss.backward()?)?;
///     Ok((state.bytes(), x.to_vec1()?))
/// };
/// # use optimisers::Communicator;
/// let threads: Vec<_> = ranks(2).into_iter().map(|rank| std::thread::spawn(move || train(rank))).collect();
/// let results: Vec<_> = threads.into_iter().map(|thread| thread.join().unwrap()).collect::<Result<_, _>>()?;
/// // Each rank has a part of the moments, and all parameters.
/// assert_eq!(results[0].0 + results[1].0, 2 * 4 * 40_000);
/// assert_eq!(results[0].1, results[1].1);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[must_use = "it does nothing until `setup` or `setup_with` is called"]
#[derive(Clone, Default)]
pub struct Setup {
    world: StateWorld,
    /// Returns the dtype in which the gradient of each variable travels. `None` for the gradient's own.
    choose_wire: Option<Arc<ChooseWire>>,
}

type ChooseWire = dyn Fn(&ChosenOptimisers<'_>) -> Result<Vec<Option<DType>>> + Send + Sync;

impl fmt::Debug for Setup {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Setup")
            .field("world", &self.world)
            .finish_non_exhaustive()
    }
}

impl Setup {
    /// Divides the state among the ranks of a data-parallel job.
    ///
    /// This is ZeRO, stages 1 and 2 (Rajbhandari et al. 2020, [arXiv
    /// 1910.02054](https://arxiv.org/abs/1910.02054)). Each rank keeps the masters, moments and accumulators
    /// of a part of the elements, updates that part, and gets the other parts of the parameters from the
    /// other ranks. The model and its gradients are whole on every rank.
    ///
    /// The state keeps the world, so [`update`](crate::update), [`LossScaler`](crate::LossScaler) and
    /// [schedules](crate::StateTree::schedule) are called as in one process, on all ranks in the same order.
    /// An error on one rank is an error on all, before anything has moved, and the next call works. If a
    /// parameter was changed outside of `update`, the rank that has the state of the changed element notices;
    /// on other ranks the change is overwritten.
    ///
    /// # What is computed
    /// The gradient is the mean over the ranks, `Σ w·g / Σ w`, with the [weight](crate::Update::weight) w of
    /// each rank's call. The weights are divided by their greatest common divisor, so equal weights become 1.
    /// Gradients are added up in the dtype of the arithmetic, pairs of neighbouring ranks first. Norms,
    /// checks and sums are over all parts.
    ///
    /// If some ranks lack a gradient, it counts as zeros there, unless the state [requires
    /// all](crate::StateTree::require_all); if all lack it, it is missing. A rank without any gradient is
    /// refused, because its zeros would make every step smaller. If a rank has no data, set its weight to 0,
    /// or [accept](crate::Update::allow_no_gradients) the zeros.
    ///
    /// The bits depend only on the gradients in rank order: not on how the state is divided, on threads or on
    /// instruction sets. If the sum of the gradients is exact (equal gradients on a power of two of ranks),
    /// the bits do not depend on the number of ranks either.
    ///
    /// # What is divided
    /// The parameters, in the order of paths, are divided into one range for each rank:
    /// [`many_machines`](crate::many_machines#what-is-divided) has where they are cut, and which rules keep a
    /// parameter whole on one rank. A small model is divided unevenly, and a rank can have nothing of it.
    /// [`Leaf::part`](crate::Leaf::part) returns the elements of this rank.
    ///
    /// # Where gradients are collected
    /// With [`AccumGrad`](crate::AccumGrad) in the chain, each rank keeps a part of the sum, and gradients
    /// travel in every call (stage 2). With an [`Accumulator`](crate::Accumulator) each rank keeps its whole
    /// sum, which travels once per step (stage 1). `Accumulator` has a table of what both cost, with sums in
    /// BF16 and in F32. [`Setup::wire`] and [`Setup::wire_as_computed`] make gradients travel in a narrower
    /// dtype.
    ///
    /// # Checkpoints
    /// All ranks call [`Checkpoint::save`](crate::Checkpoint::save),
    /// [`CheckpointFile::restore`](crate::CheckpointFile::restore) and the like, with one path. The file is
    /// the same for any number of ranks, so a run can resume with another number of ranks, one process
    /// included.
    ///
    /// # Not over ranks yet
    /// `add`, `resize_rows` and [`Update::functional`](crate::Update::functional) need the whole state, and
    /// are refused if there is more than one rank, and so is [`Offload`](crate::Offload).
    ///
    /// # Errors of `setup`
    /// On all ranks, if their models, initial values or rules differ: the error names the first parameter
    /// that differs, and the rank. Also if the transport has a [device](crate::Communicator::device), and a
    /// parameter is on another device.
    pub fn over<C: Communicator + Clone + 'static>(world: &C) -> Self {
        Setup {
            world: StateWorld::over(world),
            choose_wire: None,
        }
    }

    /// Chooses for each parameter the dtype in which its gradients travel between ranks.
    ///
    /// `None`, the default for all parameters, is the gradient's own dtype, which loses nothing. If the
    /// chosen dtype is wider, gradients travel in their own dtype as well, but no
    /// [warning](crate::Warning::WireDiffers) follows, because the program has chosen. Without
    /// [`over`](Setup::over) nothing travels.
    ///
    /// Every rank's gradient is rounded once to this dtype, also the gradient of the rank that adds the
    /// gradients up. The sum is still in the dtype of the arithmetic.
    ///
    /// If a gradient overflows in F16, the call is skipped under [`finite_only`](crate::Update::finite_only)
    /// or a [`LossScaler`](crate::LossScaler); otherwise it is an error.
    ///
    /// # Departures
    /// DeepSpeed's `communication_data_type` also widens. Here that would only send more bytes.
    pub fn wire<D: Into<DType>>(
        self,
        choose: impl Fn(&str, Parameter<'_>) -> Option<D> + Send + Sync + 'static,
    ) -> Self {
        let dtype = move |(variable, _): &(Variable<'_>, _)| {
            let dtype = choose(variable.path(), Parameter::new(&*variable.x)).map(Into::into);
            let check = |dtype| check_supported("the dtype that `Setup::wire` chose for its gradient", dtype);
            let outcome = dtype.map_or(Ok(()), check);
            outcome.map_err(|error| error.at(variable.path()))?;
            Ok(dtype)
        };
        Setup {
            choose_wire: Some(Arc::new(move |choices| choices.iter().map(&dtype).collect())),
            ..self
        }
    }

    /// Lets gradients travel in the dtype in which the layers of [`Autocast`](crate::Autocast) compute.
    ///
    /// So the list of `Autocast` decides how layers compute and how gradients travel. If one layer in BF16
    /// uses a variable once, the gradient has values of BF16, so sending it in BF16 loses nothing. If the
    /// layer is used several times in a forward pass, or gradients are [collected](crate::Accumulator) before
    /// they travel, their sum is rounded once. If several layers of `Autocast` (also of a copy of the model)
    /// or none use a variable, its gradients travel in their own dtype. If other code uses the variable too,
    /// such as an embedding with the same weights or a penalty in the loss, the sum is rounded as well: make
    /// such an embedding by `Autocast`.
    ///
    /// A layer counts while it exists. Before the first forward pass of a layer its intended dtype counts. So
    /// if a kernel [may be missing](crate::AutocastLayer#where-a-kernel-is-missing), set up after a forward
    /// pass, on all ranks alike.
    ///
    /// # Errors of `setup`
    /// If no layer that `Autocast` made has a variable of the model.
    ///
    /// ```
    /// use candle_core::{DType::{BF16, F32}, Device, Module, Tensor};
    /// use candle_nn::{VarBuilder, VarMap, linear};
    /// use optimisers::{AdamW, Autocast, Setup, ranks, update};
    ///
    /// let variables = VarMap::new();
    /// let builder = VarBuilder::from_varmap(&variables, F32, &Device::Cpu);
    /// let hidden = Autocast::new(BF16)?.layer(builder.pp("hidden"), |builder| linear(4, 8, builder))?;
    /// # for world in ranks(1) {
    /// let mut state = Setup::over(&world).wire_as_computed().build(AdamW::new(1e-3), &variables)?;
    /// let loss = hidden.forward(&Tensor::ones((2, 4), F32, &Device::Cpu)?)?.sum_all()?;
    /// update(&mut state, &variables, &loss.backward()?)?;
    /// # }
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    #[cfg(feature = "candle")]
    pub fn wire_as_computed(self) -> Self {
        Setup {
            choose_wire: Some(Arc::new(wire_of_layers)),
            ..self
        }
    }

    /// As [`setup`].
    ///
    /// # Errors
    /// As [`setup`], and those of [`Setup::over`].
    pub fn build<O: IntoOptimiser, M: Model + ?Sized>(self, optimiser: O, model: &M) -> Result<StateTree> {
        let choices = || {
            let optimiser = Arc::new(optimiser.into_optimiser());
            optimiser.check()?;
            Ok(variables(model)?
                .into_iter()
                .map(|variable| (variable, Some(optimiser.clone())))
                .collect())
        };
        self.assemble(choices())
    }

    /// As [`setup_with`].
    ///
    /// # Errors
    /// As [`setup_with`], and those of [`Setup::over`].
    pub fn build_with<O, M>(
        self,
        model: &M,
        mut choose: impl FnMut(&str, Parameter<'_>) -> Option<O>,
    ) -> Result<StateTree>
    where
        O: IntoOptimiser,
        M: Model + ?Sized,
    {
        self.assemble(variables(model).and_then(|variables| choose_optimisers(variables, &mut choose)))
    }

    /// Makes the state of variables with their optimisers, and leaves out variables without an optimiser.
    pub(crate) fn assemble(self, choices: Result<ChosenOptimisers<'_>>) -> Result<StateTree> {
        let Setup { world, choose_wire } = self;
        let plan = choices.and_then(|choices| {
            check_patterns(&choices)?;
            let choices = ChoiceCache::resolve_all(choices)?;
            for (variable, optimiser) in &choices {
                let Some(optimiser) = optimiser else { continue };
                check_offload(variable.path(), optimiser, world.size())?;
                world.check_device(variable.path(), variable.x.device())?;
            }
            let wires = match choose_wire.filter(|_| world.communicator().is_some()) {
                Some(choose_wire) => choose_wire(&choices)?,
                None => vec![None; choices.len()],
            };
            Ok((choices, wires))
        });
        let (choices, wires) = world.compare(Call::Setup, plan, |(choices, wires)| {
            let aspects = choices
                .iter()
                .zip(wires)
                .map(|(choice, wire)| choice_aspects(choice, *wire));
            Ok(aspects.collect::<Result<Vec<_>>>()?.concat())
        })?;
        let mut state = StateTree::new(Vec::new(), Vec::new());
        let parts = parts_of_choices(&world, &choices, wires);
        state.world = world.clone();
        let result = state.extend(choices, parts).and_then(|_| {
            if state.is_empty() {
                return Err(no_leaf_error(&state));
            }
            // Makes the cache of paths, so that the first update need not make it.
            state.by_path();
            Ok(state)
        });
        // All ranks agree on the result, because one rank alone may lack the memory for its state.
        world.settle(Call::Setup, result)
    }
}

/// The error for a state without a leaf.
fn no_leaf_error(state: &StateTree) -> Error {
    let left_out = state.left_out.len();
    if left_out == 0 {
        return empty_model_error();
    }
    let problem = format!("the choice leaves out all {left_out} trainable variables of the model:");
    let paths = state.left_out.iter().map(|variable| variable.paths[0].as_str());
    Error::new(ErrorKind::Model, problem)
        .with_got(comma_separated(&first_names(paths)))
        .with_remedy("return an optimiser for one of them, and compare the patterns with these paths")
}

/// The model's trainable variables.
pub(crate) fn variables<M: Model + ?Sized>(model: &M) -> Result<Vec<Variable<'_>>> {
    in_path_order(model, is_trainable)
}

/// Gives all ranks the values that rank 0 has of a model's variables, trainable or not.
///
/// Processes with random initial weights differ, which [`Setup::over`](crate::Setup::over) refuses: call
/// `broadcast` first, on all ranks. `broadcast` sends the variables in ranges, so it takes little memory.
///
/// # Errors
/// On all ranks, before anything has changed, if the models differ in paths, shapes or dtypes, if the
/// transport has a [device](crate::Communicator::device) and a variable is on another device, or if a
/// variable's owner does not lend the memory. Also if a rank has left.
///
/// ```
/// use candle_core::{Device, Var};
/// use optimisers::{AdamW, Communicator, Setup, broadcast, ranks};
///
/// let train = |world: optimisers::LocalRank| -> optimisers::Result<Vec<f32>> {
///     let x = Var::randn(0f32, 1.0, 1000, &Device::Cpu)?;
///     broadcast(&world, &x)?;
///     let _state = Setup::over(&world).build(AdamW::new(0.1), &x)?;
///     Ok(x.to_vec1()?)
/// };
/// let threads: Vec<_> = ranks(2).into_iter().map(|rank| std::thread::spawn(move || train(rank))).collect();
/// let values: Vec<_> = threads.into_iter().map(|thread| thread.join().unwrap()).collect::<Result<_, _>>()?;
/// assert_eq!(values[0], values[1]);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub fn broadcast<C, M>(world: &C, model: &M) -> Result<()>
where
    C: Communicator + Clone + 'static,
    M: Model + ?Sized,
{
    let world = StateWorld::over(world);
    let variables = in_path_order(model, |tensor| tensor.is_variable());
    let variables = world.compare(Call::Broadcast, variables, |variables| {
        variables
            .iter()
            .map(|variable| variable_aspect(&world, variable))
            .collect()
    })?;
    let Some(communicator) = world.communicator_to_others() else {
        return Ok(());
    };
    let tensors = variables.into_iter().flat_map(|Variable { x, .. }| {
        // A parameter that is divided alone and is not cut lies on rank 0, which gives its values to all.
        let parameter = Divisible {
            length: x.elem_count(),
            can_be_cut: false,
        };
        let parts = divide(&[parameter], communicator.rank(), communicator.size());
        parts.into_iter().zip([x])
    });
    let tensors: Vec<_> = tensors.collect();
    share(communicator, &tensors)
}

/// Describes a variable by what must be the same on all ranks.
fn variable_aspect(world: &StateWorld, variable: &Variable<'_>) -> Result<Aspect> {
    let (path, x) = (variable.path(), &*variable.x);
    world.check_device(path, x.device())?;
    // Rank 0 only reads its values.
    check_parameter("variable", x, world.rank() > 0).map_err(|error| error.at(path))?;
    if !x.tensor().is_none_or(Tensor::is_contiguous) {
        return Err(Error::new(
            ErrorKind::Memory,
            "it is not contiguous, so its values cannot be sent",
        )
        .with_remedy("replace the variable by a contiguous copy")
        .at(path));
    }
    Ok(Aspect::new(
        "a variable",
        format!("{:?} of shape {:?} in {:?}", variable.paths, x.shape(), x.dtype()),
    ))
}

/// The aspects of a parameter that must be the same on all ranks.
fn choice_aspects(
    (variable, optimiser): &(Variable<'_>, Option<Arc<Optimiser>>),
    wire: Option<DType>,
) -> Result<[Aspect; 8]> {
    let (x, path) = (&*variable.x, variable.path());
    let name = |what: &str| format!("{what} of {path:?}");
    let [words, text] = optimiser_aspects(path, optimiser.as_deref());
    Ok([
        Aspect::new("a parameter", format!("{path:?}")),
        Aspect::new(name("the paths"), format!("{:?}", variable.paths)),
        Aspect::new(name("the shape"), format!("{:?}", x.shape())),
        Aspect::new(name("the dtype"), format!("{:?}", x.dtype())),
        words,
        text,
        Aspect::new(
            name("the dtype on the wire"),
            wire.map_or("its own".to_string(), |dtype| format!("{dtype:?}")),
        ),
        values_aspect(path, x)?,
    ])
}

/// The parts of each variable with an optimiser; none without other ranks.
fn parts_of_choices(
    world: &StateWorld,
    choices: &ChosenOptimisers<'_>,
    wires: Vec<Option<DType>>,
) -> Vec<LeafParts> {
    if !world.is_divided() {
        return Vec::new();
    }
    let included = choices
        .iter()
        .zip(wires)
        .filter_map(|((variable, optimiser), wire)| Some((variable, optimiser.as_ref()?, wire)));
    let (divisible, wires): (Vec<_>, Vec<_>) = included
        .map(|(variable, optimiser, wire)| {
            let divisible = Divisible {
                length: variable.x.elem_count(),
                can_be_cut: optimiser.is_divisible(),
            };
            (divisible, wire)
        })
        .unzip();
    let mut parts = divide(&divisible, world.rank(), world.size());
    parts
        .iter_mut()
        .zip(wires)
        .for_each(|(parts, wire)| parts.wire = wire);
    parts
}
