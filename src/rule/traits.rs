//! What a rule is: what it says of itself, and how it plans a step.
//!
//! A rule names its fields by `&mut`, so that one description serves for reading and for writing. It is run
//! for one [`Purpose`] at a time. Reading records a [`Description`], and all else that is asked of a rule is
//! a function of that value. Only what needs the fields themselves, or the closures and rules that are named,
//! is a purpose of its own.

use std::borrow::Cow;
use std::cell::RefCell;
use std::fmt;

use dyn_clone::DynClone;

use super::description::adjust::Described;
use super::description::record::StorageRecord;
use super::description::role::Role;
use super::description::setting::Setting;
use super::description::{Description, FieldDescription, out_of_range};
use super::field::{Field, FieldValue};
use super::state::place::ChildPlace;
use super::{Adjust, Evaluation, Flow, Gradient, Kind, Parameter, State};
use crate::error::{Error, ErrorKind, Result};

/// Tells what a rule is made of: its kind, its hyper-parameters, and the rules that it holds.
///
/// [`Adjust`](crate::Adjust), checkpoints, schedules and errors need nothing else.
/// [`hyper_parameters!`](crate::hyper_parameters) says it for a struct. A rule that holds others says what is
/// its own and names them.
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
/// A rule around another adds its counters, numbers and tensors in `init`, to the states of what it holds.
/// Their names have to differ from those of the rule that it is around. [`setup`](crate::setup) refuses two
/// of one name, and a state without what is held. [`Flow::and_then`](crate::Flow::and_then) goes on from a
/// step, if there is one in this call: a window of accumulation inside may hold it back.
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
    /// Says its [kind](Describer::kind), then its settings and fields, and then what it holds.
    ///
    /// It says the same each time. Whoever asks may set the fields that it is shown.
    fn describe(&mut self, rule: &mut Describer<'_>);
}

/// What a rule describes itself for.
#[derive(Clone, Copy)]
pub(super) enum Purpose<'v> {
    /// To be recorded as a [`Description`].
    Read,
    /// To have its values compared with their ranges, and its requirements checked.
    Check,
    /// To have fields set. Nothing is recorded then, because a step may set fields of thousands of rules.
    Write(&'v [(usize, FieldValue)]),
    /// To choose for the parameter with these paths.
    Choose(&'v [String], Parameter<'v>),
    /// To show what it holds itself.
    Show(&'v dyn Fn(ChildPlace, &mut dyn Rule)),
}

/// The first fault of a rule, with the index of the field that is out of range, if that is the fault.
pub(super) type Checked = std::result::Result<(), (Error, Option<usize>)>;

/// What a rule [describes](Describe) itself to.
pub struct Describer<'v> {
    purpose: Purpose<'v>,
    /// What was described so far.
    pub(super) description: Description,
    /// The index of the next field.
    next: usize,
    /// How many members and alternatives were named so far.
    members: usize,
    /// The first fault.
    pub(super) checked: Checked,
}

impl fmt::Debug for Describer<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Describer").field("kind", &self.description.kind).finish_non_exhaustive()
    }
}

