//! The traits of a rule: [`Describe`] names its parts, and [`Rule`] plans a step.
//!
//! [`Describe::describe`] names the fields by `&mut`, so that a rule has one method for reading and writing.
//! A [`Describer`] runs that method for one [`Purpose`] at a time and counts the fields in depth-first order.
//! The count is the index by which fields are written, so every run has to name the same fields.
//!
//! Most runs only read, and work on a clone of the rule because of the `&mut`. The alternatives cost more:
//!
//! - Two closures for each field, one to read and one to write, name everything twice. They cannot reach
//!   the fields of a rule that was chosen among alternatives.
//! - A `describe(&self)` that records the addresses of fields needs unsafe code to write, and cannot write
//!   to a rule in a box.
//! - A `describe(&self) -> Self` that makes the rule from the new values also clones the rule.
//! - `Cell`s as fields are not `Sync`.
//!
//! Besides, [`Purpose::Choose`] changes the rule itself. An optimiser caches the description of its rule, and
//! a step describes anew only optimisers whose fields a schedule sets. But wrappers that read the learning
//! rate of their inner rule (`DecoupledDecay`, `Hyperball`) clone and describe the inner rule in each step of
//! each leaf, and [`Holder::visit_held`] clones the rule in each call.

use std::borrow::Cow;
use std::cell::RefCell;
use std::fmt;

use dyn_clone::DynClone;

use super::description::adjust::Described;
use super::description::record::{Setting, StorageRecord};
use super::description::role::Role;
use super::description::{ChildPlace, Description, FieldDescription, out_of_range};
use super::field::FieldValue;
use super::{Adjust, Evaluation, Flow, Gradient, Parameter, State};
use crate::error::{Error, ErrorKind, Result};

