//! The trait of all that is lent.

use std::borrow::Cow;
use std::io::{self, Write};

use super::{MemoryMut, MemoryRef, View, storage_of, write_tensor};
use crate::error::{Error, ErrorKind, Result};
use crate::numbers::{DType, elem_count, place_of};
use crate::tensors::{Device, Tensor, rows_of, tensor_of, write_values};

/// Memory of a parameter or gradient that its owner lends while it is read or written.
///
/// candle's tensors are such memory, and so is what [`ParameterSlices`](crate::ParameterSlices) and
/// [`GradientSlices`](crate::GradientSlices) hold. A framework with tensors of its own implements it for
/// them.
///
/// # What the crate promises
/// - When the function that `read` or `write` gets returns, it is done: nothing of the memory is kept.
/// - Elementwise rules work on the memory itself. What is copied, which locks are held together and which
///   threads call is on
///   [the page for authors of frameworks](crate::guide::frameworks#what-an-update-promises).
///
/// # What the owner promises
/// - `lent_shape` and `lent_dtype` say the same for as long as they are borrowed. A call asks once.
/// - `read` and `write` call the function once, with all elements, and return its error; or they return an
///   error.
/// - `read` lends a parameter in row-major order.
///
/// A breach of these is an error of the call that meets it: dtype and number of elements are compared each
/// time, and the function's error is that of the call whatever the owner returns.
pub trait Lend: Send + Sync {
    /// The sizes of all dimensions.
    fn lent_shape(&self) -> &[usize];

    /// The dtype of the elements: F16, BF16, F32 or F64.
    fn lent_dtype(&self) -> DType;

    /// A number that two lenders share exactly if they share memory, and so a lock: such as an address.
    ///
    /// `None` if nobody else can access the memory meanwhile, as with a `&mut` slice. Two gradients of one
    /// parameter that both say `None` are one, and count once, if they lie at one address in one order.
    fn memory(&self) -> Option<usize>;

    /// Where in its [`memory`](Lend::memory) the first element is, in any unit: an offset, or an address.
    ///
    /// It tells handles of one tensor from neighbours in one memory: lenders with one memory, offset, shape
    /// and dtype are the same elements in the same order. So a handle that is shown under two paths is one
    /// parameter, and a gradient that is found under two paths counts once.
    ///
    /// The default, `None`, says nothing: then one object is itself, two gradients are two, and two
    /// parameters in one memory are refused.
    fn offset(&self) -> Option<usize> {
        None
    }

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
    pub(crate) fn shape(&self) -> &[usize] {
        self.lent_shape()
    }

    pub(crate) fn dtype(&self) -> DType {
        self.lent_dtype()
    }

    /// Where it is.
    pub(crate) fn device(&self) -> &Device {
        self.tensor().map_or(&Device::Cpu, Tensor::device)
    }

    pub(crate) fn elem_count(&self) -> usize {
        elem_count(self.shape())
    }

    /// The tensor itself, or a copy of what is lent.
    pub(crate) fn tensor_or_copy(&self) -> Result<Tensor> {
        self.tensor().map_or_else(|| copied(UNNAMED, self), |tensor| Ok(tensor.clone()))
    }
}

