//! The values of tensors as little-endian bytes, the form that they have in files.

use std::io::{self, Write};

use bytemuck::NoUninit;
use candle_core::{CpuStorage, Device, Storage, Tensor};

/// Writes the values of a tensor, wherever it is. On the CPU nothing is copied; the tensor stays locked for reading meanwhile.
pub(crate) fn write_tensor(tensor: &Tensor, out: &mut dyn Write) -> io::Result<()> {
    let tensor = tensor.to_device(&Device::Cpu).and_then(|tensor| tensor.contiguous()).map_err(io::Error::other)?;
    let (storage, layout) = tensor.storage_and_layout();
    let range = layout.contiguous_offsets().map_or(0..0, |(start, end)| start..end);
    match &*storage {
        Storage::Cpu(CpuStorage::U8(values)) => write_values(&values[range], out),
        Storage::Cpu(CpuStorage::U32(values)) => write_values(&values[range], out),
        Storage::Cpu(CpuStorage::I16(values)) => write_values(&values[range], out),
        Storage::Cpu(CpuStorage::I32(values)) => write_values(&values[range], out),
        Storage::Cpu(CpuStorage::I64(values)) => write_values(&values[range], out),
        Storage::Cpu(CpuStorage::F16(values)) => write_values(&values[range], out),
        Storage::Cpu(CpuStorage::BF16(values)) => write_values(&values[range], out),
        Storage::Cpu(CpuStorage::F32(values)) => write_values(&values[range], out),
        Storage::Cpu(CpuStorage::F64(values)) => write_values(&values[range], out),
        _ => Err(io::Error::other(format!("tensors of dtype {:?} cannot be saved", tensor.dtype()))),
    }
}

pub(super) fn write_values<T: NoUninit>(values: &[T], out: &mut dyn Write) -> io::Result<()> {
    if cfg!(target_endian = "little") {
        return out.write_all(bytemuck::cast_slice(values));
    }
    values.iter().try_for_each(|value| {
        let mut bytes: smallvec::SmallVec<[u8; 8]> = bytemuck::bytes_of(value).into();
        bytes.reverse();
        out.write_all(&bytes)
    })
}
