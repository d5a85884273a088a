//! The device engine on NVIDIA devices: NVRTC compiles what is printed, and it runs on candle's stream of the device.
//!
//! A call copies its tables to the device and enqueues its launches. It waits for results only if it has some, at its end, and otherwise only until
//! the device has read the tables of the call before the last. After the first call with a set of parameters it allocates nothing on the device but
//! the inputs of tensor functions.

mod compile;
mod scratch;
mod storage;

pub use self::compile::ptx;

use std::sync::Arc;

use candle_core::cuda::cudarc::driver::{CudaFunction, CudaStream};
use candle_core::cuda::{CudaDevice, DeviceId};
use candle_core::{Tensor, Var};

use self::scratch::Scratch;
use super::Buffer;
use super::buffer::Memory;
use super::device::{Launch, Machine};
use crate::error::{Error, Result};

/// One device during one call.
pub(super) struct Cuda<'a> {
    device: DeviceId,
    stream: Arc<CudaStream>,
    /// From the first launch on. If something fails it is dropped before what follows, and waits for the device.
    scratch: Option<Scratch>,
    /// What is read. Copies that were made for this call live until what reads them has been enqueued; after that the stream keeps the order.
    read: Vec<Tensor>,
    written: Vec<&'a Tensor>,
    /// What is written first.
    new: Vec<Var>,
}

impl Cuda<'_> {
    pub(super) fn new(device: &CudaDevice) -> Self {
        let (device, stream) = (device.id(), device.cuda_stream());
        Cuda { device, stream, scratch: None, read: Vec::new(), written: Vec::new(), new: Vec::new() }
    }

    /// Notes that the stream uses the data from now on, where there are several streams.
    fn note(&mut self) -> Result<()> {
        let (read, written, new) = (self.read.drain(..), self.written.drain(..), self.new.drain(..));
        if self.stream.context().is_managing_stream_synchronization() {
            for tensor in written {
                storage::write(tensor, &self.stream)?;
            }
            for variable in new {
                storage::write(&variable, &self.stream)?;
            }
            for tensor in read {
                storage::read(&tensor, &self.stream)?;
            }
        }
        Ok(())
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

    fn write_new(&mut self, variable: Var) -> Result<u64> {
        let address = storage::write(&variable, &self.stream)?;
        self.new.push(variable);
        Ok(address)
    }

    fn launch(&mut self, launches: Vec<Launch<CudaFunction>>, results: usize) -> Result<()> {
        let scratch = match &mut self.scratch {
            Some(scratch) => scratch,
            none => none.insert(scratch::take(self.device, &self.stream)?),
        };
        // SAFETY: the rows are laid out by the program that printed the source. The addresses in them come from the functions above, and
        // their tensors live at least until all has been enqueued; what is freed afterwards is freed in the order of the stream.
        #[allow(unsafe_code)]
        unsafe { scratch.launch(&launches, results) }?;
        self.note()
    }

    fn found(self) -> Result<Vec<f64>> {
        let Some(mut scratch) = self.scratch else { return Ok(Vec::new()) };
        let found = scratch.found()?;
        scratch::give_back(self.device, scratch);
        Ok(found)
    }
}
