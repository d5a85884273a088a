//! NCCL's calls. `unsafe`, because the calls take addresses of devices, and NCCL's handles are not `Send`.
#![allow(unsafe_code)]

use std::ffi::CStr;

use candle_core::Tensor;
use candle_core::cuda::WrapErr;
use candle_core::cuda::cudarc::driver::CudaStream;
use candle_core::cuda::cudarc::nccl::result::{
    NcclError, NcclStatus, comm_init_rank, get_uniqueid, group_end, group_start, recv, send,
};
use candle_core::cuda::cudarc::nccl::sys::{
    ncclComm_t, ncclCommGetAsyncError, ncclDataType_t, ncclGetErrorString, ncclResult_t, ncclUniqueId,
};

use crate::engine::cuda::addresses::{read_address, write_address};
use crate::ranks::CommunicationError;

/// The id by which the ranks of a communicator find each other. One rank makes it, and all ranks get it.
pub(super) type Rendezvous = [u8; 128];

/// Makes a rendezvous on this machine.
pub(super) fn new_rendezvous() -> Result<Rendezvous, CommunicationError> {
    let mut id_bytes = None;
    let result = get_uniqueid().map(|id| {
        id_bytes = Some(id.internal.map(|byte| byte as u8));
        NcclStatus::Success
    });
    check("start", result)?;
    id_bytes.ok_or_else(|| nccl_error("start", "it has made no id by which the ranks find each other"))
}

/// A rank's end of NCCL's communicator.
///
/// The communicator lives until the process ends. To end a communicator is a call of all ranks together, so a
/// rank that gives up would wait for the others, and the others for this rank. An abort would lose messages
/// that other ranks have not fetched yet.
pub(super) struct NcclLink {
    communicator: ncclComm_t,
    /// The first error, after which the ranks are out of step.
    first_error: Option<CommunicationError>,
}

// SAFETY: NCCL takes calls for a communicator from any thread, one at a time, and switches to its device by
// itself. `World` has the link in a `Mutex`.
unsafe impl Send for NcclLink {}

/// A message to or from another rank.
struct Message {
    /// The address of the first byte, on the device.
    address: u64,
    bytes: usize,
    /// The rank at the other end.
    rank: i32,
}

impl NcclLink {
    /// Makes a communicator on the device of `stream`, and waits until all ranks do so.
    pub(super) fn new(
        stream: &CudaStream,
        rank: usize,
        size: usize,
        id: &Rendezvous,
    ) -> Result<Self, CommunicationError> {
        bind(stream)?;
        let mut communicator = std::ptr::null_mut();
        let id = ncclUniqueId {
            internal: id.map(|byte| byte as _),
        };
        // SAFETY: the handle is written to a local that outlives the call.
        check("start", unsafe {
            comm_init_rank(&mut communicator, size as i32, id, rank as i32)
        })?;
        Ok(NcclLink {
            communicator,
            first_error: None,
        })
    }

    /// Sends the tensors in `to[r]` to rank r, and fills the tensors in `from[r]` with the bytes that rank r
    /// sends, in the order of `stream`. Each tensor that is not empty is a message.
    pub(super) fn exchange(
        &mut self,
        stream: &CudaStream,
        to: &[Vec<Tensor>],
        from: &[Vec<Tensor>],
    ) -> Result<(), CommunicationError> {
        if let Some(error) = &self.first_error {
            return Err(error.clone());
        }
        self.enqueue(stream, to, from)
            .inspect_err(|error| self.first_error = Some(error.clone()))
    }

    fn enqueue(
        &self,
        stream: &CudaStream,
        to: &[Vec<Tensor>],
        from: &[Vec<Tensor>],
    ) -> Result<(), CommunicationError> {
        // All addresses come first: if a tensor has none, no message of the group may be enqueued already.
        let [sends, receives] = [
            messages(to, |tensor| read_address(tensor, stream))?,
            messages(from, |tensor| write_address(tensor, stream))?,
        ];
        if sends.is_empty() && receives.is_empty() {
            return Ok(());
        }
        bind(stream)?;
        self.check_earlier()?;
        check("begin an exchange", group_start())?;
        let post_result = self.post(stream, &sends, &receives);
        // The group ends even after an error, otherwise this thread's next group would be a part of it.
        let end_result = check("exchange tensors", group_end());
        post_result.and(end_result)?;
        // If cudarc orders streams by events, these calls record that this stream uses the tensors.
        if stream.context().is_managing_stream_synchronization() {
            messages(to, |tensor| read_address(tensor, stream))?;
            messages(from, |tensor| write_address(tensor, stream))?;
        }
        Ok(())
    }

