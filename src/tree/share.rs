//! Tensors of which each rank has its part.

use candle_core::{Device, Tensor};

use super::StateTree;
use super::parts::LeafParts;
use super::wire::{Parcel, Window, append, rounds, slices};
use crate::engine::set_part;
use crate::error::Result;
use crate::world::World;

/// Gives all ranks these tensors, which are contiguous, whole on each, and right in its part of them.
pub(crate) fn share(world: &World, tensors: &[(LeafParts, Tensor)]) -> Result<()> {
    let all: Vec<usize> = (0..tensors.len()).collect();
    for round in rounds(&all, world.size(), |index| &tensors[index].0) {
        let of = |window: &Window, rank: usize| window.of(&tensors[window.leaf].0.all()[rank]);
        let mut own = Vec::new();
        for window in &round {
            let x = &tensors[window.leaf].1;
            append(&x.detach().flatten_all()?, of(window, world.rank()), x.dtype(), &mut own)?;
        }
        let bytes = |rank: usize, window: &Window| {
            if rank == world.rank() { 0 } else { of(window, rank).len() * tensors[window.leaf].1.dtype().size_in_bytes() }
        };
        let mut parcels: Vec<Parcel> = (0..world.size()).map(|rank| Parcel::new(round.iter().map(|window| bytes(rank, window)))).collect();
        world.communicator().gather(&slices(&own), &mut parcels.iter_mut().map(Parcel::slices).collect::<Vec<_>>())?;
        for (rank, parcel) in parcels.iter().enumerate().filter(|(rank, _)| *rank != world.rank()) {
            for (index, window) in round.iter().enumerate() {
                let (x, elements) = (&tensors[window.leaf].1, of(window, rank));
                if !elements.is_empty() {
                    let values = Tensor::from_raw_buffer(parcel.get(index), x.dtype(), &[elements.len()], &Device::Cpu)?;
                    set_part(x, elements.start, &values)?;
                }
            }
        }
    }
    Ok(())
}

impl StateTree {
    /// [`share`] with the ranks of this state, if there are others: each tensor is that of a leaf, given by its index.
    pub(super) fn share(&self, tensors: impl IntoIterator<Item = (usize, Tensor)>) -> Result<()> {
        let Some(world) = self.world.as_ref().filter(|world| world.size() > 1) else { return Ok(()) };
        let with_parts = |(leaf, tensor): (usize, Tensor)| Ok((self.leaves[leaf].parts_of_ranks()?, tensor));
        share(world, &tensors.into_iter().map(with_parts).collect::<Result<Vec<_>>>()?)
    }

    /// New tensors of the shapes of their leaves, of which each rank has its part.
    pub(super) fn whole(&self, parts: Vec<(usize, Tensor)>) -> Result<Vec<(usize, Tensor)>> {
        if !self.is_divided() {
            return Ok(parts);
        }
        let whole = |(index, part): (usize, Tensor)| {
            let leaf = &self.leaves[index];
            let whole = Tensor::zeros(&leaf.shape, part.dtype(), part.device())?;
            set_part(&whole, leaf.part().start, &part)?;
            Ok((index, whole))
        };
        let whole = parts.into_iter().map(whole).collect::<Result<Vec<_>>>()?;
        self.share(whole.iter().cloned())?;
        Ok(whole)
    }
}
