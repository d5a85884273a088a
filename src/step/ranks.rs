//! The ranks of an update: their agreements and the gathering of norms. Gradients are in `step/exchange.rs`.

use crate::engine::{ChunkTotals, Gather};
use crate::error::Result;
use crate::model::lent::Lent;
use crate::ranks::{Call, StateWorld, differs};
use crate::{ranks::share, tree::Leaf};

/// The ranks that take part in a call; without a world this process alone.
#[derive(Clone, Copy)]
pub(crate) struct Ranks<'w>(Option<&'w StateWorld>);

impl<'w> Ranks<'w> {
    pub(crate) fn new(world: Option<&'w StateWorld>) -> Self {
        Ranks(StateWorld::several(world))
    }

    /// The world, if there are other ranks.
    pub(crate) fn several(self) -> Option<&'w StateWorld> {
        self.0
    }

    /// The value, if no rank refuses.
    pub(crate) fn settle<T>(self, call: Call, own: Result<T>) -> Result<T> {
        StateWorld::settle(self.0, call, own)
    }

    /// Gives all ranks the parameters of these leaves; each has updated its part.
    pub(crate) fn share(self, leaves: &[Leaf], parameters: &[Lent<'_>], moved: &[usize]) -> Result<()> {
        let Some(world) = self.0 else { return Ok(()) };
        let with_parts = |leaf: &usize| Ok((leaves[*leaf].parts_of_ranks()?, parameters[*leaf].clone()));
        share(world, &moved.iter().map(with_parts).collect::<Result<Vec<_>>>()?)
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
                return Err(differs(
                    rank,
                    format_args!(
                        "the norms and sums that it takes: they are more than on rank {}",
                        world.rank()
                    ),
                ));
            }
        }
        Ok(all)
    }
}
