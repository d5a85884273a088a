//! The check that a storage holds the elements that the layout of its tensor addresses.
//!
//! The layout, dtype and device of a tensor never change, but its storage can: candle passes it by `&mut` to
//! any in-place operation, which may exchange it whenever the lock is free. And `Tensor::from_storage` takes
//! any storage for any shape. So a call checks twice:
//! 1. in the plan, for all tensors that it reads or writes, so that a refusal changes nothing;
//! 2. under the lock, before it makes a pointer from a layout, because the first check may be out of date.

use std::io::{self, Write};
use std::ops::Deref;

use super::memory::reach;
use crate::error::{Error, ErrorKind, Result};
use crate::numbers::DType;
use crate::tensors::{Device, Layout, Storage, Tensor, bytes_of, held, write_values};

/// How many elements a storage must have for a tensor of this layout; `usize::MAX` on overflow.
fn needed(layout: &Layout) -> usize {
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
    check_held(tensor, held(&storage, tensor))?;
    Ok((storage, layout))
}

/// Writes the values of a tensor on any device in row-major order, as little-endian bytes.
///
/// A contiguous tensor on the CPU is not copied, and is locked for reading until its values are written.
pub(crate) fn write_tensor(tensor: &Tensor, out: &mut dyn Write) -> io::Result<()> {
    let tensor =
        tensor.to_device(&Device::Cpu).and_then(|tensor| tensor.contiguous()).map_err(io::Error::other)?;
    let (storage, layout) = storage_of(&tensor).map_err(io::Error::other)?;
    write_values(bytes_of(&storage, layout).map_err(io::Error::other)?, tensor.dtype().size_in_bytes(), out)
}

/// Refuses a storage of another dtype than the tensor's, or of too few bytes: what `held`, `held_on_cpu` or
/// `held_on_cuda` return for a locked storage.
pub(crate) fn check_held(tensor: &Tensor, (dtype, bytes): (DType, usize)) -> Result<()> {
    let (expected, size) = (needed(tensor.layout()), dtype.size_in_bytes());
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
        let of = |dims: &[usize], stride: &[usize], start| {
            needed(&Layout::new(Shape::from(dims), stride.to_vec(), start))
        };
        assert_eq!(of(&[], &[], 0), 1);
        assert_eq!((of(&[3], &[1], 0), of(&[3], &[1], 4), of(&[3, 2], &[1, 3], 0)), (3, 7, 6));
        assert_eq!((of(&[3, 2], &[0, 1], 1), of(&[2, 2], &[5, 2], 0), of(&[5, 0], &[1, 5], 9)), (3, 8, 0));
        // The product of these dimensions wraps around to 2.
        assert_eq!(of(&[(1 << 63) + 1, 2], &[1, (1 << 63) + 1], 0), usize::MAX);
    }
}
