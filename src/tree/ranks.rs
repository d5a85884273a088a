//! A state and the other ranks of its job: agreements, and tensors that are shared.

use super::StateTree;
use crate::engine::set_part;
use crate::error::{Error, ErrorKind, Result};
use crate::model::lent::Lent;
use crate::ranks::{Call, Communicator, share};
use crate::tensors::{Tensor, dtype_of, zeros};

impl StateTree {
    /// The ranks among which the state is [divided](crate::Setup::over), if it is.
    pub fn world(&self) -> Option<&dyn Communicator> {
        self.world.communicator()
    }

    /// [`share`] with the other ranks of this state. Each tensor comes with the index of its leaf.
    pub(crate) fn share<'x, 'm: 'x>(
        &self,
        tensors: impl IntoIterator<Item = (usize, &'x Lent<'m>)>,
    ) -> Result<()> {
        let Some(communicator) = self.world.communicator_to_others() else {
            return Ok(());
        };
        let with_parts =
            |(leaf, x): (usize, &'x Lent<'m>)| Ok((self.leaves[leaf].parts_of_ranks()?, x.clone()));
        share(
            communicator,
            &tensors.into_iter().map(with_parts).collect::<Result<Vec<_>>>()?,
        )
    }

    /// Agrees on `call`, and makes whole tensors in the shapes of their leaves from the parts of all ranks.
    /// Each part comes with the index of its leaf.
    pub(super) fn gather(
        &self,
        call: Call,
        parts: Result<Vec<(usize, Tensor)>>,
    ) -> Result<Vec<(usize, Tensor)>> {
        if !self.world.is_divided() {
            return parts;
        }
        let with_own_part = |(index, part): (usize, Tensor)| {
            let leaf = &self.leaves[index];
            let tensor = zeros(leaf.shape(), dtype_of(&part), part.device())?;
            set_part(&tensor, leaf.part().start, &part)?;
            Ok((index, Lent::Tensor(tensor)))
        };
        // Memory for all tensors comes before the agreement, because a rank without memory has to refuse.
        let tensors = parts.and_then(|parts| parts.into_iter().map(with_own_part).collect());
        let tensors: Vec<_> = self.world.settle(call, tensors)?;
        self.share(tensors.iter().map(|(index, tensor)| (*index, tensor)))?;
        tensors
            .into_iter()
            .map(|(index, tensor)| Ok((index, tensor.tensor_or_copy()?)))
            .collect()
    }

    /// Refuses a call that needs the whole state, if the state is divided or has lost its leaves.
    pub(crate) fn check_whole(&self, call: &'static str) -> Result<()> {
        self.check_leaves()?;
        let Some(communicator) = self.world.communicator_to_others() else {
            return Ok(());
        };
        let ranks = communicator.size();
        let problem = format!("{call} needs the whole state, which is divided among {ranks} ranks");
        Err(Error::new(ErrorKind::Unsupported, problem)
            .with_remedy("call it in a run of one process, because it does not work over ranks yet"))
    }
}
