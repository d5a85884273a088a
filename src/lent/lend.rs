//! The trait of all that is lent.

use std::borrow::Cow;
use std::io::{self, Write};

use candle_core::op::BackpropOp;
use candle_core::{DType, Device, Shape, Storage, Tensor};

use super::{MemoryMut, MemoryRef, View, storage_of, write_tensor, write_values};
use crate::error::{Error, ErrorKind, Result};

/// Memory of a parameter or gradient that its owner lends while it is read or written.
///
/// candle's tensors are such memory, and so is what [`ParameterSlices`](crate::ParameterSlices) and
/// [`GradientSlices`](crate::GradientSlices) hold. A framework with tensors of its own implements it for them.
///
/// # What the crate promises
/// - Nothing is copied, but for a gradient whose [`memory`](Lend::memory) an update writes.
/// - The function that `read` and `write` get is done when it returns; nothing of the memory is kept.
/// - A thread asks to write one parameter, and then to read its gradients, at a time; it does not ask for the memory
///   of two parameters together. So owners may have locks that other threads take in any order.
/// - Any thread of the engine may call, also several at a time for different parameters.
///
/// # What the owner promises
/// - `shape` and `dtype` say the same for as long as they are borrowed.
/// - `read` and `write` call the function once, with all elements, or return an error.
///
/// A breach of these is an error of the call that meets it: dtype and number of elements are compared each time.
pub trait Lend: Send + Sync {
    /// The sizes of all dimensions.
    fn shape(&self) -> &Shape;

    /// The dtype of the elements: F16, BF16, F32 or F64.
    fn dtype(&self) -> DType;

    /// A number that two have in common exactly if they share memory, and so a lock; an address, for example.
    ///
    /// `None` where nobody else can get at the memory meanwhile, as it is with a `&mut` slice.
    fn memory(&self) -> Option<usize>;

