//! A leaf: the optimiser and the state of one parameter.
//!
//! A leaf does not hold its parameter, so a program can write the parameter between two updates. How an
//! update notices such a write depends on the state:
//! 1. With a master, the parameter has to be the master rounded.
//! 2. With copies that rules keep of the parameter, the parameter has to be equal to the copies before the
//!    first step. Later, without a master, the parameter has to have the `last_checksum`. The parameter also
//!    has to have this checksum if the state has a norm of the parameter, or the digits that roundings of the
//!    parameter have lost.
//! 3. Without a master, copies, a norm and lost digits, an update takes any value.
//!
//! There are two optimisers. Edits and files use `optimiser`, the user's own. All code that needs the values
//! of a step, from the plan to `end_window`, uses `acting`, a copy with the values of the schedules.

use std::borrow::Cow;
use std::fmt;
use std::ops::Range;
use std::sync::Arc;

use super::drives::{Drives, ScheduleAssignment};
use crate::engine::{Buffer, CounterWrites, Progress};
use crate::error::{Error, ErrorKind, FLOATS, Result};
use crate::model::lent::{Lend, Lent, check_parameter};
use crate::numbers::{DType, Shape, counts, elem_count, is_supported, widest_compute_dtype};
use crate::ranks::{Aspect, Held, LeafParts};
use crate::rule::{FieldValue, Optimiser, State, Store};
use crate::tensors::{Device, Tensor, TensorId, repeated_zero};

/// One parameter's optimiser, state and bookkeeping.
///
/// `Debug` has two lines: the parameter with its own optimiser, and the state without the numbers of tensors.
/// The text is for people, and may change in any version.
pub struct Leaf {
    /// The first of the parameter's paths in sorted order, so that the order of the leaves does not depend on
    /// the order in which the model visits its variables.
    pub(crate) path: String,
    /// The further paths, sorted. A gradient may come under any of them.
    pub(crate) aliases: Vec<String>,
    /// The id of the variable; `None` for memory that is no tensor, which is found by its path.
    pub(crate) id: Option<TensorId>,
    /// The storage whose lock guards the parameter; `None` if nobody else can access the memory. A gradient
    /// in this storage is copied, because an update that holds the lock cannot take it again.
    pub(crate) storage: Option<usize>,
    pub(crate) device: Device,
    /// The shape of the whole parameter, also where this rank has a part.
    pub(crate) shape: Shape,
    pub(crate) dtype: DType,
    /// The elements that each rank has; `None` if the state is not divided.
    pub(crate) parts: Option<LeafParts>,
    /// The optimiser as the user made and adjusted it. Checkpoints save it, and edits change it. Thousands of
    /// leaves may share one.
    pub(crate) optimiser: Arc<Optimiser>,
    /// The optimiser of the set-up; `None` until `optimiser` is another one. Checkpoints have the values of
    /// this optimiser and of `run_start`, so that a restore reports no difference if the program sets one of
    /// these values.
    pub(crate) initial_optimiser: Option<Arc<Optimiser>>,
    /// The optimiser at the first step or restore, and whether the leaf was frozen then; `None` until one of
    /// the two changes.
    pub(crate) run_start: Option<(Arc<Optimiser>, bool)>,
    /// The schedules, resolved in `optimiser`, because finding a field by its name in each step is slow.
    pub(crate) drives: Option<Arc<Drives>>,
    /// A copy of `optimiser` with the values of the schedules in the next step; `None` without schedules. The
    /// values go into a copy, because relative schedules multiply the values in `optimiser`.
    pub(crate) acting: Option<Arc<Optimiser>>,
    pub(crate) state: State,
    pub(crate) frozen: bool,
    /// The applied steps. Each leaf counts its own, because a leaf without a gradient makes no step.
    pub(crate) steps: u64,
    pub(crate) missing_gradients: MissingGradients,
    /// The value of `steps` when state or variable last came from outside: from `setup`, a file, an edit or
    /// another model. The next step compares all of the parameter with its master, because a program may
    /// write parameters until then. Later steps compare a sample.
    pub(crate) unsettled_at: u64,
    /// Whether after the first step only `last_checksum` reveals a changed parameter: see
    /// [`State::needs_checksum`].
    pub(super) needs_checksum: bool,
    /// If `needs_checksum`, a checksum of a sample of the parameter after a step, with the value of `steps`
    /// then. The checksum counts while `steps` is the same: a later step has moved the parameter.
    pub(crate) last_checksum: Option<(u64, u32)>,
    /// A copy of the parameter, while the model has other values instead: the average, or the values to which
    /// `Sam` has moved the parameter. No failure loses the copy, and steps are refused meanwhile.
    pub(crate) parameter_aside: Option<Tensor>,
    /// Whether a parameter of 16 bits may lose steps below its rounding without a warning.
    pub(crate) allows_low_precision: bool,
    /// Whether the path is only an index in a list. Such a leaf is neither saved nor restored, because the
    /// list may have another order in another process.
    pub(crate) is_unnamed: bool,
}

