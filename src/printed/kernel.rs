//! A printed kernel, its arguments and the buffers of a parameter, as data.

use crate::engine::{CUDA_FLAGS, filled, rounded};
use crate::error::{Error, Result};
use crate::model::lent::{MemoryRef, flat_copy, storage_of};
use crate::numbers::{DType, codes, low_bits};
use crate::rule::SlotFormat;
use crate::tensors::{Device, bytes_of};

/// The code of a step of one parameter, and the arguments of its function.
///
/// One launch updates a whole parameter. A launch has [`blocks`](PrintedKernel::blocks) blocks of
/// [`threads`](PrintedKernel::threads) threads, both in one dimension, and no dynamic shared memory. Equal
/// kernels have equal sources, so compiled functions can be cached by source.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct PrintedKernel {
    /// The name of the function, which is `extern "C"`.
    pub entry: &'static str,
    /// The arguments of the function, in this order.
    pub arguments: Vec<KernelArgument>,
    /// The names of the [scalars](super::PrintedStep::scalars) in the source: `k`, the index, and what the
    /// scalar depends on.
    ///
    /// A scalar depends on real hyper-parameters, and on counters and numbers of the state. `k4_eta_beta1_t`
    /// depends on the learning rate, on β₁ and on the number of the step, so this scalar differs in each
    /// step. `k6_epsilon` stays the same.
    ///
    /// Trials of a few steps and values find the names, so a name may lack a cause. Names are for readers: a
    /// program passes all scalars in each step.
    pub scalars: Vec<String>,
    /// The dtype of the arithmetic and of the scalars: F64 if parameter, master or gradient is F64, else F32.
    pub arithmetic: DType,
    /// The number of threads in a block.
    pub threads: u32,
    /// The number of elements that a block works on.
    pub elements_per_block: usize,
    pub(super) source: String,
    pub(super) host_source: String,
}

/// An argument of a [`PrintedKernel`].
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum KernelArgument {
    /// The number of elements of the parameter: an `unsigned long long`.
    Length,
    /// The key of this step's random bits, [`PrintedStep::key`](super::PrintedStep::key): an
    /// `unsigned long long`.
    Key,
    /// A pointer to the first element of an array.
    Array(KernelArray),
    /// The scalar with this index in [`PrintedStep::scalars`](super::PrintedStep::scalars), by value: a
    /// `float`, or a `double` if the [arithmetic](PrintedKernel::arithmetic) is F64.
    Scalar(usize),
}

/// An array that a kernel works on, with one element for each element of the parameter.
///
/// Arrays are contiguous. No two arrays of a launch may overlap.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct KernelArray {
    /// The name of the array in the source.
    pub name: String,
    /// What the array holds.
    pub role: BufferRole,
    /// How the array is stored.
    pub format: SlotFormat,
    /// Whether the kernel reads the array.
    pub reads: bool,
    /// Whether the kernel writes the array.
    pub writes: bool,
}

/// What a buffer holds.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum BufferRole {
    /// The parameter that the model is evaluated with. If there are low bits, the parameter is the upper part
    /// of the master.
    Parameter,
    /// The parameter's gradient, which no kernel writes.
    Gradient,
    /// The precise copy of [`MixedPrecision`](crate::MixedPrecision). The parameter is the rounded master.
    Master,
    /// The low bits of [`SplitMaster`](crate::SplitMaster): the bits of an f32 that a bf16 lacks.
    ///
    /// The low bits are I16 in records of 272 bytes: the I16 of 128 elements, then one bit for each of these
    /// elements, which is set for a low part of 32768. The first element has the lowest bit of the first
    /// byte. If the master has 24 bits, the low bits are U8, one for each element. In both formats the array
    /// is aligned to 4 bytes.
    LowBits,
    /// The compensation of [`Kahan`](crate::Kahan): what the last rounding lost.
    Compensation,
    /// A state tensor of a rule, by its name in checkpoints: `m`, or `1.m` in the second member of a chain.
    Slot(String),
}

/// A buffer that a runtime keeps from step to step, in addition to the parameter.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct StateBuffer {
    /// What the buffer holds.
    pub role: BufferRole,
    /// How the buffer is stored.
    pub format: SlotFormat,
    /// The content of the buffer before the first step.
    pub start: BufferStart,
    pub(super) parameter: DType,
}

