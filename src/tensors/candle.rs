//! candle's tensors, by the names that the crate has for them, and what needs candle's inner parts.

use candle_core::backend::{BackendDevice, BackendStorage};
use candle_core::cpu_backend::CpuDevice;
use candle_core::op::BackpropOp;

#[cfg(feature = "cuda")]
pub(crate) use candle_core::CudaStorage;
pub(crate) use candle_core::{
    CpuStorage, DType, Device, Error as TensorError, InplaceOp1, Layout, Result, Shape, Storage, StorageRef,
    Tensor, TensorId, Var, WithDType,
};

/// An error of tensors with this text.
pub(crate) fn failure(text: impl Into<String>) -> TensorError {
    TensorError::Msg(text.into())
}

/// A tensor in row-major order whose numbers these are.
pub(crate) fn tensor_of(numbers: CpuStorage, shape: impl Into<Shape>) -> Tensor {
    Tensor::from_storage(Storage::Cpu(numbers), shape, BackpropOp::none(), false)
}

/// Zeros for a tensor of this shape.
pub(crate) fn zeroed(shape: &Shape, dtype: DType) -> Result<CpuStorage> {
    CpuDevice.zeros_impl(shape, dtype)
}

/// The dtype of numbers on the CPU.
pub(crate) fn dtype_of(numbers: &CpuStorage) -> DType {
    numbers.dtype()
}

/// The numbers of a locked tensor, if they are on the CPU.
pub(crate) fn on_cpu(storage: &Storage) -> Option<&CpuStorage> {
    if let Storage::Cpu(numbers) = storage { Some(numbers) } else { None }
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

/// The dtype of a locked storage, and how many bytes it has for its tensor: none if it is on another device.
pub(crate) fn held(storage: &Storage, tensor: &Tensor) -> (DType, usize) {
    match (storage, tensor.device()) {
        (Storage::Cpu(numbers), Device::Cpu) => super::held_on_cpu(numbers),
        #[cfg(feature = "cuda")]
        (Storage::Cuda(storage), Device::Cuda(_)) => held_on_cuda(storage, tensor),
        // The fused engines have no pointers to others.
        (Storage::Metal(_), Device::Metal(_)) => (tensor.dtype(), usize::MAX),
        (storage, _) => (storage.dtype(), 0),
    }
}

/// [`held`] by a storage on a CUDA device.
#[cfg(feature = "cuda")]
pub(crate) fn held_on_cuda(storage: &CudaStorage, tensor: &Tensor) -> (DType, usize) {
    use candle_core::cuda::CudaStorageSlice::{BF16, F16, F32, F64, I16, I32, I64, U8, U32};
    let is_here = matches!(tensor.device(), Device::Cuda(device) if device.id() == storage.device().id());
    let length = match &storage.slice {
        _ if !is_here => 0,
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
    (storage.dtype(), length * storage.dtype().size_in_bytes())
}

/// The dtype of a file's tensor.
pub(crate) fn from_file(dtype: safetensors::Dtype) -> Result<DType> {
    DType::try_from(dtype)
}

/// A dtype as files name it.
pub(crate) fn in_file(dtype: DType) -> safetensors::Dtype {
    dtype.into()
}

/// The result of an operation on the elements of a tensor, or the tensor if it has none: candle launches a
/// kernel for such a tensor as well, and CUDA refuses a launch without threads.
fn on_elements(tensor: &Tensor, operation: impl FnOnce() -> Result<Tensor>) -> Result<Tensor> {
    if tensor.elem_count() == 0 { Ok(tensor.clone()) } else { operation() }
}

/// The tensor in another dtype, rounded as candle does.
pub(crate) fn in_dtype(tensor: &Tensor, dtype: DType) -> Result<Tensor> {
    match tensor.elem_count() {
        0 => Tensor::zeros(tensor.shape(), dtype, tensor.device()),
        _ => tensor.to_dtype(dtype),
    }
}

/// The sum of two tensors of one shape and dtype.
pub(crate) fn sum(a: &Tensor, b: &Tensor) -> Result<Tensor> {
    on_elements(a, || a + b)
}

/// The difference of two tensors of one shape and dtype.
pub(crate) fn difference(a: &Tensor, b: &Tensor) -> Result<Tensor> {
    on_elements(a, || a - b)
}

/// A tensor times a number of the same dtype.
pub(crate) fn product(tensor: &Tensor, number: &Tensor) -> Result<Tensor> {
    on_elements(tensor, || tensor.broadcast_mul(number))
}

/// A tensor divided by a number of the same dtype.
pub(crate) fn quotient(tensor: &Tensor, number: &Tensor) -> Result<Tensor> {
    on_elements(tensor, || tensor.broadcast_div(number))
}
