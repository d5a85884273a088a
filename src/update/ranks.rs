//! An update by all ranks of a job together: gradients go to those who have the state, parameters come back.

use std::collections::hash_map::DefaultHasher;
use std::hash::{Hash, Hasher};
use std::ops::Range;
use std::sync::Arc;

use candle_core::{DType, Device, Tensor};

use super::how::{How, sources};
use super::wire::{Received, Window, append, rounds};
use crate::engine::{ChunkTotals, Gather, RankMean, Sent, Sources, set_part};
use crate::error::{RanksError, Result};
use crate::gradients::Gradients;
use crate::rule::{FieldValue, Optimiser};
use crate::tree::Leaf;
use crate::world::{Call, World};

/// The ranks that take part in a call; without a world it is this process alone.
#[derive(Clone, Copy)]
pub(super) struct Ranks<'w>(Option<&'w World>);

/// What each rank brings to a call.
struct Contribution {
    weight: u64,
    /// The dtype of each leaf's gradient, if there is one.
    gradients: Vec<Option<DType>>,
}

impl<'w> Ranks<'w> {
    pub(super) fn new(world: Option<&'w World>) -> Self {
        Ranks(world.filter(|world| world.size() > 1))
    }

    /// Whether there are others.
    pub(super) fn are_several(self) -> bool {
        self.0.is_some()
    }

    /// The value, if all ranks have one.
    pub(super) fn settle<T>(self, call: Call, own: Result<T>) -> Result<T> {
        match self.0 {
            Some(world) => world.settle(call, own),
            None => own,
        }
    }

    /// The mean of all ranks' gradients of this rank's parts, none for a leaf that no rank has a gradient of.
    pub(super) fn gradients<G: Gradients + ?Sized>(
        self,
        how: &mut How,
        requires_all: bool,
        leaves: &[Leaf],
        parameters: &[Tensor],
        grads: &G,
    ) -> Result<Vec<Sources>> {
        let Some(world) = self.0 else { return Ok(Vec::new()) };
        let pairs = leaves.iter().zip(parameters);
        let (own, said) = match pairs.map(|(leaf, x)| own_gradient(leaf, x, grads)).collect::<Result<Vec<_>>>() {
            Ok(own) => (own, Ok(())),
            Err(error) => (Vec::new(), Err(error)),
        };
        let said = said.map(|()| message(how, requires_all, leaves, &own));
        let brought = read(&world.agree(Call::Update, said)?, leaves)?;
        let total: u64 = brought.iter().map(|brought| brought.weight).sum();
        if total == 0 {
            return Err(RanksError::Weightless { ranks: world.size() }.into());
        }
        how.weight = total;
        means(world, leaves, parameters, &brought, &own, total).or_else(|error| self.settle(Call::Plan, Err(error)))
    }

    /// This rank's parts of the parameters, where there are others.
    pub(super) fn own_parts(self, leaves: &[Leaf], parameters: &[Tensor]) -> Result<Option<Vec<Tensor>>> {
        let parts = || leaves.iter().zip(parameters).map(|(leaf, x)| leaf.own_part(x)).collect::<Result<_>>();
        self.0.map(|_| parts().or_else(|error| self.settle(Call::Plan, Err(error)))).transpose()
    }

