//! The optimiser of a leaf: a rule, how the parameter is stored, and where the state is.
//!
//! Rules and stores do not depend on the place of the state. `Offload` puts an outer state around the state
//! of the store:
//!
//! - If the store has a master, the outer state has `staging`: memory for the rounded master, which is
//!   uploaded after a step.
//! - Otherwise the outer state has a `master`: a copy of the parameter on the CPU, which the store works on.
//!   `staging` is the variable of this `master`.
//!
//! Only `staging` shows that a parameter is offloaded, because an optimiser that offloads can also have
//! parameters on the CPU, which are not offloaded.

pub(crate) mod consistency;
pub(crate) mod store;

use std::borrow::Cow;
use std::fmt;
use std::sync::OnceLock;

use super::description::ChildPlace;
use super::description::record::StorageRecord;
use super::state::another_rule_error;
use super::traits::{CheckResult, Purpose};
use super::{
    Adjust, Described, Describer, Description, Evaluation, FieldValue, Gradient, Parameter, Rule, State,
    Store,
};
use crate::engine::{Buffer, Epilogue, Job, OffloadTarget, owned_on, set_lent};
use crate::error::{Error, ErrorKind, Result};
use crate::model::lent::Lend;
use crate::tensors::{Device, Tensor, Var};

/// A rule together with how the parameter is stored: the optimiser of a leaf.
///
/// [`setup`](crate::setup) makes an `Optimiser` from a [rule](Rule), or from a store such as
/// [`MixedPrecision`](crate::MixedPrecision). Use this type to put different optimisers in one list, or to
/// choose an optimiser by path:
///
/// ```
/// use candle_core::{DType::{BF16, F32}, Device, Var};
/// use optimisers::{AdamW, Kahan, MixedPrecision, Optimiser, setup_with};
///
/// let model = vec![Var::zeros(2, BF16, &Device::Cpu)?, Var::zeros(3, BF16, &Device::Cpu)?];
/// let state = setup_with(&model, |path, _| match path {
///     "0" => Some(Optimiser::new(MixedPrecision::new(F32, AdamW::new(1e-3)))),
///     _ => Some(Optimiser::new(Kahan::new(AdamW::new(1e-4)))),
/// })?;
/// let names: Vec<String> = state.leaves().map(|leaf| leaf.optimiser().name()).collect();
/// assert_eq!(names, ["MixedPrecision(F32, AdamW)", "Kahan(AdamW)"]);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone)]
#[must_use = "an optimiser does nothing by itself: pass it to `setup`"]
pub struct Optimiser {
    rule: Box<dyn Rule>,
    store: Store,
    place: StatePlace,
    /// Empty until the first read, because a description costs a clone of the rule.
    description: OnceLock<Description>,
}

/// Where the state of a parameter is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum StatePlace {
    /// On the device of the parameter.
    WithParameter,
    /// On the CPU, with a copy of a parameter on another device.
    OnCpu,
    /// On the CPU, with a copy of every parameter.
    OnCpuEverywhere,
    /// `Offload` around `Offload`, which is refused.
    Nested,
}

const OFFLOAD: &str = "Offload";

/// A type that converts to an [`Optimiser`]: a rule, a chain of rules, or a store around either.
///
/// Every rule and every store implements `IntoOptimiser`. For an optimiser of your own, implement [`Rule`]; a
/// new way to store parameters would need support in the engines.
#[diagnostic::on_unimplemented(
    message = "`{Self}` is not an optimiser",
    label = "expected a rule, as in `setup(Adam::new(1e-3), &model)`, or a chain: \
             `OptimiserChain::new((a, b))`",
    note = "in `CandleOptimizer::for_model(&model, rule)` the model comes first"
)]
pub trait IntoOptimiser: Adjust + fmt::Debug + Send + Sync + 'static {
    /// Converts the rule or store to an optimiser.
    fn into_optimiser(self) -> Optimiser;
}

#[diagnostic::do_not_recommend]
impl<R: Rule> IntoOptimiser for R {
    fn into_optimiser(self) -> Optimiser {
        Optimiser::with_store(Store::Rounded, self)
    }
}

impl IntoOptimiser for Optimiser {
    fn into_optimiser(self) -> Optimiser {
        self
    }
}

