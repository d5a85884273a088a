//! The device engine on NVIDIA devices: NVRTC compiles what is printed, and it runs on candle's stream of the device.
//!
//! A call copies its tables to the device and enqueues its launches; it waits for the device only where it needs results. After the first
//! call with a set of parameters nothing is allocated on the device.

mod compile;
mod scratch;
mod storage;

pub use self::compile::ptx;

use std::sync::{Arc, PoisonError};

use candle_core::cuda::cudarc::driver::{CudaFunction, CudaStream};
use candle_core::cuda::{CudaDevice, DeviceId};
use candle_core::{Tensor, Var};

use super::Buffer;
use super::buffer::Memory;
use super::device::{Launch, Machine};
use crate::error::{Error, Result};

/// One device during one call.
pub(super) struct Cuda<'a> {
    device: DeviceId,
    stream: Arc<CudaStream>,
    /// What is read. Copies that were made for this call live until it has been enqueued; after that the stream keeps the order.
    read: Vec<Tensor>,
    written: Vec<&'a Tensor>,
}

impl Cuda<'_> {
    pub(super) fn new(device: &CudaDevice) -> Self {
        Cuda { device: device.id(), stream: device.cuda_stream(), read: Vec::new(), written: Vec::new() }
    }
}

/// The variable of a state tensor.
fn variable(state: &Buffer) -> Result<&Var> {
    match state.memory() {
        Memory::Device(variable) => Ok(variable),
        _ => Err(Error::other("a state tensor is not on the device of its parameter")),
    }
}

impl<'a> Machine<'a> for Cuda<'a> {
    type Function = CudaFunction;

    fn function(&mut self, source: &str) -> Result<Option<CudaFunction>> {
        compile::function(self.stream.context(), source)
    }

    fn read(&mut self, tensor: Tensor) -> Result<u64> {
        let address = storage::read(&tensor, &self.stream)?;
        self.read.push(tensor);
        Ok(address)
    }

    fn write(&mut self, tensor: &'a Tensor) -> Result<u64> {
        let address = storage::write(tensor, &self.stream)?;
        self.written.push(tensor);
        Ok(address)
    }

    fn read_state(&mut self, state: &'a Buffer) -> Result<u64> {
        self.read(variable(state)?.as_tensor().clone())
    }

    fn write_state(&mut self, state: &'a mut Buffer) -> Result<u64> {
        self.write(variable(state)?)
    }

    fn run(self, launches: Vec<Launch<CudaFunction>>, results: usize) -> Result<Vec<f64>> {
        if launches.is_empty() {
            return Ok(vec![0.0; results]);
        }
        let scratch = scratch::scratch(self.device, &self.stream)?;
        let mut scratch = scratch.lock().unwrap_or_else(PoisonError::into_inner);
        // SAFETY: the rows are laid out by the program that printed the source. The addresses in them come from the functions above, and
        // their tensors live at least as long as `self`; what is freed afterwards is freed in the order of the stream.
        #[allow(unsafe_code)]
        let found = unsafe { scratch.run(&launches, results) }?;
        drop(scratch);
        if self.stream.context().is_managing_stream_synchronization() {
            self.written.iter().try_for_each(|tensor| storage::write(tensor, &self.stream).map(|_| ()))?;
            self.read.iter().try_for_each(|tensor| storage::read(tensor, &self.stream).map(|_| ()))?;
        }
        Ok(found)
    }
}
