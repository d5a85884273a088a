//! The memory of the emulated device.

use candle_core::{DType, Device, Shape, Tensor};

use crate::engine::memory::Buffer;
use crate::engine::memory::values::set_tensor;
use crate::error::{Error, Result};

/// A copy of a tensor's data, with guards before and after it.
pub(super) struct GuardedArray<'a> {
    /// The data and its guards, in pairs of words of 8 bytes.
    words: Vec<[u64; 2]>,
    /// The index of the first byte of the data.
    start: usize,
    /// The number of bytes of the data.
    length: usize,
    target: Option<WriteTarget<'a>>,
}

/// Where the data is copied after the launches.
pub(super) enum WriteTarget<'a> {
    Tensor(Tensor),
    State(&'a mut Buffer),
}

/// The least number of bytes of a guard.
const GUARD: usize = 64;
const GUARD_BYTE: u8 = 0xa5;

impl<'a> GuardedArray<'a> {
    /// A copy that starts `shift` bytes after a place where every access is aligned.
    pub(super) fn new(bytes: &[u8], shift: usize, target: Option<WriteTarget<'a>>) -> Self {
        let guards = [u64::from_ne_bytes([GUARD_BYTE; 8]); 2];
        let mut words = vec![guards; (bytes.len() + shift + 2 * GUARD).div_ceil(size_of_val(&guards))];
        let base = words.as_ptr().addr();
        let start = (base + GUARD).next_multiple_of(32) - base + shift;
        bytemuck::cast_slice_mut(&mut words)[start..start + bytes.len()].copy_from_slice(bytes);
        GuardedArray {
            words,
            start,
            length: bytes.len(),
            target,
        }
    }

    /// The address of the first byte of the data.
    pub(super) fn address(&self) -> u64 {
        (self.words.as_ptr().expose_provenance() + self.start) as u64
    }

    /// Copies the data to its target. Fails if anything around the data was written.
    pub(super) fn write_back(self) -> Result<()> {
        let bytes: &[u8] = bytemuck::cast_slice(&self.words);
        let (before, rest) = bytes.split_at(self.start);
        let (data, after) = rest.split_at(self.length);
        if before.iter().chain(after).any(|&byte| byte != GUARD_BYTE) {
            return Err(Error::other("emulated code wrote outside of its arrays"));
        }
        let tensor =
            |dtype: DType, shape: &Shape| Tensor::from_raw_buffer(data, dtype, shape.dims(), &Device::Cpu);
        match self.target {
            None => {}
            Some(WriteTarget::Tensor(target)) => {
                set_tensor(&target, &tensor(target.dtype(), target.shape())?)?
            }
            Some(WriteTarget::State(state)) => {
                let values = tensor(state.stored_dtype().into(), &state.stored_shape())?;
                state.set_stored(0, &values)?;
            }
        }
        Ok(())
    }
}
