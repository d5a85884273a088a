//! Ranks that are processes of an MPI job, on one machine or many. Feature `mpi`.
//!
//! `mpirun -n 4 program` starts four processes. In each process [`run`] makes the program a rank. If another
//! library has initialised MPI already, use [`World::new`].
//!
//! MPI moves bytes directly between the memory of tensors, and adds nothing up, so the bits of a training do
//! not depend on MPI. Tensors on a device go through the host, part by part, even if the MPI library could
//! read device memory. A line in the log reports that once.
//!
//! # When a rank fails
//! A failure of MPI itself, such as the death of a rank, ends the job; that is MPI's default. The job also
//! ends if a message has another length than its receiver expects, and if the program returns an error or
//! panics in [`run`]. Continue from the last checkpoint, with any number of ranks.
//!
//! # Threads
//! Calls may come from any thread; they run one at a time. If there are at most two ranks, `mpirun` binds
//! each rank to one core by default, so the engine has one thread. If there are more, `mpirun` does not bind
//! them, so each rank has as many threads as there are cores, and a [warning](crate::Warning::CoresShared)
//! reports that: see the page on [many machines](crate::many_machines).

mod cores;
mod message;
mod program;
mod world;

pub use program::run;
pub use world::World;
