//! What a state says to the other ranks of its job.

use super::StateTree;
use crate::error::{RanksError, Result};
use crate::world::{Call, Communicator, World};

impl StateTree {
    /// The ranks among which the state is [divided](crate::Setup::over), if it is.
    pub fn world(&self) -> Option<&dyn Communicator> {
        self.world.as_ref().map(World::communicator)
    }

    /// The value with the bytes of all ranks, in their order, if all have some. Without other ranks they are the own.
    pub(crate) fn agree<T>(&self, call: Call, own: Result<(T, Vec<u8>)>) -> Result<(T, Vec<Vec<u8>>)> {
        match &self.world {
            Some(world) => world.agree_with(call, own),
            None => own.map(|(value, bytes)| (value, vec![bytes])),
        }
    }

    /// Which of its ranks this process is: the first one where there are no others.
    pub(crate) fn rank(&self) -> usize {
        self.world.as_ref().map_or(0, World::rank)
    }

    /// Whether there are several ranks.
    pub(crate) fn is_divided(&self) -> bool {
        self.world.as_ref().is_some_and(|world| world.size() > 1)
    }

    /// The value, if all ranks have one.
    pub(crate) fn settle<T>(&self, call: Call, own: Result<T>) -> Result<T> {
        World::settle(self.world.as_ref(), call, own)
    }

    /// Refuses what needs the whole state, where it is divided.
    pub(crate) fn expect_whole(&self, call: &'static str) -> Result<()> {
        match &self.world {
            Some(world) if self.is_divided() => Err(RanksError::Divided { call, ranks: world.size() }.into()),
            _ => Ok(()),
        }
    }
}
