//! The device engine on NVIDIA devices. NVRTC compiles the printed code, which runs in order with candle's
//! work.
//!
//! **Order.** candle has one stream of a device for each thread of the host, and nothing orders these streams
//! against each other. The engine launches on the legacy default stream instead, which waits for all of them
//! and for which all of them wait. So gradients may come from a backward pass in any thread, and an
//! evaluation in another thread sees each parameter as it was before the launch or after it. If a device was
//! made with a stream of its own (`new_with_stream`), the launches go to that stream, and cudarc's events
//! keep the order.
//!
//! **Waiting.** A call is one use of the back-end: a turn of reductions, or a commit. It copies its tables to
//! the device and enqueues its launches. If it has results, it waits for them at the end, otherwise only
//! until the device has read the tables of the call before the last.
//!
//! **Memory.** After the first call with a set of parameters, only these are allocated on the device:
//! contiguous copies of gradients with another layout, copies of gradients that lie in variables, inputs of
//! tensor functions, and larger tables.

pub(crate) mod addresses;
mod compile;
mod scratch;

pub(super) use addresses::{download, upload};
pub use compile::ptx;

use std::sync::Arc;

use candle_core::cuda::cudarc::driver::{CudaFunction, CudaStream};
use candle_core::cuda::{CudaDevice, DeviceId};
use candle_core::{Tensor, Var};

use super::device::{Backend, Launch};
use super::memory::{Buffer, Memory};
use crate::error::Result;
use crate::model::lent::defect;
use scratch::DeviceScratch;

/// The handle of the default stream of each thread of the host, the same in all threads.
const PER_THREAD: usize = 2;

/// The stream that is in order with candle's work of all threads on a device.
pub(crate) fn ordered_stream(device: &CudaDevice) -> Arc<CudaStream> {
    let owner = device.cuda_stream();
    if owner.cu_stream().addr() == PER_THREAD { owner.context().default_stream() } else { owner }
}

/// One device during one call.
pub(super) struct Cuda<'a> {
    device: DeviceId,
    /// candle's stream of this device.
    owner: Arc<CudaStream>,
    /// Where launches go.
    stream: Arc<CudaStream>,
    /// Set by the launch. Declared before the data of the call, so that it is dropped first after an error:
    /// its drop waits until the device has finished with the data.
    scratch: Option<DeviceScratch>,
    /// The tensors that are read. Some are copies for this call, which live until the work that reads them
    /// has been enqueued. After that the stream keeps the order.
    read: Vec<Tensor>,
    written: Vec<&'a Tensor>,
    /// New variables, which are only written.
    new: Vec<Var>,
}

impl Cuda<'_> {
    pub(super) fn new(device: &CudaDevice) -> Self {
        let (owner, stream) = (device.cuda_stream(), ordered_stream(device));
        Cuda {
            device: device.id(),
            owner,
            stream,
            scratch: None,
            read: Vec::new(),
            written: Vec::new(),
            new: Vec::new(),
        }
    }

    /// Drops the tensors of this call, whose readers and writers have been enqueued. If cudarc keeps streams
    /// in order by events, their addresses are taken once more before that, so that cudarc notes that this
    /// stream uses them (`addresses.rs`).
    fn note(&mut self) -> Result<()> {
        let (read, written, new) = (self.read.drain(..), self.written.drain(..), self.new.drain(..));
        if self.stream.context().is_managing_stream_synchronization() {
            for tensor in written {
                addresses::write_address(tensor, &self.stream)?;
            }
            for variable in new {
                addresses::write_address(&variable, &self.stream)?;
            }
            for tensor in read {
                addresses::read_address(&tensor, &self.stream)?;
            }
        }
        Ok(())
    }
}

fn variable(state: &Buffer) -> Result<&Var> {
    match state.memory() {
        Memory::Variable(variable) => Ok(variable),
        _ => Err(defect("a state tensor is not on the device of its parameter")),
    }
}

impl<'a> Backend<'a> for Cuda<'a> {
    type Function = CudaFunction;

    fn function(&mut self, source: &str) -> Result<Option<CudaFunction>> {
        compile::function(self.stream.context(), source)
    }

    fn read(&mut self, tensor: Tensor) -> Result<u64> {
        let address = addresses::read_address(&tensor, &self.stream)?;
        self.read.push(tensor);
        Ok(address)
    }

    fn write(&mut self, tensor: &'a Tensor) -> Result<u64> {
        let address = addresses::write_address(tensor, &self.stream)?;
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
        let address = addresses::write_address(&variable, &self.stream)?;
        self.new.push(variable);
        Ok(address)
    }

    fn launch(&mut self, launches: Vec<Launch<CudaFunction>>, results: usize) -> Result<()> {
        let scratch = self.scratch.insert(scratch::take(self.device, &self.owner, &self.stream)?);
        // SAFETY: `Tables::add` lays out the rows as the source was printed. Their addresses come from
        // `read`, `write` and `write_new` above, where each storage is compared with its tensor under its
        // lock (`storage_of`, or `check_held` in an in-place operation). The tensors live until all has
        // been enqueued; what is freed afterwards is freed in the order of the stream.
        #[allow(unsafe_code)]
        unsafe { scratch.launch(&launches, results) }?;
        self.note()
    }

    fn read_results(self) -> Result<Vec<f64>> {
        let Some(mut scratch) = self.scratch else { return Ok(Vec::new()) };
        let results = scratch.read_results()?;
        scratch::give_back(self.device, scratch);
        Ok(results)
    }
}
