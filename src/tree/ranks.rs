//! What a state says to the other ranks of its job.

use super::StateTree;
use crate::error::{Error, ErrorKind, Result};
use crate::world::{Agreement, Call, Communicator, StateWorld};

impl StateTree {
    /// The ranks among which the state is [divided](crate::Setup::over), if it is.
    pub fn world(&self) -> Option<&dyn Communicator> {
        self.world.as_ref().map(StateWorld::communicator)
    }

    /// The value with the bytes of all ranks, in their order, if all have some. Without other ranks they are the own.
    pub(crate) fn agree<T>(&self, call: Call, own: Result<(T, Vec<u8>)>) -> Result<(T, Vec<Vec<u8>>)> {
        match &self.world {
            Some(world) => world.agree_with(call, own),
            None => own.map(|(value, bytes)| (value, vec![bytes])),
        }
    }

    /// [`StateTree::agree`] for ranks that need the same of something, too.
    pub(crate) fn agree_on<T>(&self, call: Call, own: Result<(T, Agreement<'_>, Vec<u8>)>) -> Result<(T, Vec<Vec<u8>>)> {
        match &self.world {
            Some(world) => world.agree_on(call, own),
            None => own.map(|(value, _, bytes)| (value, vec![bytes])),
        }
    }

    /// Which of its ranks this process is: the first one where there are no others.
    pub(crate) fn rank(&self) -> usize {
        self.world.as_ref().map_or(0, StateWorld::rank)
    }

    /// Whether there are several ranks.
    pub(crate) fn is_divided(&self) -> bool {
        StateWorld::several(self.world.as_ref()).is_some()
    }

    /// The value, if all ranks have one.
    pub(crate) fn settle<T>(&self, call: Call, own: Result<T>) -> Result<T> {
        StateWorld::settle(self.world.as_ref(), call, own)
    }

    /// Refuses what needs the whole state, where it is divided.
    pub(crate) fn expect_whole(&self, call: &'static str) -> Result<()> {
        match StateWorld::several(self.world.as_ref()) {
            Some(world) => Err(divided(call, world.size())),
            None => Ok(()),
        }
    }
}

/// What needs the whole state cannot be done where ranks have parts of it.
pub(super) fn divided(call: &str, ranks: usize) -> Error {
    let problem = format!("{call} needs the whole state, which is divided among {ranks} ranks");
    Error::new(ErrorKind::Unsupported, problem).with_remedy("do it in a run of one process, as it is not done over ranks yet")
}
