//! A state and the other ranks of its job: agreements, and tensors that are shared.

use super::StateTree;
use crate::engine::set_part;
use crate::error::{Error, ErrorKind, Result};
use crate::model::lent::Lent;
use crate::ranks::{Agreement, Call, Communicator, StateWorld, share};
use crate::tensors::{Tensor, dtype_of, zeros};

impl StateTree {
    /// The ranks among which the state is [divided](crate::Setup::over), if it is.
    pub fn world(&self) -> Option<&dyn Communicator> {
        self.world.as_ref().map(StateWorld::communicator)
    }

    /// [`StateWorld::all_agree_on`] with the ranks of this state.
    pub(crate) fn agree_on<T>(
        &self,
        call: Call,
        outcome: Result<(T, Agreement<'_>, Vec<u8>)>,
    ) -> Result<(T, Vec<Vec<u8>>)> {
        StateWorld::all_agree_on(self.world.as_ref(), call, outcome)
    }

    /// This process's rank; 0 without other ranks.
    pub(crate) fn rank(&self) -> usize {
        self.world.as_ref().map_or(0, StateWorld::rank)
    }

    /// Whether there are several ranks.
    pub(crate) fn is_divided(&self) -> bool {
        StateWorld::several(self.world.as_ref()).is_some()
    }

    /// The value of this rank's outcome, if no rank refuses.
    pub(crate) fn settle<T>(&self, call: Call, outcome: Result<T>) -> Result<T> {
        StateWorld::settle(self.world.as_ref(), call, outcome)
    }

    /// [`share`] with the other ranks of this state. Each tensor comes with the index of its leaf.
    pub(super) fn share<'x, 'm: 'x>(
        &self,
        tensors: impl IntoIterator<Item = (usize, &'x Lent<'m>)>,
    ) -> Result<()> {
        let Some(world) = StateWorld::several(self.world.as_ref()) else {
            return Ok(());
        };
        let with_parts =
            |(leaf, x): (usize, &'x Lent<'m>)| Ok((self.leaves[leaf].parts_of_ranks()?, x.clone()));
        share(
            world,
            &tensors.into_iter().map(with_parts).collect::<Result<Vec<_>>>()?,
        )
    }

    /// Whole tensors in the shapes of their leaves, made from the parts of all ranks.
    pub(super) fn gather(&self, parts: Vec<(usize, Tensor)>) -> Result<Vec<(usize, Tensor)>> {
        if !self.is_divided() {
            return Ok(parts);
        }
        let with_own_part = |(index, part): (usize, Tensor)| {
            let leaf = &self.leaves[index];
            let tensor = zeros(leaf.shape(), dtype_of(&part), part.device())?;
            set_part(&tensor, leaf.part().start, &part)?;
            Ok((index, Lent::Tensor(tensor)))
        };
        let tensors = parts.into_iter().map(with_own_part).collect::<Result<Vec<_>>>()?;
        self.share(tensors.iter().map(|(index, tensor)| (*index, tensor)))?;
        tensors
            .into_iter()
            .map(|(index, tensor)| Ok((index, tensor.tensor_or_copy()?)))
            .collect()
    }

    /// Refuses a call that needs the whole state, if the state is divided or has lost its leaves.
    pub(crate) fn check_whole(&self, call: &'static str) -> Result<()> {
        self.check_leaves()?;
        match StateWorld::several(self.world.as_ref()) {
            Some(world) => Err(divided_error(call, world.size())),
            None => Ok(()),
        }
    }
}

/// The error that a call needs the whole state, but the state is divided among ranks.
pub(super) fn divided_error(call: &str, ranks: usize) -> Error {
    let problem = format!("{call} needs the whole state, which is divided among {ranks} ranks");
    Error::new(ErrorKind::Unsupported, problem)
        .with_remedy("call it in a run of one process, because it does not work over ranks yet")
}