impl Described for Optimiser {
    fn description(&self) -> Cow<'_, Description> {
        Cow::Borrowed(self.description())
    }

    fn write(&mut self, values: &[(usize, FieldValue)]) -> Result<()> {
        self.run(Purpose::Write(values)).check_written()
    }

    fn check_described(&self) -> Result<()> {
        self.check_fields().map_err(|(error, _)| error)
    }
}

impl Optimiser {
    /// Makes an optimiser from a rule or a store.
    pub fn new(optimiser: impl IntoOptimiser) -> Self {
        optimiser.into_optimiser()
    }

    /// An optimiser that runs `rule` and stores parameters by `store`.
    pub(crate) fn with_store(store: Store, rule: impl Rule) -> Self {
        Self::from_boxed_rule(store, Box::new(rule))
    }

    /// [`Optimiser::with_store`] for a rule in a box, without a second box.
    pub(crate) fn from_boxed_rule(store: Store, rule: Box<dyn Rule>) -> Self {
        Optimiser {
            rule,
            store,
            place: StatePlace::WithParameter,
            description: OnceLock::new(),
        }
    }

    /// This optimiser with its state on the CPU.
    pub(crate) fn offloaded(self) -> Self {
        let place = if self.is_offloaded() {
            StatePlace::Nested
        } else {
            StatePlace::OnCpu
        };
        Optimiser {
            place,
            description: OnceLock::new(),
            ..self
        }
    }

    /// This optimiser with its state on the CPU, and with a copy also of parameters on the CPU.
    pub(crate) fn offloaded_everywhere(self) -> Self {
        let is_nested = self.place == StatePlace::Nested;
        let place = if is_nested {
            self.place
        } else {
            StatePlace::OnCpuEverywhere
        };
        Optimiser {
            place,
            description: OnceLock::new(),
            ..self
        }
    }

    /// A clone to describe, because a description runs by `&mut`.
    pub(crate) fn clone_to_describe(&self) -> Self {
        Optimiser {
            rule: self.rule.clone(),
            description: OnceLock::new(),
            ..*self
        }
    }

