//! The exchange of gradients: each rank sends its gradients to the ranks that have the state.
//!
//! Memory is the difficulty: a rank must not hold the gradients of all others. So gradients travel in rounds
//! (`ranks/rounds.rs`) of a bounded number of elements. A leaf (a parameter with its state) takes one of two
//! ways:
//!
//! 1. Its job (the plan for the leaf) needs all elements before it writes (norms, checks, functions, or a
//!    device): `fetch_sums` fetches the sum before the reduce stage, and the sum becomes the only source of the
//!    job.
//! 2. Its job is elementwise on the fused CPU engine: `commit_all` fetches range after range, and each range is
//!    added up and written by one pass of the engine.
//!
//! All ranks derive the same rounds from plans on which they have agreed. A rank waits for each run that it
//! expects, so `dtype_on_wire` alone decides, on both sides, whether a run travels.

use std::collections::hash_map::Entry;
use std::collections::{HashMap, HashSet};

use super::call::UpdateCall;
use super::contribution::{Contribution, OwnLeaf, update_agreement};
use super::leaf::GradientSource;
use super::ranks::Ranks;
use crate::engine::{
    Engine, Job, Piece, Sources, UpdateTargets, commit, commit_pieces, filled, is_splittable, on_device,
    rounded, sum_to,
};
use crate::error::{Error, ErrorKind, Result};
use crate::model::gradients::GradientLookUp;
use crate::model::lent::Lent;
use crate::numbers::{DType, compute_dtype, counts};
use crate::ranks::{
    Call, ExpectedTensors, Inbox, KeptSums, Round, Run, StateWorld, rounds, unreadable_error,
};
use crate::tensors::{Tensor, in_dtype, product, zeros};
use crate::tree::Leaf;

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