/// The id, storage and device of a variable. They are asked of the owner before a leaf changes, because the
/// owner is code of the program and may panic.
pub(super) struct VariablePlace {
    id: Option<TensorId>,
    storage: Option<usize>,
    device: Device,
}

impl VariablePlace {
    pub(super) fn new(x: &dyn Lend) -> Self {
        VariablePlace {
            id: x.tensor().map(Tensor::id),
            storage: x.memory(),
            device: x.device().clone(),
        }
    }
}

impl Leaf {
    /// A leaf with fresh state for the variable `x`, or for this rank's part of `x`.
    pub(crate) fn new(
        paths: Vec<String>,
        x: &dyn Lend,
        optimiser: Arc<Optimiser>,
        parts: Option<LeafParts>,
    ) -> Result<Self> {
        let mut paths = paths.into_iter();
        let path = paths.next().unwrap_or_default();
        if !is_supported(x.dtype()) {
            let error = Error::dtype("it", x.dtype(), FLOATS).at(&path);
            return Err(error.with_remedy("convert it, or leave it out with `setup_with`"));
        }
        check_count(x.elem_count(), x.device().is_cpu()).map_err(|error| error.at(&path))?;
        // This check comes before the state is made for the claimed shape, because the owner may lend less
        // memory.
        check_parameter("parameter", x, false).map_err(|error| error.at(&path))?;
        let state =
            part_of(parts.as_ref(), x).and_then(|part| fresh_state(&optimiser, &*part, x.elem_count()));
        let state = state.map_err(|error| error.at(&path))?;
        if let Some(Held::Part(part)) = parts.as_ref().map(LeafParts::held) {
            check_a_number_per_element(&path, &optimiser, &state, part.len())?;
        }
        Ok(Leaf {
            needs_checksum: state.needs_checksum(),
            last_checksum: None,
            state,
            path,
            aliases: paths.collect(),
            id: x.tensor().map(Tensor::id),
            storage: x.memory(),
            device: x.device().clone(),
            shape: x.shape().into(),
            dtype: x.dtype(),
            parts,
            optimiser,
            initial_optimiser: None,
            run_start: None,
            drives: None,
            acting: None,
            frozen: false,
            steps: 0,
            missing_gradients: MissingGradients::default(),
            unsettled_at: 0,
            parameter_aside: None,
            allows_low_precision: false,
            is_unnamed: false,
        })
    }

    /// The storages with a lock that an update of this leaf writes. A master on a device is among them,
    /// because functions of rules see the master and may keep it.
    pub(super) fn written_storages(&self) -> impl Iterator<Item = usize> {
        self.state
            .outer_master()
            .and_then(Lend::memory)
            .into_iter()
            .chain(self.storage)
    }

