//! The ranks of an MPI job. `unsafe`, because MPI's handles are not `Send`.
#![allow(unsafe_code)]

use std::fmt::Display;
use std::mem::ManuallyDrop;
use std::sync::{Arc, Mutex, PoisonError};

use mpi::Threading;
use mpi::environment::{is_finalized, is_initialized, threading_support};
use mpi::request::scope;
use mpi::topology::SimpleCommunicator;
use mpi::traits::{Communicator as _, Destination, Equivalence, Source};

use super::cores;
use super::message::{Incoming, join, pieces};
use crate::ranks::{CommunicationError, Communicator, check_entries, total_length};

/// The ranks of an MPI job, for [`Setup::over`](crate::Setup::over). Clones are handles of the same rank.
///
/// Messages do not mix with the program's own, because this world is a duplicate of MPI's world.
#[derive(Clone)]
pub struct World {
    rank: usize,
    size: usize,
    handle: Arc<Mutex<Handle>>,
}

/// A duplicate of MPI's world. It is never dropped, because a drop could come after the end of MPI. That end
/// frees the duplicate.
struct Handle(ManuallyDrop<SimpleCommunicator>);

// SAFETY: MPI was initialised for calls from any thread, one at a time (`World::new` checks
// `threading_support`), and `World` has the handle in a `Mutex`.
unsafe impl Send for Handle {}

impl World {
    /// The world of a program that has initialised MPI already. In other programs use [`run`](super::run).
    ///
    /// All ranks have to call this function equally often.
    ///
    /// # Errors
    /// If MPI is not initialised, has ended, or was initialised for calls from one thread only.
    pub fn new() -> Result<Self, CommunicationError> {
        let remedy = "write `let (_universe, _) = \
                      mpi::initialize_with_threading(mpi::Threading::Serialized).unwrap();` before it, or \
                      use `optimisers::mpi::run`";
        let refuse = |what: &str| {
            Err(CommunicationError::Other {
                reason: format!("{what}; {remedy}"),
            })
        };
        if !is_initialized() {
            return refuse("MPI is not initialised");
        }
        if is_finalized() {
            return refuse("MPI has ended");
        }
        if threading_support() < Threading::Serialized {
            return refuse("MPI was initialised for calls from one thread only");
        }
        let world = SimpleCommunicator::world().duplicate();
        cores::warn_if_crowded(&world);
        let (rank, size) = (world.rank() as usize, world.size() as usize);
        Ok(World {
            rank,
            size,
            handle: Arc::new(Mutex::new(Handle(ManuallyDrop::new(world)))),
        })
    }

    /// Prints `why` to the standard error, and ends the job on all ranks.
    pub(super) fn fail(&self, why: &dyn Display) -> ! {
        // One write, because all ranks may print at once.
        let line = format!("rank {}: {why}\n", self.rank);
        eprint!("{line}");
        SimpleCommunicator::world().abort(1)
    }

    fn talk(&self, to: &[&[u8]], from: &mut [Incoming<'_, '_>]) -> Result<(), CommunicationError> {
        let Handle(world) = &*self.handle.lock().unwrap_or_else(PoisonError::into_inner);
        if is_finalized() {
            return Err(CommunicationError::Other {
                reason: "MPI has ended; keep its `Universe` as long as the state".to_string(),
            });
        }
        // All receives are posted before the first send.
        scope(|scope| {
            let mut receives = Vec::new();
            for (rank, incoming) in from.iter_mut().enumerate() {
                for piece in incoming.pieces() {
                    let expected = piece.len();
                    receives.push((
                        rank,
                        expected,
                        world
                            .process_at_rank(rank as i32)
                            .immediate_receive_into(scope, piece),
                    ));
                }
            }
            let mut sends = Vec::new();
            for (rank, bytes) in to.iter().enumerate() {
                sends.extend(
                    pieces(bytes)
                        .map(|piece| world.process_at_rank(rank as i32).immediate_send(scope, piece)),
                );
            }
            // The loop waits for all requests, even after a wrong length, because a dropped request panics.
            let mut outcome = Ok(());
            for (rank, expected, request) in receives {
                let got = request.wait().count(u8::equivalent_datatype()) as usize;
                if got != expected {
                    outcome = outcome.and(Err(CommunicationError::Length { rank, expected, got }));
                }
            }
            sends.into_iter().for_each(|request| _ = request.wait());
            outcome
        })
    }

    /// [`World::talk`] that ends the job if a message has a wrong length, because its sender gets no error.
    fn call(&self, to: &[&[u8]], from: &mut [Vec<&mut [u8]>]) -> Result<(), CommunicationError> {
        check_entries("to", [self.rank, self.size], to.iter().map(|bytes| bytes.len()))?;
        check_entries(
            "from",
            [self.rank, self.size],
            from.iter().map(|slices| total_length(slices)),
        )?;
        let mut from: Vec<_> = from.iter_mut().map(|slices| Incoming::new(slices)).collect();
        match self.talk(to, &mut from) {
            Err(error @ CommunicationError::Length { .. }) => self.fail(&error),
            outcome => outcome.map(|()| from.into_iter().for_each(Incoming::finish)),
        }
    }
}

impl Communicator for World {
    fn rank(&self) -> usize {
        self.rank
    }

    fn size(&self) -> usize {
        self.size
    }

    fn exchange(&self, to: &[Vec<&[u8]>], from: &mut [Vec<&mut [u8]>]) -> Result<(), CommunicationError> {
        let to: Vec<_> = to.iter().map(|slices| join(slices)).collect();
        self.call(&to.iter().map(|bytes| &bytes[..]).collect::<Vec<_>>(), from)
    }

    fn gather(&self, own: &[&[u8]], from: &mut [Vec<&mut [u8]>]) -> Result<(), CommunicationError> {
        let own = join(own);
        let to_rank = |rank| if rank == self.rank { &[] } else { &own[..] };
        self.call(&(0..self.size).map(to_rank).collect::<Vec<_>>(), from)
    }
}

impl std::fmt::Debug for World {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("World")
            .field("rank", &self.rank)
            .field("size", &self.size)
            .finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn there_is_no_world_before_mpi() {
        let error = World::new().expect_err("MPI is not initialised").to_string();
        assert!(
            error.contains("not initialised")
                && error.contains("mpi::initialize_with_threading(mpi::Threading::Serialized)"),
            "{error}"
        );
    }
}