impl Describer<'_> {
    /// The kind of rule: the name of its type, which checkpoints know it by.
    pub fn kind(&mut self, kind: &'static str) {
        self.description.kind = kind;
    }

    /// What it is for in a chain, where that decides [where it has to stand](Role).
    pub fn role(&mut self, role: Role) {
        if matches!(self.purpose, Purpose::Read) {
            let named = self.description.parts.len();
            self.description.roles.push((role, named));
        }
    }

    /// What distinguishes it from others of its kind and cannot be adjusted, such as the dtype of masters.
    pub fn setting(&mut self, name: &'static str, value: impl Into<Setting>) {
        self.check_own();
        if matches!(self.purpose, Purpose::Read) {
            self.description.settings.push((name, value.into()));
        }
    }

    /// How the parameter is stored, where the optimiser decides that.
    pub(crate) fn stores(&mut self, storage: StorageRecord) {
        self.description.storage = Some(storage);
    }

    /// A hyper-parameter, with its default and its [range](crate::range).
    // Not inlined, because rules have hundreds of fields, of a few types.
    #[inline(never)]
    pub fn field<F: Field>(
        &mut self,
        name: &'static str,
        value: &mut F,
        default: F,
        range: fn(F) -> Option<&'static str>,
    ) {
        let fault = range(*value);
        if let Some(new) = self.field_value(name, (*value).into(), default.into(), fault) {
            let new = F::from_value(new);
            debug_assert!(new.is_some(), "a value of another type for {name}");
            *value = new.unwrap_or(*value);
        }
    }

    /// [`Describer::field`] of any type. Returns what is to be written. `fault` is what a value out of range
    /// was expected to be.
    fn field_value(
        &mut self,
        name: &'static str,
        value: FieldValue,
        default: FieldValue,
        fault: Option<&'static str>,
    ) -> Option<FieldValue> {
        self.check_own();
        let index = self.next;
        self.next += 1;
        match (self.purpose, fault) {
            (Purpose::Write(values), _) => {
                return values.iter().find_map(|(known, new)| (*known == index).then_some(*new));
            }
            (Purpose::Check, Some(expected)) => {
                let kind = self.description.kind;
                self.fail(|| Err((out_of_range(kind, name, value, expected), Some(index))));
            }
            (Purpose::Read, _) => {
                self.description.fields.push(FieldDescription { name, index, value, default });
            }
            (Purpose::Check | Purpose::Choose(..) | Purpose::Show(_), _) => {}
        }
        None
    }

    /// The name of what looks like a hyper-parameter and cannot be set: it decides the layout of the state.
    pub fn fixed(&mut self, name: &'static str) {
        self.check_own();
        if matches!(self.purpose, Purpose::Read) {
            self.description.fixed.push(name);
        }
    }

    /// What has to hold beside the ranges of fields. It runs only if the rule is checked.
    pub fn require(&mut self, check: impl FnOnce() -> Result<()>) {
        self.fail(|| check().map_err(|error| (error, None)));
    }

    /// Takes what `check` returns as the first fault, unless there is one.
    fn fail(&mut self, check: impl FnOnce() -> Checked) {
        if matches!(self.purpose, Purpose::Check) && self.checked.is_ok() {
            self.checked = check();
        }
    }

    /// The rule that this one is around: its fields are addressed as if it stood alone.
    pub fn holds(&mut self, rule: &mut dyn Rule) {
        if self.description.parts.iter().any(|(place, _)| *place == ChildPlace::Inner) {
            self.refuse(
                "it names two rules that it is around, whose fields and state have no places",
                "name `member`s or `alternative`s",
            );
        }
        self.held(ChildPlace::Inner, rule);
    }

    /// The next of several rules that act one after another.
    ///
    /// Its fields are addressed by its index, from 0 on. The learning rates of all are multiplied.
    pub fn member(&mut self, rule: &mut dyn Rule) {
        self.held(ChildPlace::Member(self.members), rule);
        self.members += 1;
    }

    /// The next of several rules of which one acts at a time.
    ///
    /// Its fields are addressed by its index, as those of [members](Describer::member) are. Each has its own
    /// learning rate: setting `eta` sets that of each, and reading it gives the one that all have, or `None`.
    /// [`Rule::evaluation`] has to say which of them acts.
    pub fn alternative(&mut self, rule: &mut dyn Rule) {
        self.held(ChildPlace::Alternative(self.members), rule);
        self.members += 1;
    }

    fn held(&mut self, place: ChildPlace, rule: &mut dyn Rule) {
        match self.purpose {
            Purpose::Show(show) => show(place, rule),
            _ => self.part(place, &mut |part| rule.describe(part)),
        }
    }

    /// What this is around or holds, which tells itself by `describe`.
    pub(crate) fn part(&mut self, place: ChildPlace, describe: &mut dyn FnMut(&mut Describer<'_>)) {
        // What a part requires may take for granted that those before it are right.
        if self.checked.is_err() {
            return;
        }
        let part = Describer::run(self.purpose, self.next, describe);
        self.next = part.next;
        if !matches!(self.purpose, Purpose::Write(_)) {
            self.description.parts.push((place, part.description));
        }
        self.fail(|| part.checked);
    }

    /// Refuses a rule that has said nothing of its kind.
    fn check_kind(&mut self) {
        if self.description.kind.is_empty() {
            self.refuse("it does not say what it is", "call `Describer::kind` first");
        }
    }

    /// Refuses a field or setting that would be taken for another rule's.
    fn check_own(&mut self) {
        if !self.description.parts.is_empty() {
            self.refuse("it says fields or settings after what it holds", "say them before");
        }
        self.check_kind();
    }

    /// Makes the check of the rule fail.
    fn refuse(&mut self, fault: &'static str, remedy: &'static str) {
        let rule = if self.description.kind.is_empty() { "a rule" } else { self.description.kind };
        let problem = move || format!("`Describe::describe` of {rule} is wrong: {fault}");
        self.require(move || Err(Error::new(ErrorKind::Contract, problem()).with_remedy(remedy)));
    }
}

