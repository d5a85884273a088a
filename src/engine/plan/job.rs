//! The plan for one leaf (a parameter with its state): a [`Job`], which the stages of a call change in turn.
//!
//! ```text
//! plan     gradients become sources, rules append steps, the store sets the epilogue; `check` and
//!          `copy_shared` run
//! reduce   steps that wait for numbers or functions are replaced in place, so that step indices stay valid
//! commit   the remaining functions run; the segments between results of functions are written
//! finish   results of functions go to the state, counters and numbers are set, gradients are dropped
//! ```
//!
//! 1. `length` is the number of elements of this job, `leaf_length` that of the leaf. The chunks of a sum
//!    follow from `leaf_length`, so that a sum does not depend on how the leaf is cut into parts.
//! 2. A commit locks all gradients together with the job's own memory. If two gradients lay in one storage,
//!    or a gradient in a storage that somebody may write, the commit could wait for ever. `copy_shared`
//!    copies such gradients.

use std::ops::{Deref, Range};

use smallvec::SmallVec;

use super::{Reduction, Step, StepSlots, Steps};
use crate::engine::memory::{Addresses, Buffer, WrittenStorages};
use crate::error::{Error, Result};
use crate::model::lent::{Lend, Lent, copy_of, defect};
use crate::numbers::{DType, widest_compute_dtype};
use crate::tensors::Tensor;

const NO_REDUCTION: &str = "numbers for a step that waits for none";

/// Gradients to be added up, each of the parameter's shape. No gradient means zeros.
pub(crate) type Sources<'a> = SmallVec<[Lent<'a>; 1]>;

/// Counters with the values they take in the commit.
pub(crate) type CounterWrites<'a> = SmallVec<[(&'a mut u64, u64); 2]>;

/// Numbers with the values they take in the commit.
pub(crate) type NumberWrites<'a> = Vec<(&'a mut f64, f64)>;

pub(crate) struct Job<'a> {
    /// The parameter's path, for errors.
    pub(crate) path: &'a str,
    /// What the arithmetic calls x: the parameter, or its master copy.
    pub(crate) x: Operand<'a>,
    /// The low bits of x, if x is a bf16 that is the upper part of an f32.
    pub(crate) low_bits: Option<&'a mut Buffer>,
    pub(crate) length: usize,
    /// How many elements the whole leaf has. This job may have a part of them.
    pub(crate) leaf_length: usize,
    /// The dtype of the arithmetic: F64 if the parameter, its master or a gradient is F64, else F32.
    pub(crate) compute: DType,
    /// The gradients that enter the first step as their sum.
    pub(crate) sources: Sources<'a>,
    pub(crate) steps: Steps<'a>,
    pub(crate) epilogue: Epilogue<&'a dyn Lend, &'a mut Buffer>,
    /// The parameter, if it is on another device than x. The gradients are on the parameter's device until
    /// `engine/offload.rs` downloads them.
    pub(crate) offloaded: Option<OffloadTarget<'a>>,
    pub(crate) counters: CounterWrites<'a>,
    pub(crate) numbers: NumberWrites<'a>,
    /// The addresses of the gradients that `copy_shared` has not copied, so that a prefetch takes no lock.
    pub(crate) addresses: SmallVec<[Addresses; 1]>,
    /// What the call does to the leaf, for the room `step`. The engine reads neither `progress` nor
    /// `windows`.
    pub(crate) progress: Progress,
    pub(crate) windows: Windows,
    /// Whether a write to parameter or state has begun.
    pub(crate) has_moved: bool,
}

/// What one call does to a leaf.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Progress {
    /// The leaf makes a step.
    Applied,
    /// The leaf collects a gradient, and the parameter stays.
    Accumulated,
    /// The leaf makes no step, because there is no gradient.
    WithoutGradient,
    /// There is no gradient yet, but the leaf's window goes on and may still get one.
    Waiting,
}

/// What a call does to the windows of accumulation of a parameter.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Windows {
    /// Whether a window of several calls counts this call.
    pub(crate) counts_call: bool,
    /// Whether a window stays open.
    pub(crate) open: bool,
    /// Whether the gradient includes what earlier calls collected.
    pub(crate) released: bool,
}

