//! What one leaf has to do in one step, before anything is written.

use std::sync::{Mutex, OnceLock, PoisonError};

use candle_core::{DType, Tensor};
use smallvec::SmallVec;

use super::{Addresses, Buffer, ErasedKernel, Factor, Following, Kernel, Norms, Remote, compute_dtype};
use crate::error::Result;
use crate::value::{Expr, Value};

/// The state tensors of one step of a chain, in the order its rule named them.
pub(crate) type Slots<'a> = &'a mut [(&'static str, Buffer)];

/// Gradients to be added up, each of the parameter's shape; none means zeros.
pub(crate) type Source = SmallVec<[Tensor; 1]>;

/// Links of a lazy gradient. Jobs are small, as thousands of them do not stay in the cache until they run; a chain has a list of its own.
pub(crate) type Steps<'a> = SmallVec<[Step<'a>; 1]>;

/// Counters with the values they take in the commit.
pub(crate) type Counters<'a> = SmallVec<[(&'a mut u64, u64); 2]>;

/// The plan for one leaf.
pub(crate) struct Job<'a> {
    /// The parameter's path, for errors.
    pub(crate) path: &'a str,
    /// What the arithmetic calls x: the parameter, or its master copy.
    pub(crate) x: &'a Tensor,
    /// Whether x is the bf16 part of an f32.
    pub(crate) is_split: bool,
    /// What x lacks of an f32 then; nothing, while another job of the leaf has it.
    pub(crate) rest: Option<&'a mut Buffer>,
    /// How many elements there are.
    pub(crate) length: usize,
    /// The dtype of the arithmetic: F64 if the parameter, its master or a gradient is F64, else F32.
    pub(crate) compute: DType,
    /// The gradient as it enters the first step.
    pub(crate) source: Source,
    /// What happens to the gradient, in order.
    pub(crate) steps: Steps<'a>,
    /// Where the result goes.
    pub(crate) store: Store<'a>,
    /// The parameter, if it is on another device than x. The gradients are there, too.
    pub(crate) remote: Option<Remote<'a>>,
    /// Counters with the values they take in the commit.
    pub(crate) counters: Counters<'a>,
    /// Numbers with the values they take in the commit.
    pub(crate) numbers: Vec<(&'a mut f64, f64)>,
    /// State tensors that a tensor function replaces, with their next values.
    pub(crate) replaced: Vec<(&'a mut Buffer, Tensor)>,
    /// Parts of the chain before a tensor function, which still have state slots to write. They run first.
    pub(crate) prefixes: Vec<Job<'a>>,
}

impl<'a> Job<'a> {
    /// A job that does nothing to `x` yet.
    pub(crate) fn new(path: &'a str, x: &'a Tensor, source: Source) -> Self {
        let wide = source.iter().any(|source| source.dtype() == DType::F64);
        Job {
            path,
            x,
            is_split: false,
            rest: None,
            length: x.elem_count(),
            compute: if wide { DType::F64 } else { compute_dtype(x.dtype()) },
            source,
            steps: Steps::new(),
            store: Store::Nothing,
            remote: None,
            counters: Counters::new(),
            numbers: Vec::new(),
            replaced: Vec::new(),
            prefixes: Vec::new(),
        }
    }

    /// Writes the results of tensor functions to the state.
    pub(crate) fn replace(&mut self) -> Result<()> {
        for (slot, next) in self.replaced.drain(..) {
            slot.set(&next)?;
        }
        Ok(())
    }

    /// Moves counters and numbers; for when the rest has been written.
    pub(crate) fn count(&mut self) {
        for (number, next) in self.numbers.drain(..) {
            *number = next;
        }
        for (counter, next) in self.counters.drain(..) {
            *counter = next;
        }
    }

    /// The parts of this job that run first, each with what it needs of the parameter.
    pub(crate) fn run_prefixes(&mut self, mut run: impl FnMut(&mut Job<'a>) -> Result<()>) -> Result<()> {
        for mut prefix in std::mem::take(&mut self.prefixes) {
            prefix.rest = self.rest.take();
            let outcome = run(&mut prefix);
            self.rest = prefix.rest.take();
            outcome?;
        }
        Ok(())
    }

    /// The part of this job before its first open reduction or tensor function, writing nothing but state slots.
    pub(crate) fn prefix(&mut self, length: usize) -> Job<'a> {
        let rest = self.steps.drain(length..).collect();
        let steps = std::mem::replace(&mut self.steps, rest);
        Job { steps, compute: self.compute, is_split: self.is_split, ..Job::new(self.path, self.x, std::mem::take(&mut self.source)) }
    }
}

/// A job, and what is asked of it when work is handed out.
pub(crate) struct Ticket<'a> {
    pub(crate) job: Job<'a>,
    /// Whether x is on the CPU.
    pub(crate) on_cpu: bool,
    /// Whether something is to be evaluated in the reduce stage.
    pub(crate) open: bool,
    /// Where parameter and gradients were when this was planned.
    pub(crate) addresses: SmallVec<[Addresses; 2]>,
}

