//! The exchange of gradients: each rank sends its gradients to the ranks that have the state.
//!
//! Memory is the difficulty: a rank must not hold the gradients of all others. So gradients travel in rounds
//! (`ranks/rounds.rs`) of a bounded number of elements. A leaf (a parameter with its state) takes one of two
//! ways:
//!
//! 1. Its job (the plan for the leaf) needs all elements before it writes (norms, checks, functions, or a
//!    device): `fetch_sums` fetches the sum before the reduce stage, and the sum becomes the only source of
//!    the job.
//! 2. Its job is elementwise on the fused CPU engine: `commit_all` fetches range after range, and each range
//!    is added up and written by one pass of the engine.
//!
//! All ranks derive the same rounds from plans on which they have agreed. A rank waits for each run that it
//! expects, so `dtype_on_wire` alone decides, on both sides, whether a run travels.

use std::collections::hash_map::Entry;
use std::collections::{HashMap, HashSet};

use super::Ranks;
use crate::engine::{
    Engine, Job, Piece, Sources, commit, commit_pieces, filled, is_splittable, on_device, rounded, sum_to,
};
use crate::error::Result;
use crate::model::lent::Lent;
use crate::numbers::DType;
use crate::ranks::{ExpectedTensors, Inbox, KeptSums, Round, Run, rounds, unreadable_error};
use crate::tensors::{Tensor, in_dtype, product, zeros};

/// Buffers that are kept from one round to the next.
#[derive(Default)]
struct ExchangeBuffers {
    /// This rank's gradients for the leaves of a round, as vectors. A gradient is kept over the rounds of its
    /// leaf, so that a gradient that is not contiguous is copied once, not for each run.
    gradients: HashMap<usize, Tensor>,
    inbox: Inbox,
}

impl ExchangeBuffers {
    /// Prepares the gradients of `round`, and drops those that the round does not need.
    fn prepare(&mut self, round: &Round, gradient_of: impl Fn(usize) -> Option<Tensor>) -> Result<()> {
        let leaves: HashSet<usize> = round.iter().flatten().map(|run| run.leaf).collect();
        self.gradients.retain(|leaf, _| leaves.contains(leaf));
        for leaf in leaves {
            if let (Entry::Vacant(entry), Some(gradient)) = (self.gradients.entry(leaf), gradient_of(leaf)) {
                entry.insert(gradient.flatten_all()?);
            }
        }
        Ok(())
    }

    /// This rank's values of a run, rounded to the dtype in which they travel. The rank has a gradient.
    fn values(&self, Run { leaf, elements }: &Run, dtype: DType) -> Result<Tensor> {
        let values = self.gradients[leaf].narrow(0, elements.start, elements.len())?;
        Ok(rounded(&values, dtype)?)
    }
}

