//! Programs whose processes are the ranks of an MPI job.

use std::fmt::Display;
use std::panic::{AssertUnwindSafe, catch_unwind};

use mpi::Threading;
use mpi::environment::initialize_with_threading;

use super::World;
use crate::error::Error;
use crate::ranks::{Call, CommunicationError, Communicator, StateWorld};

/// Initialises MPI, runs a program as one of its ranks, and ends MPI when all ranks have finished.
///
/// If the program returns an error or panics, the job ends: the rank prints the error to its standard error,
/// and MPI kills all ranks, because some may be waiting for this one. If the program of one rank ends while
/// others are in a call together, that call fails and ends the job. A single rank returns the error of its
/// program, and a panic unwinds as usual.
///
/// # Errors
/// If there is a single rank, the error of the program. Also if MPI was initialised before, or cannot be
/// called from several threads.
///
/// ```no_run
/// use candle_core::{DType, Device, Var};
/// use optimisers::{AdamW, Communicator, Setup, update};
///
/// fn main() -> Result<(), Box<dyn std::error::Error>> {
///     optimisers::mpi::run(|world| {
///         let x = Var::ones(40_000, DType::F32, &Device::Cpu)?;
///         let mut state = Setup::over(&world).build(AdamW::new(0.1), &x)?;
///         let loss = (x.as_tensor() * (world.rank() as f64 + 1.0))?.sum_all()?;
///         update(&mut state, &x, &loss.backward()?)?;
///         println!("rank {} has {} bytes of the state", world.rank(), state.bytes());
///         Ok(())
///     })
/// }
/// ```
pub fn run<T, E>(program: impl FnOnce(World) -> Result<T, E>) -> Result<T, E>
where
    E: Display + From<CommunicationError>,
{
    // MPI ends when `_universe` is dropped.
    let Some((_universe, _)) = initialize_with_threading(Threading::Serialized) else {
        let reason =
            "MPI was initialised before `optimisers::mpi::run`; use `optimisers::mpi::World::new` instead"
                .to_string();
        return Err(CommunicationError::Other { reason }.into());
    };
    let world = World::new()?;
    // Nobody waits for a single rank, so its caller can have the error.
    if world.size() == 1 {
        return program(world);
    }
    let value = match catch_unwind(AssertUnwindSafe(|| program(world.clone()))) {
        Ok(result) => result.unwrap_or_else(|error| world.fail(&error)),
        Err(_) => world.fail(&"it panicked"),
    };
    // The end of MPI waits for all ranks without end. If another rank is still in a call, this agreement
    // finds two different calls, and the job ends with an error instead.
    let farewell = StateWorld::over(&world).settle(Call::End, Ok(value));
    Ok(farewell.unwrap_or_else(|error: Error| world.fail(&error)))
}
