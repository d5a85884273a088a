//! Memory for new tensors, and the error if no memory is left.
//!
//! candle ends the process if the CPU has no memory left for a tensor. So an allocation on the CPU is tried
//! first. Linux refuses only a size that can never fit. If many allocations together are too large, Linux
//! ends the process when they are written.

#[cfg(feature = "emulate")]
use std::cell::Cell;

use super::Device;
use crate::error::{Error, Result};
use crate::numbers::DType;

/// The least number of bytes that is tried. For a smaller allocation the trial would take longer than the
/// allocation.
const LEAST_TRIED: usize = 1 << 20;

#[cfg(feature = "emulate")]
thread_local! {
    /// The largest allocation that is not refused, while an emulated device has little memory.
    pub(crate) static LARGEST_ALLOCATION: Cell<usize> = const { Cell::new(usize::MAX) };
}

/// Makes a tensor of `elements` numbers on a device.
///
/// # Errors
/// The error of `make`. If there is no memory left, an error of the kind
/// [`OutOfMemory`](crate::ErrorKind::OutOfMemory), with the number of bytes.
pub(crate) fn allocate<T>(
    elements: usize,
    dtype: DType,
    device: &Device,
    make: impl FnOnce() -> super::Result<T>,
) -> Result<T> {
    let bytes = elements.saturating_mul(dtype.size_in_bytes());
    #[cfg(feature = "emulate")]
    if bytes > LARGEST_ALLOCATION.get() {
        // The text of CUDA's error, so that the conversion of such an error is tested, too.
        let driver_error = super::failure("DriverError(CUDA_ERROR_OUT_OF_MEMORY, \"out of memory\")");
        return Err(Error::from(driver_error).asking_for(bytes));
    }
    if device.is_cpu() && bytes >= LEAST_TRIED && Vec::<u8>::new().try_reserve_exact(bytes).is_err() {
        return Err(Error::out_of_memory().asking_for(bytes));
    }
    make().map_err(|error| Error::from(error).asking_for(bytes))
}
