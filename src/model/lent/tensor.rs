//! candle's tensors as memory that is lent: under the locks of their storages.

use std::cell::RefCell;

use super::lend::UNNAMED;
use super::{Lend, MemoryMut, MemoryRef, View, check_on_cpu, defect, storage_of};
use crate::error::{Error, ErrorKind, Result};
use crate::numbers::DType;
use crate::tensors::{CpuStorage, InplaceOp1, Layout, Tensor, Var, on_cpu};

/// The error for memory to which the fused CPU engine makes no pointer.
pub(crate) fn unsupported() -> Error {
    Error::new(
        ErrorKind::Memory,
        "the fused CPU engine needs memory of F16, BF16, F32 or F64, in row-major order but for gradients",
    )
    .with_remedy("pass a copy that is so")
}

impl Lend for Tensor {
    fn lent_shape(&self) -> &[usize] {
        self.dims()
    }

    fn lent_dtype(&self) -> DType {
        Tensor::dtype(self).into()
    }

    fn memory(&self) -> Option<usize> {
        Some(std::ptr::from_ref(&*self.storage_and_layout().0).addr())
    }

    fn read(&self, run: &mut dyn FnMut(View<'_>) -> Result<()>) -> Result<()> {
        let (storage, layout) = storage_of(UNNAMED, self)?;
        run(view(on_cpu(&storage).ok_or_else(unsupported)?, layout)?)
    }

    fn write(&self, run: &mut dyn FnMut(MemoryMut<'_>) -> Result<()>) -> Result<()> {
        let outcome = RefCell::new(Ok(()));
        self.inplace_op1(&LendStorage { tensor: self, run: RefCell::new(run), outcome: &outcome })?;
        outcome.into_inner()
    }

    fn tensor(&self) -> Option<&Tensor> {
        Some(self)
    }
}

impl Lend for Var {
    fn lent_shape(&self) -> &[usize] {
        self.dims()
    }

    fn lent_dtype(&self) -> DType {
        self.as_tensor().dtype().into()
    }

    fn memory(&self) -> Option<usize> {
        self.as_tensor().memory()
    }

    fn read(&self, run: &mut dyn FnMut(View<'_>) -> Result<()>) -> Result<()> {
        self.as_tensor().read(run)
    }

    fn write(&self, run: &mut dyn FnMut(MemoryMut<'_>) -> Result<()>) -> Result<()> {
        self.as_tensor().write(run)
    }

    fn tensor(&self) -> Option<&Tensor> {
        Some(self)
    }
}

/// The elements of a layout in a storage that holds them.
fn view<'s>(storage: &'s CpuStorage, layout: &'s Layout) -> Result<View<'s>> {
    let memory = MemoryRef::of_storage(storage).ok_or_else(unsupported)?;
    let lacks = || defect("a storage holds fewer elements than were found when it was locked");
    match layout.contiguous_offsets() {
        // An empty tensor may begin anywhere.
        Some((start, end)) if start == end => Ok(View::new(memory.part(0..0).ok_or_else(lacks)?)),
        Some((start, end)) => Ok(View::new(memory.part(start..end).ok_or_else(lacks)?)),
        None => {
            let start = layout.start_offset().min(memory.len());
            View::strided(memory.part(start..memory.len()).ok_or_else(lacks)?, layout.dims(), layout.stride())
        }
    }
}

/// What is run on memory that is lent to be written.
type WriteLent<'f> = &'f mut dyn FnMut(MemoryMut<'_>) -> Result<()>;

/// An in-place operation that lends the storage of this tensor to a function, if it holds what the tensor
/// says.
struct LendStorage<'f> {
    tensor: &'f Tensor,
    run: RefCell<WriteLent<'f>>,
    outcome: &'f RefCell<Result<()>>,
}

impl LendStorage<'_> {
    fn lend(&self, storage: &mut CpuStorage, layout: &Layout) -> Result<()> {
        check_on_cpu(UNNAMED, storage, self.tensor)?;
        let (start, end) = layout.contiguous_offsets().ok_or_else(unsupported)?;
        let (start, end) = if start == end { (0, 0) } else { (start, end) };
        let memory = MemoryMut::of_storage(storage)
            .and_then(|memory| memory.part(start..end))
            .ok_or_else(unsupported)?;
        (self.run.borrow_mut())(memory)
    }
}

impl InplaceOp1 for LendStorage<'_> {
    fn name(&self) -> &'static str {
        "optimiser-update"
    }

    fn cpu_fwd(&self, storage: &mut CpuStorage, layout: &Layout) -> crate::tensors::Result<()> {
        *self.outcome.borrow_mut() = self.lend(storage, layout);
        Ok(())
    }
}
