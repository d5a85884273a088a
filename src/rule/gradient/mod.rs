//! The lazy gradient: a tensor and what is to happen to it.

pub(crate) mod elementwise;
pub(crate) mod leaf_norms;
pub(crate) mod measured;
pub(crate) mod reductions;

use candle_core::Tensor;

use super::state::parts::other_number;
use super::{Counters, OwnTensors, Slots, State};
use crate::engine::{Buffer, CounterWrites, Epilogue, Job, NumberWrites, Operand, Sources, Step, Steps, TensorStep, erased};
use crate::error::Result;
use crate::model::lent::Lend;
use crate::numbers::value::{Arithmetic, DivideBy, ScaleBy};
use leaf_norms::NormRequest;

/// A gradient on its way through a chain of rules: where it comes from, the steps planned so far and the
/// state they use.
///
/// Nothing is computed while a rule looks at it. [`update`](crate::update) evaluates it in one pass over
/// memory, once every rule of every leaf has planned without an error.
///
/// A gradient can be *missing*: the parameter took no part in the loss. Steps planned on a missing gradient
/// do nothing, and move no counter; [`AccumGrad`](crate::AccumGrad) turns a missing gradient into what it has
/// accumulated.
#[must_use = "a gradient that is dropped moves no parameter: return it in a `Flow`"]
pub struct Gradient<'a> {
    pub(super) missing: bool,
    sources: Sources<'a>,
    pub(super) steps: Steps<'a>,
    counters: CounterWrites<'a>,
    numbers: NumberWrites<'a>,
    weight: u64,
    /// The calls that windows of accumulation have counted before this one.
    calls: u64,
    windows: Windows,
    /// Whether the call is to be skipped if a number is not finite.
    finite_only: bool,
    /// The norms that are asked for, if any are.
    pub(super) wanted: Option<NormRequest>,
    path: &'a str,
}

/// What a call does to the windows of accumulation of a parameter.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Windows {
    /// Whether one goes on.
    pub(crate) open: bool,
    /// Whether what was collected in calls before goes into the gradient.
    pub(crate) released: bool,
}

/// Where a chain goes after a rule.
#[must_use]
#[derive(Debug)]
pub enum Flow<'a> {
    /// On, with this gradient.
    Step(Gradient<'a>),
    /// No further in this call: the planned steps run for the state they write, and the parameter stays.
    /// [`AccumGrad`](crate::AccumGrad) behind a rule that does so counts calls of [`update`](crate::update)
    /// all the same.
    Hold(Gradient<'a>),
}

impl<'a> Flow<'a> {
    /// The same flow with what `step` makes of a gradient that goes on: how a rule around another goes on
    /// from its step.
    ///
    /// [`Describe`](crate::Describe) has an example.
    ///
    /// # Errors
    /// Those of `step`.
    pub fn and_then(self, step: impl FnOnce(Gradient<'a>) -> Result<Gradient<'a>>) -> Result<Self> {
        match self {
            Flow::Step(dx) => step(dx).map(Flow::Step),
            Flow::Hold(dx) => Ok(Flow::Hold(dx)),
        }
    }
}

impl std::fmt::Debug for Gradient<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Gradient").field("missing", &self.missing).field("steps", &self.steps.len()).finish_non_exhaustive()
    }
}

impl<'a> Gradient<'a> {
    /// The sum of these tensors; missing if there is none.
    pub(crate) fn new(sources: Sources<'a>, weight: u64, path: &'a str) -> Self {
        Gradient {
            missing: sources.is_empty(),
            sources,
            steps: Steps::new(),
            counters: CounterWrites::new(),
            numbers: NumberWrites::new(),
            weight,
            calls: 0,
            windows: Windows::default(),
            finite_only: false,
            wanted: None,
            path,
        }
    }

    /// The same in a call after so many others that windows of accumulation have counted.
    pub(crate) fn after(self, calls: u64) -> Self {
        Gradient { calls, ..self }
    }

