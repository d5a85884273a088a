//! Ranks that are processes of an MPI job, on one machine or many. Feature `mpi`.
//!
//! Programs are started by `mpirun -n 4 program`, and are [`run`] as one rank each. Where another library has
//! initialised MPI already there is [`World::new`].
//!
//! MPI carries bytes here, from and to where tensors lie, and knows no dtypes: it never adds anything up, so
//! that the bits do not depend on it. What is on a device goes through the host, in windows, whatever the MPI
//! library could do with addresses of devices; a line in the log says so once.
//!
//! # When a rank fails
//! What MPI itself cannot do ends the job, as is its own default: a rank that has died, or a message that is
//! longer than its receiver expects. So does a rank whose program returns an error or panics in [`run`]. The
//! state is then what the last checkpoint says, and any number of ranks can go on from it.
//!
//! # Threads
//! Calls come from one thread at a time, whichever it is. `mpirun` binds each of up to two ranks to one core
//! by default, so that the engine has one thread; with more ranks it does not, and each has as many threads
//! as there are cores: see the page on [many machines](crate::many_machines).

mod message;
mod program;
mod world;

pub use program::run;
pub use world::World;
