//! The memory of a device that is kept from call to call, and the launches that use it.
//!
//! 1. `take` hands out memory that no other call uses, so that no lock is held during a call.
//! 2. `write` waits until the device has read the tables of the call before the last, and overwrites these
//!    tables.
//! 3. `enqueue` adds the copy of the tables and all launches to the stream. Then `launch` records the event
//!    `last_use`.
//! 4. `give_back` keeps the memory. After an error the memory is dropped instead, and the drop waits for
//!    `last_use`.
//!
//! The unsafe code is for page-locked memory and launches.
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

/// The memory of a call. The memory grows to the size of the largest call. It is freed when the process ends,
/// or when another device is first used after the device of this memory was dropped.
pub(super) struct DeviceScratch {
    /// candle's stream. Its reference count shows whether the device is still used.
    owner: Arc<CudaStream>,
    stream: Arc<CudaStream>,
    /// Two uploads, so that the tables of a call can be written while the device reads the tables of the call
    /// before.
    uploads: [TableUpload; 2],
    /// The index of this call's upload.
    upload_index: usize,
    tables: CudaSlice<u64>,
    results: CudaSlice<f64>,
    /// How many results this call has.
    result_count: usize,
    /// The event after the last use of `tables` and `results`, which are not freed before the event.
    last_use: CudaEvent,
}

/// Page-locked memory of the host. It is write-combined: reading it is slow.
struct TableUpload {
    memory: PinnedHostSlice<u64>,
    /// The event after the device has read the memory. cudarc has an event of its own for the memory, but
    /// records that event only if there are several streams.
    last_read: CudaEvent,
}

/// The memory that no call uses, by device.
type Pool = HashMap<DeviceId, Vec<DeviceScratch>>;

fn pool() -> MutexGuard<'static, Pool> {
    static POOL: LazyLock<Mutex<Pool>> = LazyLock::new(Mutex::default);
    POOL.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Takes memory of a device out of the pool, or allocates it.
pub(super) fn take(
    device: DeviceId,
    owner: &Arc<CudaStream>,
    stream: &Arc<CudaStream>,
) -> Result<DeviceScratch> {
    let mut pool = pool();
    let (unused, dropped_devices): (_, Vec<_>) = match pool.get_mut(&device) {
        Some(unused) => (unused.pop(), Vec::new()),
        None => {
            let dropped_devices = pool
                .extract_if(|_, unused| !unused.iter().any(|scratch| scratch.has_device(unused)))
                .collect();
            pool.insert(device, Vec::new());
            (None, dropped_devices)
        }
    };
    // The lock is released first, because allocating and freeing memory takes long.
    drop(pool);
    if !dropped_devices.is_empty() {
        drop(dropped_devices);
        forget_unused();
    }
    unused.map_or_else(|| DeviceScratch::new(owner, stream), Ok)
}

/// Returns the memory of a call to the pool.
pub(super) fn give_back(device: DeviceId, mut scratch: DeviceScratch) {
    (scratch.upload_index, scratch.result_count) = (1 - scratch.upload_index, 0);
    pool().entry(device).or_default().push(scratch);
}

impl DeviceScratch {
    fn new(owner: &Arc<CudaStream>, stream: &Arc<CudaStream>) -> Result<Self> {
        let context = stream.context();
        Ok(DeviceScratch {
            owner: owner.clone(),
            stream: stream.clone(),
            uploads: [
                TableUpload::new(context, WORDS)?,
                TableUpload::new(context, WORDS)?,
            ],
            upload_index: 0,
            tables: stream.alloc_zeros(WORDS).w()?,
            results: stream.alloc_zeros(WORDS).w()?,
            result_count: 0,
            last_use: context.new_event(None).w()?,
        })
    }

    /// Whether anything but unused memory holds the device of this memory.
    fn has_device(&self, unused: &[DeviceScratch]) -> bool {
        // If the device was made with a stream of its own, `owner` and `stream` are that stream, and
        // `tables` and `results` hold it, too.
        let handles = |scratch: &DeviceScratch| {
            if Arc::ptr_eq(&scratch.owner, &scratch.stream) {
                4
            } else {
                1
            }
        };
        let unused_handles = unused
            .iter()
            .filter(|other| Arc::ptr_eq(&other.owner, &self.owner))
            .map(handles)
            .sum();
        Arc::strong_count(&self.owner) > unused_handles
    }

    /// Enqueues the launches, which have `result_count` results together.
    ///
    /// # Safety
    /// The rows must fit the functions, and what is at their addresses must stay until the stream has run the
    /// launches.
    pub(super) unsafe fn launch(
        &mut self,
        launches: &[Launch<CudaFunction>],
        result_count: usize,
    ) -> Result<()> {
        // SAFETY: `Cuda::launch`, the only caller, gives the reasons why the rows fit and why what is at
        // their addresses stays.
        let result = unsafe { self.enqueue(launches, result_count) };
        // `last_use` is recorded also after an error, because some launches may have been enqueued.
        self.last_use.record(&self.stream).w()?;
        // `Device::synchronize` waits for candle's stream of the thread alone, so candle's stream has to wait
        // for the launches.
        if !Arc::ptr_eq(&self.owner, &self.stream) {
            self.owner.wait(&self.last_use).w()?;
        }
        result
    }

