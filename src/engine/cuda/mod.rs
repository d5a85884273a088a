//! The device engine on NVIDIA devices. NVRTC compiles the printed code, which runs in order with candle's
//! work.
//!
//! **Order.** candle has one stream of a device for each thread of the host, and nothing orders these streams
//! against each other. So the engine launches on the legacy default stream: it waits for all of candle's
//! streams, and they all wait for it. Gradients may come from a backward pass in any thread, and an
//! evaluation in another thread sees each parameter as it was before the launch or after it. If a device was
//! made with a stream of its own (`new_with_stream`), the launches go to that stream, and cudarc's events
//! keep the order.
//!
//! **Waiting.** A call is one use of the back-end: a turn of reductions, or a commit. Each call copies its
//! tables to the device and enqueues its launches. A call with results waits for its results at the end. Any
//! other call waits only until the device has read the tables of the call before the last.
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

/// The handle that means "the default stream of this thread of the host". All threads have the same handle.
const PER_THREAD: usize = 2;

/// The stream that is in order with candle's work of all threads on a device.
pub(crate) fn ordered_stream(device: &CudaDevice) -> Arc<CudaStream> {
    let owner = device.cuda_stream();
    if owner.cu_stream().addr() == PER_THREAD {
        owner.context().default_stream()
    } else {
        owner
    }
}

/// One device during one call.
pub(super) struct Cuda {
    device: DeviceId,
    /// candle's stream of this device.
    owner: Arc<CudaStream>,
    /// The stream of the launches.
    stream: Arc<CudaStream>,
    /// Set by the launch. Declared before the data of the call, so that after an error the scratch is dropped
    /// first: its drop waits until the device has finished with the data.
    scratch: Option<DeviceScratch>,
    /// The tensors that are read. Some are copies for this call, which live until the work that reads them
    /// has been enqueued. After that the stream keeps the order.
    read_tensors: Vec<Tensor>,
    written_tensors: Vec<Tensor>,
}

impl Cuda {
    pub(super) fn new(device: &CudaDevice) -> Self {
        let (owner, stream) = (device.cuda_stream(), ordered_stream(device));
        Cuda {
            device: device.id(),
            owner,
            stream,
            scratch: None,
            read_tensors: Vec::new(),
            written_tensors: Vec::new(),
        }
    }

    /// Drops the tensors of this call, whose readers and writers have been enqueued. If cudarc keeps streams
    /// in order by events, the addresses of the tensors are first taken once more, so that cudarc records
    /// that this stream uses the tensors (`addresses.rs`).
    fn release_tensors(&mut self) -> Result<()> {
        let read_tensors = self.read_tensors.drain(..);
        let written_tensors = self.written_tensors.drain(..);
        if self.stream.context().is_managing_stream_synchronization() {
            for tensor in written_tensors {
                addresses::write_address(&tensor, &self.stream)?;
            }
            for tensor in read_tensors {
                addresses::read_address(&tensor, &self.stream)?;
            }
        }
        Ok(())
    }
}

/// The variable in which a device has a state tensor.
fn state_variable(state: &Buffer) -> Result<&Var> {
    match state.memory() {
        Memory::Variable(variable) => Ok(variable),
        _ => Err(defect("a state tensor is not on the device of its parameter")),
    }
}

impl<'a> Backend<'a> for Cuda {
    type Function = CudaFunction;

    fn function(&mut self, source: &str) -> Result<Option<CudaFunction>> {
        compile::function(self.stream.context(), source)
    }

    fn read_address(&mut self, tensor: Tensor) -> Result<u64> {
        let address = addresses::read_address(&tensor, &self.stream)?;
        self.read_tensors.push(tensor);
        Ok(address)
    }

    fn write_address(&mut self, tensor: Tensor) -> Result<u64> {
        let address = addresses::write_address(&tensor, &self.stream)?;
        self.written_tensors.push(tensor);
        Ok(address)
    }

    fn read_state_address(&mut self, state: &'a Buffer) -> Result<u64> {
        self.read_address(state_variable(state)?.as_tensor().clone())
    }

    fn write_state_address(&mut self, state: &'a mut Buffer) -> Result<u64> {
        self.write_address(state_variable(state)?.as_tensor().clone())
    }

    fn launch(&mut self, launches: Vec<Launch<CudaFunction>>, result_count: usize) -> Result<()> {
        let scratch = self
            .scratch
            .insert(scratch::take(self.device, &self.owner, &self.stream)?);
        // SAFETY: `Tables::add` lays out the rows as the source was printed. The addresses in the rows come
        // from `read_address` and `write_address` above, where each storage is compared with its tensor under
        // the storage's lock (`storage_of`, or `check_extent` in an in-place operation). The tensors live
        // until all launches have been enqueued; memory that is freed later is freed in the stream's order.
        #[allow(unsafe_code)]
        unsafe { scratch.launch(&launches, result_count) }?;
        self.release_tensors()
    }

    fn read_results(self) -> Result<Vec<f64>> {
        let Some(mut scratch) = self.scratch else {
            return Ok(Vec::new());
        };
        let results = scratch.read_results()?;
        scratch::give_back(self.device, scratch);
        Ok(results)
    }
}
