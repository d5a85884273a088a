//! Addresses of tensors on a device, under the lock of one tensor at a time. A concurrent forward pass holds
//! several locks at once, so code of this file could deadlock if it held two locks.
//!
//! **Validity.** An address stays valid after the lock is released, because candle never moves a storage
//! while a tensor has it. An in-place operation of the program may have given the tensor another storage. So
//! each storage is compared with its tensor under the lock (`model/lent/stored.rs`), and the address is that
//! of the compared storage. If another thread exchanges the storage before the launch, the launch uses
//! freed memory. No check can prevent such a use, because a check would have to hold several locks.
//!
//! **Order.** The legacy default stream waits for candle's streams of all threads, and they wait for it. So a
//! launch on the default stream needs addresses, and no events. If the program has made streams of its own,
//! cudarc keeps the order by events. Taking an address then makes the stream wait for earlier work of other
//! streams on the data, and records that the stream uses the data from then on. The address is taken a second
//! time after the work has been enqueued, so that the record covers that work.

use std::cell::Cell;

use candle_core::backend::BackendStorage;
use candle_core::cuda::cudarc::driver::{CudaSlice, CudaStream, DevicePtr, DevicePtrMut, DeviceRepr};
use candle_core::cuda::{CudaStorage, CudaStorageSlice, WrapErr};
use candle_core::{CpuStorage, Device, InplaceOp1, Layout, Shape, Storage, Tensor, WithDType};

use crate::error::Result;
use crate::model::lent::{check_extent, storage_of};
use crate::tensors::cuda_extent;

fn unsupported_tensor() -> candle_core::Error {
    candle_core::Error::Msg(
        "the values of this tensor cannot be had where they lie: it has to be contiguous on CUDA, in a \
         dtype of Rust or `half`"
            .to_string(),
    )
}

/// Runs an expression on the slice of a storage, for every dtype.
macro_rules! on_slice {
    ($slices:expr, $slice:ident => $run:expr) => {
        on_slice!($slices, U8 | U32 | I16 | I32 | I64 | F16 | BF16 | F32 | F64, $slice => $run)
    };
    ($slices:expr, $($dtype:ident)|+, $slice:ident => $run:expr) => {
        match $slices {
            $(CudaStorageSlice::$dtype($slice) => $run,)+
            _ => return Err(unsupported_tensor().into()),
        }
    };
}

/// The address of the first element of a contiguous tensor that `stream` reads.
pub(crate) fn read_address(tensor: &Tensor, stream: &CudaStream) -> Result<u64> {
    let (storage, layout) = storage_of(tensor)?;
    let (start, _) = layout.contiguous_offsets().ok_or_else(unsupported_tensor)?;
    let Storage::Cuda(storage) = &*storage else {
        return Err(unsupported_tensor().into());
    };
    let (address, _recorded_on_drop) = on_slice!(&storage.slice, slice => slice.device_ptr(stream));
    Ok(address + (start * tensor.dtype().size_in_bytes()) as u64)
}

/// The address of the first element of a contiguous tensor that `stream` reads and writes.
///
/// cudarc takes the storage by `&mut` to record which stream writes. If cudarc does not manage streams, it
/// records nothing, and the lock for reading is enough. Reading takes a fraction of the time of candle's
/// in-place operation. The in-place operation also refuses tensors with repeated elements, but a contiguous
/// tensor has none.
pub(crate) fn write_address(tensor: &Tensor, stream: &CudaStream) -> Result<u64> {
    if !stream.context().is_managing_stream_synchronization() {
        return read_address(tensor, stream);
    }
    let operation = FindAddress {
        tensor,
        stream,
        address: Cell::new(Ok(0)),
    };
    tensor.inplace_op1(&operation)?;
    operation.address.into_inner()
}

