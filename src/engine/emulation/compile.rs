//! Compiles printed sources to functions of this process. The unsafe code loads and calls the libraries that
//! the C++ compiler has made.
#![allow(unsafe_code)]

use std::collections::HashMap;
use std::io::Write;
use std::process::{Command, Stdio};
use std::sync::{Arc, LazyLock, Mutex, PoisonError};

use libloading::{Library, Symbol};

use crate::engine::codegen::waits;
use crate::error::{Error, Result};

/// A source that was compiled and loaded.
pub(in crate::engine) struct CompiledSource(Library);

type LaunchFunction = unsafe extern "C" fn(
    blocks: u32,
    rows: *const u64,
    block_offsets: *const u32,
    leaves: u32,
    results: *mut f64,
);

/// The function of a source, compiled once.
pub(super) fn compile_once(source: &str) -> Result<Arc<CompiledSource>> {
    static COMPILED: LazyLock<Mutex<HashMap<String, Arc<CompiledSource>>>> = LazyLock::new(Mutex::default);
    let cache = || COMPILED.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(compiled) = cache().get(source) {
        return Ok(compiled.clone());
    }
    let compiled = Arc::new(compile(source)?);
    Ok(cache().entry(source.to_string()).or_insert(compiled).clone())
}

pub(super) fn compiler() -> Command {
    Command::new(std::env::var_os("CXX").unwrap_or("c++".into()))
}

fn compile(source: &str) -> Result<CompiledSource> {
    let folder = tempfile::tempdir().map_err(Error::other)?;
    let library = folder.path().join("kernel.so");
    let mut command = compiler();
    command
        .args([
            "-x",
            "c++",
            "-",
            "-std=c++17",
            "-O1",
            "-ffp-contract=off",
            "-fno-exceptions",
            "-nostdlib",
            "-fPIC",
            "-shared",
            "-w",
        ])
        .arg("-o")
        .arg(&library);
    command.args(source.contains("double* results").then_some("-DFOLDS"));
    // Only threads that wait for each other need stacks of their own.
    command.args(waits(source).then_some("-DWAITS"));
    let mut process = command
        .stdin(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .map_err(|error| Error::other(format!("no C++ compiler (`c++`, or what CXX names): {error}")))?;
    if let Some(mut input) = process.stdin.take() {
        let text = [
            include_str!("shim.hpp"),
            source,
            include_str!("shim_end.hpp"),
            include_str!("shim_table.hpp"),
        ]
        .concat();
        input.write_all(text.as_bytes()).map_err(Error::other)?;
    }
    let output = process.wait_with_output().map_err(Error::other)?;
    if !output.status.success() {
        return Err(Error::other(format!(
            "the C++ compiler refuses a kernel: {}",
            String::from_utf8_lossy(&output.stderr)
        )));
    }
    // SAFETY: the library has no initialisers that do anything.
    unsafe { Library::new(&library) }
        .map(CompiledSource)
        .map_err(Error::other)
}

impl CompiledSource {
    /// Runs all blocks over these tables, whose addresses point to live arrays of the lengths in their rows.
    pub(super) fn launch(&self, blocks: u32, rows: &[u64], block_offsets: &[u32], results: &mut [f64]) {
        debug_assert!(results.is_empty() || results.len() == blocks as usize);
        debug_assert!(
            block_offsets.iter().all(|first| *first < blocks)
                && rows.len().is_multiple_of(block_offsets.len())
        );
        // SAFETY: the function has this type, see `shim_table.hpp`.
        let entry: Symbol<'_, LaunchFunction> = match unsafe { self.0.get(b"launch\0") } {
            Ok(entry) => entry,
            Err(error) => unreachable!("every kernel has an entry: {error}"),
        };
        // SAFETY: tables and results are as long as the code expects: `Tables::add` writes rows of the layout
        // that `print` prints. The addresses are of copies that `EmulatedDevice` keeps until the launches are
        // done, each as long as its tensor says (`EmulatedDevice::allocate`).
        unsafe {
            entry(
                blocks,
                rows.as_ptr(),
                block_offsets.as_ptr(),
                block_offsets.len() as u32,
                results.as_mut_ptr(),
            )
        };
    }
}
