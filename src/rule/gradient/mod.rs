//! The lazy gradient: its source tensors and the steps that rules have planned on their sum.
//!
//! Methods only append steps; the engine runs these after all rules have planned. Two things need care:
//!
//! - A missing gradient gets no steps, except sums over a group. Counters and numbers are set nevertheless,
//!   because windows and groups go on without it.
//! - The norm that a caller has requested is kept as the index of its step (`NormRequest::place`). Before a
//!   step in front of that index is removed, `unmeasured` has to remove the norm.

pub(crate) mod elementwise;
pub(crate) mod reductions;
#[cfg(feature = "candle")]
mod whole;

use std::sync::{Arc, OnceLock};

use super::state::parts::other_number;
use super::{Counters, Slots};
use crate::engine::{
    Buffer, CounterWrites, Epilogue, Job, Norms, NumberWrites, Operand, Progress, Sources, Step, Steps,
    Windows, erased,
};
use crate::error::Result;
use crate::model::lent::Lend;
use crate::numbers::counts;
use crate::numbers::value::{Arithmetic, DivideBy, ScaleBy};

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
    /// How many calls windows at this place have counted before this one. After a window of `n` calls in the
    /// chain, `n` calls count as one.
    calls: u64,
    windows: Windows,
    /// Whether open windows end in this call, although they are not full.
    releases: bool,
    /// Whether windows at this place count this call.
    counts: bool,
    /// Whether the call is skipped if the gradient is not finite.
    finite_only: bool,
    /// The norms that the caller of `update` has requested, if any.
    wanted: Option<NormRequest>,
    path: &'a str,
}