    /// Whether `optimiser`, the leaf's own optimiser with other fields, needs state of the same layout.
    pub(super) fn has_layout_of(&self, optimiser: &Optimiser) -> Result<bool> {
        // For a divisible rule, which has one number for each element, an empty parameter is enough. Other
        // rules need the real shape, even on a rank without a part.
        let is_empty = self.optimiser.rule().is_divisible() && optimiser.rule().is_divisible();
        let sizes: Vec<usize> = self
            .shape()
            .iter()
            .map(|size| if is_empty { 0 } else { *size })
            .collect();
        let x = repeated_zero(sizes, self.dtype, &Device::Cpu)?;
        let has_layout = self.optimiser.has_layout_of(optimiser, &x);
        has_layout.map_err(|error| error.at(&self.path))
    }

    /// Refuses a path that is only an index in a list.
    pub(super) fn check_name(&self) -> Result<()> {
        if !self.is_unnamed {
            return Ok(());
        }
        let problem = "it has no name, only a place in the list that `CandleOptimizer::new` got, and \
                       `VarMap::all_vars` has another order in each process";
        let remedy = "make the optimiser by `CandleOptimizer::for_model(&variables, rule)`, which keeps the \
                      model's names, or, if the list always has the same order, by `for_model(&list, rule)`";
        Err(Error::new(ErrorKind::Unsupported, problem)
            .with_remedy(remedy)
            .at(&self.path))
    }

