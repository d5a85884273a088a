//! The memory of a device that is kept from call to call, and the launches that use it.
//!
//! 1. `take` hands out memory that no other call uses, so that no lock is held during a call.
//! 2. `write` waits until the device has read the tables of the call before the last, and overwrites them.
//! 3. `enqueue` adds the copy of the tables and all launches to the stream. Then `launch` records the event
//!    `done`.
//! 4. `give_back` keeps the memory. After an error the memory is dropped instead, and the drop waits for
//!    `done`.
//!
//! `unsafe`: page-locked memory and launches.
#![allow(unsafe_code)]

use std::collections::HashMap;
use std::sync::{Arc, LazyLock, Mutex, MutexGuard, PoisonError};

use candle_core::Result;
use candle_core::cuda::cudarc::driver::{
    CudaContext, CudaEvent, CudaFunction, CudaSlice, CudaStream, DevicePtr, DevicePtrMut, DeviceRepr,
    LaunchConfig, PinnedHostSlice, PushKernelArg, ValidAsZeroBits,
};
use candle_core::cuda::{DeviceId, WrapErr};

use super::compile::forget_unused;
use crate::engine::codegen::THREADS;
use crate::engine::device::Launch;

/// How many words or results each memory has room for at first.
const WORDS: usize = 1 << 12;

/// The memory of a call. It grows to what the largest call needs. It is freed with the process, or when
/// another device is first used after its own device was dropped.
pub(super) struct DeviceScratch {
    /// candle's stream. Its reference count shows whether the device is still used.
    owner: Arc<CudaStream>,
    stream: Arc<CudaStream>,
    /// Two, so that the tables of a call can be written while the device reads those of the call before.
    uploads: [TableUpload; 2],
    /// The index of this call's upload.
    turn: usize,
    tables: CudaSlice<u64>,
    results: CudaSlice<f64>,
    /// How many results there are in this call.
    count: usize,
    /// The event after the last use of `tables` and `results`, which are not freed before it.
    done: CudaEvent,
}

/// Page-locked memory of the host. It is write-combined: reading it is slow.
struct TableUpload {
    memory: PinnedHostSlice<u64>,
    /// The event that the device has read the memory. cudarc has one of its own, but only records it if there
    /// are several streams.
    read: CudaEvent,
}

/// The memory that no call uses, by device.
type Pool = HashMap<DeviceId, Vec<DeviceScratch>>;

fn pool() -> MutexGuard<'static, Pool> {
    static POOL: LazyLock<Mutex<Pool>> = LazyLock::new(Mutex::default);
    POOL.lock().unwrap_or_else(PoisonError::into_inner)
}

pub(super) fn take(
    device: DeviceId,
    owner: &Arc<CudaStream>,
    stream: &Arc<CudaStream>,
) -> Result<DeviceScratch> {
    let mut pool = pool();
    let (unused, gone): (_, Vec<_>) = match pool.get_mut(&device) {
        Some(unused) => (unused.pop(), Vec::new()),
        None => {
            let gone = pool
                .extract_if(|_, unused| !unused.iter().any(|scratch| scratch.has_device(unused)))
                .collect();
            pool.insert(device, Vec::new());
            (None, gone)
        }
    };
    // The lock is released first, because making and dropping memory takes long.
    drop(pool);
    if !gone.is_empty() {
        drop(gone);
        forget_unused();
    }
    unused.map_or_else(|| DeviceScratch::new(owner, stream), Ok)
}

/// Returns the memory of a call to the pool.
pub(super) fn give_back(device: DeviceId, mut scratch: DeviceScratch) {
    (scratch.turn, scratch.count) = (1 - scratch.turn, 0);
    pool().entry(device).or_default().push(scratch);
}

impl DeviceScratch {
    fn new(owner: &Arc<CudaStream>, stream: &Arc<CudaStream>) -> Result<Self> {
        let context = stream.context();
        Ok(DeviceScratch {
            owner: owner.clone(),
            stream: stream.clone(),
            uploads: [TableUpload::new(context, WORDS)?, TableUpload::new(context, WORDS)?],
            turn: 0,
            tables: stream.alloc_zeros(WORDS).w()?,
            results: stream.alloc_zeros(WORDS).w()?,
            count: 0,
            done: context.new_event(None).w()?,
        })
    }

    /// Whether anything but unused memory holds the device of this memory.
    fn has_device(&self, unused: &[DeviceScratch]) -> bool {
        // If a device has a stream of its own, that stream is also `stream`, and `tables` and `results` hold
        // it.
        let handles =
            |scratch: &DeviceScratch| if Arc::ptr_eq(&scratch.owner, &scratch.stream) { 4 } else { 1 };
        let known = unused.iter().filter(|other| Arc::ptr_eq(&other.owner, &self.owner)).map(handles).sum();
        Arc::strong_count(&self.owner) > known
    }

    /// Enqueues the launches, which have `results` results together.
    ///
    /// # Safety
    /// The rows must fit the functions, and what is at their addresses must stay until the stream has run the
    /// launches.
    pub(super) unsafe fn launch(&mut self, launches: &[Launch<CudaFunction>], results: usize) -> Result<()> {
        // SAFETY: `Cuda::launch`, the only caller, gives the reasons why the rows fit and why what is at
        // their addresses stays.
        let enqueued = unsafe { self.enqueue(launches, results) };
        // `done` is recorded also after an error, because some launches may have been enqueued.
        self.done.record(&self.stream).w()?;
        // `Device::synchronize` waits for candle's stream of the thread alone, so that stream has to wait for
        // the launches.
        if !Arc::ptr_eq(&self.owner, &self.stream) {
            self.owner.wait(&self.done).w()?;
        }
        enqueued
    }

