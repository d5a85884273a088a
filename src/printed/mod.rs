//! Steps as source code, for programs that own their device buffers and use no candle tensors: what an update does to a parameter as one CUDA kernel with plain
//! arguments, and the numbers of each step.
//!
//! [`printed`](printed()) takes a rule, a chain or an optimiser such as [`MixedPrecision`](crate::MixedPrecision), and the dtypes of parameter and gradient:
//!
//! ```
//! use candle_core::DType::{BF16, F32};
//! use optimisers::printed::{BufferRole, BufferStart, KernelArgument, printed};
//! use optimisers::{AdamW, MixedPrecision, OptimiserChain, Scale};
//!
//! // A factor of the gradient for each step: 1 / loss scale, or what your own clipping of the norm asks for.
//! let rule = OptimiserChain::new((Scale::new(1.0), AdamW::new(1e-3)));
//! let mut adamw = printed(MixedPrecision::new(F32, rule), BF16, BF16)?;
//!
//! // The buffers to allocate once for each parameter, beside parameter and gradient.
//! let state: Vec<_> = adamw.state().iter().map(|buffer| (&buffer.role, buffer.bytes(1000), buffer.start)).collect();
//! let slot = |name: &str| BufferRole::Slot(name.to_string());
//! assert_eq!(state, [
//!     (&BufferRole::Master, 4000, BufferStart::Parameter),
//!     (&slot("1.m"), 4000, BufferStart::Number(0.0)),
//!     (&slot("1.v"), 4000, BufferStart::Number(0.0)),
//! ]);
//!
//! // Each step: the kernel, which stays the same here, and its numbers.
//! for step in 1..=3 {
//!     adamw.adjust(1e-3 / step as f64)?; // a schedule of the learning rate
//!     adamw.adjust_field("alpha", 0.5)?; // the factor of this step's gradient
//!     let step = adamw.step()?;
//!     assert_eq!(step.scalars.len(), 9);
//!     assert_eq!((step.kernel.blocks(1_000_000), step.kernel.threads), (62, 256));
//! }
//!
//! let arguments: Vec<String> = adamw.kernel().arguments.iter().map(|argument| match argument {
//!     KernelArgument::Length => "length".to_string(),
//!     KernelArgument::Array(array) => format!("{:?}: {} {}{}", array.role, array.format, if array.reads { "r" } else { "" }, if array.writes { "w" } else { "" }),
//!     other => format!("{other:?}"),
//! }).collect();
//! assert_eq!(arguments[..6], [
//!     "length", "Master: F32 rw", "Gradient: BF16 r", "Slot(\"1.m\"): F32 rw", "Slot(\"1.v\"): F32 rw", "Parameter: BF16 w",
//! ]);
//! assert_eq!(arguments[6..].first().map(String::as_str), Some("Scalar(0)"));
//! # Ok::<(), optimisers::Error>(())
//! ```
//!
//! # The kernel
//!
//! [`PrintedKernel::source`] is complete CUDA C++ without includes. Its one function, [`entry`](PrintedKernel::entry), is `extern "C"` and takes the
//! [arguments](PrintedKernel::arguments) in their order:
//!
//! | argument | type in C | value |
//! | --- | --- | --- |
//! | [`Length`](KernelArgument::Length) | `unsigned long long` | elements of the parameter |
//! | [`Key`](KernelArgument::Key) | `unsigned long long` | [`PrintedStep::key`]; only where rounding is at random |
//! | [`Array`](KernelArgument::Array) | a pointer | its first element: `float`, `double`, or the bits of f16, bf16, i16, u8 |
//! | [`Scalar`](KernelArgument::Scalar) | `float`, or `double` in arithmetic of F64 | [`PrintedStep::scalars`] at its index |
//!
//! Which arrays there are follows from how the parameter is stored. They are contiguous, and aligned to their elements at least; where all begin at 16 bytes, an access moves 16 bytes
//! of the widest. The state begins as [`Printed::state`] says, the parameter as it is.
//!
//! | optimiser | arrays beside the gradient and the slots of the rule |
//! | --- | --- |
//! | a rule or chain; any where the parameter is F32 or F64 | parameter |
//! | [`MixedPrecision`](crate::MixedPrecision) | master, and the parameter, which is only written |
//! | [`Kahan`](crate::Kahan) | parameter, compensation |
//! | [`SplitMaster`](crate::SplitMaster) | parameter, low bits |
//! | [`StochasticRounding`](crate::StochasticRounding) | parameter; a key, for which each parameter has [a path](Printed::at_path) |
//!
//! A launch has [`blocks(length)`](PrintedKernel::blocks) blocks of [`threads`](PrintedKernel::threads) threads for a parameter of so many elements, whatever its shape. One source serves parameters of
//! all lengths, all steps and all values of hyper-parameters; it is another only where a rule computes something else (a flag of the rule, the steps of [`AccumGrad`](crate::AccumGrad) that
//! only collect, the first steps of [`RAdam`](crate::RAdam)). So compile what [`PrintedStep::kernel`] has when it is first met, and keep it by its source.
//!
//! # The numbers of a step
//!
//! [`Printed::step`] goes one step on and computes learning rates and bias corrections for it, by the code of [`update`](crate::update). Call it once for all parameters of equal dtypes that
//! move together, and leave it out where a step is skipped. Hyper-parameters are adjusted [by name](crate::Adjust::adjust_field) in between, the learning rate by
//! [`Printed::adjust`]. [`Printed::progress`] is what a checkpoint needs of it.
//!
//! # On a device
//!
//! With cudarc, for parameters that have their buffers under roles:
//!
//! ```rust,ignore
//! let compile = |kernel: &PrintedKernel| {
//!     let options = CompileOptions { options: PrintedKernel::CUDA_FLAGS.map(String::from).into(), ..Default::default() };
//!     let module = context.load_module(compile_ptx_with_opts(kernel.source(), options)?)?;
//!     module.load_function(kernel.entry)
//! };
//! let step = adamw.step()?;
//! let function = functions.entry(step.kernel.source().to_string()).or_insert_with(|| compile(&step.kernel).unwrap());
//! for parameter in &parameters {
//!     let words = step.words(parameter.length, |array| parameter.buffers[&array.role].device_ptr(&stream).0);
//!     let mut launch = stream.launch_builder(function);
//!     words.iter().for_each(|word| { launch.arg(word); });
//!     let (blocks, threads) = (step.kernel.blocks(parameter.length), step.kernel.threads);
//!     unsafe { launch.launch(LaunchConfig { grid_dim: (blocks, 1, 1), block_dim: (threads, 1, 1), shared_mem_bytes: 0 })? };
//! }
//! ```
//!
//! The words are what `cuLaunchKernel` takes the values of arguments from. Without [the flags](PrintedKernel::CUDA_FLAGS) products are contracted into sums, and the bits are others.
//!
//! # Without a device
//!
//! [`PrintedKernel::host_source`] is the same code for a C++ compiler (`c++ -std=c++17 -O2 -ffp-contract=off -fPIC -shared`), with a function `launch` that takes the same words. The example
//! [`printed`](https://docs.rs/crate/optimisers/latest/source/examples/printed/main.rs) does ten steps with it on vectors of numbers. What it comes down to:
//!
//! ```no_run
//! use std::ffi::c_void;
//! # use candle_core::DType::F32;
//! # let step = optimisers::printed(optimisers::AdamW::new(1e-3), F32, F32)?.step()?;
//!
//! // Compiled from `step.kernel.host_source()`.
//! let library = unsafe { libloading::Library::new("kernel.so")? };
//! let launch = unsafe { library.get::<unsafe extern "C" fn(u32, *const *const c_void)>(b"launch\0")? };
//!
//! let (mut x, dx) = (vec![1f32; 1000], vec![0.5f32; 1000]);
//! let mut buffers = vec![x.as_mut_ptr() as u64, dx.as_ptr() as u64]; // by their roles, in a program
//! # buffers.extend([0, 0]);
//! let mut buffers = buffers.into_iter();
//! let words = step.words(1000, |_| buffers.next().expect("a buffer for each array"));
//! let values: Vec<*const c_void> = words.iter().map(|word| std::ptr::from_ref(word).cast()).collect();
//! unsafe { launch(step.kernel.blocks(1000), values.as_ptr()) };
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! # What cannot be printed
//!
//! Rules whose step of an element depends on others: norms ([`ClipNorm`](crate::ClipNorm), [`ClipGlobalNorm`](crate::ClipGlobalNorm), [`LAMB`](crate::LAMB)), sums over the model
//! ([`Prodigy`](crate::Prodigy)), functions of whole matrices ([`Muon`](crate::Muon)). They are [refused](crate::PrintingError), by name. For a clipped norm compute the norm and put a [`Scale`](crate::Scale) into the chain,
//! as above. The gradient is one array of the parameter's elements; it is the caller who checks whether it is finite, and who calls `step` for a gradient only.