/// What the arithmetic calls x.
pub(crate) enum Operand<'a> {
    Lent(&'a dyn Lend),
    /// A master that nobody else can see.
    Own(&'a mut Buffer),
}

impl<'a> Operand<'a> {
    /// The operand for a master. A variable has a lock, so a master that is a variable is lent like a
    /// parameter.
    pub(crate) fn master(buffer: &'a mut Buffer) -> Self {
        match buffer.as_shared() {
            Ok(variable) => Operand::Lent(variable.as_tensor()),
            Err(buffer) => Operand::Own(buffer),
        }
    }
}

impl<'a> Deref for Operand<'a> {
    type Target = dyn Lend + 'a;

    fn deref(&self) -> &Self::Target {
        match self {
            Operand::Lent(lender) => *lender,
            Operand::Own(buffer) => &**buffer,
        }
    }
}

/// The parameter of a job on another device than its x.
#[derive(Clone, Copy)]
pub(crate) struct OffloadTarget<'a> {
    /// A tensor on the CPU, to which the job writes the parameter's next values.
    pub(crate) staging: &'a Tensor,
    pub(crate) parameter: &'a dyn Lend,
}

/// How a parameter is stored, and so what the commit writes after the steps have run.
///
/// `P` is a parameter that has a master, `C` is what a rounding loses, and `K` is the key of random bits. `P`
/// and `C` are tensors in a plan, pointers in a pass, and dtypes in printed code.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Epilogue<P, C, K = u64> {
    /// The parameter stays; only state moves.
    StateOnly,
    /// `x -= dx`, rounded to x's dtype.
    Subtract,
    /// `x -= dx` on the master x, and the parameter becomes x rounded to nearest even.
    Master(P),
    /// `x -= dx`, rounded up or down at random to x's dtype.
    Stochastic(K),
    /// `x -= dx`, rounded to x's dtype. The next step adds what the rounding loses.
    Kahan(C),
}

impl<P, C, K> Epilogue<P, C, K> {
    pub(in crate::engine) fn writes_x(&self) -> bool {
        !matches!(self, Epilogue::StateOnly)
    }

    /// What errors call x.
    pub(in crate::engine) fn x(&self) -> &'static str {
        if matches!(self, Epilogue::Master(_)) {
            "master"
        } else {
            "parameter"
        }
    }
}

/// Where the result of a chain goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(in crate::engine) enum Sink<W, R, C> {
    /// To parameter and state.
    Write(W),
    /// To a number. Nothing of the leaf is written.
    Reduce(R),
    /// To memory outside the leaf. Nothing of the leaf is written.
    Copy(C),
}

impl<P, C, K, R, T> Sink<Epilogue<P, C, K>, R, T> {
    pub(in crate::engine) fn writes_x(&self) -> bool {
        matches!(self, Sink::Write(epilogue) if epilogue.writes_x())
    }

    pub(in crate::engine) fn writes_state(&self) -> bool {
        matches!(self, Sink::Write(_))
    }
}

impl<'a> Job<'a> {
    /// A job that does nothing to `x` yet.
    pub(crate) fn new(path: &'a str, x: Operand<'a>, sources: Sources<'a>) -> Self {
        let dtypes = sources.iter().map(|source| source.dtype());
        let compute = widest_compute_dtype(dtypes.chain([x.dtype()]));
        let length = x.elem_count();
        Job {
            path,
            x,
            low_bits: None,
            length,
            leaf_length: length,
            compute,
            sources,
            steps: Steps::new(),
            epilogue: Epilogue::StateOnly,
            offloaded: None,
            counters: CounterWrites::new(),
            numbers: NumberWrites::new(),
            addresses: SmallVec::new(),
            progress: Progress::WithoutGradient,
            windows: Windows::default(),
            has_moved: false,
        }
    }