/// Runs a function on what is lent to be read, if it is what its owner says. `name` is what it is to the
/// program.
pub(crate) fn read(
    name: &'static str,
    lender: &dyn Lend,
    run: &mut dyn FnMut(View<'_>) -> Result<()>,
) -> Result<()> {
    let mut once = OneRun::of(lender);
    let lent = lender.read(&mut |view| {
        once.run(|| {
            expect(lender, view.fits(lender.shape(), lender.dtype()))?;
            run(view)
        })
    });
    once.end(lent).map_err(|error| error.naming(name))
}

/// Runs a function on what is lent to be written, as [`read`].
pub(crate) fn write(
    name: &'static str,
    lender: &dyn Lend,
    run: &mut dyn FnMut(MemoryMut<'_>) -> Result<()>,
) -> Result<()> {
    let mut once = OneRun::of(lender);
    let lent = lender.write(&mut |memory| {
        once.run(|| {
            let got = (memory.dtype(), memory.len());
            expect(lender, if got == (lender.dtype(), lender.elem_count()) { Ok(()) } else { Err(got) })?;
            run(memory)
        })
    });
    once.end(lent).map_err(|error| error.naming(name))
}

/// The outcome of a function that an owner is to run once, whatever the owner returns.
struct OneRun<'l> {
    lender: &'l dyn Lend,
    runs: usize,
    failed: Option<Error>,
}

impl<'l> OneRun<'l> {
    fn of(lender: &'l dyn Lend) -> Self {
        OneRun { lender, runs: 0, failed: None }
    }

    /// Runs it, if it has not run: a second run would be a second step.
    fn run(&mut self, function: impl FnOnce() -> Result<()>) -> Result<()> {
        self.runs += 1;
        let done = if self.runs == 1 { function() } else { Err(not_lent(self.lender, self.runs)) };
        done.map_err(|error| {
            self.failed.get_or_insert(error);
            Error::other("the function that was given to the owner of memory has failed")
        })
    }

    /// The function's error, or else the owner's.
    fn end(self, lent: Result<()>) -> Result<()> {
        match (self.failed, lent) {
            (Some(error), _) => Err(error),
            (None, Err(error)) => {
                use ErrorKind::{File, Io, Memory};
                // This crate's own words: of a tensor, of memory, or of a file that lends its tensors.
                if self.lender.tensor().is_some() || matches!(error.kind(), File | Io | Memory) {
                    return Err(error);
                }
                Err(Error::new(Memory, "the owner of the tensor does not lend it").caused_by(error))
            }
            (None, Ok(())) if self.runs == 0 => Err(not_lent(self.lender, 0)),
            (None, Ok(())) => Ok(()),
        }
    }
}

/// Refuses a parameter that is not what its owner says, that does not lie in row-major order, or that is to
/// be written and cannot be.
pub(crate) fn check_parameter(name: &'static str, lender: &dyn Lend, is_written: bool) -> Result<()> {
    if let Some(tensor) = lender.tensor() {
        return storage_of(name, tensor).map(drop);
    }
    read(name, lender, &mut |view| match view.in_order() {
        Some(_) => Ok(()),
        None => Err(Error::new(ErrorKind::Memory, "the tensor does not lie in row-major order")
            .with_remedy("let `Lend::read` hand over parameters as `Lend::write` does")),
    })?;
    if is_written { write(name, lender, &mut |_| Ok(())) } else { Ok(()) }
}

/// A copy of what is lent.
pub(crate) fn copied(name: &'static str, lender: &dyn Lend) -> Result<Tensor> {
    if let Some(tensor) = lender.tensor() {
        return Ok(tensor.copy()?);
    }
    let mut copy = None;
    read(name, lender, &mut |view| {
        let shape = lender.shape();
        let numbers = owned(view.memory());
        copy = Some(match view.strides() {
            None => numbers.reshape(shape)?,
            Some((_, strides)) => in_order(&numbers, shape, strides)?,
        });
        Ok(())
    })?;
    copy.ok_or_else(|| not_lent(lender, 0))
}

/// Writes the values of what is lent, as [`write_tensor`].
pub(crate) fn write_lent(lender: &dyn Lend, out: &mut dyn Write) -> io::Result<()> {
    if let Some(tensor) = lender.tensor() {
        return write_tensor(tensor, out);
    }
    let mut written = Ok(());
    let read = read("tensor", lender, &mut |view| {
        let Some(memory) = view.in_order() else {
            return Err(Error::new(
                ErrorKind::Unsupported,
                "values that do not lie in order cannot be saved",
            )
            .with_remedy("lend a copy"));
        };
        written = write_values(memory.bytes(), memory.dtype().size_in_bytes(), out);
        Ok(())
    });
    read.map_err(io::Error::other).and(written)
}

/// A vector with copies of the numbers.
pub(crate) fn owned(memory: MemoryRef<'_>) -> Tensor {
    tensor_of(memory.to_storage(), memory.len())
}

/// The elements of a vector that lie `strides` apart.
fn in_order(numbers: &Tensor, shape: &[usize], strides: &[usize]) -> crate::tensors::Result<Tensor> {
    let places = (0..elem_count(shape)).map(|element| place_of(element, shape, strides)).collect();
    rows_of(numbers, places)?.reshape(shape)
}

fn expect(lender: &dyn Lend, fits: std::result::Result<(), (DType, usize)>) -> Result<()> {
    fits.map_err(|got| other_memory(got, (lender.dtype(), lender.elem_count())))
}

/// The error for an owner that lends another number of elements, or another dtype, than it says.
pub(crate) fn other_memory(got: (DType, usize), expected: (DType, usize)) -> Error {
    Error::new(ErrorKind::Memory, "the memory lent for the tensor has")
        .with_got(format_args!("{} elements of {:?}", got.1, got.0))
        .with_expected(format_args!("{} of {:?}", expected.1, expected.0))
        .with_remedy(KEEP_TO)
}

/// The remedy for an owner whose memory is not what it says.
pub(super) const KEEP_TO: &str =
    "let `Lend::read` and `Lend::write` hand over what `lent_shape` and `lent_dtype` say";

/// The error for an owner that has run the function another number of times than once.
fn not_lent(lender: &dyn Lend, runs: usize) -> Error {
    let owner =
        format!("the owner of the tensor of {} elements of {:?}", lender.elem_count(), lender.dtype());
    Error::new(ErrorKind::Memory, format!("{owner} has run the function that it was given"))
        .with_got(format_args!("{runs} times"))
        .with_expected("once")
        .with_remedy("let `Lend::read` and `Lend::write` call it, or return an error")
}

/// The error where something is to be written that is lent to be read. `name` is what it is to the program.
pub(crate) fn read_only(name: &str) -> Error {
    Error::new(ErrorKind::Memory, format!("the memory of the {name} can only be read"))
        .with_remedy("lend what is to be written as `ParameterSlices` do")
}

/// The error for a state that this crate itself rules out.
pub(crate) fn defect(problem: impl Into<Cow<'static, str>>) -> Error {
    Error::new(ErrorKind::Other, problem).with_remedy("report this defect of the library")
}

/// What a tensor is called until it is known what it is to the program.
pub(super) const UNNAMED: &str = "tensor";
