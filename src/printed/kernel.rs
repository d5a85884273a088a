//! A kernel and its arguments as data.

use crate::engine::CUDA_FLAGS;
use crate::numbers::DType;
use crate::numbers::codes::{BLOCK, RECORD};
use crate::rule::SlotFormat;

/// The code of a step of one parameter, and what its function takes.
///
/// One launch does a whole parameter: [`blocks`](PrintedKernel::blocks) blocks of
/// [`threads`](PrintedKernel::threads) threads, each in one dimension, without dynamic shared memory. Equal
/// kernels have equal sources, so functions that were compiled can be kept by those.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct PrintedKernel {
    /// The name of the function, which is `extern "C"`.
    pub entry: &'static str,
    /// What it takes, in this order.
    pub arguments: Vec<KernelArgument>,
    /// The dtype of the arithmetic and of the scalars: F64 where parameter, master or gradient is F64, else
    /// F32.
    pub arithmetic: DType,
    /// How many threads a block has.
    pub threads: u32,
    /// How many elements a block works on.
    pub elements_per_block: usize,
    pub(super) source: String,
    pub(super) host_source: String,
}

/// An argument of a [`PrintedKernel`].
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum KernelArgument {
    /// How many elements the parameter has: an `unsigned long long`.
    Length,
    /// What decides the random bits of this step: an `unsigned long long`, which is
    /// [`PrintedStep::key`](super::PrintedStep::key).
    Key,
    /// A pointer to the first element of an array.
    Array(KernelArray),
    /// The scalar of this index of [`PrintedStep::scalars`](super::PrintedStep::scalars), by value: a
    /// `float`, or a `double` where the [arithmetic](PrintedKernel::arithmetic) is F64.
    Scalar(usize),
}

/// An array that a kernel works on: as many elements as the parameter has, one after another. No two arrays
/// of a launch may overlap.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct KernelArray {
    /// Its name in the source.
    pub name: String,
    /// What it holds.
    pub role: BufferRole,
    /// How it is stored.
    pub format: SlotFormat,
    /// Whether the kernel reads it.
    pub reads: bool,
    /// Whether the kernel writes it.
    pub writes: bool,
}

/// What a buffer holds.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum BufferRole {
    /// The parameter that the model is evaluated with. With low bits beside it, it is their upper part.
    Parameter,
    /// Its gradient, which no kernel writes.
    Gradient,
    /// The precise copy of [`MixedPrecision`](crate::MixedPrecision), of which the parameter is the rounded
    /// form.
    Master,
    /// What a bf16 lacks of an f32, of [`SplitMaster`](crate::SplitMaster): I16, or U8 of 24 bits.
    LowBits,
    /// What the last rounding lost, of [`Kahan`](crate::Kahan).
    Compensation,
    /// A state tensor of a rule, by the name that it has in checkpoints: `m`, or `1.m` of the second member
    /// of a chain.
    Slot(String),
}

/// A buffer that stays from step to step, beside the parameter.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct StateBuffer {
    /// What it holds.
    pub role: BufferRole,
    /// How it is stored.
    pub format: SlotFormat,
    /// What is in it before the first step.
    pub start: BufferStart,
}

/// What a buffer has in it before the first step.
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub enum BufferStart {
    /// This number in each element. All bytes of 0 are 0, in every format.
    Number(f64),
    /// The parameter's elements, converted.
    Parameter,
}

impl PrintedKernel {
    /// What NVRTC or nvcc has to be told besides the architecture, so that a device computes the bits of
    /// [`update`](crate::update).
    pub const CUDA_FLAGS: [&str; 5] = CUDA_FLAGS;

    /// CUDA C++, complete: it includes nothing.
    pub fn source(&self) -> &str {
        &self.source
    }

    /// The same for a C++17 compiler of the host, to test without a device.
    ///
    /// Its one function takes what `cuLaunchKernel` does, the number of blocks and a pointer to the value of
    /// each argument, and runs all threads one after another:
    ///
    /// ```text
    /// extern "C" void launch(unsigned int blocks, void** values);
    /// ```
    ///
    /// It has to be compiled without contraction of products into sums (`-ffp-contract=off`), and without
    /// `-ffast-math`. State [in 8 bits](SlotFormat::Q8) needs POSIX contexts.
    pub fn host_source(&self) -> &str {
        &self.host_source
    }

    /// How many blocks a parameter of so many elements takes. With none there is nothing to launch.
    pub fn blocks(&self, length: usize) -> u32 {
        length.div_ceil(self.elements_per_block) as u32
    }

    /// The arrays among the arguments.
    pub fn arrays(&self) -> impl Iterator<Item = &KernelArray> {
        self.arguments.iter().filter_map(|argument| if let KernelArgument::Array(array) = argument { Some(array) } else { None })
    }
}

impl KernelArray {
    /// How many bytes it takes for a parameter of so many elements.
    pub fn bytes(&self, length: usize) -> usize {
        bytes(self.format, length)
    }
}

impl StateBuffer {
    /// How many bytes it takes for a parameter of so many elements.
    pub fn bytes(&self, length: usize) -> usize {
        bytes(self.format, length)
    }
}

fn bytes(format: SlotFormat, length: usize) -> usize {
    match format {
        SlotFormat::Dtype(dtype) => length * dtype.size_in_bytes(),
        SlotFormat::Q8 => length.div_ceil(BLOCK) * RECORD,
    }
}
