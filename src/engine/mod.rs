//! How a planned step runs: knows arithmetic, tensors and devices, but no rule, model or tree.
//!
//! Every leaf's rules plan first, without computing anything. Then the norms and tensor functions that they asked for are evaluated, reading
//! only. At last parameters, state and counters are written, in one pass per leaf: a block of 512 bytes of each array goes through the whole
//! chain while it is in the first-level cache (one step by itself, with all data in place, needs no blocks). Leaves below 65 536 elements have a
//! thread each, larger ones are shared by all threads.
//!
//! On CUDA devices all leaves with the same chain and dtypes are one launch of code that is printed from the same arithmetic. It gives the same bits, but for
//! norms, which are added up in another order (fixed by lengths, dtypes and alignment): multiply-add is not contracted there either, which costs nothing, as memory is the limit.
//!
//! A step that needs norms, sums or checks from a device waits for it once: all questions go there together. Where one depends on the answer to
//! another, the device works out the factor in between, by the arithmetic and in the order of the host, which repeats that when it has the answers.
//! Functions of whole tensors are enqueued in between. The exception are norms of leaves on several devices: the host has to add them up, and
//! waits once for each of those that depend on one another.
//!
//! A parameter may be on another device than its master and state (see [`Offload`](crate::Offload)). Its gradient comes down before it is first
//! read, the work is done on the CPU, and the parameter goes up when it has been written there.
//!
//! The fused CPU engine runs on threads of its own, as many as rayon's current pool has (`RAYON_NUM_THREADS`, or the pool in which
//! [`update`](crate::update) is called).

mod buffer;
mod bytes;
mod consistency;
mod cpu;
#[cfg(feature = "cuda")]
#[doc(hidden)]
pub mod cuda;
#[cfg_attr(not(any(feature = "cuda", feature = "emulate")), allow(dead_code, unused_variables))]
mod device;
#[cfg(feature = "emulate")]
pub mod emulation;
mod job;
mod kernel;
mod question;
mod reduce;
mod remote;
mod rounding;
mod tensor;

pub(crate) use buffer::{Buffer, owned_on};
pub(crate) use bytes::write_tensor;
pub(crate) use consistency::{Difference, Extent, copy_difference, difference, is_wider};
pub use cpu::Isa;
pub(crate) use cpu::{Addresses, for_all, prefetch, prefetch_line};
pub(crate) use job::{
    Addend, Counters, Job, Link, OnNonFinite, Output, Reduction, Resolved, Scope, Slots, Source, Step, Steps, Store, Sums, TensorStep,
    Ticket, Tickets,
};
pub use kernel::Array;
pub(crate) use kernel::{Arithmetic, ErasedKernel, Factor, Following, FromNorms, FromSums, Kernel, Norms, Scale, Summed, erased};
use question::{Asked, Awaited, Elements, Of, Origin, Question, Round, TensorCall};
pub(crate) use reduce::{Reduced, Verdict, reduce};
pub(crate) use remote::Remote;
pub(crate) use rounding::{gaussian, random_key};
pub(crate) use tensor::{joined, rounded, set_split, set_tensor};

use std::sync::atomic::{AtomicBool, Ordering};

use candle_core::{DType, Device, Tensor};

use crate::error::{Error, Result};

/// What carries a step out.
///
/// All engines give the same numbers, bit for bit in f32 and f64 (norms on CUDA devices: to about 1e-15), so the choice is one of speed and of
/// debugging.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Engine {
    /// The fused engine of the parameter's device, with the widest instruction set of the processor. Devices without a fused
    /// engine use [`Engine::Tensors`].
    #[default]
    Fused,
    /// The fused CPU engine restricted to an instruction set (or the best the processor has below it).
    FusedWith(Isa),
    /// candle tensor operations, one at a time: the slow reference, on any device.
    Tensors,
    /// The engine of CUDA devices for parameters on the CPU: its code is compiled by the system's C++ compiler (`c++`) and runs on the CPU, slowly.
    /// For tests without a GPU.
    #[cfg(feature = "emulate")]
    Emulated,
}