    /// Waits for the results of this call, if there are any, and returns them.
    pub(super) fn read_results(&mut self) -> Result<Vec<f64>> {
        let mut found = vec![0.0; self.count];
        if !found.is_empty() {
            self.stream.memcpy_dtoh(&self.results.slice(..found.len()), &mut found).w()?;
            self.done.record(&self.stream).w()?;
            self.stream.synchronize().w()?;
        }
        Ok(found)
    }

    /// Uploads all tables at once, and enqueues the launches.
    ///
    /// # Safety
    /// As for [`DeviceScratch::launch`].
    unsafe fn enqueue(&mut self, launches: &[Launch<CudaFunction>], results: usize) -> Result<()> {
        let words =
            launches.iter().map(|launch| launch.rows.len() + launch.block_offsets.len().div_ceil(2)).sum();
        if words > self.tables.len() {
            self.tables = larger(words, &self.stream)?;
        }
        if results > self.results.len() {
            self.results = larger(results, &self.stream)?;
        }
        self.count = results;
        let upload = &mut self.uploads[self.turn];
        let places = upload.write(launches, words)?;
        upload.send(words, &mut self.tables, &self.stream)?;

        let (results, _noted_on_drop) = self.results.device_ptr_mut(&self.stream);
        let (tables, _noted_on_drop) = self.tables.device_ptr(&self.stream);
        for (launch, (rows, offsets)) in launches.iter().zip(places) {
            let (rows, offsets, leaves) = (tables + rows * 8, tables + offsets * 8, launch.leaves as u32);
            let results = launch.results.map(|first| results + first as u64 * 8);
            debug_assert!(launch.block_offsets.iter().all(|first| *first < launch.blocks));
            debug_assert!(launch.rows.len().is_multiple_of(launch.leaves.max(1)));
            let mut arguments = self.stream.launch_builder(&launch.function);
            arguments.arg(&rows).arg(&offsets).arg(&leaves);
            if let Some(results) = &results {
                arguments.arg(results);
            }
            let shape = LaunchConfig {
                grid_dim: (launch.blocks, 1, 1),
                block_dim: (THREADS as u32, 1, 1),
                shared_mem_bytes: 0,
            };
            // SAFETY: the arguments are those of the printed functions. `TableUpload::write` has put rows and
            // offsets into the tables, and the results have a place for each block. The caller promises the
            // rest.
            unsafe { arguments.launch(shape) }.w()?;
        }
        Ok(())
    }
}

impl Drop for DeviceScratch {
    fn drop(&mut self) {
        // `tables` and `results` are freed in the order of their stream, perhaps before a stream of the
        // device's own has finished with them, so this waits. An old error of the context is taken first,
        // because `synchronize` would return it instead of waiting. Nothing depends on whether this fails.
        let _ = self.stream.context().check_err();
        let _ = self.done.synchronize();
    }
}

impl TableUpload {
    fn new(context: &Arc<CudaContext>, words: usize) -> Result<Self> {
        let read = context.new_event(None).w()?;
        // SAFETY: the memory is filled below, before anybody reads it.
        let mut memory = unsafe { context.alloc_pinned(words) }.w()?;
        let start: *mut u64 = memory.as_mut_ptr().w()?;
        // SAFETY: that many words have just been allocated.
        unsafe { start.write_bytes(0, words) };
        Ok(TableUpload { memory, read })
    }

    /// Writes the tables of all launches: of each, the rows before the offsets of its blocks. Returns where
    /// these two begin, in words.
    fn write(&mut self, launches: &[Launch<CudaFunction>], words: usize) -> Result<Vec<(u64, u64)>> {
        self.read.synchronize().w()?;
        if words > self.memory.len() {
            let context = self.memory.context().clone();
            *self = TableUpload::new(&context, words.next_power_of_two())?;
        }
        let mut rest = self.memory.as_mut_slice().w()?;
        let mut places = Vec::with_capacity(launches.len());
        let mut begin = 0;
        for Launch { rows, block_offsets, .. } in launches {
            let (here, after) = std::mem::take(&mut rest).split_at_mut(rows.len());
            here.copy_from_slice(rows);
            let (here, after) = after.split_at_mut(block_offsets.len().div_ceil(2));
            for (word, pair) in here.iter_mut().zip(block_offsets.chunks(2)) {
                *word = u64::from(pair[0]) | pair.get(1).map_or(0, |&high| u64::from(high) << 32);
            }
            places.push((begin as u64, (begin + rows.len()) as u64));
            begin += rows.len() + here.len();
            rest = after;
        }
        Ok(places)
    }

    /// Enqueues the copy of the first words. `write` waits until it is done.
    fn send(&mut self, words: usize, to: &mut CudaSlice<u64>, stream: &Arc<CudaStream>) -> Result<()> {
        let from = &self.memory.as_slice().w()?[..words];
        stream.memcpy_htod(from, to).w()?;
        self.read.record(stream).w()
    }
}

/// Room for at least that many values.
fn larger<T: DeviceRepr + ValidAsZeroBits>(length: usize, stream: &Arc<CudaStream>) -> Result<CudaSlice<T>> {
    stream.alloc_zeros(length.next_power_of_two()).w()
}
