#![doc = include_str!("printed.md")]

mod buffers;
mod kernel;
mod names;
mod refusal;
mod step;
mod text;

use std::sync::Arc;

use smallvec::smallvec;

use buffers::{buffers, probe, slot_names};
pub use kernel::{BufferRole, BufferStart, KernelArgument, KernelArray, PrintedKernel, StateBuffer};
use names::dependencies;
use refusal::{check_arithmetic, check_elementwise};
pub use step::{PrintedProgress, PrintedStep};

use crate::engine::{BoundKernel, Buffer, Epilogue, Job, Operand, Progress, Step, TracedKernel, trace_job};
use crate::error::{Error, ErrorKind, Result};
use crate::model::lent::Lent;
use crate::numbers::{DType, check_supported, counts};
use crate::rule::field::FieldValue;
use crate::rule::{Adjust, Gradient, IntoOptimiser, Optimiser, State, out_of_range, range};
use crate::tensors::{Tensor, dtype_of};

/// The steps of `optimiser` as kernels, for these dtypes of parameter and gradient.
///
/// Each dtype is one of F16, BF16, F32 and F64.
///
/// The [module](mod@crate::printed) shows how to use the kernels.
///
/// # Errors
/// - A step of an element depends on other elements, or `AccumGrad` takes a weighted mean
///   ([`ErrorKind::Unsupported`]).
/// - A hyper-parameter is out of range, or a dtype is not one of these four.
pub fn printed<O: IntoOptimiser>(
    optimiser: O,
    parameter: impl Into<DType>,
    gradient: impl Into<DType>,
) -> Result<Printed> {
    let (parameter, gradient) = (parameter.into(), gradient.into());
    check_supported("the dtype of the parameter", parameter)?;
    check_supported("the dtype of the gradient", gradient)?;
    let (x, gradient) = (probe(parameter)?, probe(gradient)?);
    let optimiser = optimiser.into_optimiser();
    check_elementwise(&optimiser)?;
    let state = optimiser.make_state(&x)?;
    let buffers = buffers(&optimiser, &state, &x)?;
    let parameter = ProbedParameter {
        path: String::new(),
        x,
        gradient,
    };
    let mut printed = Printed {
        optimiser,
        parameter,
        state,
        buffers,
        calls: 0,
        kernels: Vec::new(),
    };
    // The first kernel is printed here, so that an optimiser that cannot be printed is refused at once.
    printed.plan(false)?;
    Ok(printed)
}

/// The steps of an optimiser as kernels, made by [`printed`](printed()) and advanced with a training.
#[must_use]
#[derive(Debug)]
pub struct Printed {
    optimiser: Optimiser,
    parameter: ProbedParameter,
    /// The state of `parameter`. Its counters and numbers are those of the training; its tensors stay at
    /// their start.
    state: State,
    buffers: Vec<StateBuffer>,
    /// The calls that open windows have counted.
    calls: u64,
    /// Every kernel so far. The kernel of the first step is at index 0.
    kernels: Vec<CachedKernel>,
}

/// A parameter of two elements, which is never written.
#[derive(Debug)]
struct ProbedParameter {
    path: String,
    x: Tensor,
    gradient: Tensor,
}

/// A kernel, and the trace from which it was printed.
#[derive(Debug)]
struct CachedKernel {
    traced: TracedKernel,
    /// The full names of slots, which tell apart equal traces, because a trace has names without the place in
    /// a chain.
    slots: Vec<String>,
    /// The indices of the traced scalars that the kernel takes.
    scalars: Vec<usize>,
    kernel: Arc<PrintedKernel>,
}

impl Printed {
    /// Sets the path of the parameter in the model, on which random bits depend.
    ///
    /// Make one `Printed` for each parameter under [`StochasticRounding`](crate::StochasticRounding).
    pub fn at_path(mut self, path: impl Into<String>) -> Self {
        self.parameter.path = path.into();
        self
    }

    /// The kernel of the first step of the optimiser, as [`printed`](printed()) got the optimiser.
    ///
    /// Other steps may have other kernels, with other arguments. [`PrintedStep::kernel`] is the kernel of a
    /// step.
    pub fn kernel(&self) -> &PrintedKernel {
        &self.kernels[0].kernel
    }

