//! `share`: each rank has a part of each tensor, and gets the parts of the other ranks.

use super::StateWorld;
use super::inbox::{ExpectedTensors, Inbox};
use super::parts::LeafParts;
use super::rounds::{Run, rounds};
use crate::engine::set_lent_part;
use crate::error::Result;
use crate::model::lent::Lent;

/// Fills tensors with the parts of the other ranks. The tensors are contiguous and of the whole shape. The
/// own part of each must have its values already.
pub(crate) fn share(world: &StateWorld, tensors: &[(LeafParts, Lent<'_>)]) -> Result<()> {
    let all: Vec<usize> = (0..tensors.len()).collect();
    let mut inbox = Inbox::default();
    for round in rounds(&all, world.size(), |index| &tensors[index].0) {
        let own = &round[world.rank()];
        let values = own.iter().map(|Run { leaf, elements }| {
            let values = tensors[*leaf].1.part(elements.clone())?.tensor_or_copy()?;
            // Several runs are copied, because `gather` locks all that it sends. Of the model at most one
            // tensor may be locked here: a thread that computes with the model may hold several locks at
            // once.
            Ok(if own.len() > 1 { values.force_contiguous()? } else { values })
        });
        let awaited = |(rank, runs): (usize, &Vec<Run>)| -> ExpectedTensors {
            let others = runs.iter().filter(|_| rank != world.rank());
            others.map(|run| (tensors[run.leaf].1.dtype(), run.elements.len())).collect()
        };
        let awaited: Vec<ExpectedTensors> = round.iter().enumerate().map(awaited).collect();
        let arrived = inbox.gather(world, &values.collect::<Result<Vec<_>>>()?, &awaited)?;
        for (run, values) in round.iter().zip(&arrived).flat_map(|(runs, values)| runs.iter().zip(values)) {
            set_lent_part(&*tensors[run.leaf].1, run.elements.start, values)?;
        }
    }
    Ok(())
}