    /// The path for lists in messages. An index says nothing by itself, so the shape follows.
    pub(crate) fn label(&self) -> Cow<'_, str> {
        if self.is_unnamed {
            format!("{} {:?}", self.path, self.shape()).into()
        } else {
            self.path.as_str().into()
        }
    }

    /// A copy with storage of its own.
    pub(crate) fn try_clone(&self) -> Result<Self> {
        let state = self.state.copy().map_err(|error| error.at(&self.path))?;
        let copy = self.with_optimiser(self.optimiser.clone(), state);
        let (drives, acting) = (self.drives.clone(), self.acting.clone());
        let (initial_optimiser, run_start) = (self.initial_optimiser.clone(), self.run_start.clone());
        let parameter_aside = self.parameter_aside.clone();
        Ok(Leaf {
            initial_optimiser,
            run_start,
            drives,
            acting,
            parameter_aside,
            ..copy
        })
    }

    /// A leaf of the same parameter with this optimiser and state, no schedules and nothing put aside.
    pub(super) fn with_optimiser(&self, optimiser: Arc<Optimiser>, state: State) -> Self {
        Leaf {
            initial_optimiser: None,
            run_start: None,
            optimiser,
            needs_checksum: state.needs_checksum(),
            last_checksum: None,
            state,
            path: self.path.clone(),
            aliases: self.aliases.clone(),
            device: self.device.clone(),
            shape: self.shape.clone(),
            parts: self.parts.clone(),
            drives: None,
            acting: None,
            parameter_aside: None,
            ..*self
        }
    }

    /// The elements, in row-major order, whose state this process has.
    ///
    /// These are all elements, unless the state is [divided](crate::Setup::over) among ranks.
    pub fn part(&self) -> Range<usize> {
        self.parts
            .as_ref()
            .map_or(0..self.shape.elem_count(), LeafParts::own)
    }

    /// How much of the state this process has.
    pub(crate) fn held(&self) -> Held {
        self.parts.as_ref().map_or(Held::All, LeafParts::held)
    }

    /// Whether several ranks have parts of the parameter.
    pub(crate) fn is_cut(&self) -> bool {
        self.parts.as_ref().is_some_and(LeafParts::are_cut)
    }

    /// The stored shape of a whole state tensor, and the range of its elements that this rank has; `None` if
    /// this rank has nothing of the tensor.
    pub(crate) fn stored_extent(&self, tensor: &Buffer) -> Option<(crate::tensors::Shape, Range<usize>)> {
        let stored_length = |elements: usize| tensor.shape_of(&[elements]).elem_count();
        match self.held() {
            Held::All => Some((
                tensor.shape_of(tensor.shape()),
                0..stored_length(elem_count(tensor.shape())),
            )),
            // The range is exact for codes, too, because each part begins with a record.
            Held::Part(part) => {
                let range = stored_length(part.start)..stored_length(part.end);
                Some((tensor.shape_of(self.shape()), range))
            }
            Held::Nothing => None,
        }
    }

    /// Refuses an optimiser that cannot work on this rank's part of the parameter.
    pub(crate) fn check_divisible(&self, optimiser: &Optimiser) -> Result<()> {
        let Some(parts) = &self.parts else { return Ok(()) };
        let ranks = parts.all().len();
        check_offload(&self.path, optimiser, ranks)?;
        if self.is_cut() && !optimiser.is_divisible() {
            let problem = format!(
                "it is divided among ranks, but {} needs the whole parameter",
                optimiser.name()
            );
            let remedy = "save a checkpoint, set up anew with this rule, and restore what fits";
            return Err(Error::new(ErrorKind::Unsupported, problem)
                .at(&self.path)
                .with_remedy(remedy));
        }
        Ok(())
    }

    /// The elements that each rank has.
    ///
    /// # Errors
    /// If the state is not divided.
    pub(crate) fn parts_of_ranks(&self) -> Result<LeafParts> {
        let defect =
            || Error::other("it is not divided among ranks; this is a defect of the library").at(&self.path);
        self.parts.clone().ok_or_else(defect)
    }

    /// This rank's part of the parameter `x`.
    pub(crate) fn own_part<'x>(&self, x: &'x dyn Lend) -> Result<Lent<'x>> {
        part_of(self.parts.as_ref(), x)
    }

    /// The dtype of the arithmetic: F64 if parameter, master or a gradient is in F64, otherwise F32.
    pub(crate) fn compute_dtype(&self, gradients: impl IntoIterator<Item = impl Into<DType>>) -> DType {
        let master = self.state.outer_master().map(Buffer::stored_dtype);
        let dtypes = master.into_iter().chain([self.dtype]);
        widest_compute_dtype(dtypes.chain(gradients.into_iter().map(Into::into)))
    }

    /// The parameter's path; the first in sorted order, if it has several.
    pub fn path(&self) -> &str {
        &self.path
    }

    /// All paths of the parameter. There are several if its variable is tied to several places of the model.
    pub fn paths(&self) -> impl Iterator<Item = &str> + Clone {
        std::iter::once(self.path.as_str()).chain(self.aliases.iter().map(String::as_str))
    }

    /// The parameter's shape.
    pub fn shape(&self) -> &[usize] {
        self.shape.dims()
    }

    /// The parameter's dtype.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// The leaf's own optimiser, which no [schedule](crate::StateTree::schedule) changes.
    ///
    /// A copy with the values of the next step is [`acting`](Leaf::acting).
    pub fn optimiser(&self) -> &Optimiser {
        &self.optimiser
    }

    /// The leaf's own hyper-parameter of that name: see [`Adjust::field`](crate::Adjust::field).
    pub fn field(&self, name: &str) -> Option<FieldValue> {
        self.optimiser.field(name)
    }

    /// The learning rate of the next step, if the optimiser has one.
    ///
    /// Without a schedule it is the leaf's own rate, `field("eta")`. In a chain it is the product of the
    /// members' rates, as in [`Adjust::field`](crate::Adjust::field).
    pub fn learning_rate(&self) -> Option<f64> {
        self.acting().description().learning_rate()
    }

    /// How many steps have been applied to the parameter.
    pub fn steps(&self) -> u64 {
        self.steps
    }

    /// How many calls of `update` have brought no gradient since the last gradient, or since `setup`.
    ///
    /// Skipped calls do not count, nor do calls while the leaf is frozen. [`thaw`](crate::Selection::thaw)
    /// starts the count anew.
    ///
    /// ```
    /// use candle_core::{DType, Device, Var};
    /// use optimisers::{Descent, setup, update};
    ///
    /// let model = vec![Var::ones(2, DType::F32, &Device::Cpu)?, Var::ones(3, DType::F32, &Device::Cpu)?];
    /// let mut state = setup(Descent::new(0.1), &model)?;
    /// for _ in 0..3 {
    ///     update(&mut state, &model, &model[0].sqr()?.sum_all()?.backward()?)?;
    /// }
    /// let counts: Vec<_> = state.leaves().map(|leaf| (leaf.calls_without_gradient(), leaf.has_had_gradient())).collect();
    /// assert_eq!(counts, [(0, true), (3, false)]);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn calls_without_gradient(&self) -> u64 {
        self.missing_gradients.calls
    }

    /// Whether any call of `update` has ever brought a gradient.
    pub fn has_had_gradient(&self) -> bool {
        self.steps > 0 || self.missing_gradients.received > 0
    }

    /// Whether there were calls, and no call brought a gradient, as for running statistics. The state of such
    /// a leaf follows what is written to the variable.
    pub(crate) fn is_unreached(&self) -> bool {
        self.missing_gradients.calls > 0 && !self.has_had_gradient()
    }

    /// Whether a step has been applied since state or variable last came from outside: see `unsettled_at`.
    pub(crate) fn is_settled(&self) -> bool {
        self.steps > self.unsettled_at
    }

    /// Gives the leaf another variable.
    pub(super) fn set_variable(&mut self, x: VariablePlace) {
        (self.id, self.storage, self.device) = (x.id, x.storage, x.device);
        self.unsettle();
    }

    /// Makes the next step compare all of the parameter.
    pub(crate) fn unsettle(&mut self) {
        (self.unsettled_at, self.last_checksum) = (self.steps, None);
        self.needs_checksum = self.state.needs_checksum();
    }

    /// Sets the leaf's own optimiser and whether the leaf is frozen. `has_begun` tells whether the run has
    /// made a step, or is restored.
    pub(crate) fn set_optimiser(&mut self, optimiser: Arc<Optimiser>, frozen: bool, has_begun: bool) {
        let before = std::mem::replace(&mut self.optimiser, optimiser);
        if has_begun {
            self.run_start
                .get_or_insert_with(|| (before.clone(), self.frozen));
        }
        self.initial_optimiser.get_or_insert(before);
        self.frozen = frozen;
    }

    /// Ends an open window: the rules drop what they have collected.
    pub(crate) fn end_window(&mut self) -> Result<()> {
        let Leaf {
            optimiser,
            acting,
            state,
            ..
        } = self;
        acting.as_ref().unwrap_or(optimiser).end_window(state)
    }

    /// Whether a parameter of 16 bits loses steps below its rounding, and `allow_low_precision` was not
    /// called.
    pub(super) fn loses_steps(&self) -> bool {
        let is_checked =
            matches!(self.dtype, DType::F16 | DType::BF16) && !self.frozen && !self.allows_low_precision;
        is_checked && self.optimiser.store() == Store::Rounded
    }

    /// Whether updates pass this parameter over.
    pub fn is_frozen(&self) -> bool {
        self.frozen
    }

    /// The names of the state tensors, such as `master` or `1.m` (with the position in a chain in front).
    pub fn tensor_names(&self) -> Vec<String> {
        self.state.tensors().into_iter().map(|(name, _)| name).collect()
    }

    /// A copy of the state tensor of that [name](Leaf::tensor_names); updates write the original in place.
    ///
    /// A tensor in [8 bits](crate::Q8) is copied as numbers in F32. Over [ranks](crate::Setup::over) the copy
    /// is this rank's part, as a vector.
    ///
    /// Code that has to work without candle uses the methods of [`Lend`](crate::Lend): it reads the shape by
    /// `tensor.lent_shape()`, and the numbers by
    /// `tensor.read(&mut |view| { numbers = view.numbers(); Ok(()) })?`. The page
    /// [frameworks](crate::guide::frameworks#reading-and-setting-the-state) has a program.
    ///
    /// # Errors
    /// If the state has no tensor of that name, or the device fails.
    ///
    /// ```
    /// use candle_core::{Device, Var};
    /// use optimisers::{Nesterov, setup};
    ///
    /// let state = setup(Nesterov::new(0.1), &vec![Var::new(&[1f32], &Device::Cpu)?])?;
    /// let error = state.leaf("0").unwrap().tensor("velocity").unwrap_err();
    /// assert!(error.to_string().contains(r#"no state tensor "velocity", expected one of: displacement"#), "{error}");
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn tensor(&self, name: &str) -> Result<Tensor> {
        let tensors = self.state.tensors();
        match tensors.into_iter().find(|(tensor_name, _)| tensor_name == name) {
            Some((_, tensor)) => Ok(tensor.tensor()?),
            None => Err(Error::unknown("state tensor", name, &self.tensor_names()).at(&self.path)),
        }
    }

    /// The counters of the state: applied steps of each rule (`t`), calls of an open window.
    pub fn counters(&self) -> Vec<(String, u64)> {
        self.state.counters()
    }

    /// Numbers of the state that are not per element, such as the sum of weights of
    /// [`ScheduleFree`](crate::ScheduleFree).
    pub fn numbers(&self) -> Vec<(String, f64)> {
        self.state.numbers()
    }

    /// The bytes that the state tensors take.
    pub fn bytes(&self) -> usize {
        self.state
            .tensors()
            .into_iter()
            .map(|(_, tensor)| tensor.bytes())
            .sum()
    }

    /// The acting optimiser as an aspect that has to be the same on all ranks.
    pub(crate) fn optimiser_aspect(&self) -> Aspect {
        description_aspect(&self.path, Some(self.acting()))
    }
}