/// Describes the parts of a rule: its kind, its hyper-parameters, and the rules that it holds.
///
/// [`Adjust`](crate::Adjust), checkpoints, schedules and errors use only this description.
/// [`hyper_parameters!`](crate::hyper_parameters) implements `Describe` for a struct without inner rules. A
/// rule that holds other rules implements `Describe` by hand:
///
/// ```
/// use candle_core::{Device, Tensor, Var};
/// use optimisers::{
///     Adjust, Describe, Describer, Descent, Flow, Gradient, Parameter, Result, Rule, State, range, setup, update,
/// };
///
/// /// Runs a rule with a gradient that is `factor` times as long.
/// #[derive(Clone, Debug)]
/// struct Louder<R> {
///     factor: f64,
///     inner: R,
/// }
///
/// impl<R: Rule + Clone> Describe for Louder<R> {
///     fn describe(&mut self, rule: &mut Describer<'_>) {
///         rule.kind("Louder");
///         rule.field("factor", &mut self.factor, 1.0, range::positive);
///         rule.holds(&mut self.inner);
///     }
/// }
///
/// impl<R: Rule + Clone> Rule for Louder<R> {
///     fn apply<'a>(&'a self, state: &'a mut State, x: Parameter<'a>, dx: Gradient<'a>) -> Result<Flow<'a>> {
///         self.inner.apply(state.parts().held.inner()?, x, dx.scale(self.factor))
///     }
/// }
///
/// let x = Var::new(&[1f32], &Device::Cpu)?;
/// let mut rule = Louder { factor: 2.0, inner: Descent::new(0.25) };
/// assert_eq!(rule.name(), "Louder(Descent)");
/// rule.adjust(0.125)?;
/// rule.adjust_field("factor", 4.0)?;
/// let refused = rule.adjust_field("factor", -1.0).unwrap_err();
/// assert_eq!(refused.to_string(), "Louder: factor is -1, expected a number above 0");
///
/// let mut state = setup(rule, &x)?;
/// update(&mut state, &x, &[("", Tensor::new(&[1f32], &Device::Cpu)?)])?;
/// assert_eq!(x.to_vec1::<f32>()?, [0.5]);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// # State of its own
/// A rule around another makes its own counters, numbers and tensors in `init`, and adds the states of the
/// held rules. The names of its own entries have to differ from the names in the inner rule.
/// [`setup`](crate::setup) refuses equal names, and a state without the states of the held rules. An inner
/// rule that accumulates makes no step in some calls; [`Flow::and_then`](crate::Flow::and_then) runs its
/// function only if there is a step.
///
/// ```
/// use candle_core::{Device, Tensor, Var};
/// use optimisers::{
///     Describe, Describer, Descent, Flow, Gradient, Parameter, Parts, Result, Rule, State, range, setup, update,
/// };
///
/// /// The steps of a rule, of which the first n are shorter: step t is t / n as long.
/// #[derive(Clone, Debug)]
/// struct WarmUp<R> {
///     n: u64,
///     inner: R,
/// }
///
/// impl<R: Rule + Clone> Describe for WarmUp<R> {
///     fn describe(&mut self, rule: &mut Describer<'_>) {
///         rule.kind("WarmUp");
///         rule.field("warm_up", &mut self.n, 100, range::at_least_one);
///         rule.holds(&mut self.inner);
///     }
/// }
///
/// impl<R: Rule + Clone> Rule for WarmUp<R> {
///     fn init(&self, x: Parameter<'_>) -> Result<State> {
///         State::empty().with_counter("warm").with_held(self, x)
///     }
///
///     fn apply<'a>(&'a self, state: &'a mut State, x: Parameter<'a>, dx: Gradient<'a>) -> Result<Flow<'a>> {
///         let Parts { counters, held, .. } = state.parts();
///         self.inner.apply(held.inner()?, x, dx)?.and_then(|dx| {
///             let (dx, t) = dx.next_step(counters)?;
///             Ok(dx.scale((t as f64 / self.n as f64).min(1.0)))
///         })
///     }
/// }
///
/// let x = Var::new(&[0f32], &Device::Cpu)?;
/// let mut state = setup(WarmUp { n: 4, inner: Descent::new(4.0) }, &x)?;
/// for expected in [-1.0, -3.0, -6.0, -10.0, -14.0] {
///     update(&mut state, &x, &[("", Tensor::new(&[1f32], &Device::Cpu)?)])?;
///     assert_eq!(x.to_vec1::<f32>()?, [expected]);
/// }
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub trait Describe {
    /// Names the [kind](Describer::kind), then settings and fields, and then the held rules.
    ///
    /// Every call must name the same things in the same order. The describer may set the fields that it is
    /// passed.
    fn describe(&mut self, rule: &mut Describer<'_>);
}

/// The purpose of one run of a description.
#[derive(Clone, Copy)]
pub(super) enum Purpose<'v> {
    /// Records a [`Description`]. Names, rates, checkpoints and warnings are functions of that value.
    Read,
    /// Compares values with their ranges, and runs requirements.
    Check,
    /// Sets these fields. The run records nothing, because a step may set fields of thousands of rules.
    Write(&'v [(usize, FieldValue)]),
    /// Makes every choice, for the parameter with these paths.
    Choose(&'v [String], Parameter<'v>),
    /// Passes each directly held rule to this function.
    Show(&'v dyn Fn(ChildPlace, &mut dyn Rule)),
}

/// An error for the first fault of a rule, with the index of the field if a field is out of range.
pub(super) type CheckResult = std::result::Result<(), (Error, Option<usize>)>;

/// The visitor that a rule [describes](Describe) itself to.
pub struct Describer<'v> {
    purpose: Purpose<'v>,
    pub(super) description: Description,
    next_index: usize,
    /// The number of the next member or alternative.
    next_number: usize,
    pub(super) check_result: CheckResult,
}

impl fmt::Debug for Describer<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Describer")
            .field("kind", &self.description.kind)
            .finish_non_exhaustive()
    }
}

