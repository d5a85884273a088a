//! The trait [`Lend`], and the functions `read` and `write`, through which the crate uses lent memory.
//!
//! Both pass a closure to the owner. The owner may run the closure twice, or never, or drop the closure's
//! error. So `OneRun` counts the runs and decides the result of a loan. If the closure has failed, the result
//! is the closure's error. Otherwise the result is the owner's error. If the owner reports success without
//! having run the closure, the result is an error as well. A second run does nothing and is an error of the
//! closure.

use std::borrow::Cow;
use std::io::{self, Write};

use super::{MemoryMut, MemoryRef, View, storage_of, with_bytes, write_tensor};
use crate::error::{Error, ErrorKind, Result};
use crate::numbers::{DType, elem_count, element_offset};
use crate::tensors::{Device, Tensor, allocate, rows_of, tensor_of, write_values};

/// Memory of a parameter or gradient that its owner lends while it is read or written.
///
/// Implemented for candle's tensors, and for the slices in [`ParameterSlices`](crate::ParameterSlices) and
/// [`GradientSlices`](crate::GradientSlices). A framework implements `Lend` for its own tensors.
///
/// # What the crate promises
/// - No pointer into the memory is kept after the closure that `read` or `write` gets has returned.
/// - Elementwise rules work on the memory itself.
///   [The page for authors of frameworks](crate::guide::frameworks#what-an-update-promises) lists the copies,
///   the locks that are held together, and the threads that call `read` and `write`.
///
/// # What the owner promises
/// - `lent_shape` and `lent_dtype` do not change while the lender is borrowed. An update, like any
///   other call of this crate, asks for each of them once.
/// - `read` and `write` either run the closure once, with all elements, and return the closure's result; or
///   they return an error of the owner.
/// - `read` lends a parameter in row-major order.
///
/// If the crate notices a broken promise, the call returns an error. Dtype and number of elements are
/// compared at each loan. If the closure fails, the call fails with the closure's error, whatever the owner
/// returns. If the closure panics and the owner catches the panic, the call fails with an error of the kind
/// [`Memory`](crate::ErrorKind::Memory).
pub trait Lend: Send + Sync {
    /// The sizes of all dimensions.
    fn lent_shape(&self) -> &[usize];

    /// The dtype of the elements: F16, BF16, F32 or F64.
    fn lent_dtype(&self) -> DType;

    /// A number that identifies the memory, such as its address.
    ///
    /// Two lenders have the same number if and only if they share memory, and therefore a lock. `None` if no
    /// other code can access the memory during the call, as with a `&mut` slice. Of two gradients of one
    /// parameter that both return `None`, one is left out if both lie at the same address in the same order.
    fn memory(&self) -> Option<usize>;

    /// The place of the first element in [`memory`](Lend::memory), in any unit: an offset, or an address.
    ///
    /// Lenders with the same memory, offset, shape and dtype are taken for the same elements in the same
    /// order. So two such handles under two paths are one parameter, and of two such gradients of a parameter
    /// only one is added.
    ///
    /// With the default, `None`, only objects are compared: two gradient objects are both added, even if they
    /// share memory, and two parameter objects that share memory are refused.
    fn offset(&self) -> Option<usize> {
        None
    }

