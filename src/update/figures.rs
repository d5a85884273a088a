//! Norms of each leaf that moves, for those who want to watch.

use super::how::How;
use crate::figures::LeafFigures;
use crate::rule::LeafNorms;
use crate::tree::Leaf;

/// Where the norms of each leaf go; none if they are not asked for.
pub(super) fn wanted(how: How, leaves: &[Leaf]) -> Vec<LeafNorms> {
    if how.figures { leaves.iter().map(|_| LeafNorms::default()).collect() } else { Vec::new() }
}

/// What was found of the leaves that have moved.
pub(super) fn of(leaves: &[Leaf], norms: &[LeafNorms]) -> Vec<LeafFigures> {
    let figures = |(leaf, norms): (&Leaf, &LeafNorms)| {
        let (gradient, step) = norms.found()?;
        Some(LeafFigures { path: leaf.path.clone(), gradient, parameter: step.parameter, update: step.gradient })
    };
    leaves.iter().zip(norms).filter_map(figures).collect()
}