impl Describer<'_> {
    /// Sets the kind of rule: the name of its type, by which checkpoints identify it.
    pub fn kind(&mut self, kind: &'static str) {
        self.description.kind = kind;
    }

    /// Adds a [`Role`], which decides where in a chain the rule has to stand.
    ///
    /// A call after `holds` is for a rule that works on the steps of its inner rule.
    pub fn role(&mut self, role: Role) {
        if matches!(self.purpose, Purpose::Read) {
            let parts_before = self.description.parts.len();
            self.description.roles.push((role, parts_before));
        }
    }

    /// Adds a value that distinguishes the rule, such as the dtype of masters.
    ///
    /// [`Adjust`] refuses the name of a setting, unless a field has that name, too.
    pub fn setting(&mut self, name: &'static str, value: impl Into<Setting>) {
        self.check_order();
        if matches!(self.purpose, Purpose::Read) {
            self.description.settings.push((name, value.into()));
        }
    }

    /// Sets how the parameter is stored. A bare rule does not call this.
    pub(crate) fn storage(&mut self, storage: StorageRecord) {
        self.description.storage = Some(storage);
    }

    /// Adds a hyper-parameter, with its default and its [range](crate::range).
    ///
    /// `F` is a type for which [`FieldValue`] has a variant, or an enum of [`choice!`](crate::choice).
    // The function is not inlined, because rules have hundreds of fields, of a few types.
    #[inline(never)]
    pub fn field<F: Copy + Into<FieldValue> + TryFrom<FieldValue, Error = Error>>(
        &mut self,
        name: &'static str,
        value: &mut F,
        default: F,
        range: fn(F) -> Option<&'static str>,
    ) {
        let fault = range(*value);
        if let Some(new) = self.field_value(name, (*value).into(), default.into(), fault) {
            match F::try_from(new) {
                Ok(new) => *value = new,
                Err(_) => self.check_result = Err((self.contract_error(OTHER_FIELDS, SAME_FIELDS), None)),
            }
        }
    }

    /// [`Describer::field`] without its type. Returns the value to write, if there is one. If `value` is out
    /// of range, `fault` is the expected range in words.
    fn field_value(
        &mut self,
        name: &'static str,
        value: FieldValue,
        default: FieldValue,
        fault: Option<&'static str>,
    ) -> Option<FieldValue> {
        self.check_order();
        let index = self.next_index;
        self.next_index += 1;
        match (self.purpose, fault) {
            (Purpose::Write(values), _) => {
                return values
                    .iter()
                    .find_map(|(target, new)| (*target == index).then_some(*new));
            }
            (Purpose::Check, Some(expected)) => {
                let kind = self.description.kind;
                self.run_check(|| Err((out_of_range(kind, name, value, expected), Some(index))));
            }
            (Purpose::Read, _) => {
                self.description.fields.push(FieldDescription {
                    name,
                    index,
                    value,
                    default,
                });
            }
            (Purpose::Check | Purpose::Choose(..) | Purpose::Show(_), _) => {}
        }
        None
    }

    /// Adds a requirement other than the range of one field.
    ///
    /// `check` runs only if the rule is checked.
    pub fn require(&mut self, check: impl FnOnce() -> Result<()>) {
        self.run_check(|| check().map_err(|error| (error, None)));
    }

    /// Runs `check` if the rule is checked and has no fault yet.
    fn run_check(&mut self, check: impl FnOnce() -> CheckResult) {
        if matches!(self.purpose, Purpose::Check) && self.check_result.is_ok() {
            self.check_result = check();
        }
    }

    /// Names the one rule that this rule is around.
    ///
    /// Fields of `rule` are addressed as if `rule` stood alone.
    pub fn holds(&mut self, rule: &mut dyn Rule) {
        if self
            .description
            .parts
            .iter()
            .any(|(place, _)| *place == ChildPlace::Inner)
        {
            self.refuse(
                "it calls `holds` twice, but the fields and states of two rules need places",
                "call `member` or `alternative` for each rule",
            );
        }
        self.add_held(ChildPlace::Inner, rule);
    }

    /// Names the next of several rules that act one after another.
    ///
    /// Fields of `rule` are addressed by its index, from 0 on. The learning rates of all members are
    /// multiplied.
    pub fn member(&mut self, rule: &mut dyn Rule) {
        self.add_held(ChildPlace::Member(self.next_number), rule);
        self.next_number += 1;
    }

    /// Names the next of several alternatives: only one of these rules acts at a time.
    ///
    /// Fields of `rule` are addressed by its index, as the fields of [members](Describer::member) are. Each
    /// alternative has its own learning rate. Setting `eta` sets all these rates; reading `eta` returns
    /// `None` if they differ. If alternatives keep averages, [`Rule::evaluation`] has to return the average
    /// of the alternative that acts.
    pub fn alternative(&mut self, rule: &mut dyn Rule) {
        self.add_held(ChildPlace::Alternative(self.next_number), rule);
        self.next_number += 1;
    }

    fn add_held(&mut self, place: ChildPlace, rule: &mut dyn Rule) {
        match self.purpose {
            Purpose::Show(show) => show(place, rule),
            _ => self.add_part(place, &mut |part| rule.describe(part)),
        }
    }

    /// Adds a held rule or a store, which `describe` describes.
    pub(crate) fn add_part(&mut self, place: ChildPlace, describe: &mut dyn FnMut(&mut Describer<'_>)) {
        // The part is skipped after a fault, because a requirement may assume that all fields before it are
        // right.
        if self.check_result.is_err() {
            return;
        }
        let part = Describer::run(self.purpose, self.next_index, describe);
        self.next_index = part.next_index;
        if !matches!(self.purpose, Purpose::Write(_)) {
            self.description.parts.push((place, part.description));
        }
        if self.check_result.is_ok() {
            self.check_result = part.check_result;
        }
    }

    /// Refuses a rule that has not named its kind.
    fn check_kind(&mut self) {
        if self.description.kind.is_empty() {
            self.refuse("it names no kind", "call `Describer::kind` first");
        }
    }

    /// Refuses a field or setting after a held rule.
    fn check_order(&mut self) {
        // Indices have the order of `Description::fields`: a rule's own fields before those of its parts.
        if !self.description.parts.is_empty() {
            self.refuse(
                "it names fields or settings after a held rule",
                "name fields and settings before held rules",
            );
        }
        self.check_kind();
    }

    fn refuse(&mut self, fault: &'static str, remedy: &'static str) {
        let error = self.contract_error(fault, remedy);
        self.require(|| Err(error));
    }

    fn contract_error(&self, fault: &str, remedy: &'static str) -> Error {
        let rule = if self.description.kind.is_empty() {
            "a rule"
        } else {
            self.description.kind
        };
        let problem = format!("`Describe::describe` of {rule} is wrong: {fault}");
        Error::new(ErrorKind::Contract, problem).with_remedy(remedy)
    }
}

