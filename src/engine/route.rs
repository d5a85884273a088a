//! The user's choice of an engine, and the route of a leaf (a parameter with its state) under that choice.

use std::sync::atomic::{AtomicBool, Ordering};

use super::Isa;
use crate::error::warning::Warning;
use crate::tensors::Device;

/// The engine that runs a step.
///
/// All engines give the same bits in f32 and f64, except that norms on CUDA devices differ by about 1e-15.
/// The choice is one of speed and of debugging.
///
/// The fused CPU engine runs on as many threads as rayon's current pool has: `RAYON_NUM_THREADS`, or the pool
/// in which [`update`](crate::update) is called.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Engine {
    /// The fused engine of the parameter's device, with the widest instruction set of the processor. If the
    /// device has no fused engine, this is [`Engine::Tensors`].
    #[default]
    Fused,
    /// The fused CPU engine restricted to an instruction set.
    FusedWith(Isa),
    /// candle's tensor operations, one at a time: the slow reference, on any device.
    #[cfg(feature = "candle")]
    Tensors,
    /// The engine of CUDA devices, run for parameters on the CPU, to test it without a GPU.
    ///
    /// The system's C++ compiler (`c++`) compiles the printed code, which runs slowly on the CPU.
    #[cfg(feature = "emulate")]
    Emulated,
}

/// Where the work of a leaf is done.
#[derive(Clone, Copy, Debug)]
pub(super) enum Route<D> {
    /// On the CPU, fused.
    Cpu(Isa),
    /// On this device, by code that is printed for it.
    Device(D),
    /// On the device of the leaf, by candle's tensor operations.
    Tensors,
}

impl Route<&Device> {
    /// The same route with a clone of the device. Call this once for each route and not for each leaf,
    /// because a clone changes several reference counts.
    pub(super) fn owned(self) -> Route<Device> {
        match self {
            Route::Cpu(isa) => Route::Cpu(isa),
            Route::Device(device) => Route::Device(device.clone()),
            Route::Tensors => Route::Tensors,
        }
    }

    /// Whether both routes lead to the same engine and, if that engine runs printed code, to the same device.
    pub(super) fn is_same(self, other: &Route<Device>) -> bool {
        match (self, other) {
            (Route::Cpu(isa), Route::Cpu(other_isa)) => isa == *other_isa,
            (Route::Device(device), Route::Device(other_device)) => device.same_device(other_device),
            (Route::Tensors, Route::Tensors) => true,
            _ => false,
        }
    }
}

impl Engine {
    /// Whether the fused CPU engine runs a leaf whose x (parameter or master) is on `device`.
    pub(crate) fn is_fused_on_cpu(self, device: &Device) -> bool {
        matches!(self.route(device), Route::Cpu(_))
    }

    /// The route of a leaf whose x (parameter or master) is on `device`.
    pub(super) fn route(self, device: &Device) -> Route<&Device> {
        match self {
            #[cfg(feature = "candle")]
            Engine::Tensors => Route::Tensors,
            #[cfg(feature = "emulate")]
            Engine::Emulated => Route::Device(device),
            _ if !device.is_cpu() => Route::Device(device),
            Engine::Fused => Route::Cpu(Isa::best()),
            Engine::FusedWith(isa) => Route::Cpu(isa),
        }
    }
}

/// Warns, once in the life of the process, that updates are slower than they could be.
pub(super) fn warn_once(reason: &str) {
    static WARNED: AtomicBool = AtomicBool::new(false);
    // Relaxed, because the flag guards no other memory.
    if !WARNED.swap(true, Ordering::Relaxed) {
        Warning::SlowEngine {
            reason: reason.to_string(),
        }
        .log();
    }
}
