//! The ranks of a call: their agreements, their norms and their gradients (`step/exchange.rs`).
//!
//! Nothing else in a step distinguishes one process from several ranks: a process alone agrees with itself
//! and has all gradients. With several ranks each agreement is a meeting point that every rank must reach,
//! also with an error. So errors go through `settle` or into the next agreement; a `?` before the agreement
//! would leave the other ranks waiting.

use super::call::UpdateCall;
use super::contribution::{Contribution, OwnLeaf};
use super::leaf::GradientSource;
use crate::engine::{ChunkTotals, Engine, Job, ReduceOutcome, reduce};
use crate::error::Result;
use crate::model::gradients::GradientLookUp;
use crate::model::lent::{Lend, Lent};
use crate::ranks::{Call, KeptSums, StateWorld, difference_error};
use crate::tree::Leaf;

/// The ranks that take part in a call, with their gradients as one rank has them: the rank's own gradients
/// as a whole, and for its own parts the gradients of the other ranks, once these gradients are fetched.
pub(super) struct Ranks<'w> {
    pub(super) world: &'w StateWorld,
    /// This rank's share of each leaf; empty without other ranks.
    pub(super) leaves: Vec<OwnLeaf<'w>>,
    /// The contribution of each rank, by rank; empty without other ranks.
    pub(super) contributions: Vec<Contribution>,
}

impl<'w> Ranks<'w> {
    /// The ranks of a call without other ranks.
    pub(super) const fn alone(world: &'w StateWorld) -> Self {
        Ranks {
            world,
            leaves: Vec::new(),
            contributions: Vec::new(),
        }
    }

    /// Agrees on the call. Also returns the sources from which plans get the gradients of their leaves.
    pub(super) fn agree<'g>(
        world: &'w StateWorld,
        call: &mut UpdateCall,
        leaves: &[Box<Leaf>],
        parameters: &'w [Lent<'_>],
        grads: &'g dyn GradientLookUp,
        by_leaf: Vec<GradientSource<'g>>,
    ) -> Result<(Self, Vec<GradientSource<'g>>)> {
        if world.several().is_none() {
            return Ok((Ranks::alone(world), by_leaf));
        }
        let ranks = Ranks::agree_with_others(world, call, leaves, parameters, grads, by_leaf)?;
        let sources = ranks.promised_sources();
        Ok((ranks, sources))
    }

    /// This rank's part of the parameter of a leaf.
    pub(super) fn part<'a>(&'a self, leaf: usize, parameters: &'a [Lent<'_>]) -> &'a dyn Lend {
        self.leaves
            .get(leaf)
            .map_or_else(|| &*parameters[leaf] as _, |own_leaf| &*own_leaf.x)
    }

    /// Fetches the gradients that are needed before anything is written. Returns the leaves whose gradients
    /// come in the commit.
    pub(super) fn add_up(
        &self,
        engine: Engine,
        jobs: &mut [Option<Job<'_>>],
        sums: &mut KeptSums,
    ) -> Result<Vec<usize>> {
        if self.leaves.is_empty() {
            return Ok(Vec::new());
        }
        self.fetch_sums(engine, jobs, sums)
            .or_else(|error| self.world.settle(Call::Plan, Err(error)))
    }

    /// The reduce stage.
    pub(super) fn reduce(&self, engine: Engine, jobs: &mut [Option<Job<'_>>]) -> Result<ReduceOutcome> {
        let gather = |totals| self.gather(totals);
        let outcome = reduce(
            engine,
            &gather,
            &mut jobs.iter_mut().flatten().collect::<Vec<_>>(),
        );
        outcome.map_err(|error| self.add_origin(error, jobs))
    }

    /// The commit stage. An error names the parameters that have moved.
    pub(super) fn commit(
        &self,
        engine: Engine,
        jobs: &mut [Option<Job<'_>>],
        late_leaves: &[usize],
    ) -> Result<()> {
        let result = self.commit_all(engine, jobs, late_leaves);
        let moved_paths = jobs
            .iter()
            .flatten()
            .filter(|job| job.has_moved)
            .map(|job| job.path);
        self.world
            .settle(Call::Commit, result.map_err(|error| error.after(moved_paths)))
    }

    /// The totals of the chunks of all ranks, in the order of elements.
    ///
    /// # Errors
    /// If this or another rank has failed, or has other numbers to add up.
    fn gather(&self, own_totals: Result<Vec<ChunkTotals>>) -> Result<Vec<ChunkTotals>> {
        if self.leaves.is_empty() {
            return own_totals;
        }
        let prepared = own_totals.map(|lists| {
            let mut bytes = Vec::new();
            for list in &lists {
                // Each list goes with its length, because other ranks have other numbers of chunks.
                bytes.extend((list.len() as u64).to_le_bytes());
                bytes.extend(list.iter().flat_map(|total| total.to_le_bytes()));
            }
            (lists.len(), bytes)
        });
        let (count, messages) = self.world.agree(Call::Reduce, prepared)?;
        let mut totals = vec![ChunkTotals::new(); count];
        for (rank, message) in messages.iter().enumerate() {
            if read_totals(message, &mut totals).is_none() {
                let what = format_args!("the number of norms and sums from rank {}", self.world.rank());
                return Err(difference_error(rank, what));
            }
        }
        Ok(totals)
    }
}

/// Appends the lists in the message of a rank to `totals`. `None` if the message has more or fewer lists.
fn read_totals(message: &[u8], totals: &mut [ChunkTotals]) -> Option<()> {
    let mut words = message.as_chunks().0.iter();
    for list in totals {
        let length = usize::try_from(u64::from_le_bytes(*words.next()?)).ok()?;
        let (numbers, rest) = words.as_slice().split_at_checked(length)?;
        list.extend(numbers.iter().map(|word| f64::from_le_bytes(*word)));
        words = rest.iter();
    }
    words.next().is_none().then_some(())
}
