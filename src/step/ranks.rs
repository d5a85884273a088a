//! The ranks of a call: their agreements, their norms and their gradients (`step/exchange.rs`).
//!
//! Nothing else in a step distinguishes one process from several ranks: a process alone agrees with itself
//! and has all gradients. With several ranks each agreement is a meeting point that every rank must reach,
//! also with an error. So errors go through `settle` or into the next agreement; a `?` before the agreement
//! would leave the other ranks waiting.

use super::call::UpdateCall;
use super::exchange::RankGradients;
use super::leaf::GradientSource;
#[cfg(feature = "candle")]
use super::wire;
use crate::engine::{ChunkTotals, Engine, Gather, Job, ReduceOutcome, commit, reduce};
use crate::error::Result;
#[cfg(feature = "candle")]
use crate::error::warning::Warning;
use crate::model::gradients::GradientLookUp;
use crate::model::lent::{Lend, Lent};
use crate::ranks::{Call, KeptSums, StateWorld, difference_error};
use crate::{ranks::share, tree::Leaf};

/// The ranks that take part in a call, with their gradients; `None` for this process alone.
pub(super) struct Ranks<'w>(Option<RankGradients<'w>>);

impl<'w> Ranks<'w> {
    /// This process alone.
    pub(super) const ALONE: Ranks<'static> = Ranks(None);

    /// Agrees on the call. Also returns the sources from which plans get the gradients of their leaves.
    pub(super) fn agree<'g>(
        world: Option<&'w StateWorld>,
        call: &mut UpdateCall,
        leaves: &[Box<Leaf>],
        parameters: &'w [Lent<'_>],
        grads: &'g dyn GradientLookUp,
        by_leaf: Vec<GradientSource<'g>>,
    ) -> Result<(Self, Vec<GradientSource<'g>>)> {
        let Some(world) = StateWorld::several(world) else {
            return Ok((Ranks::ALONE, by_leaf));
        };
        let gradients = RankGradients::agree(world, call, leaves, parameters, grads, by_leaf)?;
        let sources = gradients.promised_sources();
        Ok((Ranks(Some(gradients)), sources))
    }

    fn world(&self) -> Option<&StateWorld> {
        self.0.as_ref().map(|gradients| gradients.world)
    }

    /// This rank's part of the parameter of a leaf.
    pub(super) fn part<'a>(&'a self, leaf: usize, parameters: &'a [Lent<'_>]) -> &'a dyn Lend {
        self.0
            .as_ref()
            .map_or_else(|| &*parameters[leaf] as _, |gradients| &**gradients.part(leaf))
    }

    /// The value of `result`, if no rank refuses.
    pub(super) fn settle<T>(&self, call: Call, result: Result<T>) -> Result<T> {
        StateWorld::settle(self.world(), call, result)
    }

    /// Fetches the gradients that are needed before anything is written. Returns the leaves whose gradients
    /// come in the commit.
    pub(super) fn add_up(
        &self,
        engine: Engine,
        jobs: &mut [Option<Job<'_>>],
        sums: &mut KeptSums,
    ) -> Result<Vec<usize>> {
        let Some(gradients) = &self.0 else {
            return Ok(Vec::new());
        };
        let late_leaves = gradients.add_up(engine, jobs, sums);
        late_leaves.or_else(|error| self.settle(Call::Plan, Err(error)))
    }

    /// The reduce stage.
    pub(super) fn reduce(&self, engine: Engine, jobs: &mut [Option<Job<'_>>]) -> Result<ReduceOutcome> {
        let outcome = reduce(engine, self, &mut jobs.iter_mut().flatten().collect::<Vec<_>>());
        outcome.map_err(|error| match &self.0 {
            Some(gradients) => gradients.add_origin(error, jobs),
            None => error,
        })
    }

    /// The commit stage. An error names the parameters that have moved.
    pub(super) fn commit(
        &self,
        engine: Engine,
        jobs: &mut [Option<Job<'_>>],
        late_leaves: &[usize],
    ) -> Result<()> {
        let result = match &self.0 {
            Some(gradients) => gradients.commit(engine, jobs, late_leaves),
            None => commit(engine, jobs.iter_mut().flatten().collect()),
        };
        let moved_paths = jobs
            .iter()
            .flatten()
            .filter(|job| job.has_moved)
            .map(|job| job.path);
        self.settle(Call::Commit, result.map_err(|error| error.after(moved_paths)))
    }

    /// See [`wire::wire_warning`].
    #[cfg(feature = "candle")]
    pub(super) fn wire_warning(&self, leaves: &[Box<Leaf>]) -> Option<Warning> {
        self.0
            .as_ref()
            .and_then(|gradients| wire::wire_warning(&gradients.leaves, leaves))
    }

    /// Exchanges the new values of moved leaves, because each rank has updated only its own parts.
    pub(super) fn share(
        &self,
        leaves: &[Box<Leaf>],
        parameters: &[Lent<'_>],
        moved_leaves: &[usize],
    ) -> Result<()> {
        let Some(world) = self.world() else { return Ok(()) };
        let parts_and_parameter =
            |leaf: &usize| Ok((leaves[*leaf].parts_of_ranks()?, parameters[*leaf].clone()));
        share(
            world,
            &moved_leaves
                .iter()
                .map(parts_and_parameter)
                .collect::<Result<Vec<_>>>()?,
        )
    }
}

impl Gather for Ranks<'_> {
    fn gather(&self, own_totals: Result<Vec<ChunkTotals>>) -> Result<Vec<ChunkTotals>> {
        let Some(world) = self.world() else {
            return own_totals;
        };
        let mut bytes = Vec::new();
        let count = own_totals.as_ref().map_or(0, Vec::len);
        let own_message = own_totals.map(|lists| {
            for list in lists {
                // Each list goes with its length, because other ranks have other numbers of chunks.
                bytes.extend((list.len() as u64).to_le_bytes());
                bytes.extend(list.iter().flat_map(|total| total.to_le_bytes()));
            }
            bytes
        });
        let mut totals = vec![ChunkTotals::new(); count];
        for (rank, message) in world.agree(Call::Reduce, own_message)?.iter().enumerate() {
            let mut words = message.as_chunks().0.iter();
            for list in &mut totals {
                let length = words.next().map_or(0, |word| u64::from_le_bytes(*word));
                list.extend(
                    words
                        .by_ref()
                        .take(length as usize)
                        .map(|word| f64::from_le_bytes(*word)),
                );
            }
            if words.next().is_some() {
                return Err(difference_error(
                    rank,
                    format_args!(
                        "the number of norms and sums, which is higher than on rank {}",
                        world.rank()
                    ),
                ));
            }
        }
        Ok(totals)
    }
}
