//! What each rank brings to an update, and what has to be the same on all.

use std::collections::hash_map::DefaultHasher;
use std::hash::{Hash, Hasher};
use std::sync::Arc;

use candle_core::{DType, Tensor};

use super::how::{How, sources};
use crate::engine::{Sources, WrittenStorages, storage_of, unshared};
use crate::error::{RanksError, Result};
use crate::gradients::Gradients;
use crate::numbers::is_wider;
use crate::rule::{FieldValue, Optimiser};
use crate::tensor_file::{first_non_finite, windows};
use crate::tree::{Leaf, LeafParts};

/// What this rank has of a leaf.
pub(super) struct OwnLeaf {
    pub(super) parts: LeafParts,
    /// Its part of the parameter.
    pub(super) x: Tensor,
    /// Its gradient of the whole parameter.
    pub(super) gradient: Option<Tensor>,
}

impl OwnLeaf {
    pub(super) fn new<G: Gradients + ?Sized>(how: &How, leaf: &Leaf, x: &Tensor, grads: &G, written: &WrittenStorages) -> Result<Self> {
        // This rank writes the parameter even where another rank has all of its state and computes it.
        storage_of("parameter", x).map(drop).map_err(|error| error.at(leaf.path()))?;
        let own = OwnLeaf { parts: leaf.parts_of_ranks()?, x: leaf.own_part(x)?, gradient: own_gradient(leaf, x, grads, written)? };
        // Where numbers have to be finite what overflows makes the call a skipped one, as any other that is not.
        if !how.finite_only && !how.takes_overflow && how.weight > 0 {
            own.expect_no_overflow(leaf.path())?;
        }
        Ok(own)
    }

    /// The dtype in which the gradient travels, if there is one.
    pub(super) fn sent_dtype(&self) -> Option<DType> {
        let own = self.gradient.as_ref()?.dtype();
        Some(self.parts.wire.filter(|wire| is_wider(own, *wire)).unwrap_or(own))
    }

    /// Refuses a number that is infinite in the dtype in which it travels, and was not before.
    fn expect_no_overflow(&self, path: &str) -> Result<()> {
        let (Some(gradient), Some(dtype)) = (&self.gradient, self.sent_dtype()) else { return Ok(()) };
        if gradient.dtype() == dtype {
            return Ok(());
        }
        let flat = gradient.flatten_all()?;
        for window in windows(0..flat.elem_count()) {
            let numbers = flat.narrow(0, window.start, window.len())?.to_dtype(DType::F64)?.to_vec1::<f64>()?;
            let finite = numbers.into_iter().map(|number| if number.is_finite() { number } else { 0.0 });
            if let Some((index, number)) = first_non_finite(finite, dtype) {
                return Err(RanksError::Overflow {
                    path: path.to_string(),
                    index: window.start + index,
                    number: number.to_string(),
                    dtype,
                }
                .into());
            }
        }
        Ok(())
    }
}

/// What a rank brings to a call.
pub(super) struct Contribution {
    pub(super) weight: u64,
    /// The dtype of each leaf's gradient, if there is one.
    pub(super) gradients: Vec<Option<DType>>,
}

/// This rank's whole gradient of a leaf; that of tied parameters is added up in the dtype of the arithmetic.
fn own_gradient<G: Gradients + ?Sized>(leaf: &Leaf, x: &Tensor, grads: &G, written: &WrittenStorages) -> Result<Option<Tensor>> {
    let unshared = |gradient| unshared("gradient", gradient, written, &[]).map_err(|error| error.at(leaf.path()));
    let gradients = sources(leaf, x, None, grads)?.into_iter().map(unshared).collect::<Result<Sources>>()?;
    let [first, others @ ..] = &gradients[..] else { return Ok(None) };
    if others.is_empty() {
        return Ok(Some(first.detach()));
    }
    let compute = leaf.compute_dtype(gradients.iter().map(|gradient| gradient.dtype()));
    let sum = others.iter().try_fold(first.to_dtype(compute)?, |sum, other| sum + other.to_dtype(compute)?)?;
    Ok(Some(sum.detach()))
}

/// What this rank brings to the call, and what has to be the same on all.
pub(super) fn message(how: &How, requires_all: bool, leaves: &[Leaf], own: &[OwnLeaf]) -> Vec<u8> {
    let flags = u64::from(how.finite_only)
        | u64::from(how.keep_masters) << 1
        | u64::from(how.allow_no_gradients) << 2
        | u64::from(requires_all) << 3
        | u64::from(how.figures) << 4;
    let mut words = vec![how.loss_scale.to_bits(), flags, how.calls, how.norms, how.weight];
    let mut last: Option<(&Arc<dyn Optimiser>, u64)> = None;
    for (leaf, own) in leaves.iter().zip(own) {
        // Neighbours share their optimiser as a rule.
        let fields = match last {
            Some((known, digest)) if Arc::ptr_eq(known, &leaf.optimiser) => digest,
            _ => digest(&*leaf.optimiser),
        };
        last = Some((&leaf.optimiser, fields));
        let kind = own.sent_dtype().map_or(0, code) << 1 | u64::from(how.engine.is_fused_on_cpu(&leaf.device));
        let mut identity = DefaultHasher::new();
        (&leaf.path, fields).hash(&mut identity);
        words.extend([identity.finish(), leaf.steps << 2 | u64::from(leaf.frozen) << 1 | u64::from(leaf.waiting.is_allowed), kind]);
    }
    words.into_iter().flat_map(u64::to_le_bytes).collect()
}

/// What the ranks have said, if it goes together.
pub(super) fn read(said: &[Vec<u8>], leaves: &[Leaf]) -> Result<Vec<Contribution>> {
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
        if head[1..4] != first[1..4] {
            return differs(
                "another way to update (`Update`'s methods), another place in a window of accumulation, or another history of norms, than rank 0"
                    .to_string(),
            );
        }
        let mut gradients = Vec::with_capacity(leaves.len());
        for ((own, first), leaf) in own.zip(others).zip(leaves) {
            if own[0] != first[0] {
                return differs(format!(
                    "another rule or other hyper-parameters for {:?} than rank 0, or another name for it",
                    leaf.path()
                ));
            }
            if own[1] != first[1] {
                return differs(format!("{:?} frozen, or after another number of steps, where rank 0 has not", leaf.path()));
            }
            if (own[2] ^ first[2]) & 1 != 0 {
                return differs(format!("{:?} on another kind of device, or another engine for it, than rank 0", leaf.path()));
            }
            gradients.push(dtype(own[2] >> 1));
        }
        Ok(Contribution { weight: head[4], gradients })
    };
    all.iter().enumerate().map(read).collect()
}

/// How many words come before those of the leaves.
const HEAD: usize = 5;

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
    optimiser.name().hash(&mut hasher);
    for (name, value) in optimiser.fields() {
        name.hash(&mut hasher);
        match value {
            FieldValue::Real(a) => a.to_bits().hash(&mut hasher),
            FieldValue::Pair(a, b) => [a, b].map(f64::to_bits).hash(&mut hasher),
            FieldValue::Triple(a, b, c) => [a, b, c].map(f64::to_bits).hash(&mut hasher),
            FieldValue::Count(count) => count.hash(&mut hasher),
            FieldValue::Sizes(sizes) => sizes.hash(&mut hasher),
            FieldValue::Flag(flag) => flag.hash(&mut hasher),
            FieldValue::Choice(choice) => format!("{choice:?}").hash(&mut hasher),
        }
    }
    hasher.finish()
}
