//! The plan for one leaf.

use smallvec::SmallVec;

use super::{Group, Reduction, Step, StepSlots, Steps};
use crate::engine::memory::{Addresses, Buffer, WrittenStorages};
use crate::error::{Error, Result};
use crate::model::lent::{Lend, Lent, copied, defect};
use crate::numbers::low_bits::LowBits;
use crate::numbers::{DType, compute_dtype};
use crate::tensors::{Device, Tensor};

const NO_REDUCTION: &str = "numbers for a step that waits for none";

/// Gradients to be added up, each of the parameter's shape; none means zeros.
pub(crate) type Sources<'a> = SmallVec<[Lent<'a>; 1]>;

/// Counters with the values they take in the commit.
pub(crate) type CounterWrites<'a> = SmallVec<[(&'a mut u64, u64); 2]>;

/// Numbers with the values they take in the commit.
pub(crate) type NumberWrites<'a> = Vec<(&'a mut f64, f64)>;

/// The addresses of the storages that a job writes.
pub(crate) type OwnStorages = SmallVec<[usize; 2]>;

/// The plan for one leaf.
pub(crate) struct Job<'a> {
    /// The parameter's path, for errors.
    pub(crate) path: &'a str,
    /// What the arithmetic calls x: the parameter, or its master copy.
    pub(crate) x: Operand<'a>,
    /// The low bits of x, if x is a bf16 that is the upper part of an f32.
    pub(crate) low_bits: Option<&'a mut Buffer>,
    /// How many elements there are.
    pub(crate) length: usize,
    /// How many elements the whole leaf has; this job may have a part of them. Norms take their chunks from
    /// it, so that parts do not change them.
    pub(crate) whole: usize,
    /// The dtype of the arithmetic: F64 if the parameter, its master or a gradient is F64, else F32.
    pub(crate) compute: DType,
    /// The gradients that enter the first step as their sum.
    pub(crate) sources: Sources<'a>,
    /// What happens to the gradient, in order.
    pub(crate) steps: Steps<'a>,
    /// What becomes of the result.
    pub(crate) epilogue: Epilogue<&'a dyn Lend, &'a mut Buffer>,
    /// The parameter, if it is on another device than x. The gradients are there, too.
    pub(crate) offloaded: Option<OffloadTarget<'a>>,
    pub(crate) counters: CounterWrites<'a>,
    pub(crate) numbers: NumberWrites<'a>,
    /// Where the gradients that were not copied are, for prefetching.
    pub(crate) addresses: SmallVec<[Addresses; 1]>,
    /// Whether parameter or state have been written, or have begun to be.
    pub(crate) has_moved: bool,
}

/// What the arithmetic calls x.
pub(crate) enum Operand<'a> {
    /// A parameter.
    Lent(&'a dyn Lend),
    /// A master, which nobody else can see.
    Own(&'a mut Buffer),
}

impl<'a> Operand<'a> {
    /// A master: lent if it is a variable, else the job's own.
    pub(crate) fn master(buffer: &'a mut Buffer) -> Self {
        match buffer.as_shared() {
            Ok(variable) => Operand::Lent(variable.as_tensor()),
            Err(buffer) => Operand::Own(buffer),
        }
    }

    /// What is read.
    pub(crate) fn lender(&self) -> &dyn Lend {
        match self {
            Operand::Lent(lender) => *lender,
            Operand::Own(buffer) => &**buffer,
        }
    }

    pub(crate) fn shape(&self) -> &[usize] {
        self.lender().shape()
    }

    pub(crate) fn dtype(&self) -> DType {
        self.lender().dtype()
    }

    pub(crate) fn device(&self) -> &Device {
        self.lender().device()
    }
}

/// The parameter of a job on another device than its x.
#[derive(Clone, Copy)]
pub(crate) struct OffloadTarget<'a> {
    /// What the parameter becomes once the job has run, on the CPU.
    pub(in crate::engine) staging: &'a Tensor,
    pub(in crate::engine) parameter: &'a dyn Lend,
    /// Whether the gradients have been brought down.
    pub(in crate::engine) is_downloaded: bool,
}

impl<'a> OffloadTarget<'a> {
    pub(crate) fn new(staging: &'a Tensor, parameter: &'a dyn Lend) -> Self {
        OffloadTarget { staging, parameter, is_downloaded: false }
    }
}

