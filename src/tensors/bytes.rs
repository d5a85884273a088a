//! The values of tensors as bytes, in memory and in files.

use std::io::{self, Write};

use bytemuck::{cast_slice, cast_slice_mut};

use super::{CpuStorage, Layout, Storage, cpu_numbers, dtype_of_numbers, failure};
use crate::numbers::DType;

/// Makes a function that returns the bytes of a storage.
macro_rules! byte_function {
    ($name:ident, $storage:ty, $bytes:ty, $cast:ident) => {
        /// The bytes of the values in place, in the processor's byte order.
        pub(crate) fn $name(storage: $storage) -> super::Result<$bytes> {
            Ok(match storage {
                CpuStorage::U8(values) => values,
                CpuStorage::U32(values) => $cast(values),
                CpuStorage::I16(values) => $cast(values),
                CpuStorage::I32(values) => $cast(values),
                CpuStorage::I64(values) => $cast(values),
                CpuStorage::F16(values) => $cast(values),
                CpuStorage::BF16(values) => $cast(values),
                CpuStorage::F32(values) => $cast(values),
                CpuStorage::F64(values) => $cast(values),
                #[allow(unreachable_patterns, reason = "only candle has further dtypes")]
                _ => return Err(failure("tensors of this dtype cannot be saved or sent")),
            })
        }
    };
}

byte_function!(bytes, &CpuStorage, &[u8], cast_slice);
byte_function!(bytes_mut, &mut CpuStorage, &mut [u8], cast_slice_mut);

/// The dtype of numbers and their size in bytes. If [`bytes`] refuses the dtype, the size is `usize::MAX`:
/// any length check may pass, because no code makes a pointer to such numbers.
pub(crate) fn cpu_extent(numbers: &CpuStorage) -> (DType, usize) {
    (
        dtype_of_numbers(numbers),
        bytes(numbers).map_or(usize::MAX, <[u8]>::len),
    )
}

/// The bytes of a contiguous tensor on the CPU, in place.
pub(crate) fn bytes_of<'s>(storage: &'s Storage, layout: &Layout) -> super::Result<&'s [u8]> {
    let (Some(numbers), Some((start, end))) = (cpu_numbers(storage), layout.contiguous_offsets()) else {
        return Err(failure("the values of a tensor do not lie in order on the CPU"));
    };
    // An empty view may begin after the end of its storage.
    if start == end {
        return Ok(&[]);
    }
    let size = dtype_of_numbers(numbers).size_in_bytes();
    bytes(numbers)?
        .get(start * size..end * size)
        .ok_or_else(|| failure("the storage of a tensor is too short"))
}

/// Writes values of `size` bytes each, in little-endian order.
pub(crate) fn write_values(values: &[u8], size: usize, out: &mut dyn Write) -> io::Result<()> {
    if cfg!(target_endian = "little") {
        return out.write_all(values);
    }
    values
        .chunks(size)
        .try_for_each(|value| out.write_all(&value.iter().rev().copied().collect::<Vec<u8>>()))
}
