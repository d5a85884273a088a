//! The threads of the fused CPU engine: many small items run in rows of neighbours ([`run_in_rows`]), and a
//! large leaf runs in chunks ([`for_each_chunk`]). `unsafe` is for work that borrows from its caller and is
//! lent to other threads.
//!
//! If the caller holds no lock of a storage itself, two rules prevent deadlocks of updates:
//!
//! 1. The engine has a pool of its own. candle holds read locks while it computes in rayon's global pool. If
//!    the engine ran there, all threads could wait for these locks, and none would be left to compute.
//! 2. A thread that holds a leaf's locks never waits inside rayon, because there the thread would pick up
//!    other work, which may need locks in turn.
//!
//! So [`for_each_chunk`] is not a loop of rayon:
//!
//! ```text
//! offer the chunks to the other threads of the pool (spawn)
//! while a chunk is unclaimed:  claim some neighbours, run them, count them as finished
//! yield until the other threads have finished their chunks
//! ```
//!
//! In a row, items i + 1 to i + 3 are prepared right before item i runs: the nearest item has its last stage,
//! the farthest its first. So each stage finds in the cache the data that the stage before has fetched.
#![allow(unsafe_code)]

use std::any::Any;
use std::collections::HashMap;
use std::error::Error as _;
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use rayon::prelude::*;
use rayon::{ThreadPool, ThreadPoolBuildError, ThreadPoolBuilder};

use crate::error::{Error, Result};

/// Runs `work` in the engine's pool, which has as many threads as rayon's current pool. If the target has no
/// threads, as WebAssembly, runs `work` on the caller's thread.
pub(super) fn run<R: Send>(work: impl FnOnce() -> R + Send) -> Result<R> {
    match pool(rayon::current_num_threads()) {
        Ok(pool) => Ok(pool.install(work)),
        Err(error) if is_without_threads(&error) => Ok(work()),
        Err(error) => Err(Error::other(error)),
    }
}

fn is_without_threads(error: &ThreadPoolBuildError) -> bool {
    let cause = error.source().and_then(|cause| cause.downcast_ref::<io::Error>());
    cause.is_some_and(|cause| cause.kind() == io::ErrorKind::Unsupported)
}

/// Calls `run_chunk` with each index below `count`, on the current pool's threads.
///
/// # Panics
/// If `run_chunk` panics, on any thread.
pub(super) fn for_each_chunk(count: usize, run_chunk: &(dyn Fn(usize) + Sync)) {
    // SAFETY: only the lifetime changes. `Chunks::work` calls the function only between claiming a chunk and
    // finishing it, and this function returns, or unwinds, only after all chunks are finished and none is
    // left to claim.
    let run_chunk: &'static (dyn Fn(usize) + Sync) = unsafe { std::mem::transmute(run_chunk) };
    let threads = rayon::current_num_threads().min(count);
    let chunks = Arc::new(Chunks {
        run_chunk,
        count,
        claim_length: (count / (8 * threads.max(1))).max(1),
        next_chunk: AtomicUsize::new(0),
        finished_count: AtomicUsize::new(0),
        panic: Mutex::default(),
    });
    for _ in 1..threads {
        let chunks = chunks.clone();
        rayon::spawn(move || chunks.work());
    }
    chunks.work();
    // `Acquire` pairs with the `Release` in `work`, so that the caller sees what all chunks have written.
    while chunks.finished_count.load(Ordering::Acquire) < count {
        std::thread::yield_now();
    }
    let panic = lock(&chunks.panic).take();
    if let Some(panic) = panic {
        resume_unwind(panic);
    }
}

/// Chunks that several threads claim in turn.
struct Chunks {
    run_chunk: &'static (dyn Fn(usize) + Sync),
    count: usize,
    /// How many neighbouring chunks are claimed at once, because memory is fastest in long runs.
    claim_length: usize,
    /// The first chunk that nobody has claimed.
    next_chunk: AtomicUsize,
    finished_count: AtomicUsize,
    /// The first panic of a chunk.
    panic: Mutex<Option<Box<dyn Any + Send>>>,
}

impl Chunks {
    /// Works on chunks until none is left to claim. Does not unwind, because [`for_each_chunk`] rethrows the
    /// first panic on the thread of its caller.
    fn work(&self) {
        loop {
            let first = self.next_chunk.fetch_add(self.claim_length, Ordering::Relaxed);
            if first >= self.count {
                return;
            }
            let claim = first..self.count.min(first + self.claim_length);
            let length = claim.len();
            if let Err(panic) = catch_unwind(AssertUnwindSafe(|| claim.for_each(self.run_chunk))) {
                lock(&self.panic).get_or_insert(panic);
            }
            // Counted after a panic as well, because otherwise the caller would wait for ever.
            self.finished_count.fetch_add(length, Ordering::Release);
        }
    }
}

