//! What a device keeps from one call to the next, and the launches that use it. `unsafe`: page-locked memory and launches.
#![allow(unsafe_code)]

use std::collections::HashMap;
use std::sync::{Arc, LazyLock, Mutex, MutexGuard, PoisonError};

use candle_core::Result;
use candle_core::cuda::cudarc::driver::{
    CudaContext, CudaEvent, CudaFunction, CudaSlice, CudaStream, DevicePtr, DevicePtrMut, DeviceRepr, LaunchConfig, PinnedHostSlice,
    PushKernelArg, ValidAsZeroBits,
};
use candle_core::cuda::{DeviceId, WrapErr};

use crate::engine::device::{Launch, THREADS};

/// How many words each memory has at first.
const WORDS: usize = 1 << 12;

/// The memories of a call: they grow to what the largest needs, and are then used again and again. They go when another device is first used
/// after their own has been dropped, or with the process.
pub(super) struct Scratch {
    stream: Arc<CudaStream>,
    /// One for each time that a call launches something. There are two sets, so that a call can be written while the device reads the last one's.
    uploads: [Vec<Upload>; 2],
    /// Which of the sets is this call's.
    turn: usize,
    /// How many of them this call has used.
    used_uploads: usize,
    tables: CudaSlice<u64>,
    results: CudaSlice<f64>,
    /// How many results there are in this call.
    count: usize,
    /// When the last call is done with the tables and the results. A stream of candle's is another one on each thread of the host, so that
    /// calls on the same device need not be in order.
    done: CudaEvent,
}

/// How many references to the stream a [`Scratch`] has, one in itself and one in each memory on the device.
const OWN: usize = 3;

/// Page-locked memory of the host.
struct Upload {
    memory: PinnedHostSlice<u64>,
    /// When the device has read it. cudarc has an event of its own for this, but only records it where there are several streams.
    read: CudaEvent,
}

/// The memories that no call uses, by device.
type Pool = HashMap<DeviceId, Vec<Scratch>>;

fn pool() -> MutexGuard<'static, Pool> {
    static POOL: LazyLock<Mutex<Pool>> = LazyLock::new(Mutex::default);
    POOL.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Memories for one call.
pub(super) fn take(device: DeviceId, stream: &Arc<CudaStream>) -> Result<Scratch> {
    let mut pool = pool();
    let (unused, gone): (_, Vec<_>) = match pool.get_mut(&device) {
        Some(unused) => (unused.pop(), Vec::new()),
        None => {
            let gone = pool.extract_if(|_, unused| !unused.iter().any(|scratch| scratch.has_device(unused))).collect();
            pool.insert(device, Vec::new());
            (None, gone)
        }
    };
    // Making and dropping memories takes long.
    drop(pool);
    drop(gone);
    unused.map_or_else(|| Scratch::new(stream), Ok)
}

/// Takes the memories of a call back.
pub(super) fn give_back(device: DeviceId, mut scratch: Scratch) {
    (scratch.turn, scratch.used_uploads, scratch.count) = (1 - scratch.turn, 0, 0);
    pool().entry(device).or_default().push(scratch);
}

impl Scratch {
    fn new(stream: &Arc<CudaStream>) -> Result<Self> {
        let context = stream.context();
        Ok(Scratch {
            stream: stream.clone(),
            uploads: [vec![Upload::new(context, WORDS)?], vec![Upload::new(context, WORDS)?]],
            turn: 0,
            used_uploads: 0,
            tables: stream.alloc_zeros(WORDS).w()?,
            results: stream.alloc_zeros(WORDS).w()?,
            count: 0,
            done: context.new_event(None).w()?,
        })
    }

    /// Whether anything else than these memories uses their device.
    fn has_device(&self, unused: &[Scratch]) -> bool {
        let own = unused.iter().filter(|other| Arc::ptr_eq(&other.stream, &self.stream)).count() * OWN;
        Arc::strong_count(&self.stream) > own
    }

    /// Enqueues the launches. With those before them in this call they find `results` numbers.
    ///
    /// # Safety
    /// The rows must fit the functions, what is at their addresses must stay until the stream has done this, and what they refer to must be
    /// results of earlier launches.
    pub(super) unsafe fn launch(&mut self, launches: &[Launch<CudaFunction>], results: usize) -> Result<()> {
        self.stream.wait(&self.done).w()?;
        // SAFETY: promised by the caller.
        let enqueued = unsafe { self.enqueue(launches, results) };
        self.done.record(&self.stream).w()?;
        enqueued
    }

