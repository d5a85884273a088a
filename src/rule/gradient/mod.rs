//! The lazy gradient: a tensor and what is to happen to it.

pub(crate) mod elementwise;
pub(crate) mod leaf_norms;
pub(crate) mod measured;
pub(crate) mod reductions;
#[cfg(feature = "candle")]
mod whole;

use super::state::parts::other_number;
use super::{Counters, Slots};
use crate::engine::{
    Buffer, CounterWrites, Epilogue, Job, NumberWrites, Operand, Sources, Step, Steps, erased,
};
use crate::error::Result;
use crate::model::lent::Lend;
use crate::numbers::value::{Arithmetic, DivideBy, ScaleBy};
use leaf_norms::NormRequest;

/// A gradient on its way through a chain of rules: its sources, the planned steps and their state.
///
/// Nothing is computed while a rule looks at it. [`update`](crate::update) evaluates it in one pass over
/// memory, once every rule of every leaf has planned without an error.
///
/// A gradient can be *missing*: the parameter took no part in the loss. Steps planned on it do nothing and
/// move no counter. [`AccumGrad`](crate::AccumGrad) turns it into what it has accumulated.
#[must_use = "a gradient that is dropped moves no parameter: return it in a `Flow`"]
pub struct Gradient<'a> {
    pub(super) missing: bool,
    sources: Sources<'a>,
    pub(super) steps: Steps<'a>,
    counters: CounterWrites<'a>,
    numbers: NumberWrites<'a>,
    weight: u64,
    /// How many calls windows of accumulation have counted before this one.
    calls: u64,
    windows: Windows,
    /// Whether open windows end at this place, for want of further calls.
    releases: bool,
    /// Whether windows at this place count this call.
    counts: bool,
    /// Whether the call is to be skipped if a number is not finite.
    finite_only: bool,
    /// The norms that are asked for, if any are.
    pub(super) wanted: Option<NormRequest>,
    path: &'a str,
}

/// What a call does to the windows of accumulation of a parameter.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Windows {
    /// Whether a window stays open.
    pub(crate) open: bool,
    /// Whether the gradient includes what earlier calls collected.
    pub(crate) released: bool,
}

/// Where a chain goes after a rule.
#[must_use]
#[derive(Debug)]
pub enum Flow<'a> {
    /// On, with this gradient.
    Step(Gradient<'a>),
    /// No further in this call: planned steps still write their state, and the parameter stays.
    ///
    /// An [`AccumGrad`](crate::AccumGrad) behind the rule counts calls of [`update`](crate::update) all the
    /// same.
    Hold(Gradient<'a>),
}

impl<'a> Flow<'a> {
    /// Applies `step` to a gradient that goes on: how a rule around another goes on from its step.
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
        f.debug_struct("Gradient")
            .field("missing", &self.missing)
            .field("steps", &self.steps.len())
            .finish_non_exhaustive()
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
            releases: false,
            counts: true,
            finite_only: false,
            wanted: None,
            path,
        }
    }

    /// The same after `calls` calls that windows of accumulation have counted. If it `releases` the windows,
    /// it is missing, and they do not count it.
    pub(crate) fn after(self, calls: u64, releases: bool) -> Self {
        Gradient { calls, releases, counts: !releases, ..self }
    }

    /// Whether a window of `n` calls ends with this one, and the calls that it has counted after `before`.
    /// All windows of `n` calls end together, whenever their leaf joined. Rules after this one count
    /// windows, not calls.
    pub(crate) fn ends_window(mut self, n: u64, before: u64) -> (Self, bool, u64) {
        let calls = before + u64::from(self.counts);
        if self.releases {
            self.counts = calls > 0;
            return (self, true, calls);
        }
        let counted = self.calls + 1;
        let ends = counted.is_multiple_of(n);
        if ends {
            self.calls = counted / n - 1;
        } else {
            self.windows.open = true;
        }
        (self, ends, calls)
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

    /// Drops all steps and sources, if the steps only prepare or check numbers that nobody reads.
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

    /// Appends arithmetic that adds what other calls collected. With `finite_only` a check right before it
    /// moves behind it, and covers both.
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

    /// The number of this step by a rule's first counter: 1 for the first.
    ///
    /// The step is counted when it is committed. A missing gradient does not count, but the plan goes on.
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

    /// Elementwise arithmetic on the gradient, with its state.
    ///
    /// An [`update`](crate::update) refuses a number of state tensors other than the arithmetic's.
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

    /// The work that this gradient stands for.
    pub(crate) fn into_job(
        self,
        x: Operand<'a>,
        epilogue: Epilogue<&'a dyn Lend, &'a mut Buffer>,
    ) -> Job<'a> {
        Job {
            steps: self.steps,
            counters: self.counters,
            numbers: self.numbers,
            epilogue,
            ..Job::new(self.path, x, self.sources)
        }
    }
}
