//! candle's types and functions under the names that `plain.rs` has as well, and functions that need candle's
//! internals.

use std::cell::RefCell;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};

use candle_core::InplaceOp1;
use candle_core::backend::{BackendDevice, BackendStorage};
use candle_core::cpu_backend::CpuDevice;
use candle_core::op::BackpropOp;

use crate::error;
use crate::numbers::DType;

#[cfg(feature = "cuda")]
pub(crate) use candle_core::CudaStorage;
pub(crate) use candle_core::{
    CpuStorage, Device, Error as TensorError, Layout, Result, Shape, Storage, Tensor, TensorId, Var,
    WithDType,
};

pub(crate) fn failure(text: impl Into<String>) -> TensorError {
    TensorError::Msg(text.into())
}

/// A tensor of these numbers, which are in row-major order.
pub(crate) fn tensor_of(numbers: CpuStorage, shape: impl Into<Shape>) -> Tensor {
    Tensor::from_storage(Storage::Cpu(numbers), shape, BackpropOp::none(), false)
}

pub(crate) fn zeros(shape: impl Into<Shape>, dtype: DType, device: &Device) -> Result<Tensor> {
    Tensor::zeros(shape, dtype.into(), device)
}

/// A storage of zeros on the CPU.
pub(crate) fn zero_storage(shape: &Shape, dtype: DType) -> Result<CpuStorage> {
    CpuDevice.zeros_impl(shape, dtype.into())
}

/// A tensor of these bytes, in the processor's order.
pub(crate) fn from_bytes(bytes: &[u8], dtype: DType, shape: &[usize]) -> Result<Tensor> {
    Tensor::from_raw_buffer(bytes, dtype.into(), shape, &Device::Cpu)
}

pub(crate) fn dtype_of(tensor: &Tensor) -> DType {
    tensor.dtype().into()
}

pub(crate) fn dtype_of_numbers(numbers: &CpuStorage) -> DType {
    numbers.dtype().into()
}

/// The numbers of a locked tensor, if they are on the CPU.
pub(crate) fn cpu_numbers(storage: &Storage) -> Option<&CpuStorage> {
    if let Storage::Cpu(numbers) = storage {
        Some(numbers)
    } else {
        None
    }
}

/// Writes the elements of a layout to `to`, in row-major order from `start` on.
pub(crate) fn copy_elements(
    from: &CpuStorage,
    layout: &Layout,
    to: &mut CpuStorage,
    start: usize,
) -> Result<()> {
    from.copy_strided_src(to, start, layout)
}

/// The dtype of a locked storage and its size in bytes. If the storage is not on the tensor's device, the
/// size is 0, so that no pointer into the storage passes a length check.
pub(crate) fn storage_extent(storage: &Storage, tensor: &Tensor) -> (DType, usize) {
    match (storage, tensor.device()) {
        (Storage::Cpu(numbers), Device::Cpu) => super::cpu_extent(numbers),
        #[cfg(feature = "cuda")]
        (Storage::Cuda(storage), Device::Cuda(_)) => cuda_extent(storage, tensor),
        // Any length passes, because the fused engines make no pointers to Metal memory.
        (Storage::Metal(_), Device::Metal(_)) => (dtype_of(tensor), usize::MAX),
        (storage, _) => (storage.dtype().into(), 0),
    }
}

#[cfg(feature = "cuda")]
pub(crate) fn cuda_extent(storage: &CudaStorage, tensor: &Tensor) -> (DType, usize) {
    use candle_core::cuda::CudaStorageSlice::{BF16, F16, F32, F64, I16, I32, I64, U8, U32};
    let is_on_device =
        matches!(tensor.device(), Device::Cuda(device) if device.id() == storage.device().id());
    let length = match &storage.slice {
        _ if !is_on_device => 0,
        U8(values) => values.len(),
        U32(values) => values.len(),
        I16(values) => values.len(),
        I32(values) => values.len(),
        I64(values) => values.len(),
        BF16(values) => values.len(),
        F16(values) => values.len(),
        F32(values) => values.len(),
        F64(values) => values.len(),
        _ => 0,
    };
    (storage.dtype().into(), length * storage.dtype().size_in_bytes())
}

