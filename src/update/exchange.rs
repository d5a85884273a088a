//! The gradients of all ranks, on their way to those who have the state.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::ops::Range;

use candle_core::{DType, Device, Tensor};

use super::brought::{Contribution, OwnLeaf, message, read};
use super::how::How;
use crate::engine::{Job, Piece, Sources, Written, comes_in_pieces, commit, commit_pieces, compute_dtype, filled, rounded, set_part, sum};
use crate::error::{RanksError, Result};
use crate::gradients::Gradients;
use crate::tree::{Leaf, Parcel, Window, append, rounds, slices};
use crate::world::{Call, World};

/// The gradients of a call. Each rank has its own until they are asked for, and then only its part of all.
pub(super) struct RankGradients<'w> {
    world: &'w World,
    leaves: Vec<OwnLeaf>,
    /// By rank.
    brought: Vec<Contribution>,
}

/// This rank's gradients of the leaves of a round as vectors. One that is no contiguous tensor is copied once, not for each of its windows.
#[derive(Default)]
struct FlatGradients(HashMap<usize, Tensor>);

impl FlatGradients {
    /// Goes on to a round.
    fn advance(&mut self, round: &[Window], gradient: impl Fn(usize) -> Option<Tensor>) -> Result<()> {
        self.0.retain(|leaf, _| round.iter().any(|window| window.leaf == *leaf));
        for leaf in round.iter().map(|window| window.leaf) {
            if let (Entry::Vacant(place), Some(gradient)) = (self.0.entry(leaf), gradient(leaf)) {
                place.insert(gradient.flatten_all()?);
            }
        }
        Ok(())
    }
}

/// What all ranks have sent of a window, none if its elements are all on other ranks.
struct Arrived {
    window: Window,
    /// Which of the elements of this rank's part they are.
    elements: Range<usize>,
    gradients: Sources,
}

impl<'w> RankGradients<'w> {
    /// Agrees with all ranks on the call. The gradients that the rules get are the mean of all, with the weights that `how` has on each rank.
    pub(super) fn agree<G: Gradients + ?Sized>(
        world: &'w World,
        how: &mut How,
        requires_all: bool,
        leaves: &[Leaf],
        parameters: &[Tensor],
        grads: &G,
    ) -> Result<Self> {
        let written = Written::all();
        let own = leaves.iter().zip(parameters).map(|(leaf, x)| OwnLeaf::new(how, leaf, x, grads, &written)).collect::<Result<Vec<_>>>();
        let prepared = own.map(|own| {
            let said = message(how, requires_all, leaves, &own);
            (own, said)
        });
        let (own, said) = world.agree_with(Call::Update, prepared)?;
        let mut brought = read(&said, leaves)?;
        how.weight = brought.iter().map(|brought| brought.weight).sum();
        // Equal weights are none: they cost no rounding.
        let common = brought.iter().fold(0, |common, brought| greatest_common_divisor(common, brought.weight));
        if common == 0 {
            return Err(RanksError::Weightless { ranks: world.size() }.into());
        }
        brought.iter_mut().for_each(|brought| brought.weight /= common);
        how.divisor = how.weight / common;
        Ok(RankGradients { world, leaves: own, brought })
    }

    /// This rank's parts of the parameters.
    pub(super) fn own_parts(&self) -> Vec<Tensor> {
        self.leaves.iter().map(|leaf| leaf.x.clone()).collect()
    }

    /// What stands for a leaf's gradient until it comes, without memory; nothing if no rank has one.
    pub(super) fn promised(&self, leaf: usize) -> Result<Sources> {
        let x = &self.leaves[leaf].x;
        let dtypes = self.brought.iter().filter_map(|brought| brought.gradients[leaf]).map(compute_dtype);
        let widest = dtypes.reduce(|widest, dtype| if widest == DType::F64 { widest } else { dtype });
        let promise = |dtype| Tensor::zeros((), dtype, x.device())?.broadcast_as(x.shape());
        Ok(widest.map(promise).transpose()?.into_iter().collect())
    }