impl<'a> Ticket<'a> {
    pub(crate) fn new(job: Job<'a>) -> Self {
        let open = job.steps.iter().any(|step| !matches!(step, Step::Map { .. }));
        Ticket { on_cpu: job.x.device().is_cpu(), open, addresses: SmallVec::new(), job }
    }
}

/// Memory for the tickets of a call, kept from one to the next.
#[derive(Default)]
pub(crate) struct Tickets(Vec<Option<Ticket<'static>>>);

impl std::fmt::Debug for Tickets {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Tickets").field("capacity", &self.0.capacity()).finish()
    }
}

impl Tickets {
    /// A place for each leaf.
    pub(crate) fn lend<'a>(&mut self, leaves: usize) -> Vec<Option<Ticket<'a>>> {
        let mut places = emptied(std::mem::take(&mut self.0));
        places.resize_with(leaves, || None);
        places
    }

    /// Takes the memory back.
    pub(crate) fn take_back(&mut self, places: Vec<Option<Ticket<'_>>>) {
        self.0 = emptied(places);
    }
}

/// The same memory for values of another lifetime: collecting in place keeps it.
fn emptied<'b>(mut places: Vec<Option<Ticket<'_>>>) -> Vec<Option<Ticket<'b>>> {
    places.clear();
    places.into_iter().map(|_| None).collect()
}

/// How a parameter is stored, and so what the commit writes after the steps have run.
pub(crate) enum Store<'a> {
    /// The parameter stays; only state moves.
    Nothing,
    /// `x -= dx`, rounded to the parameter's dtype.
    Plain,
    /// `x -= dx` on the master x, and the parameter becomes x rounded to nearest even.
    Master {
        /// The parameter in its own precision.
        parameter: &'a Tensor,
    },
    /// `x -= dx`, rounded up or down at random.
    Random {
        /// Decides the random bits.
        key: [u32; 2],
    },
    /// `x -= dx`, rounded to the parameter's dtype; what that loses is carried over to the next step.
    Kahan {
        /// What the parameter lacks.
        compensation: &'a mut Buffer,
    },
}

/// One link of a lazy gradient.
pub(crate) enum Step<'a> {
    /// Elementwise arithmetic with its scalars bound.
    Map {
        /// The arithmetic.
        kernel: ErasedKernel,
        /// The state it reads and writes.
        slots: Slots<'a>,
    },
    /// The whole call is to be skipped if the gradient at this place has a number that is infinite or NaN.
    Check,
    /// A scale whose factor depends on a norm of the gradient at this place.
    Reduce(Reduction),
    /// Sums over all leaves, on which the step that takes their place depends.
    Sums(Box<Sums<'a>>),
    /// A function of the whole tensor.
    Tensor(Box<TensorStep<'a>>),
}

impl Step<'_> {
    /// The arithmetic, if it is known.
    pub(crate) fn link(&self) -> Option<Link<'_>> {
        if let Step::Map { kernel, slots } = self { Some(Link { kernel: &**kernel, slots }) } else { None }
    }

    /// The state of its arithmetic, known or not.
    pub(crate) fn slots(&self) -> &[(&'static str, Buffer)] {
        match self {
            Step::Map { slots, .. } => slots,
            Step::Sums(sums) => sums.addends.as_ref().map_or(&[], |[_, last]| last.slots),
            Step::Check | Step::Reduce(_) | Step::Tensor(_) => &[],
        }
    }

    /// The gradient behind it, if it is a function that has run ahead.
    pub(crate) fn output(&self) -> Option<&Tensor> {
        match self {
            Step::Tensor(step) => step.output.get()?.as_ref().ok().map(|output| &output.gradient),
            _ => None,
        }
    }
}

/// Elementwise arithmetic and its state.
#[derive(Clone, Copy)]
pub(crate) struct Link<'j> {
    pub(crate) kernel: &'j dyn Kernel,
    pub(crate) slots: &'j [(&'static str, Buffer)],
}

/// Two sums over the elements of all leaves that ask for those of the same name, and a step that depends on them.
pub(crate) struct Sums<'a> {
    /// Says which sums they are.
    pub(crate) name: &'static str,
    /// What is added up; nothing, where the leaf has nothing to add and makes no step. The step has the state of the last.
    pub(crate) addends: Option<[Addend<'a>; 2]>,
    /// What the state remembers of the sums.
    pub(crate) numbers: [&'a mut f64; 2],
    /// What takes the sums' place.
    pub(crate) following: Box<dyn Following>,
}

/// What is added up of a leaf.
pub(crate) struct Addend<'a> {
    /// Whether magnitudes are added up.
    pub(crate) magnitudes: bool,
    /// From x, the gradient and the slots, which it only reads, to what is added up.
    pub(crate) probe: ErasedKernel,
    /// The state that the probe reads.
    pub(crate) slots: Slots<'a>,
}

