//! `share`: each rank has a part of each tensor, and gets the parts of the other ranks.

use super::Communicator;
use super::inbox::{ExpectedTensors, Inbox};
use super::parts::LeafParts;
use super::rounds::{Run, rounds};
use crate::engine::set_lent_part;
use crate::error::Result;
use crate::model::lent::Lent;

/// Fills tensors with the parts of the other ranks. The tensors are contiguous and of the whole shape. This
/// rank's part of each tensor must have its values already.
pub(crate) fn share(communicator: &dyn Communicator, tensors: &[(LeafParts, Lent<'_>)]) -> Result<()> {
    let indices: Vec<usize> = (0..tensors.len()).collect();
    let mut inbox = Inbox::default();
    for round in rounds(&indices, communicator.size(), |index| &tensors[index].0) {
        let own_runs = &round[communicator.rank()];
        let values = own_runs.iter().map(|Run { leaf, elements }| {
            let values = tensors[*leaf].1.part(elements.clone())?.tensor_or_copy()?;
            // Several runs are copied, because `gather` locks all tensors that it sends. At most one tensor
            // of the model may be locked here, because a thread that computes with the model may hold several
            // locks at once.
            Ok(if own_runs.len() > 1 {
                values.force_contiguous()?
            } else {
                values
            })
        });
        let from_rank = |(rank, runs): (usize, &Vec<Run>)| -> ExpectedTensors {
            let runs = runs.iter().filter(|_| rank != communicator.rank());
            runs.map(|run| (tensors[run.leaf].1.dtype(), run.elements.len()))
                .collect()
        };
        let expected: Vec<ExpectedTensors> = round.iter().enumerate().map(from_rank).collect();
        let received = inbox.gather(communicator, &values.collect::<Result<Vec<_>>>()?, &expected)?;
        for (run, values) in round
            .iter()
            .zip(&received)
            .flat_map(|(runs, values)| runs.iter().zip(values))
        {
            set_lent_part(&*tensors[run.leaf].1, run.elements.start, values)?;
        }
    }
    Ok(())
}
