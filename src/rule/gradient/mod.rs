//! The lazy gradient: its source tensors and the steps that rules have planned on their sum.
//!
//! Methods only append steps; the engine runs the steps after all rules have planned. Two things need care:
//!
//! - A missing gradient gets no steps, except sums over a group. Counters and numbers are set nevertheless,
//!   because windows and groups go on without the gradient.
//! - If a caller has requested the norm of the gradient, `NormRequest::step` is the index of the step that
//!   takes the norm. Before a step in front of that index is removed, `without_norm` has to remove the norm's
//!   step.

pub(crate) mod elementwise;
pub(crate) mod reductions;
#[cfg(feature = "candle")]
mod whole;

use std::sync::{Arc, OnceLock};

use super::state::parts::count_error;
use super::{Counters, Slots};
use crate::engine::{
    Buffer, CounterWrites, Epilogue, Job, Norms, NumberWrites, Operand, Progress, Sources, Step, Steps, Then,
    Windows, erased,
};
use crate::error::Result;
use crate::model::lent::Lend;
use crate::numbers::counts;
use crate::numbers::value::{Arithmetic, DivideBy, ScaleBy};

/// A gradient on its way through a chain of rules: its sources, the planned steps and their state.
///
/// Nothing is computed while rules plan. [`update`](crate::update) evaluates the gradient in one pass over
/// memory, once every rule of every leaf has planned without an error.
///
/// A gradient can be *missing*: the parameter took no part in the loss. Steps planned on a missing gradient
/// do nothing and move no counter. [`AccumGrad`](crate::AccumGrad) turns a missing gradient into the sum or
/// mean that it has accumulated.
#[must_use = "a gradient that is dropped moves no parameter: return it in a `Flow`"]
pub struct Gradient<'a> {
    pub(super) missing: bool,
    sources: Sources<'a>,
    pub(super) steps: Steps<'a>,
    counters: CounterWrites<'a>,
    numbers: NumberWrites<'a>,
    weight: u64,
    /// The number of calls that windows at this place of the chain have counted before this call. After a
    /// window of `n` calls in the chain, `n` calls count as one.
    calls: u64,
    windows: Windows,
    /// Whether open windows end in this call, although they are not full.
    releases: bool,
    /// Whether windows at this place of the chain count this call.
    is_counted: bool,
    /// Whether a gradient that is not finite skips the call.
    finite_only: bool,
    /// The request of the caller of `update` for norms, if there is one.
    norm_request: Option<NormRequest>,
    path: &'a str,
}