    /// The buffers that a parameter needs in addition to itself and its gradient. A kernel may take only some
    /// of these buffers.
    pub fn state(&self) -> &[StateBuffer] {
        &self.buffers
    }

    /// Advances by one step, and returns the kernel and the numbers of the step.
    ///
    /// # Errors
    /// If this step, unlike earlier ones, cannot be printed. Counters and numbers then stay as they are.
    pub fn step(&mut self) -> Result<PrintedStep> {
        self.plan(true)
    }

    /// Sets the learning rate `eta` from the next step on: in a chain, [the product](crate::Adjust::adjust).
    ///
    /// # Errors
    /// As [`Adjust::adjust_field`].
    pub fn adjust(&mut self, eta: f64) -> Result<()> {
        self.optimiser.adjust(eta)
    }

    /// Sets a hyper-parameter by [its name](crate::Adjust), from the next step on.
    ///
    /// A name such as `eta` sets the hyper-parameter in all rules that have it. A name with a place in front,
    /// such as `1.eta`, sets the hyper-parameter of one rule.
    ///
    /// # Errors
    /// As [`Adjust::adjust_field`]. Also if the optimiser with this value cannot be printed, or has other
    /// buffers.
    pub fn adjust_field(&mut self, field: &str, value: impl Into<FieldValue>) -> Result<()> {
        let value = value.into();
        // Real numbers decide no buffers.
        if value.is_real() {
            return self.optimiser.adjust_field(field, value);
        }
        let mut adjusted = self.optimiser.clone();
        adjusted.adjust_field(field, value)?;
        check_elementwise(&adjusted)?;
        if !self.optimiser.has_layout_of(&adjusted, &self.parameter.x)? {
            let remedy = "print the optimiser anew, with this value, and allocate its buffers";
            return Err(adjusted.layout_error(field).with_remedy(remedy));
        }
        self.optimiser = adjusted;
        Ok(())
    }

    /// Counters, numbers and calls after the last step.
    pub fn progress(&self) -> PrintedProgress {
        PrintedProgress {
            optimiser: self.optimiser.name(),
            counters: self.state.counters(),
            numbers: self.state.numbers(),
            calls: self.calls,
        }
    }

    /// Resumes from this progress, as after a restart. The progress has no hyper-parameters.
    ///
    /// # Errors
    /// If `progress` is not of this optimiser, a count is above `u64::MAX / 2`, or a number is not finite or
    /// out of its range.
    ///
    /// ```
    /// use optimisers::{Adam, DType::F32, printed};
    ///
    /// let mut adam = printed(Adam::new(1e-3), F32, F32)?;
    /// for _ in 0..100 {
    ///     adam.step()?;
    /// }
    /// assert_eq!(adam.progress().counters, [("t".to_string(), 100)]);
    ///
    /// let mut resumed = printed(Adam::new(1e-3), F32, F32)?;
    /// resumed.resume(&adam.progress())?;
    /// assert_eq!(resumed.step()?, adam.step()?);
    /// # Ok::<(), optimisers::Error>(())
    /// ```
    pub fn resume(&mut self, progress: &PrintedProgress) -> Result<()> {
        let (expected, got) = (self.progress().form(), progress.form());
        if expected != got {
            let problem = "the progress to resume is from another optimiser: the progress has";
            return Err(Error::new(ErrorKind::OtherRule, problem)
                .with_got(got)
                .with_expected(expected)
                .with_remedy("pass what `Printed::progress` returned for an optimiser of this form"));
        }
        let calls = ("calls".to_string(), progress.calls);
        for (name, count) in progress.counters.iter().chain([&calls]) {
            counts::check(format!("{name:?} of the progress to resume is"), *count)?;
        }
        for (name, number) in &progress.numbers {
            let fault = || self.state.number_fault(name, *number);
            if let Some(expected) = range::finite(*number).or_else(fault) {
                return Err(out_of_range("the progress to resume", name, *number, expected));
            }
        }
        progress.write_to(&mut self.state);
        self.calls = progress.calls;
        Ok(())
    }

