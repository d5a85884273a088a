//! An update by all ranks of a job together: the calls in which they meet, apart from the gradients.

use candle_core::{Device, Tensor};

use super::wire::{Parcel, Window, append, rounds, slices};
use crate::engine::{ChunkTotals, Gather, set_part};
use crate::error::{RanksError, Result};
use crate::tree::Leaf;
use crate::world::{Call, World};

/// The ranks that take part in a call; without a world it is this process alone.
#[derive(Clone, Copy)]
pub(super) struct Ranks<'w>(Option<&'w World>);

impl<'w> Ranks<'w> {
    pub(super) fn new(world: Option<&'w World>) -> Self {
        Ranks(world.filter(|world| world.size() > 1))
    }

    /// The others' world, if there are others.
    pub(super) fn several(self) -> Option<&'w World> {
        self.0
    }

    /// The value, if all ranks have one.
    pub(super) fn settle<T>(self, call: Call, own: Result<T>) -> Result<T> {
        World::settle(self.0, call, own)
    }

    /// Gives all ranks the parameters of these leaves, of which each has updated its part.
    pub(super) fn share(self, leaves: &[Leaf], parameters: &[Tensor], moved: &[usize]) -> Result<()> {
        let Some(world) = self.0 else { return Ok(()) };
        let parts = moved.iter().map(|&leaf| leaves[leaf].parts_of_ranks()).collect::<Result<Vec<_>>>()?;
        let all: Vec<usize> = (0..moved.len()).collect();
        for round in rounds(&all, world.size(), |index| &parts[index]) {
            let of = |window: &Window, rank: usize| window.of(&parts[window.leaf].all()[rank]);
            let mut own = Vec::new();
            for window in &round {
                let x = &parameters[moved[window.leaf]];
                append(&x.detach().flatten_all()?, of(window, world.rank()), x.dtype(), &mut own)?;
            }
            let bytes = |rank: usize, window: &Window| {
                if rank == world.rank() { 0 } else { of(window, rank).len() * leaves[moved[window.leaf]].dtype.size_in_bytes() }
            };
            let mut parcels: Vec<Parcel> =
                (0..world.size()).map(|rank| Parcel::new(round.iter().map(|window| bytes(rank, window)))).collect();
            world.communicator().gather(&slices(&own), &mut parcels.iter_mut().map(Parcel::slices).collect::<Vec<_>>())?;
            for (rank, parcel) in parcels.iter().enumerate().filter(|(rank, _)| *rank != world.rank()) {
                for (index, window) in round.iter().enumerate() {
                    let (leaf, elements) = (moved[window.leaf], of(window, rank));
                    if !elements.is_empty() {
                        let values = Tensor::from_raw_buffer(parcel.get(index), leaves[leaf].dtype, &[elements.len()], &Device::Cpu)?;
                        set_part(&parameters[leaf], elements.start, &values)?;
                    }
                }
            }
        }
        Ok(())
    }
}

impl Gather for Ranks<'_> {
    fn gather(&self, own: Result<Vec<ChunkTotals>>) -> Result<Vec<ChunkTotals>> {
        let Some(world) = self.0 else { return own };
        let mut bytes = Vec::new();
        let count = own.as_ref().map_or(0, Vec::len);
        let said = own.map(|lists| {
            for list in lists {
                bytes.extend((list.len() as u64).to_le_bytes());
                bytes.extend(list.iter().flat_map(|total| total.to_le_bytes()));
            }
            bytes
        });
        let mut all = vec![ChunkTotals::new(); count];
        for (rank, said) in world.agree(Call::Reduce, said)?.iter().enumerate() {
            let mut words = said.as_chunks().0.iter();
            for list in &mut all {
                let length = words.next().map_or(0, |word| u64::from_le_bytes(*word));
                list.extend(words.by_ref().take(length as usize).map(|word| f64::from_le_bytes(*word)));
            }
            if words.next().is_some() {
                return Err(RanksError::Differ { rank, what: "more norms and sums to take than this rank".to_string() }.into());
            }
        }
        Ok(all)
    }
}