/// Where the work of a leaf is done.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Route {
    Cpu(Isa),
    /// On its device, by code that is printed for it.
    Device,
    Tensors,
}

impl Engine {
    fn route(self, on_cpu: bool) -> Route {
        match self {
            Engine::Tensors => Route::Tensors,
            #[cfg(feature = "emulate")]
            Engine::Emulated => Route::Device,
            _ if !on_cpu => Route::Device,
            Engine::Fused => Route::Cpu(Isa::best()),
            Engine::FusedWith(isa) => Route::Cpu(isa.min(Isa::best())),
        }
    }
}

/// Says once in the life of the program that updates are slower than they could be.
fn warn_once(reason: &str) {
    static WARNED: AtomicBool = AtomicBool::new(false);
    if !WARNED.swap(true, Ordering::Relaxed) {
        log::warn!("updates run as single tensor operations, which is correct but slow: {reason}");
    }
}

/// Whether the engines read and write this dtype.
pub(crate) fn is_supported(dtype: DType) -> bool {
    matches!(dtype, DType::F16 | DType::BF16 | DType::F32 | DType::F64)
}

/// The dtype that state and arithmetic have for a parameter of `dtype`: F64 for F64, else F32.
pub(crate) fn compute_dtype(dtype: DType) -> DType {
    if dtype == DType::F64 { DType::F64 } else { DType::F32 }
}

/// Refuses a gradient of another shape or device than the parameter's, or of a dtype that the engines do not read.
pub(crate) fn expect_gradient(path: &str, x: &Tensor, gradient: &Tensor) -> Result<()> {
    if gradient.shape() != x.shape() {
        return Err(Error::GradientShape { path: path.to_string(), expected: x.shape().clone(), got: gradient.shape().clone() });
    }
    let (expected, got) = (x.device().location(), gradient.device().location());
    if expected != got {
        return Err(Error::GradientDevice { path: path.to_string(), expected, got });
    }
    if !is_supported(gradient.dtype()) {
        return Err(Error::GradientDtype { path: path.to_string(), got: gradient.dtype() });
    }
    Ok(())
}

/// The items with those of the same device together, in the order in which the devices come.
fn by_device<T>(items: impl IntoIterator<Item = T>, device: impl Fn(&T) -> &Device) -> Vec<(Device, Vec<T>)> {
    let mut groups: Vec<(Device, Vec<T>)> = Vec::new();
    for item in items {
        match groups.iter_mut().find(|(known, _)| known.same_device(device(&item))) {
            Some((_, group)) => group.push(item),
            None => groups.push((device(&item).clone(), vec![item])),
        }
    }
    groups
}

/// An address that two tensors share exactly if they share storage.
pub(crate) fn storage_address(tensor: &Tensor) -> usize {
    Addresses::of(tensor).storage
}

/// Runs the last stage over all jobs: parameters and state are written, and then the counters of that leaf move.
///
/// # Errors
/// Only if a device fails.
pub(crate) fn commit(engine: Engine, tickets: &mut [Option<Ticket<'_>>]) -> Result<()> {
    let remote = tickets.iter_mut().filter_map(|place| place.take_if(|ticket| ticket.job.remote.is_some())).collect();
    compute(engine, tickets)?;
    remote::commit(engine, remote)
}

/// Runs jobs whose data is where their arithmetic is done. Their places are empty then.
fn compute(engine: Engine, tickets: &mut [Option<Ticket<'_>>]) -> Result<()> {
    let mut on_device = Vec::new();
    let mut isa = Isa::Portable;
    for place in &mut *tickets {
        let Some(ticket) = place else { continue };
        match engine.route(ticket.on_cpu) {
            _ if ticket.job.length == 0 => {
                ticket.job.replace()?;
                ticket.job.count();
                *place = None;
            }
            Route::Cpu(best) => isa = best,
            Route::Device => on_device.extend(place.take()),
            Route::Tensors => {
                tensor::commit(&mut ticket.job)?;
                ticket.job.count();
                *place = None;
            }
        }
    }
    device::commit(on_device)?;
    cpu::commit(isa, tickets)
}