mod buffers;
mod kernel;
mod refusal;
mod step;
mod text;

use std::sync::Arc;

use candle_core::{DType, Tensor};
use smallvec::smallvec;

use buffers::{buffers, probe, slot_places};
pub use kernel::{BufferRole, BufferStart, KernelArgument, KernelArray, PrintedKernel, StateBuffer};
use refusal::{expect_arithmetic, expect_dtypes, expect_elementwise};
pub use step::{PrintedProgress, PrintedStep};

use crate::engine::{Epilogue, Job, Step, Traced, TracedKernel, traced};
use crate::error::{Error, PrintingError, Result};
use crate::field::FieldValue;
use crate::rule::{Adjust, Gradient, Optimiser, Planned, Progress, State, Target};

/// The steps of `optimiser` as kernels, for parameters and gradients of these dtypes (F16, BF16, F32 or F64).
///
/// The [module](mod@crate::printed) says how they are used.
///
/// # Errors
/// - A step of an element depends on other elements, see [`PrintingError`].
/// - A hyper-parameter is out of range, or a dtype is none of those.
pub fn printed<O: Optimiser>(optimiser: O, parameter: DType, gradient: DType) -> Result<Printed> {
    expect_dtypes("", parameter, gradient)?;
    let (x, gradient) = (probe(parameter)?, probe(gradient)?);
    expect_elementwise(&optimiser, &x)?;
    let state = optimiser.init(&x)?;
    let buffers = buffers(&optimiser, &state, &x)?;
    let mut printed =
        Printed { optimiser: Box::new(optimiser), path: String::new(), x, gradient, state, buffers, calls: 0, known: Vec::new() };
    printed.plan(false)?;
    Ok(printed)
}