    /// Copies each gradient in memory that somebody may write, or in which another gradient lies. Keeps the
    /// addresses of the other gradients.
    ///
    /// # Errors
    /// If the storage of a gradient does not hold the gradient's elements.
    pub(crate) fn copy_shared(&mut self, targets: &WrittenStorages) -> Result<()> {
        if self.sources.is_empty() {
            return Ok(());
        }
        let own_storages = self.own_storages();
        for gradient in &mut self.sources {
            let addresses =
                Addresses::from_lender("gradient", &**gradient).map_err(|error| error.at(self.path))?;
            let is_locked = |memory| {
                own_storages.contains(&memory)
                    || self.addresses.iter().any(|other| other.memory == Some(memory))
            };
            let is_variable = gradient.tensor().is_some_and(Tensor::is_variable);
            let is_written = |memory: &usize| targets.contains_key(memory) || is_locked(*memory);
            if is_variable || addresses.memory.as_ref().is_some_and(is_written) {
                let copy = copy_in_shape(&**gradient, self.x.shape());
                *gradient = Lent::Tensor(copy.map_err(|error| error.at(self.path))?);
            } else {
                self.addresses.push(addresses);
            }
        }
        Ok(())
    }

    /// Each lender whose memory the job writes, with its name in errors.
    pub(in crate::engine) fn write_targets(&self) -> impl Iterator<Item = (&'static str, &'a dyn Lend)> {
        let x = if let Operand::Lent(lender) = self.x {
            Some((self.epilogue.x(), lender))
        } else {
            None
        };
        let parameter = if let Epilogue::Master(parameter) = self.epilogue {
            Some(parameter)
        } else {
            None
        };
        let offloaded = self.offloaded.map(|offloaded| offloaded.parameter);
        x.into_iter().chain(
            parameter
                .into_iter()
                .chain(offloaded)
                .map(|parameter| ("parameter", parameter)),
        )
    }

    /// The addresses of the storages that the commit locks for writing.
    pub(in crate::engine) fn own_storages(&self) -> SmallVec<[usize; 2]> {
        self.write_targets()
            .filter_map(|(_, lender)| lender.memory())
            .collect()
    }

    /// Whether all memory that the job reads or writes, except state, is that of candle's tensors.
    pub(in crate::engine) fn uses_only_tensors(&self) -> bool {
        self.write_targets().all(|(_, lender)| lender.tensor().is_some())
            && self.sources.iter().all(|source| source.tensor().is_some())
    }

    /// Whether the job shares pending numbers with other leaves.
    pub(crate) fn shares_numbers(&self) -> bool {
        let is_shared =
            |step: &Step<'_>| matches!(step, Step::Reduce(reduction) if reduction.group.is_some());
        self.steps.iter().any(is_shared)
    }

    /// Whether functions of the whole tensor have not run yet.
    pub(crate) fn has_functions(&self) -> bool {
        self.length > 0 && self.steps.iter().any(|step| matches!(step, Step::Tensor(_)))
    }

    /// The ranges of steps that the commit runs as one loop each. A range ends before a function, whose
    /// result is the gradient of the next range. Ranges that write nothing are left out. All functions must
    /// have run.
    pub(in crate::engine) fn segments(&self) -> SmallVec<[Range<usize>; 1]> {
        let (mut segments, mut start) = (SmallVec::new(), 0);
        loop {
            let output = self.steps[start..]
                .iter()
                .position(|step| matches!(step, Step::Output(_)));
            let end = output.map_or(self.steps.len(), |output| start + output);
            // Steps without state have nothing to write: the function has already read their result.
            let writes_state = self.steps[start..end].iter().any(|step| !step.slots().is_empty());
            if writes_state || output.is_none() && self.epilogue.writes_x() {
                segments.push(start..end);
            }
            if output.is_none() {
                return segments;
            }
            start = end + 1;
        }
    }

    /// The epilogue after a segment. Only the last segment stores the parameter.
    pub(in crate::engine) fn epilogue_of(
        &self,
        segment: &Range<usize>,
    ) -> &Epilogue<&'a dyn Lend, &'a mut Buffer> {
        if segment.end == self.steps.len() {
            &self.epilogue
        } else {
            &Epilogue::StateOnly
        }
    }