impl Ranks<'_> {
    /// Fetches the sum of the gradients for all jobs that read all elements before they write. Returns the
    /// other leaves with a gradient, in order, because their gradients come in the commit.
    pub(super) fn fetch_sums(
        &self,
        engine: Engine,
        jobs: &mut [Option<Job<'_>>],
        kept_sums: &mut KeptSums,
    ) -> Result<Vec<usize>> {
        let has_gradient = |job: &Option<Job<'_>>| job.as_ref().is_some_and(|job| !job.sources.is_empty());
        let with_gradient = (0..jobs.len()).filter(|&leaf| has_gradient(&jobs[leaf]));
        let is_late = |leaf: &usize| jobs[*leaf].as_ref().is_some_and(|job| is_splittable(engine, job));
        let (late_leaves, early_leaves): (Vec<usize>, Vec<usize>) = with_gradient.partition(is_late);
        let mut sums: Vec<Option<Tensor>> = vec![None; jobs.len()];
        let mut buffers = ExchangeBuffers::default();
        for round in self.rounds(&early_leaves) {
            for Piece {
                job: leaf,
                elements,
                gradients,
            } in self.exchange(&round, jobs, &mut buffers)?
            {
                let Some(job) = &jobs[leaf] else { continue };
                let x = &self.leaves[leaf].x;
                let part = x.part(elements.clone())?;
                let sum = match &sums[leaf] {
                    Some(sum) => sum.clone(),
                    // A function gets new memory, because the function may keep the tensor.
                    None if job.has_functions() => zeros(job.length, job.compute, x.device())?,
                    None => kept_sums.vector(leaf, job.length, job.compute, x.device())?,
                };
                sum_to(
                    engine,
                    &*part,
                    // Cloned, because the lifetime of `Sources` cannot be shortened.
                    gradients.iter().cloned().collect(),
                    &sum.narrow(0, elements.start, elements.len())?,
                )?;
                sums[leaf] = Some(sum);
            }
        }
        for leaf in early_leaves {
            let (Some(job), Some(sum)) = (&mut jobs[leaf], sums[leaf].take()) else {
                continue;
            };
            job.sources = Sources::from_iter([Lent::Tensor(sum.reshape(job.x.shape())?)]);
        }
        Ok(late_leaves)
    }

    /// Commits all jobs. Jobs of `late_leaves` are written range by range, as their gradients come.
    pub(super) fn commit_all<'a>(
        &self,
        engine: Engine,
        jobs: &mut [Option<Job<'a>>],
        late_leaves: &[usize],
    ) -> Result<()> {
        let mut buffers = ExchangeBuffers::default();
        for round in self.rounds(late_leaves) {
            let pieces = self.exchange(&round, jobs, &mut buffers)?;
            let mut job_refs: Vec<_> = jobs.iter_mut().map(Option::as_mut).collect();
            commit_pieces(engine, &mut job_refs, pieces)?;
        }
        // All other jobs follow, also late jobs without elements on this rank, so that their counters move as
        // on other ranks.
        let is_committed = |leaf: usize| {
            late_leaves.binary_search(&leaf).is_ok() && !self.leaves[leaf].parts.own().is_empty()
        };
        let other_jobs = jobs
            .iter_mut()
            .enumerate()
            .filter(|(leaf, _)| !is_committed(*leaf));
        commit(engine, other_jobs.filter_map(|(_, job)| job.as_mut()).collect())
    }

    fn rounds<'r>(&'r self, leaves: &'r [usize]) -> impl Iterator<Item = Round> {
        let rounds = || rounds(leaves, self.world.size(), |leaf| &self.leaves[leaf].parts);
        (!leaves.is_empty()).then(rounds).into_iter().flatten()
    }

    /// Sends this rank's gradients of a round. Returns the gradients of all ranks for this rank's parts, each
    /// piece with those of all ranks in rank order.
    fn exchange<'p>(
        &self,
        round: &Round,
        jobs: &[Option<Job<'_>>],
        buffers: &mut ExchangeBuffers,
    ) -> Result<Vec<Piece<'p>>> {
        let Some(communicator) = self.world.communicator_to_others() else {
            return Ok(Vec::new());
        };
        let (ranks, own_rank) = (0..communicator.size(), communicator.rank());
        buffers.prepare(round, |leaf| {
            self.dtype_on_wire(own_rank, leaf)
                .and_then(|_| self.leaves[leaf].gradient.clone())
        })?;
        let to_rank = |rank: usize| {
            let runs = round[rank].iter().filter(|_| rank != own_rank);
            runs.filter_map(|run| Some(buffers.values(run, self.dtype_on_wire(own_rank, run.leaf)?)))
                .collect::<Result<Vec<Tensor>>>()
        };
        let to = ranks.clone().map(to_rank).collect::<Result<Vec<_>>>()?;
        let from_rank = |rank: usize| -> ExpectedTensors {
            let runs = round[own_rank].iter().filter(|_| rank != own_rank);
            runs.filter_map(|run| Some((self.dtype_on_wire(rank, run.leaf)?, run.elements.len())))
                .collect()
        };
        let expected: Vec<ExpectedTensors> = ranks.clone().map(from_rank).collect();
        let tensors = buffers.inbox.exchange(communicator, &to, &expected)?;

        let mut from: Vec<_> = tensors.into_iter().map(Vec::into_iter).collect();
        let received_piece = |run: &Run| {
            let (leaf, first) = (run.leaf, self.leaves[run.leaf].parts.own().start);
            let compute = jobs[leaf].as_ref().map_or(DType::F32, |job| job.compute);
            let mut gradients = Sources::new();
            let rank_and_dtype = |rank| Some((rank, self.dtype_on_wire(rank, leaf)?));
            for (rank, dtype) in ranks.clone().filter_map(rank_and_dtype) {
                // Own values are rounded as on the wire, so that the sum does not depend on which rank has
                // the part.
                let values = if rank == own_rank {
                    buffers.values(run, dtype)?
                } else {
                    // A tensor arrives for each run with a dtype, in the order of the runs.
                    let arrived = from[rank].next();
                    arrived.ok_or_else(|| unreadable_error(rank))?
                };
                let gradient = on_device(&values, self.leaves[leaf].x.device())?;
                let weighted = weighted(gradient, self.contributions[rank].weight, compute)?;
                gradients.push(Lent::Tensor(weighted));
            }
            Ok(Piece {
                job: leaf,
                elements: run.elements.start - first..run.elements.end - first,
                gradients,
            })
        };
        round[own_rank].iter().map(received_piece).collect()
    }

    /// The dtype in which a rank sends its gradient of a leaf; `None` without a gradient.
    fn dtype_on_wire(&self, rank: usize, leaf: usize) -> Option<DType> {
        self.contributions[rank].dtypes[leaf]
    }
}

/// The gradient times its weight, as it enters the sum.
pub(crate) fn weighted(gradient: Tensor, weight: u64, compute: DType) -> Result<Tensor> {
    if weight == 1 {
        return Ok(gradient);
    }
    let weight = filled(weight as f64, (), compute, gradient.device())?;
    Ok(product(&in_dtype(&gradient, compute)?, &weight)?)
}
