//! Ranks that are processes of an MPI job, on one machine or many. Feature `mpi`.
//!
//! `mpirun -n 4 program` starts four processes; in each, [`run`] makes the program a rank. If another library
//! has initialised MPI already, use [`World::new`].
//!
//! MPI carries bytes here, from and to where tensors lie. It knows no dtypes and adds nothing up, so the bits
//! do not depend on it. Tensors on a device go through the host, in windows, even if the MPI library could
//! read device memory; a line in the log says so once.
//!
//! # When a rank fails
//! A failure of MPI itself ends the job, which is MPI's default: a rank has died, or a message has another
//! length than its receiver expects. A program that returns an error or panics in [`run`] ends it too. Go on
//! from the last checkpoint, with any number of ranks.
//!
//! # Threads
//! Calls come from any thread, one at a time. By default `mpirun` binds each of up to two ranks to one core,
//! so the engine has one thread. More ranks it does not bind, and each has as many threads as there are
//! cores: see the page on [many machines](crate::many_machines). A [warning](crate::Warning::CoresShared)
//! says so.

mod cores;
mod message;
mod program;
mod world;

pub use program::run;
pub use world::World;