    /// Plans the next step, and prints its kernel if the kernel is new. If `advances`, counters and numbers
    /// move.
    fn plan(&mut self, advances: bool) -> Result<PrintedStep> {
        // Names and progress are taken before the plan borrows the state.
        let (names, progress_before) = (slot_names(&self.state), self.progress());
        let Printed {
            optimiser,
            parameter,
            state,
            calls,
            kernels,
            ..
        } = self;
        let mut job = parameter.job(optimiser, state, *calls)?;
        let (progress, windows) = (job.progress, job.windows);
        let x_role = if matches!(job.x, Operand::Own(_)) {
            BufferRole::Master
        } else {
            BufferRole::Parameter
        };
        let key = if let Epilogue::Stochastic(key) = job.epilogue {
            key
        } else {
            0
        };
        let slots = job_slots(&job, &names);
        let bound = trace_job(&job).ok_or_else(nothing_written_error)?;
        // Most steps have the same kernel, which is printed once.
        let index = kernels
            .iter()
            .position(|cached| cached.traced == bound.kernel && cached.slots == slots)
            .unwrap_or_else(|| {
                kernels.push(parameter.kernel(optimiser, &progress_before, &bound, &x_role, slots));
                kernels.len() - 1
            });
        if advances {
            job.finish()?;
            *calls = if windows.open { counts::add(*calls, 1) } else { 0 };
        }
        let CachedKernel {
            kernel,
            scalars: indices,
            ..
        } = &kernels[index];
        let scalars = indices.iter().map(|&scalar| bound.scalars[scalar]).collect();
        Ok(PrintedStep {
            kernel: kernel.clone(),
            scalars,
            key,
            moves: progress == Progress::Applied,
        })
    }
}

impl ProbedParameter {
    /// Plans a step of the probe. Counters move once the job has finished.
    fn job<'s>(&'s self, optimiser: &'s Optimiser, state: &'s mut State, calls: u64) -> Result<Job<'s>> {
        let sources = smallvec![Lent::Tensor(self.gradient.clone())];
        let dx = Gradient::new(sources, 1, &self.path).after_calls(calls, false);
        let job = optimiser.job(state, &self.x, dx)?;
        job.check(&self.x, &|| optimiser.name())?;
        check_arithmetic(optimiser, &job)?;
        Ok(job)
    }

    /// Prints the kernel of a step that follows this progress.
    fn kernel(
        &self,
        optimiser: &Optimiser,
        progress: &PrintedProgress,
        bound: &BoundKernel,
        x: &BufferRole,
        slots: Vec<String>,
    ) -> CachedKernel {
        let trace = |optimiser: &Optimiser, progress: &PrintedProgress| {
            let mut state = optimiser.make_state(&self.x).ok()?;
            // A rule may panic for a number out of its range.
            let is_in_range = |(name, number): &(String, f64)| state.number_fault(name, *number).is_none();
            if !progress.numbers.iter().all(is_in_range) {
                return None;
            }
            progress.write_to(&mut state);
            trace_job(&self.job(optimiser, &mut state, progress.calls).ok()?)
        };
        let dependencies = dependencies(bound, optimiser, progress, trace);
        let comment = text::comment(optimiser, dtype_of(&self.x), dtype_of(&self.gradient));
        let (kernel, scalars) = text::kernel(&bound.kernel, x, &slots, &dependencies, comment);
        CachedKernel {
            traced: bound.kernel.clone(),
            slots,
            scalars,
            kernel: Arc::new(kernel),
        }
    }
}

/// The full names of the slots that a job works on, in the order of its arrays.
fn job_slots(job: &Job<'_>, slot_names: &[(usize, String)]) -> Vec<String> {
    let name = |(_, buffer): &(&str, Buffer)| {
        let address = std::ptr::from_ref(buffer).addr();
        slot_names
            .iter()
            .find(|(slot, _)| *slot == address)
            .map(|(_, name)| name.clone())
    };
    job.steps.iter().flat_map(Step::slots).filter_map(name).collect()
}

/// The error for a step that writes nothing.
fn nothing_written_error() -> Error {
    Error::new(
        ErrorKind::Unsupported,
        "a step that writes nothing cannot be printed",
    )
}