/// How a parameter is stored, and so what the commit writes after the steps have run.
///
/// `P` stands for a parameter in a precision of its own, `C` for what a rounding loses, and `K` for what
/// decides random bits: tensors in a plan, pointers in a pass, dtypes in printed code.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Epilogue<P, C, K = [u32; 2]> {
    /// The parameter stays; only state moves.
    StateOnly,
    /// `x -= dx`, rounded to x's dtype.
    Subtract,
    /// `x -= dx` on the master x, and the parameter becomes x rounded to nearest even.
    Master(P),
    /// `x -= dx`, rounded up or down at random.
    Stochastic(K),
    /// `x -= dx`, rounded to x's dtype; what that loses is carried over to the next step.
    Kahan(C),
}

impl<P, C, K> Epilogue<P, C, K> {
    /// The same with other data, if it can be had.
    pub(in crate::engine) fn try_map<Q, D, E>(
        self,
        parameter: impl FnOnce(P) -> std::result::Result<Q, E>,
        compensation: impl FnOnce(C) -> std::result::Result<D, E>,
    ) -> std::result::Result<Epilogue<Q, D, K>, E> {
        Ok(match self {
            Epilogue::StateOnly => Epilogue::StateOnly,
            Epilogue::Subtract => Epilogue::Subtract,
            Epilogue::Master(data) => Epilogue::Master(parameter(data)?),
            Epilogue::Stochastic(key) => Epilogue::Stochastic(key),
            Epilogue::Kahan(data) => Epilogue::Kahan(compensation(data)?),
        })
    }

    /// Whether x is written.
    pub(in crate::engine) fn writes_x(&self) -> bool {
        !matches!(self, Epilogue::StateOnly)
    }

    /// What x is to the program.
    pub(in crate::engine) fn x(&self) -> &'static str {
        if matches!(self, Epilogue::Master(_)) { "master" } else { "parameter" }
    }
}

/// Where the result of a chain goes: a commit writes it, or whoever asked for it gets it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(in crate::engine) enum Sink<W, R, C> {
    Write(W),
    /// Elements are reduced to a number; nothing of the leaf is written.
    Reduce(R),
    /// Elements go to memory of their own; nothing of the leaf is written.
    Copy(C),
}

impl<P, C, K, R, T> Sink<Epilogue<P, C, K>, R, T> {
    /// Whether x is written.
    pub(in crate::engine) fn writes_x(&self) -> bool {
        matches!(self, Sink::Write(epilogue) if epilogue.writes_x())
    }

    /// Whether state is written.
    pub(in crate::engine) fn writes_state(&self) -> bool {
        matches!(self, Sink::Write(_))
    }
}

/// A run of elementwise steps in a job, from the gradients or a function's result to a function or to the
/// end.
pub(in crate::engine) struct Segment<'s, 'a> {
    /// The dtype of x.
    pub(in crate::engine) x: DType,
    /// What the low bits of x are, if it is the upper part of a number.
    pub(in crate::engine) low_bits: Option<LowBits>,
    pub(in crate::engine) length: usize,
    pub(in crate::engine) compute: DType,
    pub(in crate::engine) sources: &'s [Lent<'a>],
    pub(in crate::engine) steps: &'s mut [Step<'a>],
    pub(in crate::engine) epilogue: Epilogue<&'a dyn Lend, &'s mut Buffer>,
}

/// The segments of a job that write something, in order; and its x and low bits, which each of them needs.
pub(in crate::engine) struct JobSegments<'s, 'a> {
    pub(in crate::engine) x: &'s mut Operand<'a>,
    pub(in crate::engine) low_bits: Option<&'s mut Buffer>,
    pub(in crate::engine) all: SmallVec<[Segment<'s, 'a>; 1]>,
    /// That of the job.
    pub(in crate::engine) has_moved: &'s mut bool,
}