const OTHER_FIELDS: &str = "it has described other fields before, or others of this name";
const SAME_FIELDS: &str = "describe the same fields, with the same types, in each call";

impl<'v> Describer<'v> {
    /// Runs `describe`. The first field of the rule has the index `next_index`.
    pub(super) fn run(
        purpose: Purpose<'v>,
        next_index: usize,
        describe: &mut dyn FnMut(&mut Describer<'_>),
    ) -> Self {
        let description = Description::default();
        let mut rule = Describer {
            purpose,
            description,
            next_index,
            next_number: 0,
            check_result: Ok(()),
        };
        describe(&mut rule);
        rule.check_kind();
        rule
    }

    /// Returns the error of the run, or an error if a value was not written.
    pub(super) fn check_written(self) -> Result<()> {
        let is_lost = match self.purpose {
            Purpose::Write(values) => values.iter().any(|(index, _)| *index >= self.next_index),
            _ => false,
        };
        if is_lost && self.check_result.is_ok() {
            return Err(self.contract_error(OTHER_FIELDS, SAME_FIELDS));
        }
        self.check_result.map_err(|(error, _)| error)
    }

    /// Adds a choice between rules by these patterns of paths. In a run for [`Purpose::Choose`], returns the
    /// paths and the parameter for which the rule has to choose.
    pub(crate) fn add_choice(&mut self, patterns: &[String]) -> Option<(&'v [String], Parameter<'v>)> {
        match self.purpose {
            Purpose::Choose(paths, x) => return Some((paths, x)),
            Purpose::Read => self.description.patterns = Some(patterns.to_vec()),
            Purpose::Check | Purpose::Write(_) | Purpose::Show(_) => {}
        }
        None
    }
}

/// Access to the rules that a rule holds.
///
/// The implementation for every rule runs the rule's description.
pub trait Holder {
    /// Calls `show` with each directly held rule, in the order of the description.
    #[doc(hidden)]
    fn visit_held(&self, show: &mut dyn FnMut(ChildPlace, &mut dyn Rule));
}

/// A gradient transformation: a member of an [`OptimiserChain`](crate::OptimiserChain), or the rule inside
/// [`MixedPrecision`](crate::MixedPrecision).
///
/// A rule is configuration only; everything that changes from step to step is in a separate [`State`]. Most
/// rules implement [`Elementwise`](crate::Elementwise), which implements `Rule` for them. A rule that needs
/// the whole tensor implements `Rule` itself, and plans a function with [`Gradient::with_tensors`]:
///
/// ```
/// use candle_core::{Device, Tensor, Var};
/// use optimisers::{
///     Descent, Flow, Gradient, OptimiserChain, Parameter, Result, Rule, State, hyper_parameters, range, setup, update,
/// };
///
/// hyper_parameters! {
///     /// Divides each row of the gradient by its largest absolute value.
///     pub struct ByLargest {
///         /// What the largest absolute value becomes.
///         size: f64 = 1.0 => range::positive,
///     }
/// }
///
/// impl Rule for ByLargest {
///     fn apply<'a>(&'a self, state: &'a mut State, _x: Parameter<'a>, dx: Gradient<'a>) -> Result<Flow<'a>> {
///         Ok(Flow::Step(dx.with_tensors(state, |_step, _x, dx, _slots| {
///             let largest = dx.abs()?.max_keepdim(1)?;
///             Ok((dx.broadcast_div(&largest)? * self.size)?)
///         })))
///     }
/// }
///
/// let x = Var::zeros((1, 3), candle_core::DType::F32, &Device::Cpu)?;
/// let mut state = setup(OptimiserChain::new((ByLargest::default(), Descent::new(3.0))), &x)?;
/// let grads = x.mul(&Tensor::new(&[[1f32, 2.0, -4.0]], &Device::Cpu)?)?.sum_all()?.backward()?;
/// update(&mut state, &x, &grads)?;
/// assert_eq!(x.to_vec2::<f32>()?, [[-0.75, -1.5, 3.0]]);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// # Panics
/// A rule reports a fault by an error, from `apply` or from a function of `with_tensors`; then nothing is
/// written. If the rule panics, all threads stop first, and the panic reaches the caller of
/// [`update`](crate::update). Nothing has been written if the panic comes from [`apply`](Rule::apply), from
/// [`Elementwise::scalars`](crate::Elementwise::scalars), from a function of `with_tensors`, or from
/// arithmetic before a norm, a sum, a check or a function of `with_tensors`: all this code runs before the
/// first write.
///
/// All other arithmetic of an [`Elementwise`](crate::Elementwise) rule runs while parameters are written.
/// After a panic of this arithmetic
///
/// - the parameter of the arithmetic is torn: some elements and their state have moved, others have not, and
///   the counters stay. On a CUDA device and with [`Engine::Tensors`](crate::Engine::Tensors) this parameter
///   is unchanged, because there the arithmetic is recorded before it runs;
/// - every other parameter is either unchanged, or has moved as a whole with its state and counters, whatever
///   the order of the paths;
/// - the number of calls that windows of [`AccumGrad`](crate::AccumGrad) have counted is unchanged.
///
/// If an owner of [lent memory](crate::Lend) panics during these writes, only one thing is different: the
/// owner's parameter is not torn, but unchanged or moved as a whole with its state and counters.
///
/// candle's locks are all released, so model and state can still be used. But model and state no longer
/// belong together, and an update may refuse the torn parameter as changed: take both from a checkpoint, or
/// from a copy. With [`Update::functional`](crate::Update::functional) the originals are whole.
#[diagnostic::on_unimplemented(
    message = "`{Self}` does not turn a gradient into a gradient, so it cannot stand in a chain or inside \
               `MixedPrecision`",
    label = "not a gradient rule: write `MixedPrecision::new(F32, OptimiserChain::new((a, b)))`",
    note = "`MixedPrecision` decides how the parameter is stored and goes outermost"
)]
pub trait Rule: Describe + Holder + Adjust + DynClone + std::fmt::Debug + Send + Sync + 'static {
    /// Makes the state for a parameter (or its master) `x`.
    ///
    /// A tensor that is to start as x has to be a [`Slot::parameter`](crate::Slot::parameter), because no
    /// other tensor follows new weights.
    ///
    /// By default, the state has only the states of the [held](crate::Describer::holds) rules. An `init` that
    /// makes entries of its own adds the held states by [`State::with_held`]; [`setup`](crate::setup) refuses
    /// a state without the held states.
    ///
    /// # Errors
    /// If the device has no memory left, or the rule does not fit the parameter.
    fn init(&self, x: Parameter<'_>) -> Result<State> {
        self.delegate()
            .map_or_else(|| State::empty().with_held(self, x), |rule| rule.init(x))
    }

    /// Plans a step on the gradient that the rules before have planned.
    ///
    /// `apply` itself computes and writes nothing. After an error the whole call writes nothing.
    ///
    /// # Errors
    /// If the rule does not fit the parameter.
    fn apply<'a>(&'a self, state: &'a mut State, x: Parameter<'a>, dx: Gradient<'a>) -> Result<Flow<'a>>;

    /// What the step of one element depends on.
    ///
    /// The default is the widest kind of the held rules, and [`Kind::WholeTensor`] if the rule holds none.
    /// Every [`Elementwise`](crate::Elementwise) rule is [`Kind::Elementwise`].
    fn kind(&self) -> Kind {
        if let Some(rule) = self.delegate() {
            return rule.kind();
        }
        let mut widest = None;
        self.visit_held(&mut |_, held| widest = widest.max(Some(held.kind())));
        widest.unwrap_or(Kind::WholeTensor)
    }

    /// Whether a part of a parameter can be updated without the rest.
    ///
    /// If ranks [divide](crate::Setup::over) the state, each rank updates a run of neighbouring elements: x,
    /// gradient and state then have one dimension. Return `true` for arithmetic on elements, and for norms
    /// and sums of the [gradient](Gradient), which are taken over all parts. Return `false` for functions of
    /// tensors, and if shape, number or places of elements matter.
    ///
    /// By default, a rule that holds other rules is divisible if all held rules are divisible. Any other rule
    /// is divisible if its kind is [`Kind::Elementwise`]. Each parameter of a rule that is not divisible
    /// stays whole on one rank.
    fn is_divisible(&self) -> bool {
        if let Some(rule) = self.delegate() {
            return rule.is_divisible();
        }
        let mut all_divisible = None;
        self.visit_held(&mut |_, held| {
            all_divisible = Some(all_divisible.unwrap_or(true) && held.is_divisible());
        });
        all_divisible.unwrap_or_else(|| self.kind() == Kind::Elementwise)
    }

    /// Discards all that the rule has collected over calls, because the step of this window is not taken.
    ///
    /// The default calls `end_window` of the held rules, which is right for a rule that collects nothing
    /// itself.
    ///
    /// # Errors
    /// If a device fails.
    fn end_window(&self, state: &mut State) -> Result<()> {
        if let Some(rule) = self.delegate() {
            return rule.end_window(state);
        }
        state.end_held_windows(&|show| self.visit_held(show), &|| self.name())
    }

    /// The weights to evaluate the model with, if this rule has better weights than the parameter.
    ///
    /// The default returns the state tensor of a [`Slot::average`](crate::Slot::average) if there is one,
    /// otherwise the weights of the last held rule that has such weights. A rule with
    /// [alternatives](crate::Describer::alternative) has to call `evaluation` of the alternative that acts,
    /// with its state from [`State::held`].
    ///
    /// # Errors
    /// If the state is that of another rule. If an alternative has weights to evaluate with, but the rule
    /// uses the default.
    fn evaluation<'s>(&self, state: &'s State) -> Result<Option<Evaluation<'s>>> {
        if let Some(rule) = self.delegate() {
            return rule.evaluation(state);
        }
        state.held_evaluation(&|show| self.visit_held(show), &|| self.name())
    }

    /// The rule to which this rule forwards all calls, as a box does.
    #[doc(hidden)]
    fn delegate(&self) -> Option<&dyn Rule> {
        None
    }
}

