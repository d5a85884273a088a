//! Engines: the user's choice, and where the work of a leaf is done by it.

use std::sync::atomic::{AtomicBool, Ordering};

use super::Isa;
use crate::error::warning::Warning;
use crate::tensors::Device;

/// The engine that carries a step out.
///
/// All engines give the same numbers, bit for bit in f32 and f64 (norms on CUDA devices: to about 1e-15), so
/// the choice is one of speed and of debugging.
///
/// The fused CPU engine runs on as many threads as rayon's current pool has: `RAYON_NUM_THREADS`, or the pool
/// in which [`update`](crate::update) is called.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Engine {
    /// The fused engine of the parameter's device, with the widest instruction set of the processor. Devices
    /// without a fused engine use [`Engine::Tensors`].
    #[default]
    Fused,
    /// The fused CPU engine restricted to an instruction set.
    FusedWith(Isa),
    /// candle tensor operations, one at a time: the slow reference, on any device.
    #[cfg(feature = "candle")]
    Tensors,
    /// The engine of CUDA devices for parameters on the CPU, to test it without a GPU.
    ///
    /// Its code is compiled by the system's C++ compiler (`c++`) and runs on the CPU, slowly.
    #[cfg(feature = "emulate")]
    Emulated,
}

/// Where the work of a leaf is done.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Route {
    /// On the CPU, fused.
    Cpu(Isa),
    /// On its device, by code that is printed for it.
    Device,
    /// On its device, by candle's tensor operations.
    #[cfg(feature = "candle")]
    Tensors,
}

impl Engine {
    /// Whether the fused CPU engine has a leaf whose x is on this device.
    pub(crate) fn is_fused_on_cpu(self, device: &Device) -> bool {
        matches!(self.route(device), Route::Cpu(_))
    }

    /// Where the work of a leaf is done whose x is on this device.
    pub(super) fn route(self, device: &Device) -> Route {
        match self {
            #[cfg(feature = "candle")]
            Engine::Tensors => Route::Tensors,
            #[cfg(feature = "emulate")]
            Engine::Emulated => Route::Device,
            _ if !device.is_cpu() => Route::Device,
            Engine::Fused => Route::Cpu(Isa::best()),
            Engine::FusedWith(isa) => Route::Cpu(isa),
        }
    }
}

/// Says once in the life of the program that updates are slower than they could be.
pub(super) fn warn_once(reason: &str) {
    static WARNED: AtomicBool = AtomicBool::new(false);
    if !WARNED.swap(true, Ordering::Relaxed) {
        Warning::SlowEngine { reason: reason.to_string() }.say();
    }
}