/// The steps of an optimiser as kernels: made by [`printed`](printed()), it goes along with a training.
#[derive(Debug)]
pub struct Printed {
    optimiser: Box<dyn Optimiser>,
    path: String,
    /// A parameter of two elements, which stays as it is.
    x: Tensor,
    gradient: Tensor,
    /// Of that parameter: its counters and numbers are those of the training.
    state: State,
    buffers: Vec<StateBuffer>,
    /// Of open windows.
    calls: u64,
    /// Every kernel so far, the first step's first.
    known: Vec<KnownKernel>,
}

/// A kernel, and what decides its text and its arguments.
#[derive(Debug)]
struct KnownKernel {
    traced: TracedKernel,
    slots: Vec<String>,
    /// Which of the traced scalars it takes.
    scalars: Vec<usize>,
    kernel: Arc<PrintedKernel>,
}

impl Printed {
    /// The same for the parameter of this path in the model, which random bits depend on. Parameters under [`StochasticRounding`](crate::StochasticRounding) get one each.
    pub fn at_path(self, path: impl Into<String>) -> Self {
        Printed { path: path.into(), ..self }
    }

    /// The kernel of the first step.
    pub fn kernel(&self) -> &PrintedKernel {
        &self.known[0].kernel
    }

    /// The buffers that a parameter has besides itself and its gradient. Not every kernel takes all of them.
    pub fn state(&self) -> &[StateBuffer] {
        &self.buffers
    }

    /// Goes one step on: the kernel of this step, and its numbers.
    ///
    /// # Errors
    /// If this step, unlike those before, cannot be printed. Nothing has moved then.
    pub fn step(&mut self) -> Result<PrintedStep> {
        self.plan(true)
    }