/// Refuses `Offload` over several ranks.
pub(crate) fn check_offload(path: &str, optimiser: &Optimiser, ranks: usize) -> Result<()> {
    if ranks == 1 || !optimiser.is_offloaded() {
        return Ok(());
    }
    let problem = format!(
        "it is offloaded, but a state that is divided among {ranks} ranks does not support `Offload`"
    );
    let error = Error::new(ErrorKind::Unsupported, problem).at(path);
    Err(error.with_remedy("leave `Offload` out"))
}

/// An optimiser as aspects that have to be the same on all ranks: its description, and its `Debug` text,
/// which also has fields that a rule does not describe.
pub(crate) fn optimiser_aspects(path: &str, optimiser: Option<&Optimiser>) -> [Aspect; 2] {
    [
        description_aspect(path, optimiser),
        Aspect::new(format!("the optimiser of {path:?}"), format!("{optimiser:?}")),
    ]
}

fn description_aspect(path: &str, optimiser: Option<&Optimiser>) -> Aspect {
    let words = optimiser.map(|optimiser| optimiser.description().record().words());
    Aspect::of_words(
        format!("the optimiser of {path:?}"),
        words.unwrap_or_else(|| vec!["none".to_string()]),
    )
}

impl fmt::Debug for Leaf {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let paths: Vec<String> = self.paths().map(|path| format!("{path:?}")).collect();
        write!(f, "{} {:?} {:?}", paths.join(" = "), self.shape(), self.dtype)?;
        if let Some(parts) = &self.parts {
            write!(f, ", elements {:?}", parts.own())?;
            parts
                .wire
                .map_or(Ok(()), |wire| write!(f, ", gradient sent in {wire:?}"))?;
        }
        if !self.device.is_cpu() {
            write!(f, " on {:?}", self.device.location())?;
        }
        for ScheduleAssignment { schedule, .. } in self.schedules() {
            let field = schedule.driven_field();
            let value = self
                .acting()
                .field(field)
                .map_or("-".to_string(), |value| value.to_string());
            write!(f, ", {field} {value} by a schedule")?;
        }
        let frozen = if self.frozen { ", frozen" } else { "" };
        write!(
            f,
            ", steps {}{frozen}: {:?}\n    {:?}",
            self.steps, self.optimiser, self.state
        )
    }
}

