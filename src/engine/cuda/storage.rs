//! Addresses of tensors on a device, one tensor at a time: a concurrent forward pass holds several locks at once, so holding two could deadlock.
//!
//! An address stays when the lock is given back, for candle never moves a storage while a tensor has it. That the device's work keeps its
//! order is cudarc's concern: asked for an address, it lets the stream wait for earlier work on the data by other streams, and notes that
//! the stream uses the data from now on. Where there are several streams, an address is asked for a second time after the work has been
//! enqueued, so that the note covers it.

use std::cell::Cell;

use candle_core::cuda::cudarc::driver::{CudaSlice, CudaStream, DevicePtr, DevicePtrMut, DeviceRepr};
use candle_core::cuda::{CudaStorage, CudaStorageSlice, WrapErr};
use candle_core::{CpuStorage, Device, InplaceOp1, Layout, Shape, Storage, Tensor, WithDType};

fn unsupported() -> candle_core::Error {
    candle_core::Error::Msg("the fused CUDA engine needs contiguous f16, bf16, f32 or f64 storage".to_string())
}

/// The address of the first element of a contiguous tensor that `stream` reads.
pub(super) fn read(tensor: &Tensor, stream: &CudaStream) -> candle_core::Result<u64> {
    fn address<T>(slice: &CudaSlice<T>, start: usize, stream: &CudaStream) -> u64 {
        let (address, _noted_on_drop) = slice.device_ptr(stream);
        address + (start * size_of::<T>()) as u64
    }
    let (storage, layout) = tensor.storage_and_layout();
    let (start, _) = layout.contiguous_offsets().ok_or_else(unsupported)?;
    let Storage::Cuda(storage) = &*storage else { return Err(unsupported()) };
    Ok(match &storage.slice {
        CudaStorageSlice::F16(slice) => address(slice, start, stream),
        CudaStorageSlice::BF16(slice) => address(slice, start, stream),
        CudaStorageSlice::F32(slice) => address(slice, start, stream),
        CudaStorageSlice::F64(slice) => address(slice, start, stream),
        CudaStorageSlice::I16(slice) => address(slice, start, stream),
        _ => return Err(unsupported()),
    })
}

/// The address of the first element of a contiguous variable that `stream` reads and writes.
pub(super) fn write(tensor: &Tensor, stream: &CudaStream) -> candle_core::Result<u64> {
    let borrow = FindAddress { stream, address: Cell::new(0) };
    tensor.inplace_op1(&borrow)?;
    Ok(borrow.address.get())
}

/// A copy on the CPU of a contiguous tensor, which takes no memory on the device. It is done when this returns.
pub(in crate::engine) fn download(tensor: &Tensor) -> candle_core::Result<Tensor> {
    fn copy<T: DeviceRepr + WithDType>(slice: &CudaSlice<T>, (start, end): (usize, usize), shape: &Shape) -> candle_core::Result<Tensor> {
        let stream = slice.stream();
        let values = stream.clone_dtoh(&slice.slice(start..end)).w()?;
        stream.synchronize().w()?;
        Tensor::from_vec(values, shape, &Device::Cpu)
    }
    let (storage, layout) = tensor.storage_and_layout();
    let range = layout.contiguous_offsets().ok_or_else(unsupported)?;
    let Storage::Cuda(storage) = &*storage else { return Err(unsupported()) };
    match &storage.slice {
        CudaStorageSlice::F16(slice) => copy(slice, range, tensor.shape()),
        CudaStorageSlice::BF16(slice) => copy(slice, range, tensor.shape()),
        CudaStorageSlice::F32(slice) => copy(slice, range, tensor.shape()),
        CudaStorageSlice::F64(slice) => copy(slice, range, tensor.shape()),
        _ => Err(unsupported()),
    }
}

/// Writes a contiguous tensor on the CPU over the elements of a variable from `start` on, which takes no memory on the device.
pub(in crate::engine) fn upload(values: &Tensor, variable: &Tensor, start: usize) -> candle_core::Result<()> {
    variable.inplace_op1(&WriteFromHost { values, start })
}

/// An in-place operation that writes a part of its storage.
struct WriteFromHost<'v> {
    values: &'v Tensor,
    start: usize,
}

impl InplaceOp1 for WriteFromHost<'_> {
    fn name(&self) -> &'static str {
        "optimiser-upload"
    }

    fn cpu_fwd(&self, _: &mut CpuStorage, _: &Layout) -> candle_core::Result<()> {
        Err(unsupported())
    }

    fn cuda_fwd(&self, storage: &mut CudaStorage, layout: &Layout) -> candle_core::Result<()> {
        fn copy<T: DeviceRepr>(values: &[T], slice: &mut CudaSlice<T>, start: usize) -> candle_core::Result<()> {
            let stream = slice.stream().clone();
            stream.memcpy_htod(values, &mut slice.slice_mut(start..start + values.len())).w()
        }
        let (first, _) = layout.contiguous_offsets().ok_or_else(unsupported)?;
        let (values, from) = self.values.storage_and_layout();
        let (begin, end) = from.contiguous_offsets().ok_or_else(unsupported)?;
        let (range, start) = (begin..end, first + self.start);
        match (&*values, &mut storage.slice) {
            (Storage::Cpu(CpuStorage::F16(values)), CudaStorageSlice::F16(slice)) => copy(&values[range], slice, start),
            (Storage::Cpu(CpuStorage::BF16(values)), CudaStorageSlice::BF16(slice)) => copy(&values[range], slice, start),
            (Storage::Cpu(CpuStorage::F32(values)), CudaStorageSlice::F32(slice)) => copy(&values[range], slice, start),
            (Storage::Cpu(CpuStorage::F64(values)), CudaStorageSlice::F64(slice)) => copy(&values[range], slice, start),
            _ => Err(unsupported()),
        }
    }
}

/// An in-place operation that only looks where its storage is.
struct FindAddress<'s> {
    stream: &'s CudaStream,
    address: Cell<u64>,
}

impl InplaceOp1 for FindAddress<'_> {
    fn name(&self) -> &'static str {
        "optimiser-update"
    }

    fn cpu_fwd(&self, _: &mut CpuStorage, _: &Layout) -> candle_core::Result<()> {
        Err(unsupported())
    }

    fn cuda_fwd(&self, storage: &mut CudaStorage, layout: &Layout) -> candle_core::Result<()> {
        fn address<T>(slice: &mut CudaSlice<T>, start: usize, stream: &CudaStream) -> u64 {
            let (address, _noted_on_drop) = slice.device_ptr_mut(stream);
            address + (start * size_of::<T>()) as u64
        }
        let (start, _) = layout.contiguous_offsets().ok_or_else(unsupported)?;
        self.address.set(match &mut storage.slice {
            CudaStorageSlice::F16(slice) => address(slice, start, self.stream),
            CudaStorageSlice::BF16(slice) => address(slice, start, self.stream),
            CudaStorageSlice::F32(slice) => address(slice, start, self.stream),
            CudaStorageSlice::F64(slice) => address(slice, start, self.stream),
            CudaStorageSlice::I16(slice) => address(slice, start, self.stream),
            _ => return Err(unsupported()),
        });
        Ok(())
    }
}