    /// Ends a job whose segments are written: stores the state that functions have returned, and moves
    /// counters and numbers. The gradients are dropped here, so that a call frees them leaf by leaf.
    pub(crate) fn finish(&mut self) -> Result<()> {
        self.has_moved |= self.epilogue.writes_x() || self.steps.iter().any(|step| !step.slots().is_empty());
        for step in &mut self.steps {
            if let Step::Output(output) = step {
                output
                    .slots
                    .iter_mut()
                    .zip(&output.next)
                    .try_for_each(|((_, slot), next)| slot.set(next))?;
            }
        }
        self.numbers.drain(..).for_each(|(number, next)| *number = next);
        self.counters
            .drain(..)
            .for_each(|(counter, next)| *counter = next);
        self.sources.clear();
        self.steps.clear();
        Ok(())
    }

    pub(in crate::engine) fn reduction(&self, index: usize) -> Result<&Reduction<'a>> {
        if let Step::Reduce(reduction) = &self.steps[index] {
            Ok(reduction)
        } else {
            Err(self.defect(NO_REDUCTION))
        }
    }

    /// Takes out the reduction at `index`, and leaves a step that does nothing.
    pub(in crate::engine) fn take_reduction(&mut self, index: usize) -> Result<Reduction<'a>> {
        let step = std::mem::replace(&mut self.steps[index], Step::Identity);
        if let Step::Reduce(reduction) = step {
            Ok(*reduction)
        } else {
            Err(self.defect(NO_REDUCTION))
        }
    }

    /// The error for a state that no plan should reach: a defect of this crate.
    pub(in crate::engine) fn defect(&self, problem: &'static str) -> Error {
        defect(problem).at(self.path)
    }
}

/// A copy of a gradient in the parameter's shape, because lent memory may be a vector.
pub(in crate::engine) fn copy_in_shape(gradient: &dyn Lend, shape: &[usize]) -> Result<Tensor> {
    Ok(copy_of("gradient", gradient)?.reshape(shape)?)
}

/// The gradients after these steps: what the last function among the steps has returned. Without a function,
/// the `sources` of the job.
pub(in crate::engine) fn sources_after<'s, 'a>(
    steps: &'s [Step<'a>],
    sources: &'s [Lent<'a>],
) -> &'s [Lent<'a>] {
    let output = |step: &'s Step<'a>| {
        if let Step::Output(output) = step {
            Some(&output.gradient)
        } else {
            None
        }
    };
    steps
        .iter()
        .rev()
        .find_map(output)
        .map_or(sources, std::slice::from_ref)
}

/// The slots of a chain, in order.
pub(in crate::engine) fn slots_mut<'s>(steps: &'s mut [Step<'_>]) -> impl Iterator<Item = &'s mut Buffer> {
    let step_slots = |step: &'s mut Step<'_>| -> StepSlots<'s> {
        if let Step::Map { slots, .. } = step {
            slots
        } else {
            Default::default()
        }
    };
    steps.iter_mut().flat_map(step_slots).map(|(_, slot)| slot)
}

/// Memory for the list of jobs of a call. The memory is kept from call to call, so that the list is allocated
/// once.
#[derive(Default)]
pub(crate) struct JobPool(Vec<Option<Job<'static>>>);

impl std::fmt::Debug for JobPool {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("JobPool")
            .field("capacity", &self.0.capacity())
            .finish()
    }
}

impl JobPool {
    /// Room for a job of each leaf.
    pub(crate) fn take<'a>(&mut self, leaves: usize) -> Vec<Option<Job<'a>>> {
        let mut jobs = reuse_memory(std::mem::take(&mut self.0));
        jobs.resize_with(leaves, || None);
        jobs
    }

    pub(crate) fn recycle(&mut self, jobs: Vec<Option<Job<'_>>>) {
        self.0 = reuse_memory(jobs);
    }
}

/// The same memory for jobs of another lifetime, because collecting in place reuses it.
fn reuse_memory<'b>(mut jobs: Vec<Option<Job<'_>>>) -> Vec<Option<Job<'b>>> {
    jobs.clear();
    jobs.into_iter().map(|_| None).collect()
}
