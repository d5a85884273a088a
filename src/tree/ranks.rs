//! What a state says to the other ranks of its job.

use super::StateTree;
use crate::error::{Error, RanksError, Result};
use crate::world::{Call, Communicator, World};

impl StateTree {
    /// The ranks among which the state is [divided](crate::Setup::over), if it is.
    pub fn world(&self) -> Option<&dyn Communicator> {
        self.world.as_ref().map(World::communicator)
    }

    /// Tells the other ranks that this one does not go on with a call, which they then refuse as well. The result is the error to return.
    pub(crate) fn refused(&self, call: Call, error: Error) -> Error {
        match &self.world {
            Some(world) => world.settle::<()>(call, Err(error)).err().unwrap_or_else(|| Error::other("a refusal was not heard")),
            None => error,
        }
    }

    /// The value with the bytes of all ranks, in their order, if all have some. Without other ranks they are the own.
    pub(crate) fn agree<T>(&self, call: Call, own: Result<(T, Vec<u8>)>) -> Result<(T, Vec<Vec<u8>>)> {
        match (&self.world, own) {
            (Some(world), Ok((value, bytes))) => Ok((value, world.agree(call, Ok(bytes))?)),
            (None, Ok((value, bytes))) => Ok((value, vec![bytes])),
            (_, Err(error)) => Err(self.refused(call, error)),
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
        match &self.world {
            Some(world) => world.settle(call, own),
            None => own,
        }
    }

    /// Refuses what needs the whole state, where it is divided.
    pub(crate) fn expect_whole(&self, call: &'static str) -> Result<()> {
        match &self.world {
            Some(world) if self.is_divided() => Err(RanksError::Divided { call, ranks: world.size() }.into()),
            _ => Ok(()),
        }
    }
}
