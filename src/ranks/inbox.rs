//! Tensors that travel between ranks: sent from where they lie, received into memory that is used again.
//!
//! All rounds (see `rounds.rs`) have about the same size, so an `Inbox` has one tensor of each dtype and
//! grows it to the largest round. A message is received into a view of that tensor. If the transport has no
//! device, it takes bytes: a tensor to send is locked for reading and lends its bytes, and the tensors of the
//! inbox are locked for writing as long as the call of the transport lasts.

use std::collections::HashMap;
use std::ops::Deref;
use std::sync::atomic::{AtomicBool, Ordering};

use super::{StateWorld, not_empty};
use crate::engine::download;
use crate::error::Result;
use crate::model::lent::{check_held, storage_of};
use crate::numbers::DType;
use crate::tensors::{
    Device, Layout, Storage, Tensor, bytes_mut, bytes_of, dtype_of, held_on_cpu, with_numbers_mut, zeros,
};

/// The flat tensors that a rank is to send, in order, by dtype and length.
pub(crate) type ExpectedTensors = Vec<(DType, usize)>;

/// Memory for the tensors that other ranks send, by dtype. Each round uses it again.
#[derive(Debug, Default)]
pub(crate) struct Inbox(HashMap<DType, Tensor>);

/// Views begin at multiples of this many elements, so that each is aligned for vector instructions.
const ALIGNED: usize = 64;

impl Inbox {
    /// Views to receive into: a flat tensor for each that is awaited.
    fn room(&mut self, awaited: &[ExpectedTensors], device: &Device) -> Result<Vec<Vec<Tensor>>> {
        let mut ends: HashMap<DType, usize> = HashMap::new();
        let mut placed = Vec::with_capacity(awaited.len());
        for awaited in awaited {
            let place = |&(dtype, length): &(DType, usize)| {
                let end = ends.entry(dtype).or_default();
                let start = *end;
                *end += length.next_multiple_of(ALIGNED);
                (dtype, start, length)
            };
            placed.push(awaited.iter().map(place).collect::<Vec<_>>());
        }
        for (dtype, end) in ends {
            if self.0.get(&dtype).is_none_or(|memory| memory.elem_count() < end) {
                self.0.insert(dtype, zeros(end, dtype, device)?);
            }
        }
        let view =
            |&(dtype, start, length): &(DType, usize, usize)| Ok(self.0[&dtype].narrow(0, start, length)?);
        placed.iter().map(|of_rank| of_rank.iter().map(view).collect()).collect()
    }

    /// The bytes of the views in `rooms`, by rank. `memory` has the bytes of all tensors in the map's order.
    ///
    /// The views of a dtype follow each other in memory, so each is split off from what is left.
    fn slices<'b>(&self, rooms: &[Vec<Tensor>], memory: Vec<&'b mut [u8]>) -> Vec<Vec<&'b mut [u8]>> {
        let mut left: HashMap<DType, (usize, &mut [u8])> =
            self.0.keys().copied().zip(memory.into_iter().map(|bytes| (0, bytes))).collect();
        let mut slice = |room: &Tensor| {
            let (done, bytes) = left.get_mut(&dtype_of(room))?;
            let (start, length) =
                (room.layout().start_offset() * room.dtype().size_in_bytes(), byte_length(room));
            bytes.split_off_mut(..start - std::mem::replace(done, start + length))?;
            bytes.split_off_mut(..length)
        };
        rooms.iter().map(|of_rank| not_empty(of_rank.iter().filter_map(&mut slice))).collect()
    }

    /// Sends the tensors in `to[r]`, flat and of any layout, to rank r. Returns the tensors that each rank
    /// has sent, which are overwritten when the inbox is used again.
    pub(crate) fn exchange(
        &mut self,
        world: &StateWorld,
        to: &[Vec<Tensor>],
        awaited: &[ExpectedTensors],
    ) -> Result<Vec<Vec<Tensor>>> {
        let to = to.iter().map(|tensors| in_order(world, tensors)).collect::<Result<Vec<_>>>()?;
        if let Some(device) = world.communicator().device() {
            return self.on_device(world, device, &to, awaited);
        }
        self.on_host(awaited, |from| {
            let locked = to.iter().map(|tensors| locked(tensors)).collect::<Result<Vec<_>>>()?;
            let sent =
                locked.iter().map(|locked| lent(locked)).collect::<crate::tensors::Result<Vec<_>>>()?;
            Ok(world.communicator().exchange(&sent, from)?)
        })
    }

    /// [`Inbox::exchange`] that sends the same tensors to all other ranks.
    pub(crate) fn gather(
        &mut self,
        world: &StateWorld,
        own: &[Tensor],
        awaited: &[ExpectedTensors],
    ) -> Result<Vec<Vec<Tensor>>> {
        let own = in_order(world, own)?;
        if let Some(device) = world.communicator().device() {
            let to: Vec<Vec<Tensor>> = (0..world.size())
                .map(|rank| if rank == world.rank() { Vec::new() } else { own.clone() })
                .collect();
            return self.on_device(world, device, &to, awaited);
        }
        self.on_host(awaited, |from| Ok(world.communicator().gather(&lent(&locked(&own)?)?, from)?))
    }

    /// The tensors that arrive over a transport between devices.
    fn on_device(
        &mut self,
        world: &StateWorld,
        device: &Device,
        to: &[Vec<Tensor>],
        awaited: &[ExpectedTensors],
    ) -> Result<Vec<Vec<Tensor>>> {
        let rooms = self.room(awaited, device)?;
        world.communicator().exchange_tensors(to, &rooms)?;
        Ok(rooms)
    }

    /// The tensors that arrive over a transport of bytes; `talk` fills the slices.
    fn on_host(
        &mut self,
        awaited: &[ExpectedTensors],
        talk: impl Fn(&mut [Vec<&mut [u8]>]) -> Result<()>,
    ) -> Result<Vec<Vec<Tensor>>> {
        let rooms = self.room(awaited, &Device::Cpu)?;
        let mut outcome = Ok(());
        // `slices` reads the keys: keys and values of an unchanged map have the same order.
        let memory: Vec<&Tensor> = self.0.values().collect();
        with_bytes_mut(&memory, Vec::new(), &mut |memory| outcome = talk(&mut self.slices(&rooms, memory)))?;
        outcome?;
        Ok(rooms)
    }
}

