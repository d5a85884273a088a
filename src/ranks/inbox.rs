//! Tensors that travel between ranks, from their own memory into memory that is used again.
//!
//! All rounds (see `rounds.rs`) have about the same size, so an `Inbox` has one tensor of each dtype and
//! grows it to the largest round. A message is received into a view of that tensor. If the transport has no
//! device, the transport takes bytes: a tensor to send is locked for reading and lends its bytes, and the
//! tensors of the inbox are locked for writing as long as the call of the transport lasts.

use std::collections::HashMap;
use std::ops::Deref;
use std::sync::atomic::{AtomicBool, Ordering};

use super::{Communicator, without_empty};
use crate::engine::download;
use crate::error::Result;
use crate::model::lent::{check_extent, storage_of};
use crate::numbers::DType;
use crate::tensors::{
    Device, Layout, Storage, Tensor, bytes_mut, bytes_of, cpu_extent, dtype_of, with_numbers_mut, zeros,
};

/// The flat tensors that a rank is to send, in order, by dtype and length.
pub(crate) type ExpectedTensors = Vec<(DType, usize)>;

/// Memory for the tensors that other ranks send, by dtype. Each round uses the memory again.
#[derive(Debug, Default)]
pub(crate) struct Inbox(HashMap<DType, Tensor>);

/// Views begin at multiples of this many elements, so that each is aligned for vector instructions.
const ALIGNED: usize = 64;

impl Inbox {
    /// Views to receive into: a flat tensor for each expected tensor.
    fn views(&mut self, expected: &[ExpectedTensors], device: &Device) -> Result<Vec<Vec<Tensor>>> {
        let mut ends: HashMap<DType, usize> = HashMap::new();
        let mut positions = Vec::with_capacity(expected.len());
        for tensors in expected {
            let position = |&(dtype, length): &(DType, usize)| {
                let end = ends.entry(dtype).or_default();
                let start = *end;
                *end += length.next_multiple_of(ALIGNED);
                (dtype, start, length)
            };
            positions.push(tensors.iter().map(position).collect::<Vec<_>>());
        }
        for (dtype, end) in ends {
            if self.0.get(&dtype).is_none_or(|memory| memory.elem_count() < end) {
                self.0.insert(dtype, zeros(end, dtype, device)?);
            }
        }
        let view =
            |&(dtype, start, length): &(DType, usize, usize)| Ok(self.0[&dtype].narrow(0, start, length)?);
        positions
            .iter()
            .map(|positions| positions.iter().map(view).collect())
            .collect()
    }

    /// The bytes of `views`, by rank. `memory` has the bytes of all tensors in the map's order.
    ///
    /// The views of a dtype follow each other in memory, so each is split off from the remaining bytes.
    fn slices<'b>(&self, views: &[Vec<Tensor>], memory: Vec<&'b mut [u8]>) -> Vec<Vec<&'b mut [u8]>> {
        let mut remaining: HashMap<DType, (usize, &mut [u8])> = self
            .0
            .keys()
            .copied()
            .zip(memory.into_iter().map(|bytes| (0, bytes)))
            .collect();
        let mut slice = |view: &Tensor| {
            let (offset, bytes) = remaining.get_mut(&dtype_of(view))?;
            let (start, length) = (
                view.layout().start_offset() * view.dtype().size_in_bytes(),
                byte_length(view),
            );
            bytes.split_off_mut(..start - std::mem::replace(offset, start + length))?;
            bytes.split_off_mut(..length)
        };
        views
            .iter()
            .map(|views| without_empty(views.iter().filter_map(&mut slice)))
            .collect()
    }

    /// Sends the tensors in `to[r]`, flat and of any layout, to rank r. Returns the tensors that each rank
    /// has sent, which are overwritten when the inbox is used again.
    pub(crate) fn exchange(
        &mut self,
        communicator: &dyn Communicator,
        to: &[Vec<Tensor>],
        expected: &[ExpectedTensors],
    ) -> Result<Vec<Vec<Tensor>>> {
        let to = to
            .iter()
            .map(|tensors| make_sendable(communicator, tensors))
            .collect::<Result<Vec<_>>>()?;
        if let Some(device) = communicator.device() {
            let views = self.views(expected, device)?;
            communicator.exchange_tensors(&to, &views)?;
            return Ok(views);
        }
        self.on_host(expected, |from| {
            let locks = to
                .iter()
                .map(|tensors| lock_all(tensors))
                .collect::<Result<Vec<_>>>()?;
            let slices = locks.iter().map(|locks| locked_bytes(locks));
            let slices = slices.collect::<crate::tensors::Result<Vec<_>>>()?;
            Ok(communicator.exchange(&slices, from)?)
        })
    }

    /// [`Inbox::exchange`] that sends the same tensors to all other ranks.
    pub(crate) fn gather(
        &mut self,
        communicator: &dyn Communicator,
        own: &[Tensor],
        expected: &[ExpectedTensors],
    ) -> Result<Vec<Vec<Tensor>>> {
        if communicator.device().is_some() {
            let mut to = vec![own.to_vec(); communicator.size()];
            to[communicator.rank()].clear();
            return self.exchange(communicator, &to, expected);
        }
        let own = make_sendable(communicator, own)?;
        self.on_host(expected, |from| {
            Ok(communicator.gather(&locked_bytes(&lock_all(&own)?)?, from)?)
        })
    }

    /// The tensors that arrive over a transport of bytes; `talk` fills the slices.
    fn on_host(
        &mut self,
        expected: &[ExpectedTensors],
        talk: impl Fn(&mut [Vec<&mut [u8]>]) -> Result<()>,
    ) -> Result<Vec<Vec<Tensor>>> {
        let views = self.views(expected, &Device::Cpu)?;
        let mut outcome = Ok(());
        // `Inbox::slices` reads the keys: keys and values of an unchanged map have the same order.
        let memory: Vec<&Tensor> = self.0.values().collect();
        with_bytes_mut(&memory, Vec::new(), &mut |memory| {
            outcome = talk(&mut self.slices(&views, memory))
        })?;
        outcome?;
        Ok(views)
    }
}