    /// Whether a window of `n` calls ends with this one. All windows of `n` calls do so together, whenever a
    /// leaf came to them. Rules behind this one count windows, not calls.
    pub(crate) fn ends_window(mut self, n: u64) -> (Self, bool) {
        let counted = self.calls + 1;
        let ends = counted.is_multiple_of(n);
        if ends {
            self.calls = counted / n - 1;
        } else {
            self.windows.open = true;
        }
        (self, ends)
    }

    /// What the call does to windows.
    pub(crate) fn windows(&self) -> Windows {
        self.windows
    }

    /// The parameter's path in the model.
    pub fn path(&self) -> &'a str {
        self.path
    }

    /// How much this call counts in a weighted mean, see [`Update::weight`](crate::Update::weight).
    pub fn weight(&self) -> u64 {
        self.weight
    }

    /// The same with another weight.
    pub(crate) fn weighing(self, weight: u64) -> Self {
        Gradient { weight, ..self }
    }

    /// Whether the parameter received no gradient.
    pub fn is_missing(&self) -> bool {
        self.missing
    }

    /// A gradient of zeros, to which steps apply, in place of a missing one.
    pub(crate) fn or_zeros(mut self) -> Self {
        self.missing = false;
        self
    }

    /// The same where its numbers are not wanted: what was planned only to prepare or to check them is not
    /// done.
    pub(crate) fn unread(mut self) -> Self {
        let is_for_nothing = |step: &Step<'_>| match step {
            Step::Check => true,
            Step::Map { slots, .. } => slots.is_empty(),
            Step::Tensor(step) => step.slots.is_empty(),
            Step::Reduce(reduction) => reduction.group.is_none(),
            Step::Output(_) | Step::Identity => true,
        };
        if self.steps.iter().all(is_for_nothing) {
            self = self.unmeasured();
            self.steps.clear();
            self.sources.clear();
        }
        self
    }

    /// Arithmetic that puts what was collected in other calls into the gradient. If numbers have to be
    /// finite, then these, too: a check right before it comes behind it, which is of both.
    pub(crate) fn release(mut self, kernel: impl Arithmetic, slots: Slots<'a>) -> Self {
        self.windows.released = true;
        if matches!(self.steps.last(), Some(Step::Check)) {
            self.steps.pop();
        }
        let finite_only = self.finite_only;
        let released = self.map(kernel, slots);
        if finite_only { released.finite_only() } else { released }
    }

    /// Sets a counter when the step is committed, whether the gradient is missing or not.
    pub fn set_counter(mut self, counter: &'a mut u64, next: u64) -> Self {
        if *counter != next {
            self.counters.push((counter, next));
        }
        self
    }

    /// Sets a number when the step is committed, whether the gradient is missing or not.
    pub fn set_number(mut self, number: &'a mut f64, next: f64) -> Self {
        self.numbers.push((number, next));
        self
    }

    /// The number of this step by a rule's first counter, 1 for the first, counted when it is committed.
    ///
    /// A missing gradient moves it not, but the plan goes on all the same.
    ///
    /// # Errors
    /// If there is no counter: the rule's [`init`](crate::Rule::init) made none, or the state is another
    /// rule's.
    pub fn next_step(self, Counters(counters): Counters<'a>) -> Result<(Self, u64)> {
        let Some((_, t)) = counters.first_mut() else {
            return Err(other_number("counters", 1, 0));
        };
        Ok(self.counted_by(t))
    }

    /// The number of this step by this counter.
    fn counted_by(self, t: &'a mut u64) -> (Self, u64) {
        let next = *t + 1;
        (if self.missing { self } else { self.set_counter(t, next) }, next)
    }

    /// Elementwise arithmetic on the gradient, with its state. An [`update`](crate::update) refuses another
    /// number of state tensors than the arithmetic has.
    ///
    /// [`Parts`](crate::Parts) has an example.
    pub fn map(mut self, arithmetic: impl Arithmetic, Slots(slots): Slots<'a>) -> Self {
        if !self.missing {
            self.steps.push(Step::Map { kernel: erased(arithmetic), slots });
        }
        self
    }

    /// Multiplies the gradient by a number.
    pub fn scale(self, factor: f64) -> Self {
        self.map(ScaleBy(factor), Slots::none())
    }

    /// Divides the gradient by a number.
    pub(crate) fn divide(self, divisor: f64) -> Self {
        self.map(DivideBy(divisor), Slots::none())
    }

    /// Skips the whole call if the gradient is not finite at this place.
    pub(crate) fn finite_only(mut self) -> Self {
        self.finite_only = true;
        if !self.missing {
            self.steps.push(Step::Check);
        }
        self
    }

    /// Puts a function of the whole tensor into the chain, for rules that are not elementwise.
    ///
    /// The function receives the step's number (1 for the first), the parameter (its master where there is
    /// one), the gradient and the state's tensors, all in the compute dtype. It returns the new gradient and
    /// may replace the tensors, keeping their shapes; they are rounded to their own dtypes. It runs before
    /// anything is written, and only if there is a gradient and the parameter has elements; the state's first
    /// counter counts these steps; without one the number is always 1.
    ///
    /// What it returns is kept until everything has been computed, which takes 4 bytes per parameter of the
    /// model in F32. Where that is too much, and the function does not refuse anything, see
    /// [`Gradient::with_tensors_late`].
    pub fn with_tensors<F>(self, state: &'a mut State, function: F) -> Self
    where
        F: FnOnce(u64, &Tensor, Tensor, &mut [Tensor]) -> Result<Tensor> + Send + Sync + 'a,
    {
        self.function(state, true, function)
    }

    /// [`Gradient::with_tensors`] for a function that fails only where a device fails: it runs while the
    /// parameters are written, a few of them at a time, so that its results take little memory. If it fails
    /// all the same, the parameters before this one have moved.
    ///
    /// Where a norm is taken behind it, it runs before anything is written all the same.
    pub fn with_tensors_late<F>(self, state: &'a mut State, function: F) -> Self
    where
        F: FnOnce(u64, &Tensor, Tensor, &mut [Tensor]) -> Result<Tensor> + Send + Sync + 'a,
    {
        self.function(state, false, function)
    }

    fn function<F>(self, state: &'a mut State, may_refuse: bool, function: F) -> Self
    where
        F: FnOnce(u64, &Tensor, Tensor, &mut [Tensor]) -> Result<Tensor> + Send + Sync + 'a,
    {
        let State { tensors, counters, .. } = state;
        let (gradient, step) = match counters.first_mut() {
            Some((_, t)) => self.counted_by(t),
            None => (self, 1),
        };
        gradient.through(tensors, may_refuse, move |x, dx, slots| function(step, x, dx, slots))
    }

    /// As [`Gradient::with_tensors`], with these state tensors and without the number of the step: for a rule
    /// that holds another, whose state goes there.
    pub fn map_tensors<F>(self, Slots(slots): Slots<'a>, function: F) -> Self
    where
        F: FnOnce(&Tensor, Tensor, &mut [Tensor]) -> Result<Tensor> + Send + Sync + 'a,
    {
        self.through(slots, true, function)
    }

    /// A function of the whole tensor without the count.
    pub(crate) fn through<F>(mut self, slots: OwnTensors<'a>, may_refuse: bool, function: F) -> Self
    where
        F: FnOnce(&Tensor, Tensor, &mut [Tensor]) -> Result<Tensor> + Send + Sync + 'a,
    {
        if !self.missing {
            self.steps.push(Step::Tensor(Box::new(TensorStep { function: Box::new(function), slots, may_refuse })));
        }
        self
    }

    /// The work this gradient stands for.
    pub(crate) fn into_job(self, path: &'a str, x: Operand<'a>, epilogue: Epilogue<&'a dyn Lend, &'a mut Buffer>) -> Job<'a> {
        Job { steps: self.steps, counters: self.counters, numbers: self.numbers, epilogue, ..Job::new(path, x, self.sources) }
    }
}