/// The tensors, contiguous, and on the host unless the transport has a device.
fn in_order(world: &StateWorld, tensors: &[Tensor]) -> Result<Vec<Tensor>> {
    let here = |tensor: &Tensor| match tensor.device() {
        device if device.is_cpu() => Ok(tensor.contiguous()?),
        _ if world.communicator().device().is_some() => Ok(tensor.contiguous()?),
        device => {
            // No `Once`, which would refuse all later calls after a panic of the logger.
            static WARNED: AtomicBool = AtomicBool::new(false);
            if !WARNED.swap(true, Ordering::Relaxed) {
                log::warn!("what is on {:?} goes to other ranks through the host", device.location());
            }
            download(tensor)
        }
    };
    tensors.iter().map(here).collect()
}

fn byte_length(tensor: &Tensor) -> usize {
    tensor.elem_count() * tensor.dtype().size_in_bytes()
}

/// The locks of tensors. `storage_of` compares the length of each storage with its tensor, because other
/// ranks wait for exactly that many bytes.
fn locked(tensors: &[Tensor]) -> Result<Vec<(impl Deref<Target = Storage>, &Layout)>> {
    tensors.iter().map(storage_of).collect()
}

/// The bytes of contiguous tensors on the host, without those of empty tensors.
fn lent<'l>(locked: &'l [(impl Deref<Target = Storage>, &Layout)]) -> crate::tensors::Result<Vec<&'l [u8]>> {
    let values = locked.iter().map(|(storage, layout)| bytes_of(storage, layout));
    Ok(not_empty(values.collect::<crate::tensors::Result<Vec<_>>>()?))
}

/// Calls `run` with `held` and the bytes of all tensors. Each tensor must have a storage of its own.
///
/// Recursive, because `with_numbers_mut` lends a storage only during a call, and `run` needs all at once.
fn with_bytes_mut(
    tensors: &[&Tensor],
    held: Vec<&mut [u8]>,
    run: &mut dyn FnMut(Vec<&mut [u8]>),
) -> Result<()> {
    let Some((first, rest)) = tensors.split_first() else {
        run(held);
        return Ok(());
    };
    let mut held = Some(held);
    with_numbers_mut(first, &mut |storage, _| {
        check_held(first, held_on_cpu(storage))?;
        let mut held: Vec<&mut [u8]> = held.take().unwrap_or_default();
        held.push(bytes_mut(storage)?);
        with_bytes_mut(rest, held, run)
    })
}

/// Memory for sums of gradients, by leaf, kept from one call to the next. To get new memory from the system,
/// page by page, takes longer than the additions.
#[derive(Debug, Default)]
pub(crate) struct KeptSums(Vec<Option<Tensor>>);

impl KeptSums {
    /// A vector for the sum of a leaf's gradients, with arbitrary numbers.
    pub(crate) fn of(&mut self, leaf: usize, length: usize, dtype: DType, device: &Device) -> Result<Tensor> {
        // Nothing is kept for a device, because its allocator keeps memory.
        if !device.is_cpu() {
            return Ok(zeros(length, dtype, device)?);
        }
        if self.0.len() <= leaf {
            self.0.resize(leaf + 1, None);
        }
        match &self.0[leaf] {
            Some(known) if (known.elem_count(), dtype_of(known)) == (length, dtype) => Ok(known.clone()),
            _ => Ok(self.0[leaf].insert(zeros(length, dtype, device)?).clone()),
        }
    }
}