    /// Waits for the results of this call, if there are any, and returns them.
    pub(super) fn found(&mut self) -> Result<Vec<f64>> {
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
    /// As for [`Scratch::launch`].
    unsafe fn enqueue(&mut self, launches: &[Launch<CudaFunction>], results: usize) -> Result<()> {
        let words = launches.iter().map(|launch| launch.rows.len() + launch.firsts.len().div_ceil(2)).sum();
        if words > self.tables.len() {
            self.tables = larger(words, &self.stream)?;
        }
        if results > self.results.len() {
            let mut memory = larger(results, &self.stream)?;
            if self.count > 0 {
                self.stream.memcpy_dtod(&self.results.slice(..self.count), &mut memory.slice_mut(..self.count)).w()?;
            }
            self.results = memory;
        }
        self.count = results;
        let uploads = &mut self.uploads[self.turn];
        if self.used_uploads == uploads.len() {
            uploads.push(Upload::new(self.stream.context(), words.next_power_of_two())?);
        }
        let upload = &mut uploads[self.used_uploads];
        self.used_uploads += 1;
        let (results, _noted_on_drop) = self.results.device_ptr_mut(&self.stream);
        let places = upload.write(launches, words, results)?;
        upload.send(words, &mut self.tables, &self.stream)?;

        let (tables, _noted_on_drop) = self.tables.device_ptr(&self.stream);
        for (launch, (rows, firsts)) in launches.iter().zip(places) {
            let (rows, firsts, leaves) = (tables + rows * 8, tables + firsts * 8, launch.leaves as u32);
            let results = launch.results.map(|first| results + first as u64 * 8);
            let mut arguments = self.stream.launch_builder(&launch.function);
            arguments.arg(&rows).arg(&firsts).arg(&leaves);
            if let Some(results) = &results {
                arguments.arg(results);
            }
            let shape = LaunchConfig { grid_dim: (launch.blocks, 1, 1), block_dim: (THREADS as u32, 1, 1), shared_mem_bytes: 0 };
            // SAFETY: the arguments are those of the printed functions, the tables hold the rows and the numbers of the first blocks, the
            // results have a place for each block, references are to results of launches before this one, and the rest is promised by the
            // caller.
            unsafe { arguments.launch(shape) }.w()?;
        }
        Ok(())
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        // A thread's stream frees the memories, maybe before other threads' streams are done with them. An old error of the context would be
        // returned in place of waiting; whether this fails does not matter.
        let _ = self.stream.context().check_err();
        let _ = self.done.synchronize();
    }
}

impl Upload {
    fn new(context: &Arc<CudaContext>, words: usize) -> Result<Self> {
        let read = context.new_event(None).w()?;
        // SAFETY: it is filled before anybody reads it.
        let mut memory = unsafe { context.alloc_pinned(words) }.w()?;
        let start: *mut u64 = memory.as_mut_ptr().w()?;
        // SAFETY: that many words have just been allocated.
        unsafe { start.write_bytes(0, words) };
        Ok(Upload { memory, read })
    }

    /// Writes the tables of all launches, the rows of each before the numbers of its first blocks, with the addresses of what they refer to
    /// among the results. What is returned is where each begins, in words.
    fn write(&mut self, launches: &[Launch<CudaFunction>], words: usize, results: u64) -> Result<Vec<(u64, u64)>> {
        self.read.synchronize().w()?;
        if words > self.memory.len() {
            let context = self.memory.context().clone();
            *self = Upload::new(&context, words.next_power_of_two())?;
        }
        let mut rest = self.memory.as_mut_slice().w()?;
        let mut places = Vec::with_capacity(launches.len());
        let mut begin = 0;
        for Launch { rows, references, firsts, .. } in launches {
            let (here, after) = std::mem::take(&mut rest).split_at_mut(rows.len());
            here.copy_from_slice(rows);
            references.iter().for_each(|&word| here[word] = results + here[word] * size_of::<f64>() as u64);
            let (here, after) = after.split_at_mut(firsts.len().div_ceil(2));
            for (word, pair) in here.iter_mut().zip(firsts.chunks(2)) {
                *word = u64::from(pair[0]) | pair.get(1).map_or(0, |&high| u64::from(high) << 32);
            }
            places.push((begin as u64, (begin + rows.len()) as u64));
            begin += rows.len() + here.len();
            rest = after;
        }
        Ok(places)
    }

    /// Enqueues the copy of the first words. They are not written before it is done.
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