/// This rank's part of a parameter: the parameter itself if the part is all of it, else a flat view of the
/// elements.
fn part_of<'x>(parts: Option<&LeafParts>, x: &'x dyn Lend) -> Result<Lent<'x>> {
    let Some(part) = parts
        .map(LeafParts::own)
        .filter(|part| part.len() < x.elem_count())
    else {
        return Ok(Lent::new(x));
    };
    // A part can be flat, because parameters whose rule depends on the shape are not cut. A rank may still
    // have an empty part of such a parameter. The empty part keeps the number of dimensions, because the
    // names of the rule's state tensors depend on that number.
    if part.is_empty() && !x.shape().is_empty() {
        Lent::empty_part(x)
    } else {
        Lent::new(x).part(part)
    }
}

/// Refuses a parameter on a device with more elements than candle's kernels can count. Conversions between
/// dtypes get the count in 32 bits, and with a larger count their loop never ends.
pub(super) fn check_count(elements: usize, is_on_cpu: bool) -> Result<()> {
    if is_on_cpu || u32::try_from(elements).is_ok() {
        return Ok(());
    }
    let problem = "the kernels of a device count elements in 32 bits, but its number of elements is";
    let error = Error::new(ErrorKind::Unsupported, problem).with_got(elements);
    let remedy = "cut it into several parameters, or leave it on the CPU";
    Err(error
        .with_expected(format_args!("at most {}", u32::MAX))
        .with_remedy(remedy))
}

