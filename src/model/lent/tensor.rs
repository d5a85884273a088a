//! candle's tensors as lenders: their memory is lent under the locks of their storages.

use super::{Lend, MemoryMut, MemoryRef, View, check_extent, defect, storage_of};
use crate::error::{Error, ErrorKind, Result};
use crate::numbers::DType;
use crate::tensors::{CpuStorage, Layout, Tensor, cpu_extent, cpu_numbers, dtype_of, with_numbers_mut};

/// The error for memory to which the fused CPU engine makes no pointer.
pub(crate) fn unsupported_error() -> Error {
    Error::new(
        ErrorKind::Memory,
        "the fused CPU engine needs memory of F16, BF16, F32 or F64, and, except for gradients, in row-major \
         order",
    )
    .with_remedy("pass such a copy")
}

impl Lend for Tensor {
    fn lent_shape(&self) -> &[usize] {
        self.dims()
    }

    fn lent_dtype(&self) -> DType {
        dtype_of(self)
    }

    fn memory(&self) -> Option<usize> {
        // All views of a tensor share its storage, so the address of the storage identifies the memory.
        Some(std::ptr::from_ref(&*self.storage_and_layout().0).addr())
    }

    fn read(&self, run: &mut dyn FnMut(View<'_>) -> Result<()>) -> Result<()> {
        let (storage, layout) = storage_of(self)?;
        run(view(
            cpu_numbers(&storage).ok_or_else(unsupported_error)?,
            layout,
        )?)
    }

    fn write(&self, run: &mut dyn FnMut(MemoryMut<'_>) -> Result<()>) -> Result<()> {
        with_numbers_mut(self, &mut |storage, layout| {
            // The storage is checked under the lock, because an operation may have exchanged it since the
            // plan was made.
            check_extent(self, cpu_extent(storage))?;
            let (start, end) = layout.contiguous_offsets().ok_or_else(unsupported_error)?;
            // An empty tensor may begin after the end of its storage.
            let (start, end) = if start == end { (0, 0) } else { (start, end) };
            let memory = MemoryMut::from_storage(storage).and_then(|memory| memory.part(start..end));
            run(memory.ok_or_else(unsupported_error)?)
        })
    }

    fn tensor(&self) -> Option<&Tensor> {
        Some(self)
    }
}

/// The elements of a layout in a storage that holds them.
fn view<'s>(storage: &'s CpuStorage, layout: &'s Layout) -> Result<View<'s>> {
    let memory = MemoryRef::from_storage(storage).ok_or_else(unsupported_error)?;
    let length_error = || defect("a storage holds fewer elements than were found when it was locked");
    match layout.contiguous_offsets() {
        // An empty tensor may begin after the end of its storage.
        Some((start, end)) if start == end => Ok(View::new(memory.part(0..0).ok_or_else(length_error)?)),
        Some((start, end)) => Ok(View::new(memory.part(start..end).ok_or_else(length_error)?)),
        None => {
            let start = layout.start_offset().min(memory.len());
            View::strided(
                memory.part(start..memory.len()).ok_or_else(length_error)?,
                layout.dims(),
                layout.stride(),
            )
        }
    }
}