    /// Runs a function on the elements, which do not change meanwhile.
    ///
    /// # Errors
    /// Those of the function; and if the memory cannot be had.
    fn read(&self, run: &mut dyn FnMut(View<'_>) -> Result<()>) -> Result<()>;

    /// Runs a function on the elements in row-major order, which nobody else reads or writes meanwhile.
    ///
    /// # Errors
    /// Those of the function; and if the memory cannot be had.
    fn write(&self, run: &mut dyn FnMut(MemoryMut<'_>) -> Result<()>) -> Result<()>;

    /// The tensor, if it is one of candle's.
    #[doc(hidden)]
    fn tensor(&self) -> Option<&Tensor> {
        None
    }
}

impl dyn Lend + '_ {
    /// Where it is.
    pub(crate) fn device(&self) -> &Device {
        self.tensor().map_or(&Device::Cpu, Tensor::device)
    }

    pub(crate) fn elem_count(&self) -> usize {
        self.shape().elem_count()
    }

    /// The tensor itself, or a copy of what is lent.
    pub(crate) fn to_tensor(&self) -> Result<Tensor> {
        self.tensor().map_or_else(|| copied(UNNAMED, self), |tensor| Ok(tensor.clone()))
    }
}

/// Runs a function on what is lent to be read, if it is what its owner says. `name` is what it is to the program.
pub(crate) fn read(name: &'static str, lender: &dyn Lend, run: &mut dyn FnMut(View<'_>) -> Result<()>) -> Result<()> {
    let mut runs = 0;
    let outcome = lender.read(&mut |view| {
        runs += 1;
        expect(lender, view.fits(lender.shape().dims(), lender.dtype()))?;
        run(view)
    });
    outcome.and(expect_once(name, lender, runs)).map_err(|error| error.naming(name))
}

/// Runs a function on what is lent to be written, as [`read`].
pub(crate) fn write(name: &'static str, lender: &dyn Lend, run: &mut dyn FnMut(MemoryMut<'_>) -> Result<()>) -> Result<()> {
    let mut runs = 0;
    let outcome = lender.write(&mut |memory| {
        runs += 1;
        // A second run would be a second step.
        expect_once(name, lender, runs)?;
        let (dtype, length) = (memory.dtype(), memory.len());
        let fits = dtype == lender.dtype() && length == lender.elem_count();
        expect(lender, if fits { Ok(()) } else { Err((dtype, length)) })?;
        run(memory)
    });
    outcome.and(expect_once(name, lender, runs)).map_err(|error| error.naming(name))
}

/// Refuses what is not what its owner says.
pub(crate) fn expect_stored(name: &'static str, lender: &dyn Lend) -> Result<()> {
    match lender.tensor() {
        Some(tensor) => storage_of(name, tensor).map(drop),
        None => read(name, lender, &mut |_| Ok(())),
    }
}

/// A copy of what is lent.
pub(crate) fn copied(name: &'static str, lender: &dyn Lend) -> Result<Tensor> {
    if let Some(tensor) = lender.tensor() {
        return Ok(tensor.copy()?);
    }
    let mut copy = None;
    read(name, lender, &mut |view| {
        let shape = lender.shape().clone();
        let numbers = owned(view.memory());
        copy = Some(match view.strides() {
            None => numbers.reshape(shape)?,
            Some((_, strides)) => in_order(&numbers, shape, strides)?,
        });
        Ok(())
    })?;
    copy.ok_or_else(|| not_lent(name, lender, 0))
}

/// Writes the values of what is lent, as [`write_tensor`].
pub(crate) fn write_lent(lender: &dyn Lend, out: &mut dyn Write) -> io::Result<()> {
    if let Some(tensor) = lender.tensor() {
        return write_tensor(tensor, out);
    }
    let mut written = Ok(());
    let read = read("tensor", lender, &mut |view| {
        let Some(memory) = view.in_order() else {
            return Err(Error::new(ErrorKind::Unsupported, "values that do not lie in order cannot be saved").with_remedy("lend a copy"));
        };
        written = write_values(memory.bytes(), memory.dtype().size_in_bytes(), out);
        Ok(())
    });
    read.map_err(io::Error::other).and(written)
}

/// A vector with copies of the numbers.
pub(crate) fn owned(memory: MemoryRef<'_>) -> Tensor {
    Tensor::from_storage(Storage::Cpu(memory.to_storage()), memory.len(), BackpropOp::none(), false)
}

/// The elements of a vector that are so far apart.
fn in_order(numbers: &Tensor, shape: Shape, strides: &[usize]) -> candle_core::Result<Tensor> {
    let places = (0..shape.elem_count()).map(|element| {
        let mut rest = element;
        let of_dim = |(dim, stride): (&usize, &usize)| {
            let place = rest % dim * stride;
            rest /= dim;
            place
        };
        shape.dims().iter().zip(strides).rev().map(of_dim).sum::<usize>() as i64
    });
    let places = Tensor::from_iter(places, &Device::Cpu)?;
    numbers.index_select(&places, 0)?.reshape(shape)
}

fn expect(lender: &dyn Lend, fits: std::result::Result<(), (DType, usize)>) -> Result<()> {
    fits.map_err(|(dtype, length)| {
        Error::new(ErrorKind::Memory, "the memory lent for the tensor has")
            .with_got(format_args!("{length} elements of {dtype:?}"))
            .with_expected(format_args!("{} of {:?}", lender.elem_count(), lender.dtype()))
            .with_remedy(KEEP_TO)
    })
}

/// What the owner of memory of another kind than it says has to do.
pub(super) const KEEP_TO: &str = "let `Lend::read` and `Lend::write` hand over what `shape` and `dtype` say";

/// Refuses an owner that has not called the function, or not once.
fn expect_once(name: &str, lender: &dyn Lend, runs: usize) -> Result<()> {
    if runs == 1 { Ok(()) } else { Err(not_lent(name, lender, runs)) }
}

fn not_lent(name: &str, lender: &dyn Lend, runs: usize) -> Error {
    let owner = format!("the owner of the {name} of {} elements of {:?}", lender.elem_count(), lender.dtype());
    Error::new(ErrorKind::Contract, format!("{owner} has run the function that it was given"))
        .with_got(format_args!("{runs} times"))
        .with_expected("once")
        .with_remedy("let `Lend::read` and `Lend::write` call it, or return an error")
}

/// The error where something is to be written that is lent to be read. `name` is what it is to the program.
pub(crate) fn read_only(name: &str) -> Error {
    Error::new(ErrorKind::Memory, format!("the memory of the {name} can only be read"))
        .with_remedy("lend what is to be written as `ParameterSlices` do")
}

/// The error for a state of affairs that this crate itself rules out.
pub(crate) fn defect(problem: impl Into<Cow<'static, str>>) -> Error {
    Error::new(ErrorKind::Other, problem).with_remedy("report this defect of the library")
}

/// What a tensor is called until it is known what it is to the program.
pub(super) const UNNAMED: &str = "tensor";
