//! The check that a storage holds the elements that the layout of its tensor addresses.
//!
//! The layout, dtype and device of a tensor never change, but its storage can: candle passes the storage by
//! `&mut` to any in-place operation, which may exchange it whenever the lock is free. And
//! `Tensor::from_storage` takes any storage for any shape. So a call checks twice:
//! 1. in the plan, for all tensors that the call reads or writes, so that a refusal changes nothing;
//! 2. under the lock, before a layout becomes a pointer, because the first check may be out of date.

use std::io::{self, Write};
use std::ops::Deref;

use super::memory::reach;
use crate::error::{Error, ErrorKind, Result};
use crate::numbers::DType;
use crate::tensors::{Device, Layout, Storage, Tensor, bytes_of, storage_extent, write_values};

/// The least number of elements of a storage for a tensor of this layout; `usize::MAX` on overflow.
fn least_length(layout: &Layout) -> usize {
    match reach(layout.dims(), layout.stride()) {
        0 => 0,
        length => layout.start_offset().saturating_add(length),
    }
}

/// Locks the storage of a tensor for reading. Refuses a storage that lacks elements of the tensor.
pub(crate) fn storage_of<'t>(
    tensor: &'t Tensor,
) -> Result<(impl Deref<Target = Storage> + use<'t>, &'t Layout)> {
    let (storage, layout) = tensor.storage_and_layout();
    check_extent(tensor, storage_extent(&storage, tensor))?;
    Ok((storage, layout))
}

/// Writes the values of a tensor on any device in row-major order, as little-endian bytes.
///
/// A contiguous tensor on the CPU is not copied, and is locked for reading until its values are written.
pub(crate) fn write_tensor(tensor: &Tensor, out: &mut dyn Write) -> io::Result<()> {
    let mut write_result = Ok(());
    let read_result = with_bytes(tensor, |bytes| {
        write_result = write_values(bytes, tensor.dtype().size_in_bytes(), out);
        Ok(())
    });
    read_result.map_err(io::Error::other).and(write_result)
}

/// Runs `run` on the values of a tensor on any device in row-major order, as bytes in the processor's order.
/// The storage is locked for reading until `run` returns.
pub(super) fn with_bytes(tensor: &Tensor, run: impl FnOnce(&[u8]) -> Result<()>) -> Result<()> {
    let tensor = tensor
        .to_device(&Device::Cpu)
        .and_then(|tensor| tensor.contiguous())?;
    let (storage, layout) = storage_of(&tensor)?;
    run(bytes_of(&storage, layout)?)
}

/// Refuses a storage of another dtype than the tensor's, or of too few bytes. Takes the result of
/// `storage_extent`, `cpu_extent` or `cuda_extent` for a locked storage.
pub(crate) fn check_extent(tensor: &Tensor, (dtype, bytes): (DType, usize)) -> Result<()> {
    let (expected, size) = (least_length(tensor.layout()), dtype.size_in_bytes());
    if tensor.dtype() == dtype && bytes >= expected.saturating_mul(size) {
        return Ok(());
    }
    Err(Error::new(ErrorKind::Memory, "the storage holds")
        .with_got(format_args!("{} elements of {dtype:?}", bytes / size.max(1)))
        .with_expected(format_args!("{expected} of {:?}", tensor.dtype()))
        .with_remedy(
            "make a new tensor, because something has replaced the storage of this one (an in-place \
             operation or `Tensor::from_storage` can)",
        ))
}

#[cfg(test)]
mod tests {
    use candle_core::Shape;

    use super::*;

    #[test]
    fn a_layout_needs_all_up_to_its_last_element() {
        let length = |dims: &[usize], stride: &[usize], start| {
            least_length(&Layout::new(Shape::from(dims), stride.to_vec(), start))
        };
        assert_eq!(length(&[], &[], 0), 1);
        assert_eq!(
            (
                length(&[3], &[1], 0),
                length(&[3], &[1], 4),
                length(&[3, 2], &[1, 3], 0)
            ),
            (3, 7, 6)
        );
        assert_eq!(
            (
                length(&[3, 2], &[0, 1], 1),
                length(&[2, 2], &[5, 2], 0),
                length(&[5, 0], &[1, 5], 9)
            ),
            (3, 8, 0)
        );
        // The product of these dimensions wraps around to 2.
        assert_eq!(length(&[(1 << 63) + 1, 2], &[1, (1 << 63) + 1], 0), usize::MAX);
    }
}