impl Addend<'_> {
    /// The arithmetic.
    pub(crate) fn link(&self) -> Link<'_> {
        Link { kernel: &*self.probe, slots: self.slots }
    }
}

/// A norm to be taken, and what to make of it.
pub(crate) struct Reduction {
    /// The exponent: 1, 2, infinity, any positive number, or 0 to count the elements other than 0.
    pub(crate) p: f64,
    /// What the norm is of.
    pub(crate) scope: Scope,
    /// Whether the norm stands for a [`Step::Check`] as well.
    pub(crate) finite_only: bool,
    /// Whether the parameter's norm is to be taken, too.
    pub(crate) of_parameter: bool,
    /// What happens if the gradient's norm is not finite.
    pub(crate) non_finite: OnNonFinite,
    /// From the norms to the factor.
    pub(crate) factor: Box<dyn Factor>,
}

impl Reduction {
    /// What follows from the norms.
    pub(crate) fn resolve(&self, norms: Norms) -> Resolved {
        match self.non_finite {
            OnNonFinite::Compute => Resolved::Scale(self.factor.of(norms)),
            _ if norms.gradient.is_finite() => Resolved::Scale(self.factor.of(norms)),
            OnNonFinite::Pass => Resolved::Scale(1.0),
            OnNonFinite::Refuse => Resolved::Refuse,
            OnNonFinite::Skip => Resolved::Skip,
        }
    }

    /// Records the arithmetic of the factor that follows from the norms, if one does.
    pub(crate) fn trace<'g>(&self, norms: Norms<Expr<'g>>) -> Expr<'g> {
        let factor = self.factor.trace(norms);
        match self.non_finite {
            OnNonFinite::Pass => {
                let is_finite = norms.gradient.abs().le(factor.constant(f64::MAX));
                Value::select(is_finite, factor, factor.constant(1.0))
            }
            OnNonFinite::Compute | OnNonFinite::Refuse | OnNonFinite::Skip => factor,
        }
    }
}

/// What happens if a norm is infinite or NaN.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum OnNonFinite {
    /// The factor follows from it as from any other.
    Compute,
    /// The gradient stays as it is.
    Pass,
    /// See [`Resolved::Refuse`].
    Refuse,
    /// See [`Resolved::Skip`].
    Skip,
}

/// What a norm is of.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Scope {
    /// This leaf.
    Leaf,
    /// All leaves with a norm of this group.
    Group(u64),
}

/// What follows from a norm once it is known.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Resolved {
    /// Multiply the gradient.
    Scale(f64),
    /// Refuse the call: the norm is not finite.
    Refuse,
    /// Leave everything as it is and report a skipped step.
    Skip,
}

/// Receives x, the gradient (both in the compute dtype) and the slots' values, which it may replace.
pub(crate) type TensorFunction<'a> = dyn FnOnce(&Tensor, Tensor, &mut [Tensor]) -> Result<Tensor> + Send + Sync + 'a;

/// A function from the gradient to the gradient, with candle's tensor operations.
pub(crate) struct TensorStep<'a> {
    /// The function, until it runs.
    function: Mutex<Option<Box<TensorFunction<'a>>>>,
    /// The state it reads and replaces.
    pub(crate) slots: Slots<'a>,
    /// What came of it.
    output: OnceLock<Result<Output>>,
}

/// What a function has returned.
pub(crate) struct Output {
    pub(crate) gradient: Tensor,
    /// The next values of the state.
    pub(crate) slots: Vec<Tensor>,
}

impl<'a> TensorStep<'a> {
    pub(crate) fn new(function: Box<TensorFunction<'a>>, slots: Slots<'a>) -> Self {
        TensorStep { function: Mutex::new(Some(function)), slots, output: OnceLock::new() }
    }

    /// Runs the function, if it has not run yet. What comes of it is kept.
    pub(crate) fn run(&self, run: impl FnOnce(Box<TensorFunction<'a>>, &[(&'static str, Buffer)]) -> Result<Output>) {
        let function = self.function.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(function) = function {
            // It is the first, as the function was there.
            let _ = self.output.set(run(function, self.slots));
        }
    }

    /// Whether the function has run.
    pub(crate) fn has_run(&self) -> bool {
        self.output.get().is_some()
    }

    /// The state, and what came of the function.
    pub(crate) fn into_output(self) -> (Slots<'a>, Option<Result<Output>>) {
        (self.slots, self.output.into_inner())
    }
}