/// Copies a contiguous tensor to the CPU, without memory on the device. The copy is complete on return.
pub(in crate::engine) fn download(tensor: &Tensor) -> Result<Tensor> {
    fn copy<T: DeviceRepr + WithDType>(
        slice: &CudaSlice<T>,
        (start, end): (usize, usize),
        shape: &Shape,
    ) -> candle_core::Result<Tensor> {
        let stream = slice.stream();
        let values = stream.clone_dtoh(&slice.slice(start..end)).w()?;
        stream.synchronize().w()?;
        Tensor::from_vec(values, shape, &Device::Cpu)
    }
    let (storage, layout) = storage_of(tensor).map_err(|error| error.in_role("gradient"))?;
    let range = layout.contiguous_offsets().ok_or_else(unsupported_tensor)?;
    let Storage::Cuda(storage) = &*storage else {
        return Err(unsupported_tensor().into());
    };
    Ok(on_slice!(&storage.slice, slice => copy(slice, range, tensor.shape()))?)
}

/// Writes a contiguous tensor on the CPU over the elements of a variable from `start` on, without memory on
/// the device.
pub(in crate::engine) fn upload(values: &Tensor, variable: &Tensor, start: usize) -> candle_core::Result<()> {
    variable.inplace_op1(&WriteFromHost {
        values,
        variable,
        start,
    })
}

/// An in-place operation that writes a part of its storage.
struct WriteFromHost<'v> {
    values: &'v Tensor,
    variable: &'v Tensor,
    start: usize,
}

impl InplaceOp1 for WriteFromHost<'_> {
    fn name(&self) -> &'static str {
        "optimiser-upload"
    }

    fn cpu_fwd(&self, _: &mut CpuStorage, _: &Layout) -> candle_core::Result<()> {
        Err(unsupported_tensor())
    }

    fn cuda_fwd(&self, storage: &mut CudaStorage, layout: &Layout) -> candle_core::Result<()> {
        fn copy<T: DeviceRepr>(
            values: &[T],
            slice: &mut CudaSlice<T>,
            start: usize,
        ) -> candle_core::Result<()> {
            let stream = slice.stream().clone();
            stream
                .memcpy_htod(values, &mut slice.slice_mut(start..start + values.len()))
                .w()
        }
        check_extent(self.variable, cuda_extent(storage, self.variable))
            .map_err(|error| error.in_role("parameter"))?;
        let (first, _) = layout.contiguous_offsets().ok_or_else(unsupported_tensor)?;
        let (host_storage, host_layout) = self.values.storage_and_layout();
        let (begin, end) = host_layout.contiguous_offsets().ok_or_else(unsupported_tensor)?;
        let Storage::Cpu(values) = &*host_storage else {
            return Err(unsupported_tensor());
        };
        on_slice!(&mut storage.slice, slice => copy(&values.as_slice()?[begin..end], slice, first + self.start))
    }
}

/// An in-place operation that only finds the address of its storage.
struct FindAddress<'s> {
    tensor: &'s Tensor,
    stream: &'s CudaStream,
    address: Cell<Result<u64>>,
}

impl FindAddress<'_> {
    fn address(&self, storage: &mut CudaStorage, layout: &Layout) -> Result<u64> {
        check_extent(self.tensor, cuda_extent(storage, self.tensor))?;
        let (start, _) = layout.contiguous_offsets().ok_or_else(unsupported_tensor)?;
        let size = storage.dtype().size_in_bytes();
        let (address, _recorded_on_drop) =
            on_slice!(&mut storage.slice, slice => slice.device_ptr_mut(self.stream));
        Ok(address + (start * size) as u64)
    }
}

impl InplaceOp1 for FindAddress<'_> {
    fn name(&self) -> &'static str {
        "optimiser-update"
    }

    fn cpu_fwd(&self, _: &mut CpuStorage, _: &Layout) -> candle_core::Result<()> {
        Err(unsupported_tensor())
    }

    fn cuda_fwd(&self, storage: &mut CudaStorage, layout: &Layout) -> candle_core::Result<()> {
        self.address.set(self.address(storage, layout));
        Ok(())
    }
}
