//! Ranks with a CUDA device each, between whose memories NCCL moves tensors. Feature `nccl`.
//!
//! A [`World`] is made [over](World::over) another one, most often that of an MPI job: `mpirun -n 4 program`,
//! and in the program
//!
//! ```no_run
//! # #[cfg(feature = "mpi")]
//! # fn example() -> Result<(), Box<dyn std::error::Error>> {
//! use candle_core::{DType, Device, Var};
//! use optimisers::{AdamW, Communicator, MixedPrecision, Setup, mpi, nccl, update};
//!
//! mpi::run(|host| {
//!     // What Open MPI says; `SLURM_LOCALID` under srun.
//!     let on_this_machine = std::env::var("OMPI_COMM_WORLD_LOCAL_RANK")?.parse()?;
//!     let device = Device::new_cuda(on_this_machine)?;
//!     let world = nccl::World::over(&host, &device)?;
//!     let x = Var::ones(40_000, DType::BF16, &device)?;
//!     let mut state = Setup::over(&world).setup(MixedPrecision::new(DType::F32, AdamW::new(0.1)), &x)?;
//!     update(&mut state, &x, &x.sqr()?.sum_all()?.backward()?)?;
//!     Ok::<(), Box<dyn std::error::Error>>(())
//! })
//! # }
//! ```
//!
//! Several devices in one process have a thread each, whose world is made over one of
//! [`ranks`](crate::ranks).
//!
//! NCCL carries gradients and parameters here, from and to where they lie, and knows no dtypes: it never adds
//! anything up, so that the bits do not depend on it. What the ranks agree on, a few bytes in each call, the
//! other world carries.
//!
//! # What it needs
//! candle's build links cudarc with `libnccl.so`, which is in NVIDIA's package `libnccl-dev`; running needs
//! `libnccl.so.2` (package `libnccl2`). All parameters have to be on the world's device, or on a clone of it:
//! [`Setup::over`](crate::Setup::over) refuses others. NCCL takes one rank on each GPU; with fewer GPUs than
//! ranks use the other world by itself.
//!
//! # Order
//! What is moved is in order with candle's work on the device, in whichever thread that is done: a gradient
//! may come from any, and nobody waits on the host. All ranks make the same calls in the same order, on one
//! thread or on several.
//!
//! # When a rank fails
//! Until what it has enqueued has been done NCCL waits for the other ranks, without end: it has no time-out
//! for messages between processes that are alive. A process that has died is noticed over a network
//! (`NCCL_IB_TIMEOUT` and `NCCL_IB_RETRY_CNT`, or the system's time-outs of TCP), and on one machine not at
//! all. Programs under [`mpi::run`](https://docs.rs/optimisers/latest/optimisers/mpi/fn.run.html) need not
//! care, because MPI kills all ranks. An error that NCCL tells is the error of the call, and that of all
//! later calls. `NCCL_DEBUG=WARN` in the environment makes it say more.

mod link;
mod world;

pub use world::World;