/// Lends the numbers of a tensor on the CPU to `run`, while no other code can read or write them.
///
/// # Errors
/// If the tensor is on another device, and those of `run`.
pub(crate) fn with_numbers_mut(
    tensor: &Tensor,
    run: &mut dyn FnMut(&mut CpuStorage, &Layout) -> error::Result<()>,
) -> error::Result<()> {
    let operation = LendNumbers {
        run: RefCell::new(run),
        outcome: RefCell::new(Ok(Ok(()))),
    };
    tensor.inplace_op1(&operation)?;
    operation
        .outcome
        .into_inner()
        .unwrap_or_else(|panic| resume_unwind(panic))
}

/// A function that writes the numbers of a tensor.
type WriteNumbers<'f> = &'f mut dyn FnMut(&mut CpuStorage, &Layout) -> error::Result<()>;

/// An in-place operation, because candle locks a storage for writing only during in-place operations. A field
/// stores the outcome, because candle would wrap an error of this crate, and candle 0.10.2 would never lend a
/// storage again after a panic. The fields are cells, because candle passes the operation by `&`.
struct LendNumbers<'f> {
    run: RefCell<WriteNumbers<'f>>,
    outcome: RefCell<std::thread::Result<error::Result<()>>>,
}

impl InplaceOp1 for LendNumbers<'_> {
    fn name(&self) -> &'static str {
        "optimiser-write"
    }

    fn cpu_fwd(&self, storage: &mut CpuStorage, layout: &Layout) -> Result<()> {
        let run = || (self.run.borrow_mut())(storage, layout);
        *self.outcome.borrow_mut() = catch_unwind(AssertUnwindSafe(run));
        Ok(())
    }
}

/// The result of an operation on the elements of a tensor. A tensor without elements is returned as it is,
/// because candle would launch a kernel for it, and CUDA refuses a launch without threads.
fn unless_empty(tensor: &Tensor, operation: impl FnOnce() -> Result<Tensor>) -> Result<Tensor> {
    if tensor.elem_count() == 0 {
        Ok(tensor.clone())
    } else {
        operation()
    }
}

/// The tensor in another dtype, rounded as candle does.
pub(crate) fn in_dtype(tensor: &Tensor, dtype: DType) -> Result<Tensor> {
    match tensor.elem_count() {
        0 => zeros(tensor.shape(), dtype, tensor.device()),
        _ => tensor.to_dtype(dtype.into()),
    }
}

/// The rows with these indices, of a tensor on the CPU.
pub(crate) fn rows_of(tensor: &Tensor, rows: Vec<usize>) -> Result<Tensor> {
    // Rust collects in place, in the memory of `rows`, because both types have the same size.
    let (count, indices) = (rows.len(), rows.into_iter().map(|row| row as i64).collect());
    tensor.index_select(&Tensor::from_vec::<_, i64>(indices, count, &Device::Cpu)?, 0)
}

pub(crate) fn sum(a: &Tensor, b: &Tensor) -> Result<Tensor> {
    unless_empty(a, || a + b)
}

pub(crate) fn difference(a: &Tensor, b: &Tensor) -> Result<Tensor> {
    unless_empty(a, || a - b)
}

/// A tensor times a number of the same dtype.
pub(crate) fn product(tensor: &Tensor, number: &Tensor) -> Result<Tensor> {
    unless_empty(tensor, || tensor.broadcast_mul(number))
}

/// A tensor divided by a number of the same dtype.
pub(crate) fn quotient(tensor: &Tensor, number: &Tensor) -> Result<Tensor> {
    unless_empty(tensor, || tensor.broadcast_div(number))
}
