//! The lazy gradient: a tensor and what is to happen to it.

use candle_core::Tensor;

use super::State;
use crate::engine::{Counters, Job, Kernel, Later, Reduction, Resolved, Scale, Scope, Slots, Source, Step, Steps, Store, Sum, TensorStep};
use crate::error::Result;

/// A gradient on its way through a chain of rules: where it comes from, the steps planned so far and the state they use.
///
/// Nothing is computed while a rule looks at it. [`update`](crate::update) evaluates it in one pass over memory, once every rule of
/// every leaf has planned without an error.
///
/// A gradient can be *missing*: the parameter took no part in the loss. Steps planned on a missing gradient do nothing, and move no
/// counter; [`AccumGrad`](crate::AccumGrad) turns a missing gradient into what it has accumulated.
pub struct Gradient<'a> {
    missing: bool,
    source: Source,
    steps: Steps<'a>,
    counters: Counters<'a>,
    numbers: Vec<(&'a mut f64, Later)>,
    weight: u64,
}

/// Where a chain goes after a rule.
#[derive(Debug)]
pub enum Flow<'a> {
    /// On, with this gradient.
    Step(Gradient<'a>),
    /// No further in this call: the planned steps run for the state they write, and the parameter stays.
    Hold(Gradient<'a>),
}

impl std::fmt::Debug for Gradient<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Gradient").field("missing", &self.missing).field("steps", &self.steps.len()).finish_non_exhaustive()
    }
}

/// A number that is known already.
pub(crate) fn known(number: f64) -> Later {
    Later::new(number.into())
}

impl<'a> Gradient<'a> {
    /// The sum of these tensors; missing if there is none.
    pub(crate) fn new(source: Source, weight: u64) -> Self {
        Gradient { missing: source.is_empty(), source, steps: Steps::new(), counters: Counters::new(), numbers: Vec::new(), weight }
    }

    /// How much this call counts in a weighted mean, see [`Update::weight`](crate::Update::weight).
    pub fn weight(&self) -> u64 {
        self.weight
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

    /// Sets a counter when the step is committed, whether the gradient is missing or not.
    pub(crate) fn count(mut self, counter: &'a mut u64, next: u64) -> Self {
        if *counter != next {
            self.counters.push((counter, next));
        }
        self
    }

    /// Sets a number when the step is committed, whether the gradient is missing or not.
    pub(crate) fn number(mut self, number: &'a mut f64, next: Later) -> Self {
        self.numbers.push((number, next));
        self
    }

    /// Adds up over all leaves what `probe` makes of their elements, before anything is written, and goes on with the step that `resolve` makes of
    /// the sum. A missing gradient adds nothing and makes no step, but learns of the sum.
    pub(crate) fn sum<F>(mut self, name: &'static str, magnitudes: bool, probe: Box<dyn Kernel>, slots: Slots<'a>, resolve: F) -> Self
    where
        F: FnOnce(f64) -> Option<Box<dyn Kernel>> + Send + Sync + 'a,
    {
        let probe = (!self.missing).then_some(probe);
        self.steps.push(Step::Sum(Sum { name, magnitudes, probe, slots, resolve: Box::new(resolve) }));
        self
    }

    /// Elementwise arithmetic on the gradient, with its state.
    pub(crate) fn map(mut self, kernel: Box<dyn Kernel>, slots: Slots<'a>) -> Self {
        if !self.missing {
            self.steps.push(Step::Map { kernel, slots });
        }
        self
    }

    /// Multiplies the gradient by a number.
    pub(crate) fn scale(self, factor: f64) -> Self {
        self.map(Box::new(Scale(factor)), &mut [])
    }

    /// Skips the whole call if the gradient is not finite at this place.
    pub(crate) fn finite_only(mut self) -> Self {
        if !self.missing {
            self.steps.push(Step::Check);
        }
        self
    }

    /// Multiplies the gradient by a factor that depends on its norm, which is taken before anything is written.
    pub(crate) fn scale_by_norm(mut self, scope: Scope, p: f64, resolve: impl Fn(f64) -> Resolved + Send + Sync + 'a) -> Self {
        if !self.missing {
            self.steps.push(Step::Reduce(Reduction { p, scope, finite_only: false, resolve: Box::new(resolve) }));
        }
        self
    }

    /// Puts a function of the whole tensor into the chain, for rules that are not elementwise.
    ///
    /// The function receives the step's number (1 for the first), the parameter (its master where there is one) and the gradient, both in
    /// the compute dtype, and the state's tensors. It returns the new gradient and may replace the tensors, keeping their shapes. It runs
    /// before anything is written, and only if there is a gradient; the state's first counter, if it has one, counts these steps.
    pub fn with_tensors<F>(mut self, state: &'a mut State, function: F) -> Self
    where
        F: FnOnce(u64, &Tensor, Tensor, &mut [Tensor]) -> Result<Tensor> + Send + Sync + 'a,
    {
        if self.missing {
            return self;
        }
        let State { tensors, counters, .. } = state;
        let step = match counters.first_mut() {
            None => 1,
            Some((_, counter)) => {
                let next = *counter + 1;
                self.counters.push((counter, next));
                next
            }
        };
        let run = Box::new(move |x: &Tensor, dx: Tensor, slots: &mut [Tensor]| function(step, x, dx, slots));
        self.steps.push(Step::Tensor(TensorStep { run, slots: tensors }));
        self
    }

    /// The work this gradient stands for.
    pub(crate) fn into_job(self, path: &'a str, x: &'a Tensor, store: Store<'a>) -> Job<'a> {
        Job { steps: self.steps, counters: self.counters, numbers: self.numbers, store, ..Job::new(path, x, self.source) }
    }
}