/// Fresh state for a part of a parameter that has `elements` elements as a whole.
pub(super) fn fresh_state(optimiser: &Optimiser, part: &dyn Lend, elements: usize) -> Result<State> {
    let mut state = optimiser.make_state(part)?;
    // The size of the whole parameter decides whether it is too small for 8 bits, so that a part is stored as
    // the whole parameter would be.
    state.widen_small(part.elem_count(), elements)?;
    Ok(state)
}

/// Refuses a rule that claims to be divisible but does not keep one number per element.
fn check_a_number_per_element(
    path: &str,
    optimiser: &Optimiser,
    state: &State,
    elements: usize,
) -> Result<()> {
    let misfit = state
        .tensors()
        .into_iter()
        .find(|(_, tensor)| elem_count(tensor.shape()) != elements);
    let Some((slot, tensor)) = misfit else {
        return Ok(());
    };
    let problem = format!(
        "{} is declared divisible, but its state tensor {slot:?} has shape",
        optimiser.rule().name()
    );
    let error = Error::new(ErrorKind::Contract, problem)
        .at(path)
        .with_got(format_args!("{:?}", tensor.shape()));
    let expected = format!("a number for each of {elements} elements");
    Err(error
        .with_expected(expected)
        .with_remedy("return `false` from its `is_divisible`"))
}

/// A leaf's calls without a gradient.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct MissingGradients {
    /// Calls since the last gradient.
    pub(crate) calls: u64,
    /// 1 once a gradient went into an accumulator. A leaf with steps has had a gradient even if this counter
    /// is 0.
    pub(crate) received: u64,
    /// Whether the leaf may lack a gradient under `require_all`.
    pub(crate) is_allowed: bool,
}

impl MissingGradients {
    /// Adds the writes that count a call when the call is committed. A leaf with a gradient in every call
    /// adds no write, because writes take time with thousands of leaves.
    pub(crate) fn count<'a>(
        &'a mut self,
        has_gradient: bool,
        progress: Progress,
        counters: &mut CounterWrites<'a>,
    ) {
        let MissingGradients { calls, received, .. } = self;
        if !has_gradient {
            let next_count = counts::add(*calls, 1);
            return counters.push((calls, next_count));
        }
        if *calls > 0 {
            counters.push((calls, 0));
        }
        if progress == Progress::Accumulated && *received == 0 {
            counters.push((received, 1));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_device_counts_in_32_bits() {
        for (elements, is_on_cpu, fits) in [
            (1 << 32, true, true),
            ((1 << 32) - 1, false, true),
            (1 << 32, false, false),
        ] {
            assert_eq!(
                check_count(elements, is_on_cpu).is_ok(),
                fits,
                "{elements} {is_on_cpu}"
            );
        }
    }
}