impl<'a> Job<'a> {
    /// A job that does nothing to `x` yet.
    pub(crate) fn new(path: &'a str, x: Operand<'a>, sources: Sources<'a>) -> Self {
        let wide = sources.iter().any(|source| source.dtype() == DType::F64);
        let (length, dtype) = (x.lender().elem_count(), x.dtype());
        Job {
            path,
            x,
            low_bits: None,
            length,
            whole: length,
            compute: if wide { DType::F64 } else { compute_dtype(dtype) },
            sources,
            steps: Steps::new(),
            epilogue: Epilogue::StateOnly,
            offloaded: None,
            counters: CounterWrites::new(),
            numbers: NumberWrites::new(),
            addresses: SmallVec::new(),
            has_moved: false,
        }
    }

    /// Copies the gradients that lie where somebody may write, or where another gradient lies, and notes
    /// where the others are. The commit locks all of them together with its `own` memory, and no lock may be
    /// asked for twice.
    ///
    /// # Errors
    /// If the storage of a gradient does not hold it.
    pub(crate) fn copy_shared(&mut self, written: &WrittenStorages, own: &[usize]) -> Result<()> {
        for gradient in &mut self.sources {
            let addresses = Addresses::of("gradient", &**gradient).map_err(|error| error.at(self.path))?;
            let is_locked = |memory| {
                own.contains(&memory) || self.addresses.iter().any(|known| known.memory == Some(memory))
            };
            let is_variable = gradient.tensor().is_some_and(Tensor::is_variable);
            let is_written = |memory: &usize| written.contains_key(memory) || is_locked(*memory);
            if is_variable || addresses.memory.as_ref().is_some_and(is_written) {
                *gradient = Lent::Tensor(
                    shaped(copied("gradient", &**gradient), self.x.shape())
                        .map_err(|error| error.at(self.path))?,
                );
            } else {
                self.addresses.push(addresses);
            }
        }
        Ok(())
    }

    /// Copies the gradients that are no tensors, for what works with tensors alone.
    pub(in crate::engine) fn copy_lent(&mut self) -> Result<()> {
        for gradient in self.sources.iter_mut().filter(|gradient| gradient.tensor().is_none()) {
            *gradient = Lent::Tensor(shaped(copied("gradient", &**gradient), self.x.shape())?);
        }
        Ok(())
    }

    /// What the job writes and does not own, each with what it is to the program.
    pub(in crate::engine) fn written(&self) -> impl Iterator<Item = (&'static str, &'a dyn Lend)> {
        let x = if let Operand::Lent(lender) = self.x { Some((self.epilogue.x(), lender)) } else { None };
        let parameter = if let Epilogue::Master(parameter) = self.epilogue { Some(parameter) } else { None };
        let elsewhere = self.offloaded.map(|offloaded| offloaded.parameter);
        x.into_iter().chain(parameter.into_iter().chain(elsewhere).map(|parameter| ("parameter", parameter)))
    }

    /// Whether all that it reads and writes, but for state, is candle's tensors.
    pub(in crate::engine) fn is_of_tensors(&self) -> bool {
        self.written().all(|(_, lender)| lender.tensor().is_some())
            && self.sources.iter().all(|source| source.tensor().is_some())
    }

    /// The groups of leaves with which it shares numbers that are not known yet.
    pub(crate) fn groups(&self) -> impl Iterator<Item = Group> {
        self.steps
            .iter()
            .filter_map(|step| if let Step::Reduce(reduction) = step { reduction.group } else { None })
    }

    /// Whether functions of the whole tensor are left to run.
    pub(crate) fn has_functions(&self) -> bool {
        self.length > 0 && self.steps.iter().any(|step| matches!(step, Step::Tensor(_)))
    }

