//! Ranks with a CUDA device each; NCCL moves tensors between the devices. Feature `nccl`.
//!
//! A [`World`] is made [over](World::over) another world, usually that of an MPI job. The program, started by
//! `mpirun -n 4 program`, contains:
//!
//! ```no_run
//! # #[cfg(feature = "mpi")]
//! # fn example() -> Result<(), Box<dyn std::error::Error>> {
//! use candle_core::{DType, Device, Var};
//! use optimisers::{AdamW, Communicator, MixedPrecision, Setup, mpi, nccl, update};
//!
//! mpi::run(|host| {
//!     // Open MPI sets this variable; srun sets `SLURM_LOCALID`.
//!     let local_rank = std::env::var("OMPI_COMM_WORLD_LOCAL_RANK")?.parse()?;
//!     let device = Device::new_cuda(local_rank)?;
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
//! NCCL moves gradients and parameters directly between the tensors. It moves bytes and adds nothing up, so
//! the bits of a training do not depend on NCCL. The other world carries a few bytes in each call, by which
//! the ranks agree.
//!
//! # Requirements
//! NCCL has to be [installed](crate::guide::devices#what-to-install). All parameters have to be on the
//! world's device, or on a clone of it; [`Setup::over`](crate::Setup::over) refuses others. NCCL takes one
//! rank on each GPU. With fewer GPUs than ranks use the other world alone, without NCCL.
//!
//! # Order
//! Transfers are in order with candle's work on the device, whichever threads do that work, and no thread
//! waits on the host. All ranks have to make the same calls in the same order, on one thread or on several.
//!
//! # When a rank fails
//! NCCL waits for the other ranks without end, because it has no time-out for messages between live
//! processes. Over a network NCCL notices a dead process (`NCCL_IB_TIMEOUT` and `NCCL_IB_RETRY_CNT`, or the
//! system's time-outs of TCP), but on one machine NCCL does not. Under
//! [`mpi::run`](https://docs.rs/optimisers/latest/optimisers/mpi/fn.run.html) MPI kills all ranks, so no rank
//! waits. If NCCL reports an error, that call and all later calls return the error. With `NCCL_DEBUG=WARN` in
//! the environment NCCL prints more.

mod link;
mod world;

pub use world::World;