/// The content of a buffer before the first step.
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub enum BufferStart {
    /// This number in each element. In every format a 0 has all bytes 0.
    Number(f64),
    /// The parameter's elements, converted.
    Parameter,
}

impl PrintedKernel {
    /// The flags for NVRTC or nvcc with which a device computes the bits of [`update`](crate::update).
    ///
    /// Add the flag for the architecture.
    pub const CUDA_FLAGS: [&str; 5] = CUDA_FLAGS;

    /// The source in CUDA C++, complete: it includes nothing.
    pub fn source(&self) -> &str {
        &self.source
    }

    /// The source for a C++17 compiler of the host, to test without a device.
    ///
    /// The source has one function. Like `cuLaunchKernel`, the function takes the number of blocks and a
    /// pointer to the value of each argument. The function runs all threads one after another:
    ///
    /// ```text
    /// extern "C" void launch(unsigned int blocks, void** values);
    /// ```
    ///
    /// Compile the source with `-ffp-contract=off` (no contraction of products into sums), and without
    /// `-ffast-math`.
    /// State [in 8 bits](SlotFormat::Q8) needs POSIX contexts (`ucontext.h`).
    pub fn host_source(&self) -> &str {
        &self.host_source
    }

    /// The number of blocks for a parameter of `length` elements. If `length` is 0, launch nothing.
    pub fn blocks(&self, length: usize) -> u32 {
        length.div_ceil(self.elements_per_block) as u32
    }

    /// The arrays among the arguments.
    pub fn arrays(&self) -> impl Iterator<Item = &KernelArray> {
        self.arguments.iter().filter_map(|argument| {
            if let KernelArgument::Array(array) = argument {
                Some(array)
            } else {
                None
            }
        })
    }
}

impl KernelArray {
    /// How many bytes the array takes for a parameter of `length` elements.
    pub fn bytes(&self, length: usize) -> usize {
        bytes(&self.role, self.format, length)
    }
}

impl StateBuffer {
    /// How many bytes the buffer takes for a parameter of `length` elements.
    pub fn bytes(&self, length: usize) -> usize {
        bytes(&self.role, self.format, length)
    }

    /// The bytes of the buffer before the first step of this parameter, to upload.
    ///
    /// # Errors
    /// If the parameter has another dtype than [`printed`](crate::printed()) got, or there is no memory for
    /// the bytes.
    ///
    /// ```
    /// use optimisers::DType::{BF16, F32};
    /// use optimisers::{Adam, MixedPrecision, printed};
    ///
    /// let adam = printed(MixedPrecision::new(F32, Adam::new(1e-3)), BF16, BF16)?;
    /// let parameter = [half::bf16::ONE; 2];
    /// let starts = adam.state().iter().map(|buffer| buffer.start_bytes(&parameter)).collect::<Result<Vec<_>, _>>()?;
    /// assert_eq!(starts, [[1f32.to_ne_bytes(); 2].concat(), vec![0; 8], vec![0; 8]]); // master, m, v
    /// # Ok::<(), optimisers::Error>(())
    /// ```
    pub fn start_bytes<'p>(&self, parameter: impl Into<MemoryRef<'p>>) -> Result<Vec<u8>> {
        let parameter = parameter.into();
        if parameter.dtype() != self.parameter {
            let expected = format_args!("{:?}, as in `printed`", self.parameter);
            return Err(Error::dtype("the parameter", parameter.dtype(), expected));
        }
        let start = match (self.start, self.format) {
            (BufferStart::Number(number), SlotFormat::Dtype(dtype)) if number != 0.0 => {
                filled(number, parameter.len(), dtype, &Device::Cpu)?
            }
            (BufferStart::Parameter, SlotFormat::Dtype(dtype)) => rounded(&flat_copy(parameter), dtype)?,
            // In every format a 0 has all bytes 0, and buffers in 8 bits start with 0.
            _ => return Ok(vec![0; self.bytes(parameter.len())]),
        };
        let (storage, layout) = storage_of(&start)?;
        Ok(bytes_of(&storage, layout)?.to_vec())
    }
}

fn bytes(role: &BufferRole, format: SlotFormat, length: usize) -> usize {
    match (role, format) {
        (BufferRole::LowBits, SlotFormat::Dtype(DType::I16)) => low_bits::stored_bytes(length),
        (_, SlotFormat::Dtype(dtype)) => length * dtype.size_in_bytes(),
        (_, SlotFormat::Q8) => codes::stored_bytes(length),
    }
}