    /// What is left to do. All functions must have run.
    pub(in crate::engine) fn segments(&mut self) -> JobSegments<'_, 'a> {
        let (x, length, compute) = (self.x.dtype(), self.length, self.compute);
        let low_bits = self.low_bits.as_deref().map(Buffer::as_low_bits);
        let segment =
            |sources, steps, epilogue| Segment { x, low_bits, length, compute, sources, steps, epilogue };
        let (mut sources, mut steps) = (&self.sources[..], &mut self.steps[..]);
        let mut all = SmallVec::new();
        while let Some(end) = steps.iter().position(|step| matches!(step, Step::Output(_))) {
            let (before, rest) = std::mem::take(&mut steps).split_at_mut(end);
            if before.iter().any(|step| !step.slots().is_empty()) {
                all.push(segment(sources, before, Epilogue::StateOnly));
            }
            if let Some((Step::Output(output), behind)) = rest.split_first_mut() {
                (sources, steps) = (std::slice::from_ref(&output.gradient), behind);
            }
        }
        let epilogue = match &mut self.epilogue {
            Epilogue::StateOnly => Epilogue::StateOnly,
            Epilogue::Subtract => Epilogue::Subtract,
            Epilogue::Master(parameter) => Epilogue::Master(*parameter),
            Epilogue::Stochastic(key) => Epilogue::Stochastic(*key),
            Epilogue::Kahan(compensation) => Epilogue::Kahan(&mut **compensation),
        };
        if epilogue.writes_x() || steps.iter().any(|step| !step.slots().is_empty()) {
            all.push(segment(sources, steps, epilogue));
        }
        JobSegments {
            x: &mut self.x,
            low_bits: self.low_bits.as_deref_mut(),
            all,
            has_moved: &mut self.has_moved,
        }
    }

    /// Ends a job whose segments are written: writes what functions have returned to the state, moves
    /// counters and numbers, and drops everything else.
    pub(crate) fn finish(&mut self) -> Result<()> {
        self.has_moved |= self.epilogue.writes_x() || self.steps.iter().any(|step| !step.slots().is_empty());
        for step in &mut self.steps {
            if let Step::Output(output) = step {
                output.slots.iter_mut().zip(&output.next).try_for_each(|((_, slot), next)| slot.set(next))?;
            }
        }
        self.numbers.drain(..).for_each(|(number, next)| *number = next);
        self.counters.drain(..).for_each(|(counter, next)| *counter = next);
        self.sources.clear();
        self.steps.clear();
        Ok(())
    }

    /// The reduction at `index`.
    pub(in crate::engine) fn reduction(&self, index: usize) -> Result<&Reduction<'a>> {
        if let Step::Reduce(reduction) = &self.steps[index] {
            Ok(reduction)
        } else {
            Err(self.broken(NO_REDUCTION))
        }
    }

    /// The reduction at `index`, taken out: the step does nothing from now on.
    pub(in crate::engine) fn take_reduction(&mut self, index: usize) -> Result<Reduction<'a>> {
        let step = std::mem::replace(&mut self.steps[index], Step::Identity);
        if let Step::Reduce(reduction) = step { Ok(*reduction) } else { Err(self.broken(NO_REDUCTION)) }
    }

    /// The error for a state that the plan rules out.
    pub(in crate::engine) fn broken(&self, what: &'static str) -> Error {
        defect(what).at(self.path)
    }
}

/// A copy of a gradient in the parameter's shape, for which a vector may stand.
fn shaped(gradient: Result<Tensor>, shape: &[usize]) -> Result<Tensor> {
    Ok(gradient?.reshape(shape)?)
}

/// The slots of a chain, in order.
pub(in crate::engine) fn slots_mut<'s>(steps: &'s mut [Step<'_>]) -> impl Iterator<Item = &'s mut Buffer> {
    let of_step = |step: &'s mut Step<'_>| -> StepSlots<'s> {
        if let Step::Map { slots, .. } = step { slots } else { Default::default() }
    };
    steps.iter_mut().flat_map(of_step).map(|(_, slot)| slot)
}

/// Memory for the jobs of a call, kept from one to the next.
#[derive(Default)]
pub(crate) struct JobPool(Vec<Option<Job<'static>>>);

impl std::fmt::Debug for JobPool {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("JobPool").field("capacity", &self.0.capacity()).finish()
    }
}

impl JobPool {
    /// Room for a job of each leaf.
    pub(crate) fn take<'a>(&mut self, leaves: usize) -> Vec<Option<Job<'a>>> {
        let mut jobs = emptied(std::mem::take(&mut self.0));
        jobs.resize_with(leaves, || None);
        jobs
    }

    /// Takes the memory back.
    pub(crate) fn recycle(&mut self, jobs: Vec<Option<Job<'_>>>) {
        self.0 = emptied(jobs);
    }
}

/// The same memory for values of another lifetime: collecting in place keeps it.
fn emptied<'b>(mut jobs: Vec<Option<Job<'_>>>) -> Vec<Option<Job<'b>>> {
    jobs.clear();
    jobs.into_iter().map(|_| None).collect()
}