/// Where a chain goes after a rule.
#[must_use]
#[derive(Debug)]
pub enum Flow<'a> {
    /// On, with this gradient.
    Step(Gradient<'a>),
    /// No further in this call: planned steps still write their state, and the parameter stays.
    ///
    /// Put an [`AccumGrad`](crate::AccumGrad) before a rule that holds gradients, never after it. Held calls
    /// do not reach an `AccumGrad` after the rule. If such a call leaves no window open, all windows count
    /// their calls from 0 again, and may never be full.
    Hold(Gradient<'a>),
}

impl<'a> Flow<'a> {
    /// Applies `step` unless the gradient is held. A wrapper uses this to change the step of its inner rule.
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

    /// The job of all planned steps on `x`. If the leaf makes a step, `epilogue` stores the parameter.
    pub(crate) fn into_job(
        self,
        x: Operand<'a>,
        epilogue: Epilogue<&'a dyn Lend, &'a mut Buffer>,
    ) -> Job<'a> {
        let (gradient, progress) = match self {
            Flow::Step(gradient) if gradient.missing => (gradient, Progress::WithoutGradient),
            Flow::Hold(gradient) if gradient.missing => (gradient, Progress::Waiting),
            Flow::Step(gradient) => (gradient.measured_at_the_end(), Progress::Applied),
            // Not measured, because a window is measured as a whole when it ends.
            Flow::Hold(gradient) => (gradient.unmeasured(), Progress::Accumulated),
        };
        Job {
            steps: gradient.steps,
            counters: gradient.counters,
            numbers: gradient.numbers,
            epilogue: if progress == Progress::Applied { epilogue } else { Epilogue::StateOnly },
            progress,
            windows: gradient.windows,
            ..Job::new(gradient.path, x, gradient.sources)
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
    /// The sum of these tensors, or a missing gradient if there are no tensors.
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

    /// Sets how many calls windows have counted before this one. A call that `releases` windows brings no
    /// gradient, so they do not count it.
    pub(crate) fn after(self, calls: u64, releases: bool) -> Self {
        Gradient { calls, releases, counts: !releases, ..self }
    }

    /// Whether a window of `n` calls ends with this one, and the calls that the leaf has counted in it.
    ///
    /// `before` are those without this call. They do not decide on the end: the count of the tree does, so
    /// that all windows of `n` calls end together, whenever their leaf joined.
    pub(crate) fn ends_window(mut self, n: u64, before: u64) -> (Self, bool, u64) {
        let calls = counts::after(before, self.counts.into());
        if self.releases {
            // A window after this one counts the step of this one, and an empty one makes no step.
            self.counts = calls > 0;
            return (self, true, calls);
        }
        let counted = self.calls + 1;
        let ends = counted.is_multiple_of(n);
        if ends {
            // Rules after this one count windows instead of calls. The current window is their current call.
            self.calls = counted / n - 1;
        } else {
            self.windows.open = true;
        }
        (self, ends, calls)
    }

    /// The parameter's path in the model.
    pub fn path(&self) -> &'a str {
        self.path
    }

    /// How much this call counts in a weighted mean, see [`Update::weight`](crate::Update::weight).
    pub fn weight(&self) -> u64 {
        self.weight
    }

    /// Sets the weight: that of a mean is the sum of the weights in it.
    pub(crate) fn weighing(self, weight: u64) -> Self {
        Gradient { weight, ..self }
    }

    /// Whether the parameter received no gradient.
    pub fn is_missing(&self) -> bool {
        self.missing
    }

    /// Makes a missing gradient one of zeros, so that later steps apply to it.
    pub(crate) fn or_zeros(mut self) -> Self {
        self.missing = false;
        self
    }

    /// Drops all steps and sources, unless a step has to run. For a gradient that does not count: one of
    /// weight 0 may be NaN.
    pub(crate) fn unread(mut self) -> Self {
        // A step with state has to write it, and the norm of a group is also that of other leaves.
        let is_for_nothing = |step: &Step<'_>| match step {
            Step::Check => true,
            Step::Map { slots, .. } => slots.is_empty(),
            Step::Tensor(step) => step.slots.is_empty(),
            Step::Reduce(reduction) => reduction.group.is_none(),
            Step::Output(_) | Step::Identity => true,
        };
        if self.steps.iter().all(is_for_nothing) {
            // First, because the index of the norm's step means nothing after `clear`.
            self = self.unmeasured();
            self.steps.clear();
            self.sources.clear();
        }
        self
    }

    /// Appends arithmetic that adds what earlier calls collected. With `finite_only`, checks the sum.
    pub(crate) fn release(mut self, kernel: impl Arithmetic, slots: Slots<'a>) -> Self {
        self.windows.released = true;
        // Dropped, because the check of the sum covers all that goes into it: one read instead of two.
        if matches!(self.steps.last(), Some(Step::Check)) {
            self.steps.pop();
        }
        let finite_only = self.finite_only;
        let released = self.map(kernel, slots);
        if finite_only { released.finite_only() } else { released }
    }

    /// Sets a counter when the step is committed, whether the gradient is missing or not.
    pub fn set_counter(mut self, counter: &'a mut u64, next: u64) -> Self {
        // Unchanged counters are left out, because `LeafPlan::note` takes a counter here for a change.
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

    /// Counts this step with the first counter of a rule, and returns its number: 1 for the first step.
    ///
    /// The commit writes the count. A missing gradient is not counted, but has a number to plan with.
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

    /// [`Gradient::next_step`] with the counter `t`.
    fn counted_by(self, t: &'a mut u64) -> (Self, u64) {
        let next = counts::after(*t, 1);
        (if self.missing { self } else { self.set_counter(t, next) }, next)
    }

    /// Appends elementwise arithmetic with its state.
    ///
    /// [`update`](crate::update) refuses the call if the arithmetic is for another number of state tensors.
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
}

/// The norms of a leaf, which the reduce stage sets. Shared, because two closures of its job set them.
#[derive(Clone, Debug, Default)]
pub(crate) struct LeafNorms(Arc<NormCells>);

#[derive(Debug, Default)]
struct NormCells {
    gradient: OnceLock<f64>,
    step: OnceLock<Norms>,
}

/// The request for the norms of a gradient and of its step.
#[derive(Debug)]
struct NormRequest {
    norms: LeafNorms,
    /// The index of the step that takes the norm of the gradient, once it is planned.
    place: Option<usize>,
}

impl LeafNorms {
    pub(crate) fn set_gradient(&self, norm: f64) {
        // Planned once, so set once.
        let _ = self.0.gradient.set(norm);
    }

    pub(crate) fn set_step(&self, norms: Norms) {
        let _ = self.0.step.set(norms);
    }

    /// The norm of the gradient and those of its step; `None` for a leaf without a step.
    pub(crate) fn found(&self) -> Option<(f64, Norms)> {
        Some((*self.0.gradient.get()?, *self.0.step.get()?))
    }
}