    fn run<'v>(&mut self, purpose: Purpose<'v>) -> Describer<'v> {
        // The description is dropped, because the run may change fields or choose a rule.
        self.description.take();
        Describer::run(purpose, 0, &mut |describer| self.describe(describer))
    }

    fn describe(&mut self, describer: &mut Describer<'_>) {
        if self.place == StatePlace::WithParameter {
            return self.store.describe(&mut *self.rule, describer);
        }
        describer.kind(OFFLOAD);
        let everywhere = self.place == StatePlace::OnCpuEverywhere;
        describer.storage(StorageRecord {
            kind: self.store.kind(),
            offloaded: true,
            everywhere,
        });
        let is_nested = self.place == StatePlace::Nested;
        describer.require(|| if is_nested { Err(nested_error()) } else { Ok(()) });
        describer.add_part(ChildPlace::Stored, &mut |inner| {
            self.store.describe(&mut *self.rule, inner)
        });
    }

    /// See [`Adjust::name`].
    pub fn name(&self) -> String {
        self.description().name()
    }

    /// See [`Adjust::fields`].
    pub fn fields(&self) -> Vec<(&'static str, FieldValue)> {
        self.description().named_values()
    }

    /// See [`Adjust::field`].
    pub fn field(&self, name: &str) -> Option<FieldValue> {
        self.description().field(name)
    }

    /// See [`Adjust::places`].
    pub fn places(&self) -> Vec<String> {
        self.description().places()
    }

    /// The rule inside the store.
    pub fn rule(&self) -> &dyn Rule {
        &*self.rule
    }

    /// [`Adjust::check`], with the index of the field if a field is out of range.
    pub(crate) fn check_fields(&self) -> CheckResult {
        self.clone_to_describe().run(Purpose::Check).check_result
    }

    /// The description, which is cached until a field is written.
    pub(crate) fn description(&self) -> &Description {
        self.description
            .get_or_init(|| self.clone_to_describe().run(Purpose::Read).description)
    }

    pub(crate) fn store(&self) -> Store {
        self.store
    }

    pub(crate) fn is_offloaded(&self) -> bool {
        self.place != StatePlace::WithParameter
    }

    /// Whether a part of a parameter can be updated without the rest.
    pub(crate) fn is_divisible(&self) -> bool {
        self.store.is_divisible() && self.rule.is_divisible()
    }

    /// Makes all choices for the parameter with these paths.
    pub(crate) fn choose(&mut self, paths: &[String], x: Parameter<'_>) {
        self.run(Purpose::Choose(paths, x));
    }

    fn offloads(&self, x: &dyn Lend) -> bool {
        match self.place {
            StatePlace::WithParameter => false,
            StatePlace::OnCpu | StatePlace::Nested => !x.device().is_cpu(),
            StatePlace::OnCpuEverywhere => true,
        }
    }

    /// The state for the parameter `x`.
    ///
    /// # Errors
    /// If a hyper-parameter is out of range, or the device has no memory left.
    pub(crate) fn make_state(&self, x: &dyn Lend) -> Result<State> {
        self.check()?;
        let make_checked = |x: &dyn Lend| -> Result<State> {
            let state = self.store.state(&*self.rule, x)?;
            rule_state(&state).check_layout(&*self.rule)?;
            Ok(state)
        };
        if !self.offloads(x) {
            return make_checked(x);
        }
        let copy = owned_on(&Device::Cpu, &x.tensor_or_copy()?)?;
        offloaded_state(&copy, make_checked(&copy)?)
    }

    /// Whether `other`, this optimiser with other fields, needs state of the same layout for `x`.
    pub(crate) fn has_layout_of(&self, other: &Optimiser, x: &Tensor) -> Result<bool> {
        if self.fields() == other.fields() {
            return Ok(true);
        }
        // Both rules make a state, and the states are compared. Stores are not compared, because their
        // tensors depend on the parameter alone.
        let slots = |optimiser: &Optimiser| -> Result<Vec<_>> {
            let state = optimiser.rule.init(Parameter::new(x))?;
            let slot = |(name, tensor): (String, &Buffer)| {
                (name, tensor.shape_of(tensor.shape()), tensor.stored_dtype())
            };
            Ok(state.tensors().into_iter().map(slot).collect())
        };
        Ok(slots(self)? == slots(other)?)
    }

    /// The error for a field that cannot be adjusted, because [`Optimiser::has_layout_of`] is false then.
    pub(crate) fn layout_error(&self, field: &str) -> Error {
        let rule = self.rule.name();
        let problem = format!("{rule}: {field} decides the layout of the state and cannot be adjusted");
        Error::new(ErrorKind::Argument, problem)
    }

    /// A copy of `state` for the parameter `x`, which has moved to another device.
    pub(crate) fn state_for(&self, state: &State, x: &dyn Lend) -> Result<State> {
        match (&state.staging, self.offloads(x)) {
            (Some(_), true) => state.copy(),
            (Some(_), false) => store_view(state, x)?.0.copy(),
            (None, true) => offloaded_state(&owned_on(&Device::Cpu, &x.tensor_or_copy()?)?, state.copy()?),
            (None, false) => state.to_device(x.device()),
        }
    }

    /// The most precise value of the parameter `x`. The tensor may share storage with state or parameter.
    pub(crate) fn precise(&self, state: &State, x: &dyn Lend) -> Result<Tensor> {
        let (state, x) = store_view(state, x)?;
        self.store.precise(state, x)
    }

    /// A copy of [`Optimiser::precise`] with storage of its own.
    pub(crate) fn master(&self, state: &State, x: &dyn Lend) -> Result<Tensor> {
        Ok(self.precise(state, x)?.detach().copy()?)
    }

    /// The x of the rule (see `store.rs`). The tensor may share storage with state or parameter.
    pub(crate) fn x_of_rule(&self, state: &State, x: &dyn Lend) -> Result<Tensor> {
        let (state, x) = store_view(state, x)?;
        self.store.x_of_rule(state, x)
    }

    /// Sets the most precise value, and sets the parameter to this value rounded.
    pub(crate) fn set_precise(&self, state: &mut State, x: &dyn Lend, values: &Tensor) -> Result<()> {
        if state.staging.is_none() {
            return self.store.set_precise(state, x, values);
        }
        let (copy, values) = (cpu_copy(state).cloned(), values.to_device(&Device::Cpu)?);
        let [inner] = &mut state.children[..] else {
            return Err(another_rule_error(OFFLOAD));
        };
        // Without a copy the store has a master, and writes the rounded values to `x` directly.
        let Some(copy) = copy else {
            return self.store.set_precise(&mut inner.state, x, &values);
        };
        self.store.set_precise(&mut inner.state, &copy, &values)?;
        set_lent(x, &copy)
    }

    /// Sets only the state. The new precise value is the nearest to `values` of all values that round to `x`.
    /// Returns whether the state makes the parameter more precise.
    pub(crate) fn keep_precise(&self, state: &mut State, x: &dyn Lend, values: &Tensor) -> Result<bool> {
        if state.staging.is_none() {
            return self.store.keep_precise(state, x, values);
        }
        let [inner] = &mut state.children[..] else {
            return Err(another_rule_error(OFFLOAD));
        };
        self.store
            .keep_precise(&mut inner.state, x, &values.to_device(&Device::Cpu)?)
    }

    /// The job of a step for the parameter `x`.
    pub(crate) fn job<'a>(
        &'a self,
        state: &'a mut State,
        x: &'a dyn Lend,
        dx: Gradient<'a>,
    ) -> Result<Job<'a>> {
        if state.staging.is_none() {
            return self.store.job(&*self.rule, state, x, dx);
        }
        let State {
            master,
            staging,
            children,
            ..
        } = state;
        let (Some(staging), [inner]) = (&*staging, &mut children[..]) else {
            return Err(another_rule_error(OFFLOAD));
        };
        let copy = master.as_ref().and_then(Buffer::variable);
        let on_cpu = copy.map_or(x, |copy| copy as &dyn Lend);
        let mut job = self.store.job(&*self.rule, &mut inner.state, on_cpu, dx)?;
        // The job writes on the CPU only. The rounded master is uploaded from `staging`.
        if let Epilogue::Master(rounded) = &mut job.epilogue {
            *rounded = staging;
        }
        job.offloaded = Some(OffloadTarget {
            staging,
            parameter: x,
        });
        Ok(job)
    }

    /// See [`Rule::end_window`].
    pub(crate) fn end_window(&self, state: &mut State) -> Result<()> {
        self.rule.end_window(rule_state_mut(state))
    }

    /// See [`Rule::evaluation`].
    pub(crate) fn evaluation<'s>(&self, state: &'s State) -> Result<Option<Evaluation<'s>>> {
        self.rule.evaluation(rule_state(state))
    }
}