    /// Gives all ranks the parameters of these leaves, of which each has updated its part.
    pub(super) fn share(self, leaves: &[Leaf], parameters: &[Tensor], moved: &[usize]) -> Result<()> {
        let Some(world) = self.0 else { return Ok(()) };
        for round in rounds(leaves, moved) {
            let mut own = Vec::new();
            for window in &round {
                append(&parameters[window.leaf], window.of(&leaves[window.leaf].part()), &mut own)?;
            }
            let bytes = |rank: usize, window: &Window| {
                let leaf = &leaves[window.leaf];
                if rank == world.rank() { 0 } else { window.of(&part(leaf, rank)).len() * leaf.dtype.size_in_bytes() }
            };
            let lengths = (0..world.size()).map(|rank| round.iter().map(|window| bytes(rank, window)).collect());
            let mut received = Received::new(lengths.collect());
            let sent: &[&[u8]] = if own.is_empty() { &[] } else { &[&own] };
            world.communicator().gather(sent, &mut received.slices())?;
            for rank in (0..world.size()).filter(|rank| *rank != world.rank()) {
                for (index, window) in round.iter().enumerate() {
                    let (leaf, elements) = (&leaves[window.leaf], window.of(&part(&leaves[window.leaf], rank)));
                    if !elements.is_empty() {
                        let values = Tensor::from_raw_buffer(received.of(rank, index), leaf.dtype, &[elements.len()], &Device::Cpu)?;
                        set_part(&parameters[window.leaf], elements.start, &values)?;
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

/// The means of what all ranks have brought, for the parts of this one.
fn means(
    world: &World,
    leaves: &[Leaf],
    parameters: &[Tensor],
    brought: &[Contribution],
    own: &[Option<Tensor>],
    total: u64,
) -> Result<Vec<Sources>> {
    let has_any = |leaf: &usize| brought.iter().any(|brought| brought.gradients[*leaf].is_some());
    let with_gradient: Vec<usize> = (0..leaves.len()).filter(has_any).collect();
    let compute = |leaf: usize| leaves[leaf].compute_dtype(brought.iter().filter_map(|brought| brought.gradients[leaf]));
    let mut means: Vec<Option<RankMean>> = leaves.iter().map(|_| None).collect();
    for &leaf in &with_gradient {
        means[leaf] = Some(RankMean::zeros(compute(leaf), leaves[leaf].part().len()));
    }
    for round in rounds(leaves, &with_gradient) {
        exchange(world, &round, leaves, brought, own, &mut means, total)?;
    }
    let source = |((leaf, x), mean): ((&Leaf, &Tensor), Option<RankMean>)| {
        let Some(mean) = mean else { return Ok(Sources::new()) };
        let part = leaf.own_part(x)?;
        Ok(Sources::from_iter([mean.into_tensor(part.shape())?.to_device(x.device())?]))
    };
    leaves.iter().zip(parameters).zip(means).map(source).collect()
}

/// The part of a leaf that a rank has.
fn part(leaf: &Leaf, rank: usize) -> Range<usize> {
    leaf.parts.as_ref().map_or(0..0, |parts| parts.all()[rank].clone())
}

/// This rank's whole gradient of a leaf; that of tied parameters is added up in the dtype of the arithmetic.
fn own_gradient<G: Gradients + ?Sized>(leaf: &Leaf, x: &Tensor, grads: &G) -> Result<Option<Tensor>> {
    let gradients = sources(leaf, x, grads)?;
    let [first, others @ ..] = &gradients[..] else { return Ok(None) };
    if others.is_empty() {
        return Ok(Some(first.detach()));
    }
    let compute = leaf.compute_dtype(gradients.iter().map(|gradient| gradient.dtype()));
    let sum = others.iter().try_fold(first.to_dtype(compute)?, |sum, other| sum + other.to_dtype(compute)?)?;
    Ok(Some(sum.detach()))
}

/// What this rank brings to the call, and what has to be the same on all.
fn message(how: &How, requires_all: bool, leaves: &[Leaf], own: &[Option<Tensor>]) -> Vec<u8> {
    let flags = u64::from(how.finite_only)
        | u64::from(how.keep_masters) << 1
        | u64::from(how.allow_no_gradients) << 2
        | u64::from(requires_all) << 3;
    let mut words = vec![how.loss_scale.to_bits(), flags, how.calls, how.weight];
    let mut last: Option<(&Arc<dyn Optimiser>, u64)> = None;
    for (leaf, gradient) in leaves.iter().zip(own) {
        // Neighbours share their optimiser as a rule.
        let fields = match last {
            Some((known, digest)) if Arc::ptr_eq(known, &leaf.optimiser) => digest,
            _ => digest(&*leaf.optimiser),
        };
        last = Some((&leaf.optimiser, fields));
        let dtype = gradient.as_ref().map_or(0, |gradient| code(gradient.dtype()));
        let mut identity = DefaultHasher::new();
        (&leaf.path, fields).hash(&mut identity);
        words.extend([identity.finish(), leaf.steps << 2 | u64::from(leaf.frozen) << 1 | u64::from(leaf.waiting.is_allowed), dtype]);
    }
    words.into_iter().flat_map(u64::to_le_bytes).collect()
}

/// What the ranks have said, if it goes together.
fn read(said: &[Vec<u8>], leaves: &[Leaf]) -> Result<Vec<Contribution>> {
    let words = |said: &Vec<u8>| said.as_chunks().0.iter().map(|word| u64::from_le_bytes(*word)).collect();
    let all: Vec<Vec<u64>> = said.iter().map(words).collect();
    let read = |(rank, words): (usize, &Vec<u64>)| {
        let differs = |what: String| Err(RanksError::Differ { rank, what }.into());
        let (Some((head, own)), Some((first, others))) = (words.split_at_checked(HEAD), all[0].split_at_checked(HEAD)) else {
            return differs("said less than this version of the crate says".to_string());
        };
        let (own, others) = (own.chunks_exact(EACH), others.chunks_exact(EACH));
        if own.len() != leaves.len() {
            return differs(format!("{} parameters in its state where this rank has {}", own.len(), leaves.len()));
        }
        if head[0] != first[0] {
            return differs(format!("the loss scale {} where rank 0 has {}", f64::from_bits(head[0]), f64::from_bits(first[0])));
        }
        if head[1..3] != first[1..3] {
            return differs(
                "another way to update (`Update`'s methods), or another place in a window of accumulation, than rank 0".to_string(),
            );
        }
        let mut gradients = Vec::with_capacity(leaves.len());
        for ((own, first), leaf) in own.zip(others).zip(leaves) {
            if own[0] != first[0] {
                return differs(format!("other hyper-parameters of {:?} than rank 0, or another name for it", leaf.path()));
            }
            if own[1] != first[1] {
                return differs(format!("{:?} frozen, or after another number of steps, where rank 0 has not", leaf.path()));
            }
            gradients.push(dtype(own[2]));
        }
        Ok(Contribution { weight: head[3], gradients })
    };
    all.iter().enumerate().map(read).collect()
}

/// How many words come before those of the leaves.
const HEAD: usize = 4;

/// How many words a leaf has.
const EACH: usize = 3;

/// The dtypes of gradients by their numbers on the wire.
const DTYPES: [DType; 4] = [DType::F16, DType::BF16, DType::F32, DType::F64];

fn code(dtype: DType) -> u64 {
    DTYPES.iter().position(|known| *known == dtype).map_or(0, |index| index as u64 + 1)
}

fn dtype(code: u64) -> Option<DType> {
    DTYPES.get((code as usize).checked_sub(1)?).copied()
}

/// A number for an optimiser's hyper-parameters, the same on all ranks that run the same program.
fn digest(optimiser: &dyn Optimiser) -> u64 {
    let mut hasher = DefaultHasher::new();
    for (name, value) in optimiser.fields() {
        name.hash(&mut hasher);
        match value {
            FieldValue::Real(a) => a.to_bits().hash(&mut hasher),
            FieldValue::Pair(a, b) => [a, b].map(f64::to_bits).hash(&mut hasher),
            FieldValue::Triple(a, b, c) => [a, b, c].map(f64::to_bits).hash(&mut hasher),
            FieldValue::Count(count) => count.hash(&mut hasher),
            FieldValue::Flag(flag) => flag.hash(&mut hasher),
            FieldValue::Choice(choice) => format!("{choice:?}").hash(&mut hasher),
        }
    }
    hasher.finish()
}

/// Sends this rank's gradients of these windows to those who have the parts, and takes the means of what arrives.
fn exchange(
    world: &World,
    round: &[Window],
    leaves: &[Leaf],
    brought: &[Contribution],
    own: &[Option<Tensor>],
    means: &mut [Option<RankMean>],
    total: u64,
) -> Result<()> {
    let me = world.rank();
    // What counts nothing is not sent.
    let sends = |rank: usize, leaf: usize| brought[rank].gradients[leaf].filter(|_| brought[rank].weight > 0);
    let mut outgoing: Vec<Vec<u8>> = vec![Vec::new(); world.size()];
    for (rank, bytes) in outgoing.iter_mut().enumerate() {
        for window in round.iter().filter(|window| sends(me, window.leaf).is_some()) {
            if let Some(gradient) = &own[window.leaf] {
                append(gradient, window.of(&part(&leaves[window.leaf], rank)), bytes)?;
            }
        }
    }
    let elements = |window: &Window| window.of(&leaves[window.leaf].part());
    let bytes = |rank: usize, window: &Window| sends(rank, window.leaf).map_or(0, |dtype| elements(window).len() * dtype.size_in_bytes());
    let lengths = (0..world.size()).map(|rank| round.iter().map(|window| bytes(rank, window)).collect());
    let mut received = Received::new(lengths.collect());
    received.set(me, &std::mem::take(&mut outgoing[me]));
    let sent: Vec<Vec<&[u8]>> = outgoing.iter().map(|bytes| if bytes.is_empty() { Vec::new() } else { vec![&bytes[..]] }).collect();
    world.communicator().exchange(&sent, &mut received.slices_but(me))?;

    for (index, window) in round.iter().enumerate() {
        let (part, elements) = (leaves[window.leaf].part(), elements(window));
        let sent = (0..world.size()).filter_map(|rank| {
            let dtype = sends(rank, window.leaf)?;
            Some(Sent { dtype, bytes: received.of(rank, index), weight: brought[rank].weight })
        });
        if let Some(mean) = &mut means[window.leaf] {
            mean.set(elements.start - part.start, elements.len(), &sent.collect::<Vec<_>>(), total)?;
        }
    }
    Ok(())
}
