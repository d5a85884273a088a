//! Ranks with a CUDA device each; NCCL moves tensors between the devices. Feature `nccl`.
//!
//! A [`World`] is made [over](World::over) another one, usually that of an MPI job: `mpirun -n 4 program`,
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
//!     let mut state = Setup::over(&world).build(MixedPrecision::new(DType::F32, AdamW::new(0.1)), &x)?;
//!     update(&mut state, &x, &x.sqr()?.sum_all()?.backward()?)?;
//!     Ok::<(), Box<dyn std::error::Error>>(())
//! })
//! # }
//! ```
//!
//! For several devices in one process, give each a thread and a world over one of [`ranks`](crate::ranks).
//!
//! NCCL carries gradients and parameters here, from and to where they lie. It knows no dtypes and adds
//! nothing up, so the bits do not depend on it. The other world carries what the ranks agree on, a few bytes
//! in each call.
//!
//! # What it needs
//! candle's build links cudarc with `libnccl.so`, which is in NVIDIA's package `libnccl-dev`; running needs
//! `libnccl.so.2` (package `libnccl2`). All parameters have to be on the world's device, or on a clone of it:
//! [`Setup::over`](crate::Setup::over) refuses others. NCCL takes one rank on each GPU; with fewer GPUs than
//! ranks use the other world alone.
//!
//! # Order
//! Transfers are in order with candle's work on the device, in any thread: a gradient may come from any, and
//! nobody waits on the host. All ranks make the same calls in the same order, on one thread or on several.
//!
//! # When a rank fails
//! NCCL waits for the other ranks without end: it has no time-out for messages between live processes. It
//! notices a dead process over a network (`NCCL_IB_TIMEOUT` and `NCCL_IB_RETRY_CNT`, or the system's
//! time-outs of TCP), but not on one machine. Programs under
//! [`mpi::run`](https://docs.rs/optimisers/latest/optimisers/mpi/fn.run.html) need not care, because MPI
//! kills all ranks. An error that NCCL reports is the error of the call and of all later calls. With
//! `NCCL_DEBUG=WARN` in the environment it says more.

mod link;
mod world;

pub use world::World;