    /// Runs `run` on the elements, which do not change until `run` returns.
    ///
    /// # Errors
    /// The errors of `run`, and an error if the memory is not available.
    fn read(&self, run: &mut dyn FnMut(View<'_>) -> Result<()>) -> Result<()>;

    /// Runs `run` on the elements in row-major order. No other code accesses them until `run` returns.
    ///
    /// # Errors
    /// The errors of `run`, and an error if the memory is not available.
    fn write(&self, run: &mut dyn FnMut(MemoryMut<'_>) -> Result<()>) -> Result<()>;

    /// The lender itself, if it is a tensor of candle's.
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

    /// The device of the memory: the CPU, unless the lender is a tensor on another device.
    pub(crate) fn device(&self) -> &Device {
        self.tensor().map_or(&Device::Cpu, Tensor::device)
    }

    pub(crate) fn elem_count(&self) -> usize {
        elem_count(self.shape())
    }

    /// The tensor itself, or a copy of memory that is no tensor.
    pub(crate) fn tensor_or_copy(&self) -> Result<Tensor> {
        self.tensor()
            .map_or_else(|| copy_of("tensor", self), |tensor| Ok(tensor.clone()))
    }
}

/// Runs `run` on the memory of `lender`, if its dtype and length are those that `lender` reports.
///
/// Errors name the role of the tensor, such as "gradient".
pub(crate) fn read(
    role: &'static str,
    lender: &dyn Lend,
    run: &mut dyn FnMut(View<'_>) -> Result<()>,
) -> Result<()> {
    let mut one_run = OneRun::new(lender);
    let owner_result = lender.read(&mut |view| {
        one_run.run_once(|| {
            view.check_fit(lender.shape(), lender.dtype())
                .map_err(|got| misfit_error(lender, got))?;
            run(view)
        })
    });
    one_run
        .into_result(owner_result)
        .map_err(|error| error.in_role(role))
}

/// [`read`], for memory that `run` may write.
pub(crate) fn write(
    role: &'static str,
    lender: &dyn Lend,
    run: &mut dyn FnMut(MemoryMut<'_>) -> Result<()>,
) -> Result<()> {
    let mut one_run = OneRun::new(lender);
    let owner_result = lender.write(&mut |memory| {
        one_run.run_once(|| {
            let got = (memory.dtype(), memory.len());
            if got != (lender.dtype(), lender.elem_count()) {
                return Err(misfit_error(lender, got));
            }
            run(memory)
        })
    });
    one_run
        .into_result(owner_result)
        .map_err(|error| error.in_role(role))
}

/// Counts the runs of a closure that an owner has to run once, and stores the closure's first error.
struct OneRun<'l> {
    lender: &'l dyn Lend,
    runs: usize,
    /// Whether the first run has returned. False if the run panicked and the owner caught the panic.
    has_returned: bool,
    error: Option<Error>,
}

impl<'l> OneRun<'l> {
    fn new(lender: &'l dyn Lend) -> Self {
        OneRun {
            lender,
            runs: 0,
            has_returned: false,
            error: None,
        }
    }

    /// Runs `closure` the first time only, because a second run would apply a second step.
    fn run_once(&mut self, closure: impl FnOnce() -> Result<()>) -> Result<()> {
        self.runs += 1;
        let result = if self.runs == 1 {
            closure()
        } else {
            Err(run_count_error(self.lender, self.runs))
        };
        self.has_returned = true;
        result.map_err(|error| {
            // The owner gets a substitute, so that the error itself survives even if the owner drops the
            // substitute.
            self.error.get_or_insert(error);
            Error::other("the function that was given to the owner of memory has failed")
        })
    }

    /// The result of the loan: the error of the closure or, if the closure succeeded, the error of the owner.
    fn into_result(self, owner_result: Result<()>) -> Result<()> {
        match (self.error, owner_result) {
            (Some(error), _) => Err(error),
            (None, Err(error)) => {
                use ErrorKind::{File, Io, Memory};
                // An error of a tensor, of memory, or of a file that lends its tensors is not wrapped,
                // because it comes from this crate and names the problem already.
                if self.lender.tensor().is_some() || matches!(error.kind(), File | Io | Memory) {
                    return Err(error);
                }
                Err(Error::new(Memory, "the owner does not lend the memory").caused_by(error))
            }
            (None, Ok(())) if self.runs == 0 => Err(run_count_error(self.lender, 0)),
            (None, Ok(())) if !self.has_returned => {
                let problem = "the function that was given to the owner of memory has panicked";
                Err(Error::new(ErrorKind::Memory, problem)
                    .with_remedy("let `Lend::read` and `Lend::write` pass a panic of that function on"))
            }
            (None, Ok(())) => Ok(()),
        }
    }
}

/// Refuses a parameter whose memory differs from its shape or dtype, or is not in row-major order. If
/// `needs_write`, also refuses a parameter that its owner does not lend for writing.
pub(crate) fn check_parameter(role: &'static str, lender: &dyn Lend, needs_write: bool) -> Result<()> {
    if let Some(tensor) = lender.tensor() {
        return storage_of(tensor).map(drop).map_err(|error| error.in_role(role));
    }
    read(role, lender, &mut |view| match view.in_order() {
        Some(_) => Ok(()),
        None => Err(
            Error::new(ErrorKind::Memory, "the elements do not lie in row-major order").with_remedy(
                "let `Lend::read` hand over parameters in row-major order, as `Lend::write` does",
            ),
        ),
    })?;
    // This loan writes nothing. If the owner refuses to lend, the call fails before any parameter changes.
    if needs_write {
        write(role, lender, &mut |_| Ok(()))
    } else {
        Ok(())
    }
}

/// A copy of the lent memory.
pub(crate) fn copy_of(role: &'static str, lender: &dyn Lend) -> Result<Tensor> {
    if let Some(tensor) = lender.tensor() {
        return allocate(lender.elem_count(), lender.dtype(), tensor.device(), || {
            tensor.copy()
        });
    }
    let mut copy = None;
    read(role, lender, &mut |view| {
        copy = Some(copy_of_view(view, lender)?);
        Ok(())
    })?;
    copy.ok_or_else(|| run_count_error(lender, 0))
}

/// A copy of the view of a lender.
fn copy_of_view(view: View<'_>, lender: &dyn Lend) -> Result<Tensor> {
    let shape = lender.shape();
    allocate(lender.elem_count(), lender.dtype(), &Device::Cpu, || {
        let numbers = flat_copy(view.memory());
        match view.strides() {
            None => numbers.reshape(shape),
            Some((_, strides)) => copy_in_order(&numbers, shape, strides),
        }
    })
}

/// Writes the values of any lender to `out`, as [`write_tensor`] does for a tensor.
pub(crate) fn serialise_lent(lender: &dyn Lend, out: &mut dyn Write) -> io::Result<()> {
    if let Some(tensor) = lender.tensor() {
        return write_tensor(tensor, out);
    }
    let mut write_result = Ok(());
    let read_result = read("tensor", lender, &mut |view| {
        let Some(memory) = view.in_order() else {
            return Err(Error::new(
                ErrorKind::Unsupported,
                "values that do not lie in order cannot be saved",
            )
            .with_remedy("lend a copy"));
        };
        // The error is stored instead of returned to the owner, so that the error stays an `io::Error`.
        write_result = write_values(memory.bytes(), memory.dtype().size_in_bytes(), out);
        Ok(())
    });
    read_result.map_err(io::Error::other).and(write_result)
}

/// Sends the values of any lender, in any order, to a watch or a checksum, as little-endian bytes in
/// row-major order. The memory is lent until `out` has them all, so `out` must not be a file.
pub(crate) fn send_bytes(role: &'static str, lender: &dyn Lend, out: &mut dyn Write) -> Result<()> {
    let size = lender.dtype().size_in_bytes();
    let mut send = |bytes: &[u8]| write_values(bytes, size, out).map_err(Error::other);
    if let Some(tensor) = lender.tensor() {
        return with_bytes(tensor, send).map_err(|error| error.in_role(role));
    }
    read(role, lender, &mut |view| match view.in_order() {
        Some(memory) => send(memory.bytes()),
        None => with_bytes(&copy_of_view(view, lender)?, &mut send),
    })
}

/// A tensor of one dimension with copies of the numbers.
pub(crate) fn flat_copy(memory: MemoryRef<'_>) -> Tensor {
    tensor_of(memory.to_storage(), memory.len())
}

/// A copy of the elements of `numbers` that lie `strides` apart, in row-major order.
fn copy_in_order(numbers: &Tensor, shape: &[usize], strides: &[usize]) -> crate::tensors::Result<Tensor> {
    let offsets = (0..elem_count(shape))
        .map(|element| element_offset(element, shape, strides))
        .collect();
    rows_of(numbers, offsets)?.reshape(shape)
}

/// The error for lent memory whose dtype and length, `got`, are not those that the lender reports.
fn misfit_error(lender: &dyn Lend, got: (DType, usize)) -> Error {
    wrong_memory(got, (lender.dtype(), lender.elem_count()))
}

/// The error for an owner that lends another number of elements, or another dtype, than it reports.
pub(crate) fn wrong_memory(got: (DType, usize), expected: (DType, usize)) -> Error {
    Error::new(ErrorKind::Memory, "the lent memory has")
        .with_got(format_args!("{} elements of {:?}", got.1, got.0))
        .with_expected(format_args!("{} of {:?}", expected.1, expected.0))
        .with_remedy(LEND_AS_REPORTED)
}

/// The remedy for an owner whose memory has another length or dtype than it reports.
pub(super) const LEND_AS_REPORTED: &str =
    "let `Lend::read` and `Lend::write` hand over what `lent_shape` and `lent_dtype` return";

/// The error for an owner that did not run the closure exactly once.
fn run_count_error(lender: &dyn Lend, runs: usize) -> Error {
    let memory = format!("{} elements of {:?}", lender.elem_count(), lender.dtype());
    Error::new(
        ErrorKind::Memory,
        format!("the owner of {memory} has run the function that it was given"),
    )
    .with_got(format_args!("{runs} times"))
    .with_expected("once")
    .with_remedy("let `Lend::read` and `Lend::write` call the function once, or return an error")
}

/// The error for a write to memory that is lent only to be read.
pub(crate) fn read_only_error() -> Error {
    Error::new(ErrorKind::Memory, "the memory can only be read")
        .with_remedy("if it is to be written, lend the memory as `ParameterSlices` does")
}

/// The error for a situation that only a defect of this crate can cause.
pub(crate) fn defect(problem: impl Into<Cow<'static, str>>) -> Error {
    Error::new(ErrorKind::Other, problem).with_remedy("report this defect of the library")
}
