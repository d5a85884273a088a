//! The threads that the fused CPU engine runs on.
//!
//! A pool of its own: a thread that waits while it holds a leaf's locks may pick up another task of its pool, and a task of the
//! user's (an evaluation of the same model, say) would wait for these locks for ever.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use rayon::prelude::*;
use rayon::{ThreadPool, ThreadPoolBuilder};

use crate::error::{Error, Result};

/// Runs `work` on as many threads as rayon's current pool has, one call at a time.
pub(super) fn run<R: Send>(work: impl FnOnce() -> R + Send) -> Result<R> {
    let pool = pool(rayon::current_num_threads())?;
    static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());
    let _turn = lock(&ONE_AT_A_TIME);
    Ok(pool.install(work))
}

/// Calls `make` on every item, on all threads if there are many; the first error in the order of the items is returned.
pub(crate) fn map_all<I: Send, R: Send>(items: Vec<I>, make: impl Fn(I) -> Result<R> + Send + Sync) -> Result<Vec<R>> {
    const MANY: usize = 256;
    if items.len() < MANY {
        return items.into_iter().map(make).collect();
    }
    let made: Vec<Result<R>> = run(|| items.into_par_iter().map(make).collect())?;
    made.into_iter().collect()
}

/// The engine's pool with that many threads, made on first use. Idle threads sleep.
fn pool(threads: usize) -> Result<Arc<ThreadPool>> {
    static POOLS: OnceLock<Mutex<HashMap<usize, Arc<ThreadPool>>>> = OnceLock::new();
    let mut pools = lock(POOLS.get_or_init(Mutex::default));
    if let Some(pool) = pools.get(&threads) {
        return Ok(pool.clone());
    }
    let pool =
        ThreadPoolBuilder::new().num_threads(threads).thread_name(|thread| format!("optimiser-{thread}")).build().map_err(Error::other)?;
    let pool = Arc::new(pool);
    pools.insert(threads, pool.clone());
    Ok(pool)
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