impl<'v> Describer<'v> {
    /// Runs the description of a rule, whose first field has the index `next`.
    pub(super) fn run(
        purpose: Purpose<'v>,
        next: usize,
        describe: &mut dyn FnMut(&mut Describer<'_>),
    ) -> Self {
        let description = Description::default();
        let mut rule = Describer { purpose, description, next, members: 0, checked: Ok(()) };
        describe(&mut rule);
        rule.check_kind();
        rule
    }

    /// A choice that is made for each parameter by these patterns of paths. Returns what to choose for, if the
    /// description runs to choose.
    pub(crate) fn choice(&mut self, patterns: &[String]) -> Option<(&'v [String], Parameter<'v>)> {
        match self.purpose {
            Purpose::Choose(paths, x) => return Some((paths, x)),
            Purpose::Read => self.description.patterns = Some(patterns.to_vec()),
            Purpose::Check | Purpose::Write(_) | Purpose::Show(_) => {}
        }
        None
    }
}

/// A rule that can show what it holds.
pub trait Holder {
    /// Shows all rules that this one holds itself, in their order.
    #[doc(hidden)]
    fn visit_held(&self, show: &mut dyn FnMut(ChildPlace, &mut dyn Rule));
}

/// A gradient transformation: what stands in an [`OptimiserChain`](crate::OptimiserChain) or inside
/// [`MixedPrecision`](crate::MixedPrecision).
///
/// A rule is configuration; what it remembers is a [`State`] outside of it. Most rules are
/// [`Elementwise`](crate::Elementwise) and get this trait from that. A rule that needs the whole tensor
/// implements `Rule` itself, and plans a function with [`Gradient::with_tensors`]:
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
///         /// What that becomes.
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
/// A rule says what is wrong by an error, here or in a function of `with_tensors`; nothing is written then.
/// If it panics instead, the panic reaches the caller of [`update`](crate::update) when all threads have
/// stopped. Nothing has been written either if it comes from [`apply`](Rule::apply), from
/// [`Elementwise::scalars`](crate::Elementwise::scalars), from a function of `with_tensors`, or from
/// arithmetic before a norm, a sum, a check or such a function: all of this is evaluated before the first
/// write.
///
/// All other arithmetic of an [`Elementwise`](crate::Elementwise) rule runs while parameters are written. A
/// panic there leaves
///
/// - its own parameter in part: some elements have made the step together with their state, others have not,
///   and its counters stay. On a CUDA device and with [`Engine::Tensors`](crate::Engine::Tensors) it is as it
///   was, because arithmetic is recorded first;
/// - every other parameter as it was, or moved as a whole with its state and counters, whatever the order of
///   the paths;
/// - the number of calls that windows of [`AccumGrad`](crate::AccumGrad) have counted as it was.
///
/// An owner of [lent memory](crate::Lend) that panics there leaves the same, except that its parameter is as
/// it was, or has moved as a whole with its state and counters.
///
/// No lock of candle's stays held, so model and state can be used. But they do not belong together: take both
/// from a checkpoint, or from a copy. With [`Update::functional`](crate::Update::functional) the originals
/// are whole.
#[diagnostic::on_unimplemented(
    message = "`{Self}` does not turn a gradient into a gradient, so it cannot stand in a chain or inside \
               `MixedPrecision`",
    label = "not a gradient rule",
    note = "`MixedPrecision` decides how the parameter is stored and goes outermost: write \
            `MixedPrecision::new(F32, OptimiserChain::new((ClipGrad::new(1.0), Adam::new(1e-3))))`"
)]
pub trait Rule: Describe + Holder + Adjust + DynClone + std::fmt::Debug + Send + Sync + 'static {
    /// The state for a parameter (or its master) `x`.
    ///
    /// A tensor that starts as x is a [`Slot::parameter`](crate::Slot::parameter), so that it follows new
    /// weights.
    ///
    /// By default a rule has no state of its own, only the states of the rules that it
    /// [holds](crate::Describer::holds). A rule that has some adds theirs by [`State::with_held`];
    /// [`setup`](crate::setup) refuses a state without them.
    ///
    /// # Errors
    /// If the device has no memory left, or the rule does not fit the parameter.
    fn init(&self, x: Parameter<'_>) -> Result<State> {
        self.delegate().map_or_else(|| State::empty().with_held(self, x), |rule| rule.init(x))
    }

    /// Plans a step: takes the gradient as the rules before left it, and says how it goes on.
    ///
    /// Nothing is computed or written here.
    ///
    /// # Errors
    /// If the rule does not fit the parameter; nothing is written then.
    fn apply<'a>(&'a self, state: &'a mut State, x: Parameter<'a>, dx: Gradient<'a>) -> Result<Flow<'a>>;

    /// What the step of one element depends on.
    ///
    /// Every [`Elementwise`](crate::Elementwise) says so itself. By default a rule that holds others depends
    /// on what they do, and any other rule on the whole tensor.
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
    /// Ranks that [divide](crate::Setup::over) the state do that: x, gradient and state are then those of a
    /// run of neighbouring elements, of one dimension. It is right for arithmetic on elements, and for norms
    /// and sums that the gradient is asked for, which are taken over all parts. It is wrong for functions of
    /// tensors, and if shape, number or places of elements matter.
    ///
    /// By default a rule keeps its parameters whole, each on one rank. A rule that holds others is as they
    /// are.
    fn is_divisible(&self) -> bool {
        if let Some(rule) = self.delegate() {
            return rule.is_divisible();
        }
        let mut all = None;
        self.visit_held(&mut |_, held| all = Some(all.unwrap_or(true) && held.is_divisible()));
        all.unwrap_or(false)
    }

    /// Forgets what was collected for a step that will not be taken.
    ///
    /// By default the held rules do so. A rule that collects nothing has nothing to add.
    ///
    /// # Errors
    /// If a device fails.
    fn end_window(&self, state: &mut State) -> Result<()> {
        if let Some(rule) = self.delegate() {
            return rule.end_window(state);
        }
        state.end_held_windows(&|show| self.visit_held(show), &|| self.name())
    }

    /// What to evaluate the model with in place of the parameter, if this rule has better weights.
    ///
    /// By default that is the state tensor of a [`Slot::average`](crate::Slot::average), if there is one,
    /// else what the last of the held rules has. A rule with [alternatives](crate::Describer::alternative)
    /// asks the one that acts, with its state from [`State::held`].
    ///
    /// # Errors
    /// If the state is not this rule's, or alternatives have such weights and nothing is said of which acts.
    fn evaluation<'s>(&self, state: &'s State) -> Result<Option<Evaluation<'s>>> {
        if let Some(rule) = self.delegate() {
            return rule.evaluation(state);
        }
        state.held_evaluation(&|show| self.visit_held(show), &|| self.name())
    }

    /// The rule that this one stands for, as a box does.
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

/// A rule is cloned to be looked at, because it [describes](Describe) itself by `&mut`.
impl<R: Describe + Clone> Described for R {
    fn description(&self) -> Cow<'_, Description> {
        let mut rule = self.clone();
        Cow::Owned(Describer::run(Purpose::Read, 0, &mut |reader| rule.describe(reader)).description)
    }

    fn write(&mut self, values: &[(usize, FieldValue)]) {
        Describer::run(Purpose::Write(values), 0, &mut |writer| self.describe(writer));
    }

    fn check_described(&self) -> Result<()> {
        let mut rule = self.clone();
        let checked = Describer::run(Purpose::Check, 0, &mut |checker| rule.describe(checker)).checked;
        checked.map_err(|(error, _)| error)
    }

    fn as_described(&mut self) -> &mut dyn Described {
        self
    }
}

impl<R: Describe + Clone> Holder for R {
    fn visit_held(&self, show: &mut dyn FnMut(ChildPlace, &mut dyn Rule)) {
        let (mut rule, show) = (self.clone(), RefCell::new(show));
        let show = |place, held: &mut dyn Rule| show.borrow_mut()(place, held);
        Describer::run(Purpose::Show(&show), 0, &mut |shown| rule.describe(shown));
    }
}