/// How a chain goes on after a rule.
#[must_use]
#[derive(Debug)]
pub enum Flow<'a> {
    /// The next rule works on this gradient. After the last rule, the gradient is the step of the parameter.
    Step(Gradient<'a>),
    /// The chain ends in this call: planned steps still write their state, and the parameter stays.
    ///
    /// Put an [`AccumGrad`](crate::AccumGrad) before a rule that holds gradients, never after such a rule. A
    /// call with a held gradient does not reach an `AccumGrad` after the rule. If such a call leaves no
    /// window open, all windows count their calls from 0 again, and may never be full.
    Hold(Gradient<'a>),
}

impl<'a> Flow<'a> {
    /// Applies `step` unless the gradient is held.
    ///
    /// A wrapper changes the step of its inner rule by `and_then`.
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

    /// The job of all planned steps on `x`. If the parameter makes a step, `epilogue` stores the parameter.
    pub(crate) fn into_job(
        self,
        x: Operand<'a>,
        epilogue: Epilogue<&'a dyn Lend, &'a mut Buffer>,
    ) -> Job<'a> {
        let (gradient, progress) = match self {
            Flow::Step(gradient) if gradient.missing => (gradient, Progress::WithoutGradient),
            Flow::Hold(gradient) if gradient.missing => (gradient, Progress::Waiting),
            Flow::Step(gradient) => (gradient.measure_step(), Progress::Applied),
            // The norm is removed, because the norm of a window is taken when the window ends.
            Flow::Hold(gradient) => (gradient.without_norm(), Progress::Accumulated),
        };
        Job {
            steps: gradient.steps,
            counters: gradient.counters,
            numbers: gradient.numbers,
            epilogue: if progress == Progress::Applied {
                epilogue
            } else {
                Epilogue::StateOnly
            },
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
    /// The sum of `sources`, or a missing gradient if there are no sources.
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
            is_counted: true,
            finite_only: false,
            norm_request: None,
            path,
        }
    }

    /// Sets the number of calls that windows have counted before this call. Windows do not count a call that
    /// `releases` windows, because such a call brings no gradient.
    pub(crate) fn after_calls(self, calls: u64, releases: bool) -> Self {
        Gradient {
            calls,
            releases,
            is_counted: !releases,
            ..self
        }
    }

    /// Counts this call in a window of `n` calls, of which the leaf has counted `earlier` before.
    ///
    /// Returns whether the window ends with this call, and the count of the leaf. The count of the tree
    /// decides on the end, so that all windows of `n` calls end together, no matter when their leaf joined.
    pub(crate) fn count_in_window(mut self, n: u64, earlier: u64) -> (Self, bool, u64) {
        let leaf_calls = counts::add(earlier, self.is_counted.into());
        if self.releases {
            // A window later in the chain counts the step of this window. An empty window makes no step.
            self.is_counted = leaf_calls > 0;
            return (self, true, leaf_calls);
        }
        self.windows.counts_call |= n > 1;
        let tree_calls = self.calls + 1;
        let ends = tree_calls.is_multiple_of(n);
        if ends {
            // Rules after this window count windows instead of calls: this window is their current call.
            self.calls = tree_calls / n - 1;
        } else {
            self.windows.open = true;
        }
        (self, ends, leaf_calls)
    }

    /// The parameter's path in the model.
    pub fn path(&self) -> &'a str {
        self.path
    }

    /// The weight of this call in a weighted mean, see [`Update::weight`](crate::Update::weight).
    pub fn weight(&self) -> u64 {
        self.weight
    }

    /// Sets the weight. The weight of a mean is the sum of the weights of its gradients.
    pub(crate) fn with_weight(self, weight: u64) -> Self {
        Gradient { weight, ..self }
    }

    /// Whether the parameter received no gradient.
    pub fn is_missing(&self) -> bool {
        self.missing
    }

    /// Turns a missing gradient into a gradient of zeros, to which later steps apply.
    pub(crate) fn or_zeros(mut self) -> Self {
        self.missing = false;
        self
    }

    /// Unless a step has to write state, drops the sources and all steps but the reductions of a group, to
    /// which this leaf then adds nothing.
    ///
    /// This is for a gradient of weight 0, which does not count and may be NaN.
    pub(crate) fn discard(mut self) -> Self {
        let has_state = |step: &Step<'_>| match step {
            Step::Map { slots, .. } => !slots.is_empty(),
            Step::Tensor(step) => !step.slots.is_empty(),
            Step::Reduce(reduction) => {
                let has_numbers = matches!(&reduction.then, Then::Map { numbers, .. } if !numbers.is_empty());
                has_numbers || !reduction.slots.is_empty()
            }
            Step::Check | Step::Output(_) | Step::Identity => false,
        };
        if !self.steps.iter().any(has_state) {
            // The norm comes first, because the index of its step is meaningless after `retain`.
            self = self.without_norm();
            // Other leaves wait for the numbers of a group.
            self.steps.retain(|step| match step {
                Step::Reduce(reduction) => {
                    reduction.contributes = false;
                    reduction.group.is_some()
                }
                _ => false,
            });
            self.sources.clear();
        }
        self
    }

    /// Appends arithmetic that adds the gradients of earlier calls. With `finite_only`, checks the sum.
    pub(crate) fn release(mut self, kernel: impl Arithmetic, slots: Slots<'a>) -> Self {
        self.windows.released = true;
        // The check is dropped, because a check of the sum covers all its terms with one read instead of two.
        if matches!(self.steps.last(), Some(Step::Check)) {
            self.steps.pop();
        }
        let finite_only = self.finite_only;
        let sum = self.map(kernel, slots);
        if finite_only { sum.finite_only() } else { sum }
    }

    /// Sets a counter when the step is committed, whether the gradient is missing or not.
    pub fn set_counter(mut self, counter: &'a mut u64, next: u64) -> Self {
        // An unchanged counter is left out, because `LeafPlan::note` takes each counter of a job for a
        // change.
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

    /// Counts this step with the first counter of a rule, and returns the step's number, from 1 on.
    ///
    /// The commit writes the count. A step of a missing gradient is not counted, but has a number to plan
    /// with.
    ///
    /// # Errors
    /// If there is no counter: the rule's [`init`](crate::Rule::init) made none, or the state is another
    /// rule's.
    pub fn next_step(self, Counters(counters): Counters<'a>) -> Result<(Self, u64)> {
        let Some((_, t)) = counters.first_mut() else {
            return Err(count_error("counters", 1, 0));
        };
        Ok(self.count_step(t))
    }

    /// [`Gradient::next_step`] with the counter `t`.
    pub(crate) fn count_step(self, t: &'a mut u64) -> (Self, u64) {
        let next = counts::add(*t, 1);
        (
            if self.missing {
                self
            } else {
                self.set_counter(t, next)
            },
            next,
        )
    }

    /// Appends elementwise arithmetic with its state.
    ///
    /// [`update`](crate::update) refuses arithmetic for another number of state tensors than `slots` has.
    /// [`Parts`](crate::Parts) has an example.
    pub fn map(mut self, arithmetic: impl Arithmetic, Slots(slots): Slots<'a>) -> Self {
        if !self.missing {
            self.steps.push(Step::Map {
                kernel: erased(arithmetic),
                slots,
            });
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

    /// Lets a gradient that is not finite at this place of the chain skip the whole call.
    pub(crate) fn finite_only(mut self) -> Self {
        self.finite_only = true;
        if !self.missing {
            self.steps.push(Step::Check);
        }
        self
    }
}

/// The norms of a leaf, which the reduce stage sets. The cells are shared, because two closures of the
/// leaf's job set norms.
#[derive(Clone, Debug, Default)]
pub(crate) struct LeafNorms {
    gradient: Arc<OnceLock<f64>>,
    step: Arc<OnceLock<Norms>>,
}

/// The request for the norms of a gradient and of its step.
#[derive(Debug)]
struct NormRequest {
    norms: LeafNorms,
    /// The index of the planned step that takes the norm of the gradient, if there is one.
    step: Option<usize>,
}

impl LeafNorms {
    pub(crate) fn set_gradient(&self, norm: f64) {
        // The value is set only once, because the norm is planned only once.
        let _ = self.gradient.set(norm);
    }

    pub(crate) fn set_step(&self, norms: Norms) {
        let _ = self.step.set(norms);
    }

    /// The norm of the gradient and the norms of its step; `None` for a leaf without a step.
    pub(crate) fn get(&self) -> Option<(f64, Norms)> {
        Some((*self.gradient.get()?, *self.step.get()?))
    }
}