    /// Fetches the sum of the gradients for all jobs that ask for something of all elements before they write. The result are the other jobs with a
    /// gradient: theirs come in the commit.
    pub(super) fn add_up(&self, how: &How, jobs: &mut [Option<Job<'_>>]) -> Result<Vec<usize>> {
        let has_gradient = |job: &Option<Job<'_>>| job.as_ref().is_some_and(|job| !job.sources.is_empty());
        let with_gradient = (0..jobs.len()).filter(|&leaf| has_gradient(&jobs[leaf]));
        let comes_in_pieces = |leaf: &usize| jobs[*leaf].as_ref().is_some_and(|job| comes_in_pieces(how.engine, job));
        let (left, wanted): (Vec<usize>, Vec<usize>) = with_gradient.partition(comes_in_pieces);
        let mut sums: Vec<Option<Tensor>> = vec![None; jobs.len()];
        let mut flat = FlatGradients::default();
        for round in self.rounds(&wanted) {
            for Arrived { window, elements, gradients } in self.exchange(&round, jobs, &mut flat)? {
                let Some(job) = jobs[window.leaf].as_ref().filter(|_| !elements.is_empty()) else { continue };
                let x = &self.leaves[window.leaf].x;
                let part = x.detach().flatten_all()?.narrow(0, elements.start, elements.len())?;
                let sum = sum(how.engine, &part, job.compute, gradients)?;
                match &sums[window.leaf] {
                    None if elements.len() == job.length => sums[window.leaf] = Some(sum),
                    None => {
                        let all = Tensor::zeros(job.length, job.compute, x.device())?;
                        set_part(&all, elements.start, &sum)?;
                        sums[window.leaf] = Some(all);
                    }
                    Some(all) => set_part(all, elements.start, &sum)?,
                }
            }
        }
        for leaf in wanted {
            let (Some(job), Some(sum)) = (&mut jobs[leaf], sums[leaf].take()) else { continue };
            job.sources = Sources::from_iter([sum.reshape(job.x.shape())?]);
        }
        Ok(left)
    }

    /// Commits all jobs, those of `left` window by window as their gradients come.
    pub(super) fn commit(&self, how: &How, jobs: &mut [Option<Job<'_>>], left: &[usize]) -> Result<()> {
        let mut flat = FlatGradients::default();
        for round in self.rounds(left) {
            let arrived = self.exchange(&round, jobs, &mut flat)?;
            let piece = |Arrived { window, elements, gradients }| {
                let length = self.leaves[window.leaf].parts.own().len();
                let (is_last, is_all) = (elements.end == length, elements.len() == length);
                Piece { job: window.leaf, window: (!is_all).then_some(elements), is_last, gradients }
            };
            let mut jobs: Vec<Option<&mut Job<'_>>> = jobs.iter_mut().map(Option::as_mut).collect();
            commit_pieces(how.engine, &mut jobs, arrived.into_iter().map(piece))?;
        }
        let others = jobs.iter_mut().enumerate().filter(|(leaf, _)| left.binary_search(leaf).is_err());
        commit(how.engine, others.filter_map(|(_, job)| job.as_mut()).collect())
    }

    fn rounds(&self, leaves: &[usize]) -> Vec<Vec<Window>> {
        rounds(leaves, self.world.size(), |leaf| &self.leaves[leaf].parts)
    }

    /// Sends this rank's gradients of these windows to those who have the parts. The result is what has arrived for the parts of this one.
    fn exchange(&self, round: &[Window], jobs: &[Option<Job<'_>>], flat: &mut FlatGradients) -> Result<Vec<Arrived>> {
        let (world, me) = (self.world, self.world.rank());
        let parts = |window: &Window| &self.leaves[window.leaf].parts;
        flat.advance(round, |leaf| self.sent(me, leaf).and_then(|_| self.leaves[leaf].gradient.clone()))?;
        let mut outgoing: Vec<Vec<u8>> = vec![Vec::new(); world.size()];
        for (rank, bytes) in outgoing.iter_mut().enumerate().filter(|(rank, _)| *rank != me) {
            for window in round {
                if let (Some(gradient), Some(dtype)) = (flat.0.get(&window.leaf), self.sent(me, window.leaf)) {
                    append(gradient, window.of(&parts(window).all()[rank]), dtype, bytes)?;
                }
            }
        }
        let sent: Vec<Vec<&[u8]>> = outgoing.iter().map(|bytes| slices(bytes)).collect();
        let bytes = |rank: usize, window: &Window| {
            let dtype = self.sent(rank, window.leaf).filter(|_| rank != me);
            dtype.map_or(0, |dtype| window.of(&parts(window).own()).len() * dtype.size_in_bytes())
        };
        let mut parcels: Vec<Parcel> = (0..world.size()).map(|rank| Parcel::new(round.iter().map(|window| bytes(rank, window)))).collect();
        world.communicator().exchange(&sent, &mut parcels.iter_mut().map(Parcel::slices).collect::<Vec<_>>())?;

        let arrived = round.iter().enumerate().map(|(index, window)| {
            let (part, compute) = (parts(window).own(), jobs[window.leaf].as_ref().map_or(DType::F32, |job| job.compute));
            let (elements, device) = (window.of(&part), self.leaves[window.leaf].x.device());
            let mut gradients = Sources::new();
            for (rank, dtype) in (0..world.size()).filter_map(|rank| Some((rank, self.sent(rank, window.leaf)?))) {
                let values = match flat.0.get(&window.leaf) {
                    Some(own) if rank == me => rounded(&own.narrow(0, elements.start, elements.len())?, dtype)?,
                    _ => Tensor::from_raw_buffer(parcels[rank].get(index), dtype, &[elements.len()], &Device::Cpu)?.to_device(device)?,
                };
                gradients.push(weighted(values, self.brought[rank].weight, compute)?);
            }
            Ok(Arrived { window: *window, elements: elements.start - part.start..elements.end - part.start, gradients })
        });
        // The last window of a part that is shorter than others' comes before theirs.
        let is_here =
            |arrived: &Result<Arrived>| arrived.as_ref().map_or(true, |arrived| arrived.window.index == 0 || !arrived.elements.is_empty());
        arrived.filter(is_here).collect()
    }

    /// The dtype of what a rank sends of a leaf. What counts nothing is not sent.
    fn sent(&self, rank: usize, leaf: usize) -> Option<DType> {
        let Contribution { weight, gradients } = &self.brought[rank];
        gradients[leaf].filter(|_| *weight > 0)
    }
}

/// A gradient as it enters the sum.
fn weighted(gradient: Tensor, weight: u64, compute: DType) -> Result<Tensor> {
    if weight == 1 {
        return Ok(gradient);
    }
    let weight = filled(weight as f64, (), compute, gradient.device())?;
    Ok(gradient.to_dtype(compute)?.broadcast_mul(&weight)?)
}

fn greatest_common_divisor(a: u64, b: u64) -> u64 {
    if b == 0 { a } else { greatest_common_divisor(b, a % b) }
}