    /// Enqueues all messages, inside of a group.
    fn post(
        &self,
        stream: &CudaStream,
        sends: &[Message],
        receives: &[Message],
    ) -> Result<(), CommunicationError> {
        let (dtype, stream) = (ncclDataType_t::ncclUint8, stream.cu_stream().cast());
        for message in sends {
            // SAFETY: `read_address` compares the tensor with its storage, so the address has `bytes` bytes.
            // This stream comes after their writers: it waits for all of candle's streams (`ordered_stream`),
            // or, where cudarc manages streams, for those that `read_address` names. The caller holds the
            // tensor until the group has ended. Memory freed later is freed in the order of its stream, which
            // comes after this one.
            check("send", unsafe {
                send(
                    message.address as *const _,
                    message.bytes,
                    dtype,
                    message.rank,
                    self.communicator,
                    stream,
                )
            })?;
        }
        for message in receives {
            // SAFETY: `write_address` checks as `read_address` does, and this stream comes after the readers
            // of these bytes as after their writers. Nothing else uses them until then:
            // `Communicator::exchange_tensors` demands it, `Inbox` owns the memory.
            check("receive", unsafe {
                recv(
                    message.address as *mut _,
                    message.bytes,
                    dtype,
                    message.rank,
                    self.communicator,
                    stream,
                )
            })?;
        }
        Ok(())
    }

    /// Returns an error if NCCL has noticed a failure since the last call.
    fn check_earlier(&self) -> Result<(), CommunicationError> {
        let mut state = ncclResult_t::ncclSuccess;
        // SAFETY: the communicator was made by `new` and is never destroyed; the result is written to a local
        // that outlives the call.
        check(
            "report whether earlier exchanges have failed",
            unsafe { ncclCommGetAsyncError(self.communicator, &mut state) }.result(),
        )?;
        check(
            "exchange tensors, because an earlier exchange has failed",
            state.result(),
        )
    }
}

/// Binds the stream's context to this thread.
fn bind(stream: &CudaStream) -> Result<(), CommunicationError> {
    stream
        .context()
        .bind_to_thread()
        .w()
        .map_err(|error| nccl_error("use the device", &error.to_string()))
}

/// A message for each tensor that has elements.
fn messages(
    tensors: &[Vec<Tensor>],
    address_of: impl Fn(&Tensor) -> crate::error::Result<u64>,
) -> Result<Vec<Message>, CommunicationError> {
    let with_elements = (0..)
        .zip(tensors)
        .flat_map(|(rank, tensors)| tensors.iter().map(move |tensor| (rank, tensor)));
    let message = |(rank, tensor): (i32, &Tensor)| {
        let address = address_of(tensor).map_err(|error| nccl_error("move a tensor", &error.to_string()))?;
        Ok(Message {
            address,
            bytes: tensor.elem_count() * tensor.dtype().size_in_bytes(),
            rank,
        })
    };
    with_elements
        .filter(|(_, tensor)| tensor.elem_count() > 0)
        .map(message)
        .collect()
}

/// Makes an error of an NCCL call that failed.
fn check(what: &str, result: Result<NcclStatus, NcclError>) -> Result<(), CommunicationError> {
    match result {
        Ok(NcclStatus::Success) => Ok(()),
        Ok(_) => Err(nccl_error(
            what,
            "it runs asynchronously, which is not supported; unset NCCL_COMM_BLOCKING",
        )),
        Err(NcclError(code)) => {
            // SAFETY: NCCL returns a static text for every code.
            let text = unsafe { CStr::from_ptr(ncclGetErrorString(code)) };
            Err(nccl_error(what, &text.to_string_lossy()))
        }
    }
}

fn nccl_error(what: &str, why: &str) -> CommunicationError {
    let remedy = "run with NCCL_DEBUG=WARN in the environment to see more, and start all ranks anew from \
                  the last checkpoint";
    CommunicationError::Other {
        reason: format!("NCCL cannot {what}: {why}; {remedy}"),
    }
}