    /// Waits for the results of this call, if there are any, and returns them.
    pub(super) fn read_results(&mut self) -> Result<Vec<f64>> {
        let mut results = vec![0.0; self.result_count];
        if !results.is_empty() {
            self.stream
                .memcpy_dtoh(&self.results.slice(..results.len()), &mut results)
                .w()?;
            self.last_use.record(&self.stream).w()?;
            self.stream.synchronize().w()?;
        }
        Ok(results)
    }

    /// Uploads all tables at once, and enqueues the launches.
    ///
    /// # Safety
    /// As for [`DeviceScratch::launch`].
    unsafe fn enqueue(&mut self, launches: &[Launch<CudaFunction>], result_count: usize) -> Result<()> {
        let words = launches
            .iter()
            .map(|launch| launch.rows.len() + launch.block_offsets.len().div_ceil(2))
            .sum();
        if words > self.tables.len() {
            self.tables = larger(words, &self.stream)?;
        }
        if result_count > self.results.len() {
            self.results = larger(result_count, &self.stream)?;
        }
        self.result_count = result_count;
        let upload = &mut self.uploads[self.upload_index];
        let table_starts = upload.write(launches, words)?;
        upload.send(words, &mut self.tables, &self.stream)?;

        let (results, _recorded_on_drop) = self.results.device_ptr_mut(&self.stream);
        let (tables, _recorded_on_drop) = self.tables.device_ptr(&self.stream);
        for (launch, (first_row, first_offset)) in launches.iter().zip(table_starts) {
            let (rows, offsets) = (tables + first_row * 8, tables + first_offset * 8);
            let leaves = launch.block_offsets.len();
            let results = launch.first_result.map(|first| results + first as u64 * 8);
            debug_assert!(launch.block_offsets.iter().all(|first| *first < launch.blocks));
            debug_assert!(launch.rows.len().is_multiple_of(leaves.max(1)));
            let leaves = leaves as u32;
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
            // SAFETY: the arguments are those of the printed functions. `TableUpload::write` has written rows
            // and offsets to the tables, and the results have room for each block. The caller promises the
            // rest.
            unsafe { arguments.launch(shape) }.w()?;
        }
        Ok(())
    }
}

impl Drop for DeviceScratch {
    fn drop(&mut self) {
        // `tables` and `results` are freed in the order of their stream, perhaps before a stream of the
        // device's own has finished with them, so the drop waits. An old error of the context is cleared
        // first, because `synchronize` would return that error instead of waiting. A failure of either call
        // is ignored, because nothing depends on it.
        let _ = self.stream.context().check_err();
        let _ = self.last_use.synchronize();
    }
}

impl TableUpload {
    fn new(context: &Arc<CudaContext>, words: usize) -> Result<Self> {
        let last_read = context.new_event(None).w()?;
        // SAFETY: the memory is filled below, before anything reads it.
        let mut memory = unsafe { context.alloc_pinned(words) }.w()?;
        let start: *mut u64 = memory.as_mut_ptr().w()?;
        // SAFETY: `words` words have just been allocated.
        unsafe { start.write_bytes(0, words) };
        Ok(TableUpload { memory, last_read })
    }

    /// Writes the tables of all launches: for each launch its rows, then the offsets of its blocks. Returns
    /// where rows and offsets begin, in words.
    fn write(&mut self, launches: &[Launch<CudaFunction>], words: usize) -> Result<Vec<(u64, u64)>> {
        self.last_read.synchronize().w()?;
        if words > self.memory.len() {
            let context = self.memory.context().clone();
            *self = TableUpload::new(&context, words.next_power_of_two())?;
        }
        let mut rest = self.memory.as_mut_slice().w()?;
        let mut table_starts = Vec::with_capacity(launches.len());
        let mut begin = 0;
        for Launch {
            rows, block_offsets, ..
        } in launches
        {
            let (row_words, after) = std::mem::take(&mut rest).split_at_mut(rows.len());
            row_words.copy_from_slice(rows);
            let (offset_words, after) = after.split_at_mut(block_offsets.len().div_ceil(2));
            for (word, pair) in offset_words.iter_mut().zip(block_offsets.chunks(2)) {
                *word = u64::from(pair[0]) | pair.get(1).map_or(0, |&high| u64::from(high) << 32);
            }
            table_starts.push((begin as u64, (begin + rows.len()) as u64));
            begin += rows.len() + offset_words.len();
            rest = after;
        }
        Ok(table_starts)
    }

    /// Enqueues the copy of the first `words` words. The next `write` waits until the copy is done.
    fn send(&mut self, words: usize, to: &mut CudaSlice<u64>, stream: &Arc<CudaStream>) -> Result<()> {
        let from = &self.memory.as_slice().w()?[..words];
        stream.memcpy_htod(from, to).w()?;
        self.last_read.record(stream).w()
    }
}

/// Memory for at least `length` values.
fn larger<T: DeviceRepr + ValidAsZeroBits>(length: usize, stream: &Arc<CudaStream>) -> Result<CudaSlice<T>> {
    stream.alloc_zeros(length.next_power_of_two()).w()
}
