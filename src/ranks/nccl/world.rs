//! The ranks of a job whose tensors NCCL moves.

use std::sync::{Arc, Mutex, PoisonError};

use candle_core::cuda::{CudaDevice, WrapErr};
use candle_core::{Device, Tensor};

use super::link::{NcclLink, Rendezvous, new_rendezvous};
use crate::engine::cuda::ordered_stream;
use crate::error::Error;
use crate::ranks::{Call, CommunicationError, Communicator, StateWorld, unreadable_error};

/// The ranks of a job, each with a CUDA device, for [`Setup::over`](crate::Setup::over). Clones are handles
/// of the same rank.
///
/// NCCL moves tensors from device to device. Bytes of the host go through the world over which this world was
/// made.
#[derive(Clone)]
pub struct World {
    host: Arc<dyn Communicator>,
    device: Device,
    cuda: CudaDevice,
    link: Arc<Mutex<NcclLink>>,
}

/// The name of a GPU, unique over all machines.
type Uuid = [u8; 16];

impl World {
    /// Makes a world in which each rank of `host` has a CUDA device.
    ///
    /// All ranks have to call this function equally often. Each call waits until all ranks have made theirs.
    ///
    /// NCCL's memory on the device is freed only when the process ends: make one world, and clone it.
    ///
    /// # Errors
    /// If the device of a rank is no CUDA device, or two ranks have the same GPU, on all ranks. If NCCL
    /// cannot start, usually on all ranks.
    ///
    /// The page on devices has [a program for two GPUs](crate::guide::devices#two-gpus) of one process.
    pub fn over<C: Communicator + Clone + 'static>(host: &C, device: &Device) -> Result<Self, Error> {
        let ranks = StateWorld::over(host);
        let host: Arc<dyn Communicator> = Arc::new(host.clone());
        // The ranks agree twice, because a rank that fails must keep the others from waiting in NCCL's start,
        // and a failed start must be an error on all.
        let prepared = cuda_of(&*host, device).and_then(|cuda| {
            let uuid = gpu_uuid(&cuda)?;
            let id = if host.rank() == 0 {
                new_rendezvous()?.to_vec()
            } else {
                Vec::new()
            };
            Ok((cuda, [&uuid[..], &id].concat()))
        });
        let (cuda, messages) = ranks.agree(Call::Nccl, prepared)?;
        let id = rendezvous_of_messages(&messages)?;
        let link = NcclLink::new(&ordered_stream(&cuda), host.rank(), host.size(), &id);
        let link = ranks.settle(Call::Nccl, link.map_err(Into::into))?;
        Ok(World {
            host,
            device: device.clone(),
            cuda,
            link: Arc::new(Mutex::new(link)),
        })
    }
}

/// The CUDA device of candle's device.
fn cuda_of(host: &dyn Communicator, device: &Device) -> Result<CudaDevice, Error> {
    let Device::Cuda(cuda) = device else {
        let remedy = "give it `Device::new_cuda` of the rank on its machine, or divide the state over the \
                      host's world";
        let reason = format!(
            "NCCL moves tensors between CUDA devices, and rank {} has {device:?}; {remedy}",
            host.rank()
        );
        return Err(Error::from(CommunicationError::Other { reason }).of_rank(host.rank()));
    };
    Ok(cuda.clone())
}

/// The name of the GPU of a device.
fn gpu_uuid(cuda: &CudaDevice) -> Result<Uuid, Error> {
    Ok(cuda
        .cuda_stream()
        .context()
        .uuid()
        .w()?
        .bytes
        .map(|byte| byte as u8))
}

/// The rendezvous, which rank 0 has sent, if each rank has a GPU of its own. If two ranks shared a GPU, NCCL
/// itself would return an error on some ranks only.
fn rendezvous_of_messages(messages: &[Vec<u8>]) -> Result<Rendezvous, Error> {
    let uuids: Vec<Option<&Uuid>> = messages.iter().map(|message| message.first_chunk()).collect();
    for (rank, uuid) in uuids.iter().enumerate() {
        if let Some(first) = uuids[..rank].iter().position(|other| other == uuid) {
            let remedy = "start as many ranks as there are GPUs, make each device by `Device::new_cuda` of \
                          the rank on its machine, or divide the state over the host's world";
            let reason = format!(
                "NCCL takes one rank on each GPU, and ranks {first} and {rank} have the same; {remedy}"
            );
            return Err(Error::from(CommunicationError::Other { reason }).of_rank(rank));
        }
    }
    let id = messages.first().and_then(|message| message.last_chunk());
    id.copied().ok_or_else(|| unreadable_error(0))
}

impl Communicator for World {
    fn rank(&self) -> usize {
        self.host.rank()
    }

    fn size(&self) -> usize {
        self.host.size()
    }

    fn exchange(&self, to: &[Vec<&[u8]>], from: &mut [Vec<&mut [u8]>]) -> Result<(), CommunicationError> {
        self.host.exchange(to, from)
    }

    fn gather(&self, own: &[&[u8]], from: &mut [Vec<&mut [u8]>]) -> Result<(), CommunicationError> {
        self.host.gather(own, from)
    }

    fn device(&self) -> Option<&Device> {
        Some(&self.device)
    }

    fn exchange_tensors(&self, to: &[Vec<Tensor>], from: &[Vec<Tensor>]) -> Result<(), CommunicationError> {
        self.link.lock().unwrap_or_else(PoisonError::into_inner).exchange(
            &ordered_stream(&self.cuda),
            to,
            from,
        )
    }
}

impl std::fmt::Debug for World {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("World")
            .field("rank", &self.rank())
            .field("size", &self.size())
            .field("device", &self.device)
            .finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_on_one_gpu_are_told_who_they_are() {
        let messages = |gpus: &[u8]| -> Vec<Vec<u8>> {
            let message = |(rank, gpu): (usize, &u8)| {
                [vec![*gpu; 16], vec![7; if rank == 0 { 128 } else { 0 }]].concat()
            };
            gpus.iter().enumerate().map(message).collect()
        };
        assert_eq!(rendezvous_of_messages(&messages(&[1, 2, 3])).unwrap(), [7; 128]);
        let error = rendezvous_of_messages(&messages(&[1, 2, 3, 2]))
            .unwrap_err()
            .to_string();
        assert!(
            error.contains("ranks 1 and 3 have the same; start as many ranks as there are GPUs"),
            "{error}"
        );
    }
}
