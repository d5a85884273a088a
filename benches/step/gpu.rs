//! What a GPU says of itself, and the floor there: a copy within its memory.

use candle_core::{CudaDevice, Device, Error, Result};

use crate::timed::Timed;

/// The most bytes that are copied at once; a cache is much smaller.
const PART: usize = 1 << 30;

pub fn name(gpu: &CudaDevice) -> Result<String> {
    gpu.cuda_stream().context().name().map_err(Error::wrap)
}

/// The bytes that nobody has taken.
pub fn free_memory(gpu: &CudaDevice) -> Result<usize> {
    // What was dropped is free when its last use is over.
    Device::Cuda(gpu.clone()).synchronize()?;
    let (free, _) = gpu.cuda_stream().context().mem_get_info().map_err(Error::wrap)?;
    Ok(free)
}

/// A copy that moves so many bytes: half of them are read, half written. That many pairs of places take
/// turns.
pub fn copy(gpu: &CudaDevice, elements: usize, moved: usize, places: usize) -> Result<Timed> {
    let bytes = moved / 2;
    let place = bytes.min(PART);
    let source = gpu.alloc_zeros::<u8>(place * places)?;
    let mut target = gpu.alloc_zeros::<u8>(place * places)?;
    let mut turn = (0..places).cycle();
    let device = Device::Cuda(gpu.clone());
    let gpu = gpu.clone();
    let run = move |go_on: &mut dyn FnMut() -> bool| {
        while go_on() {
            let first = place * turn.next().unwrap_or(0);
            for done in (0..bytes).step_by(PART) {
                let part = first..first + PART.min(bytes - done);
                gpu.memcpy_dtod(&source.slice(part.clone()), &mut target.slice_mut(part))
                    .expect("a copy on the device");
            }
        }
    };
    Ok(Timed {
        elements,
        device,
        run: Box::new(run),
    })
}