/// Makes tensors contiguous, and brings them to the host unless the transport has a device.
fn make_sendable(communicator: &dyn Communicator, tensors: &[Tensor]) -> Result<Vec<Tensor>> {
    let prepare = |tensor: &Tensor| match tensor.device() {
        device if device.is_cpu() => Ok(tensor.contiguous()?),
        _ if communicator.device().is_some() => Ok(tensor.contiguous()?),
        device => {
            // Not a `Once`, which would refuse all later calls after a panic of the logger.
            static WARNED: AtomicBool = AtomicBool::new(false);
            if !WARNED.swap(true, Ordering::Relaxed) {
                log::warn!(
                    "what is on {:?} goes to other ranks through the host",
                    device.location()
                );
            }
            download(tensor)
        }
    };
    tensors.iter().map(prepare).collect()
}

fn byte_length(tensor: &Tensor) -> usize {
    tensor.elem_count() * tensor.dtype().size_in_bytes()
}

/// The locks of tensors. `storage_of` compares the length of each storage with its tensor, because other
/// ranks wait for exactly that many bytes.
fn lock_all(tensors: &[Tensor]) -> Result<Vec<(impl Deref<Target = Storage>, &Layout)>> {
    tensors.iter().map(storage_of).collect()
}

/// The bytes of contiguous tensors on the host, without those of empty tensors.
fn locked_bytes<'l>(
    locks: &'l [(impl Deref<Target = Storage>, &Layout)],
) -> crate::tensors::Result<Vec<&'l [u8]>> {
    let slices = locks.iter().map(|(storage, layout)| bytes_of(storage, layout));
    Ok(without_empty(slices.collect::<crate::tensors::Result<Vec<_>>>()?))
}

/// Calls `run` with `slices` and the bytes of all tensors. Each tensor must have a storage of its own.
///
/// The function is recursive, because `with_numbers_mut` lends a storage only during a call, and `run` needs
/// all at once.
fn with_bytes_mut(
    tensors: &[&Tensor],
    slices: Vec<&mut [u8]>,
    run: &mut dyn FnMut(Vec<&mut [u8]>),
) -> Result<()> {
    let Some((first, rest)) = tensors.split_first() else {
        run(slices);
        return Ok(());
    };
    let mut slices = Some(slices);
    with_numbers_mut(first, &mut |storage, _| {
        check_extent(first, cpu_extent(storage))?;
        let mut slices: Vec<&mut [u8]> = slices.take().unwrap_or_default();
        slices.push(bytes_mut(storage)?);
        with_bytes_mut(rest, slices, run)
    })
}

/// Memory for sums of gradients, by leaf, kept from one call to the next. To get new memory from the system,
/// page by page, takes longer than the additions.
#[derive(Debug, Default)]
pub(crate) struct KeptSums(Vec<Option<Tensor>>);

impl KeptSums {
    /// A vector for the sum of a leaf's gradients, with arbitrary numbers.
    pub(crate) fn vector(
        &mut self,
        leaf: usize,
        length: usize,
        dtype: DType,
        device: &Device,
    ) -> Result<Tensor> {
        // Nothing is kept for a device, because the device's allocator keeps memory.
        if !device.is_cpu() {
            return Ok(zeros(length, dtype, device)?);
        }
        if self.0.len() <= leaf {
            self.0.resize(leaf + 1, None);
        }
        match &self.0[leaf] {
            Some(vector) if (vector.elem_count(), dtype_of(vector)) == (length, dtype) => Ok(vector.clone()),
            _ => Ok(self.0[leaf].insert(zeros(length, dtype, device)?).clone()),
        }
    }
}