/// The engine's pool with this number of threads, made on first use. Idle threads sleep.
fn pool(threads: usize) -> std::result::Result<Arc<ThreadPool>, ThreadPoolBuildError> {
    static POOLS: OnceLock<Mutex<HashMap<usize, Arc<ThreadPool>>>> = OnceLock::new();
    let mut pools = lock(POOLS.get_or_init(Mutex::default));
    if let Some(pool) = pools.get(&threads) {
        return Ok(pool.clone());
    }
    let pool = ThreadPoolBuilder::new()
        .num_threads(threads)
        .thread_name(|thread| format!("optimiser-{thread}"))
        .build()?;
    let pool = Arc::new(pool);
    // Pools of other sizes are dropped if nobody uses them, because otherwise their threads would stay.
    pools.retain(|_, other| Arc::strong_count(other) > 1);
    pools.insert(threads, pool.clone());
    Ok(pool)
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// For each stage, how many items before its own run an item is prepared.
const DISTANCES: [usize; 3] = [3, 2, 1];

/// Calls `run` on every item, in rows of neighbours, and before that `prepare` in stages.
///
/// `prepare` fetches an item's memory into the cache, because a small item waits for memory longer than it
/// computes.
///
/// # Errors
/// The first error in the order of the items. A row ends with its first error; other rows go on.
pub(super) fn run_in_rows<I: Send>(
    items: &mut [I],
    row_length: usize,
    prepare: impl Fn(&I, usize) + Sync,
    run: impl Fn(&mut I) -> Result<()> + Sync,
) -> Result<()> {
    let rows: Vec<_> = items
        .par_chunks_mut(row_length)
        .map(|row| run_row(row, &prepare, &run))
        .collect();
    rows.into_iter().collect()
}

/// [`run_in_rows`] for one row.
fn run_row<I>(row: &mut [I], prepare: impl Fn(&I, usize), run: impl Fn(&mut I) -> Result<()>) -> Result<()> {
    // The first items are prepared here, because no item runs before them.
    for (stage, &distance) in DISTANCES.iter().enumerate() {
        row.iter().take(distance).for_each(|item| prepare(item, stage));
    }
    for index in 0..row.len() {
        for (stage, &distance) in DISTANCES.iter().enumerate() {
            row.get(index + distance)
                .into_iter()
                .for_each(|item| prepare(item, stage));
        }
        run(&mut row[index])?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::Error;
    use std::sync::Mutex;

    #[test]
    fn every_chunk_runs_once() {
        for count in [0, 1, 2, 1000] {
            let calls: Vec<AtomicUsize> = (0..count).map(|_| AtomicUsize::new(0)).collect();
            let call = |i: usize| {
                calls[i].fetch_add(1, Ordering::Relaxed);
            };
            run(|| for_each_chunk(count, &call)).expect("a pool");
            assert!(calls.iter().all(|calls| calls.load(Ordering::Relaxed) == 1));
        }
    }

    #[test]
    fn a_panic_reaches_the_caller() {
        let outcome = catch_unwind(|| run(|| for_each_chunk(100, &|i| assert_ne!(i, 57, "on purpose"))));
        let text = outcome
            .expect_err("a panic")
            .downcast::<String>()
            .expect("a text");
        assert!(text.contains("on purpose"), "{text}");
    }

    #[test]
    fn every_item_is_prepared_in_order_and_runs_once() {
        for row_length in [1, 5, 7] {
            for count in [0, 1, 4, 5, 23] {
                let mut items: Vec<Mutex<Vec<usize>>> = (0..count).map(|_| Mutex::default()).collect();
                let note = |item: &Mutex<Vec<usize>>, stage| item.lock().expect("a lock").push(stage);
                run_in_rows(&mut items, row_length, note, |item| {
                    note(item, DISTANCES.len());
                    Ok(())
                })
                .expect("no error");
                assert!(
                    items
                        .iter()
                        .all(|item| item.lock().expect("a lock")[..] == [0, 1, 2, 3]),
                    "{items:?}"
                );
            }
        }
    }

    #[test]
    fn the_first_error_in_order_is_returned() {
        let mut items: Vec<usize> = (0..40).collect();
        let run = |item: &mut usize| {
            if [17, 19, 38].contains(item) {
                Err(Error::other(item.to_string()))
            } else {
                Ok(())
            }
        };
        let error = run_in_rows(&mut items, 5, |_, _| (), run).expect_err("an error");
        assert!(error.to_string().contains("17"), "{error}");
    }
}
