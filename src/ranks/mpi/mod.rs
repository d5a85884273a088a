//! Ranks that are processes of an MPI job, on one machine or many. Feature `mpi`.
//!
//! `mpirun -n 4 program` starts four processes. In each process [`run`] makes the program a rank. If another
//! library has initialised MPI already, use [`World::new`].
//!
//! MPI moves bytes directly between the memory of tensors, and adds nothing up, so the bits of a training do
//! not depend on MPI. Tensors on a device go through the host, part by part, even if the MPI library could
//! read device memory. A line in the log reports that once.
//!
//! [Many machines](crate::many_machines#when-something-fails) has what happens when a rank fails.
//!
//! # Threads
//! Calls may come from any thread; they run one at a time. The cores of a rank are those that
//! [`mpirun` binds](crate::many_machines#starting-a-job).

mod cores;
mod message;
mod program;
mod world;

pub use program::run;
pub use world::World;