    /// Sets the learning rate `eta` from the next step on.
    ///
    /// # Errors
    /// As [`Adjust::adjust_field`].
    pub fn adjust(&mut self, eta: f64) -> Result<()> {
        self.optimiser.adjust(eta)
    }

    /// Sets a hyper-parameter by [its name](crate::Adjust), in all rules that have it or with a place in front of it, from the next step on.
    ///
    /// # Errors
    /// As [`Adjust::adjust_field`].
    pub fn adjust_field(&mut self, field: &str, value: impl Into<FieldValue>) -> Result<()> {
        self.optimiser.adjust_field(field, value)
    }

    /// Counters and numbers after the last step.
    pub fn progress(&self) -> PrintedProgress {
        PrintedProgress { counters: self.state.counters(), numbers: self.state.numbers(), calls: self.calls }
    }

    /// Goes on from there, as after a restart. Hyper-parameters are not part of it.
    ///
    /// # Errors
    /// If these are the counters of another optimiser.
    ///
    /// ```
    /// use candle_core::DType::F32;
    /// use optimisers::{Adam, printed};
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
        let names = |progress: &PrintedProgress| -> Vec<String> {
            let numbers = progress.numbers.iter().map(|(name, _)| name);
            progress.counters.iter().map(|(name, _)| name).chain(numbers).cloned().collect()
        };
        let (expected, got) = (names(&self.progress()), names(progress));
        let (counted, own) = (progress.counters.len(), self.state.counters().len());
        if expected != got || counted != own {
            return Err(PrintingError::Progress { rule: self.optimiser.name(), expected, got }.into());
        }
        let parts = self.state.parts_mut();
        parts.counters.into_iter().zip(&progress.counters).for_each(|(own, (_, count))| *own = *count);
        parts.numbers.into_iter().zip(&progress.numbers).for_each(|(own, (_, number))| *own = *number);
        self.calls = progress.calls;
        Ok(())
    }

    /// The next step, after which counters and numbers move if it is to be taken.
    fn plan(&mut self, is_taken: bool) -> Result<PrintedStep> {
        let places = slot_places(&self.state);
        let Printed { optimiser, path, x, gradient, state, calls, known, .. } = self;
        let dx = Gradient::new(smallvec![gradient.clone()], 1, path).after(*calls);
        let Planned { mut job, progress, windows } = optimiser.plan(state, Target { path, x, shown: x, extent: None }, dx)?;
        job.check(x, &|| optimiser.name())?;
        expect_arithmetic(&**optimiser, &job)?;
        let on = if job.x.id() == x.id() { BufferRole::Parameter } else { BufferRole::Master };
        let key = if let Epilogue::Stochastic([low, high]) = job.epilogue { u64::from(high) << 32 | u64::from(low) } else { 0 };
        let slots = slots(&job, &places);
        let Traced { kernel, scalars } = traced(&mut job).ok_or_else(nothing)?;
        let index = known.iter().position(|known| known.traced == kernel && known.slots == slots).unwrap_or_else(|| {
            let (printed, scalars) = text::kernel(&kernel, &on, &slots);
            known.push(KnownKernel { traced: kernel, slots, scalars, kernel: Arc::new(printed) });
            known.len() - 1
        });
        if is_taken {
            job.finish();
            *calls = if windows.open { *calls + 1 } else { 0 };
        }
        let KnownKernel { kernel, scalars: taken, .. } = &known[index];
        let scalars = taken.iter().map(|&scalar| scalars[scalar]).collect();
        Ok(PrintedStep { kernel: kernel.clone(), scalars, key, moves: progress == Progress::Applied })
    }
}

/// The full names of the slots that a job works on, in the order of its arrays.
fn slots(job: &Job<'_>, places: &[(usize, String)]) -> Vec<String> {
    let of_step = |step: &Step<'_>| -> Vec<usize> {
        let Step::Map { slots, .. } = step else { return Vec::new() };
        slots.iter().map(|(_, buffer)| std::ptr::from_ref(buffer).addr()).collect()
    };
    let name = |address| places.iter().find(|(place, _)| *place == address).map(|(_, name)| name.clone());
    job.steps.iter().flat_map(of_step).filter_map(name).collect()
}

fn nothing() -> Error {
    Error::other("a step that writes nothing cannot be printed")
}