impl<'w> Ranks<'w> {
    /// Agrees with all other ranks on the call, and sets the call's weight and divisor to the values of all ranks
    /// together.
    pub(super) fn agree_with_others(
        world: &'w StateWorld,
        call: &mut UpdateCall,
        leaves: &[Box<Leaf>],
        parameters: &'w [Lent<'_>],
        grads: &dyn GradientLookUp,
        by_leaf: Vec<GradientSource<'_>>,
    ) -> Result<Self> {
        let targets = UpdateTargets::all_registered();
        let gradients = GradientSource::for_all_leaves(by_leaf);
        let own_leaves = leaves
            .iter()
            .zip(parameters)
            .zip(gradients)
            .map(|((leaf, x), mut gradient)| {
                OwnLeaf::new(call, leaf, &**x, gradient.take(leaf, &**x, grads), &targets)
            });
        let prepared = own_leaves.collect::<Result<Vec<_>>>().map(|own_leaves| {
            let message = Contribution::message(call, &own_leaves);
            (own_leaves, update_agreement(call, leaves), message)
        });
        let (own_leaves, messages) = world.agree_on(Call::Update, prepared)?;
        let mut contributions = messages
            .iter()
            .enumerate()
            .map(|message| Contribution::from_message(message, leaves.len()))
            .collect::<Result<Vec<_>>>()?;
        let weight = contributions
            .iter()
            .map(|contribution| contribution.weight)
            .fold(0, u64::saturating_add);
        let problem = format!("the sum of the weights of all {} ranks is", world.size());
        counts::check(problem, weight)
            .map_err(|error| error.with_remedy("set smaller weights with `Update::weight`"))?;
        call.weight = weight;
        // The weights are divided by their greatest common divisor, so that equal weights become 1 and no
        // multiplication rounds.
        let weights = contributions.iter().map(|contribution| contribution.weight);
        let divisor = weights.fold(0, greatest_common_divisor);
        let needs_weight = !call.options.allow_no_gradients && !call.options.releases_windows;
        if divisor == 0 && needs_weight {
            let error = Error::new(
                ErrorKind::Argument,
                format!("the weights of all {} ranks are", world.size()),
            )
            .with_got(0);
            let remedy = "set the weight of each rank with `Update::weight`";
            return Err(error.with_expected("at least one above 0").with_remedy(remedy));
        }
        check_gradients_of_all(call, leaves, &contributions)?;
        let divisor = divisor.max(1);
        contributions
            .iter_mut()
            .for_each(|contribution| contribution.weight /= divisor);
        call.divisor = (call.weight / divisor).max(1);
        Ok(Ranks {
            world,
            leaves: own_leaves,
            contributions,
        })
    }

    /// The sources that the plans of all leaves get until the gradients come.
    pub(super) fn promised_sources<'g>(&self) -> Vec<GradientSource<'g>> {
        let promise = |leaf: usize| {
            let dtypes = self
                .contributions
                .iter()
                .filter_map(|contribution| contribution.dtypes[leaf])
                .map(compute_dtype);
            let widest = dtypes.reduce(|widest, dtype| if widest == DType::F64 { widest } else { dtype });
            widest.map_or_else(|| GradientSource::from_handles([]), GradientSource::Promised)
        };
        (0..self.leaves.len()).map(promise).collect()
    }

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

    /// If an error of all ranks is about a gradient that is not finite, adds the first rank that brought such
    /// a gradient.
    pub(super) fn add_origin(&self, error: Error, jobs: &[Option<Job<'_>>]) -> Error {
        let path = error.path().filter(|_| error.kind() == ErrorKind::NotFinite);
        let leaf = path.and_then(|path| {
            jobs.iter()
                .position(|job| job.as_ref().is_some_and(|job| job.path == path))
        });
        let Some(own_leaf) = leaf.and_then(|leaf| self.leaves.get(leaf)) else {
            return error;
        };
        // Every rank has the same error, so every rank takes part in this agreement.
        let own_message = own_leaf
            .is_finite()
            .map(|is_finite| ((), vec![u8::from(!is_finite)]));
        match self.world.agree(Call::Reduce, own_message) {
            Ok(((), messages)) => match messages.iter().position(|message| *message == [1]) {
                Some(rank) => error.caused_by_rank(rank),
                None => error,
            },
            Err(error) => error,
        }
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
        let Some(communicator) = self.world.several() else {
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

/// Refuses a rank without a gradient that other ranks have, if the rank counts in the mean and the call or the
/// state requires the gradient. Otherwise the gradient counts as zeros there. All ranks find the same.
fn check_gradients_of_all(
    call: &UpdateCall,
    leaves: &[Box<Leaf>],
    contributions: &[Contribution],
) -> Result<()> {
    let without_all = contributions.iter().position(Contribution::lacks_all);
    let has_any = contributions
        .iter()
        .any(|contribution| contribution.dtypes.iter().any(Option::is_some));
    if let (Some(rank), true, false) = (without_all, has_any, call.options.allow_no_gradients) {
        let problem = format!("rank {rank} has no gradient at all, but a weight above 0 in the mean");
        let remedy = "on a rank without data set `Update::weight` to 0; or call `Update::allow_no_gradients`, \
                      and its gradients count as zeros";
        return Err(Error::new(ErrorKind::NoGradient, problem)
            .of_rank(rank)
            .with_remedy(remedy));
    }
    if !call.requires_all {
        return Ok(());
    }
    for (index, leaf) in leaves.iter().enumerate() {
        let lacks =
            |contribution: &Contribution| contribution.weight > 0 && contribution.dtypes[index].is_none();
        let some_have = contributions
            .iter()
            .any(|contribution| contribution.dtypes[index].is_some());
        let is_optional = leaf.frozen || leaf.missing_gradients.is_allowed;
        // What no rank has is refused by `StepSummary`.
        if let (true, false, Some(rank)) = (some_have, is_optional, contributions.iter().position(lacks)) {
            let problem = format!(
                "it has no gradient on rank {rank}, but on another rank, and the state requires all gradients"
            );
            let remedy = "on a rank without data set `Update::weight` to 0; or declare the parameter with \
                          `Selection::allow_missing`, and its gradient counts as zeros there";
            return Err(Error::new(ErrorKind::NoGradient, problem)
                .at(leaf.path())
                .of_rank(rank)
                .with_remedy(remedy));
        }
    }
    Ok(())
}

/// The gradient times its weight, as it enters the sum.
pub(crate) fn weighted(gradient: Tensor, weight: u64, compute: DType) -> Result<Tensor> {
    if weight == 1 {
        return Ok(gradient);
    }
    let weight = filled(weight as f64, (), compute, gradient.device())?;
    Ok(product(&in_dtype(&gradient, compute)?, &weight)?)
}

fn greatest_common_divisor(a: u64, b: u64) -> u64 {
    if b == 0 {
        a
    } else {
        greatest_common_divisor(b, a % b)
    }
}