/// Leaves out the store and the place of the state if both are the defaults.
impl fmt::Debug for Optimiser {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Optimiser {
            rule, store, place, ..
        } = self;
        match (store, place) {
            (Store::Rounded, StatePlace::WithParameter) => rule.fmt(f),
            (store, StatePlace::WithParameter) => {
                f.debug_tuple(store.name()).field(store).field(rule).finish()
            }
            _ => f
                .debug_tuple(OFFLOAD)
                .field(place)
                .field(store)
                .field(rule)
                .finish(),
        }
    }
}

fn nested_error() -> Error {
    Error::new(ErrorKind::Unsupported, "an Offload is inside of another")
        .with_remedy("use one, which keeps the whole state on the CPU already")
}

/// The state and the parameter that the store works on, which are on the CPU if `x` is offloaded.
fn store_view<'s>(state: &'s State, x: &'s dyn Lend) -> Result<(&'s State, &'s dyn Lend)> {
    match (&state.staging, &state.children[..]) {
        (None, _) => Ok((state, x)),
        (Some(_), [inner]) => Ok((&inner.state, cpu_copy(state).map_or(x, |copy| copy as &dyn Lend))),
        _ => Err(another_rule_error(OFFLOAD)),
    }
}

/// The copy of an offloaded parameter on the CPU. `None` if the store has a master, which is such a copy.
fn cpu_copy(state: &State) -> Option<&Var> {
    state.master.as_ref().and_then(Buffer::variable)
}

/// The state of an offloaded parameter, around `inner`, which the store has made for `copy`.
///
/// If `inner` has no master, `copy` becomes the master.
fn offloaded_state(copy: &Tensor, inner: State) -> Result<State> {
    if inner.master.is_none() {
        // The buffer is shared, because one thread uploads the copy while another computes the next batch.
        let master = Buffer::shared(copy)?;
        let staging = master.variable().cloned();
        return Ok(State {
            staging,
            master: Some(master),
            ..State::empty().with_rule_state(inner)
        });
    }
    let staging = Some(Var::zeros(copy.shape(), copy.dtype(), copy.device())?);
    Ok(State {
        staging,
        ..State::empty().with_rule_state(inner)
    })
}

/// The state of the rule, inside the states of stores.
fn rule_state(state: &State) -> &State {
    state.inside_store().map_or(state, rule_state)
}

fn rule_state_mut(state: &mut State) -> &mut State {
    if state.inside_store().is_some() {
        rule_state_mut(&mut state.children[0].state)
    } else {
        state
    }
}