dyn_clone::clone_trait_object!(Rule);

impl Rule for Box<dyn Rule> {
    fn delegate(&self) -> Option<&dyn Rule> {
        Some(&**self)
    }

    fn apply<'a>(&'a self, state: &'a mut State, x: Parameter<'a>, dx: Gradient<'a>) -> Result<Flow<'a>> {
        (**self).apply(state, x, dx)
    }
}

impl Describe for Box<dyn Rule> {
    fn describe(&mut self, rule: &mut Describer<'_>) {
        (**self).describe(rule);
    }
}

/// Reads and checks a clone of the rule, because a rule [describes](Describe) itself by `&mut`.
impl<R: Describe + Clone> Described for R {
    fn description(&self) -> Cow<'_, Description> {
        let mut rule = self.clone();
        Cow::Owned(Describer::run(Purpose::Read, 0, &mut |reader| rule.describe(reader)).description)
    }

    fn write(&mut self, values: &[(usize, FieldValue)]) -> Result<()> {
        Describer::run(Purpose::Write(values), 0, &mut |writer| self.describe(writer)).check_written()
    }

    fn check_described(&self) -> Result<()> {
        let mut rule = self.clone();
        let describer = Describer::run(Purpose::Check, 0, &mut |checker| rule.describe(checker));
        describer.check_result.map_err(|(error, _)| error)
    }
}

impl<R: Describe + Clone> Holder for R {
    fn visit_held(&self, show: &mut dyn FnMut(ChildPlace, &mut dyn Rule)) {
        let (mut rule, show) = (self.clone(), RefCell::new(show));
        let show = |place, held: &mut dyn Rule| show.borrow_mut()(place, held);
        Describer::run(Purpose::Show(&show), 0, &mut |shown| rule.describe(shown));
    }
}

/// What the step of an element depends on, from the cheapest kind of rule to the most expensive.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Kind {
    /// The element alone. The rule is a part of the one pass over memory.
    Elementwise,
    /// The whole parameter, or the element's place in the parameter. The rule costs at least one more read
    /// of the gradient.
    WholeTensor,
    /// Other parameters as well.
    WholeModel,
}

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Kind::Elementwise => "elementwise",
            Kind::WholeTensor => "whole tensor",
            Kind::WholeModel => "whole model",
        })
    }
}
