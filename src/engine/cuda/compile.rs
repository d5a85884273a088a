//! Compiles printed code to functions of a CUDA device.

use std::collections::HashMap;
use std::sync::{Arc, LazyLock, Mutex, MutexGuard, PoisonError};

use candle_core::cuda::WrapErr;
use candle_core::cuda::cudarc::driver::{CudaContext, CudaFunction};
use candle_core::cuda::cudarc::nvrtc::{CompileError, CompileOptions, Ptx, compile_ptx_with_opts};

use crate::engine::codegen::CUDA_FLAGS;
use crate::engine::route::warn_once;
use crate::error::{Error, Result};

/// Functions that the printed sources call. NVRTC has most of these functions only with headers.
const INTRINSICS: &str = include_str!("intrinsics.cu");

/// The functions by address of their context and by source. The `Arc` keeps the context alive, so that no
/// other context gets the address. `None` is a failed compilation.
type Functions = HashMap<usize, (Arc<CudaContext>, HashMap<Box<str>, Option<CudaFunction>>)>;

fn functions() -> MutexGuard<'static, Functions> {
    static FUNCTIONS: LazyLock<Mutex<Functions>> = LazyLock::new(Mutex::default);
    FUNCTIONS.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Drops the contexts that nobody else uses, with their functions.
pub(super) fn forget_unused() {
    // Each function holds its context through its module, and the map holds each context once more.
    functions()
        .retain(|_, (context, cache)| Arc::strong_count(context) > 1 + cache.values().flatten().count());
}

/// The function of a source in a context, kept as long as the context is used. `None` if the compiler or the
/// device refuses the source, for example because the compiler is much older or newer than the device.
pub(super) fn function(context: &Arc<CudaContext>, source: &str) -> Result<Option<CudaFunction>> {
    let key = context.cu_ctx().addr();
    if let Some(function) = functions().get(&key).and_then(|(_, cache)| cache.get(source)) {
        return Ok(function.clone());
    }
    // The compilation runs without the lock, because it takes long. Two threads may compile the same
    // function, which only costs time.
    let capability = context.compute_capability().w()?;
    let load = |ptx| context.load_module(ptx)?.load_function("optimiser");
    let compilation =
        compile(source, capability).and_then(|ptx| load(ptx).map_err(|error| error.to_string()));
    let function = compilation
        .inspect_err(|error| warn_once(&format!("a kernel does not compile: {error}")))
        .ok();
    let new_entry = || (context.clone(), HashMap::new());
    functions()
        .entry(key)
        .or_insert_with(new_entry)
        .1
        .insert(source.into(), function.clone());
    Ok(function)
}

/// Compiles a source for a compute capability to PTX.
///
/// # Errors
/// With the compiler's message, if it refuses the source.
pub fn ptx(source: &str, capability: (i32, i32)) -> Result<String> {
    compile(source, capability)
        .map(|ptx| ptx.to_src())
        .map_err(Error::other)
}

/// Compiles with flags that give the bits of the CPU. The error is the compiler's message.
fn compile(source: &str, (major, minor): (i32, i32)) -> std::result::Result<Ptx, String> {
    // Warning 177 is about unused functions: a source uses a part of `INTRINSICS`.
    let more_flags = [
        format!("--gpu-architecture=compute_{major}{minor}"),
        "--diag-suppress=177".to_string(),
    ];
    let options = CompileOptions {
        options: CUDA_FLAGS
            .map(str::to_string)
            .into_iter()
            .chain(more_flags)
            .collect(),
        ..CompileOptions::default()
    };
    compile_ptx_with_opts(format!("{INTRINSICS}{source}"), options).map_err(|error| match error {
        CompileError::CompileError { log, .. } => log.to_string_lossy().into_owned(),
        error => error.to_string(),
    })
}
