//! Ranks that are threads of a test.

use std::sync::Arc;
use std::sync::mpsc::channel;
use std::time::Duration;

use optimisers::{Communicator, LocalRank, ranks};

/// What the ranks return, each in a thread of its own, in order; `None` for one that panicked. Fails instead of hanging.
pub fn together<T: Send + 'static>(ranks: Vec<LocalRank>, work: impl Fn(LocalRank) -> T + Clone + Send + 'static) -> Vec<Option<T>> {
    let size = ranks.len();
    let (done, finished) = channel();
    for own in ranks {
        let (done, work, rank) = (done.clone(), work.clone(), own.rank());
        std::thread::spawn(move || {
            let result = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| work(own)));
            done.send((rank, result.ok())).expect("somebody waits");
        });
    }
    let next = |_| finished.recv_timeout(Duration::from_secs(100)).expect("deadlock");
    let mut results: Vec<_> = (0..size).map(next).collect();
    results.sort_by_key(|(rank, _)| *rank);
    results.into_iter().map(|(_, result)| result).collect()
}

/// What each of so many ranks returns, in their order.
pub fn on<T: Send + 'static>(size: usize, work: impl Fn(LocalRank) -> T + Send + Sync + 'static) -> Vec<T> {
    let work = Arc::new(work);
    together(ranks(size), move |own| work(own)).into_iter().map(|result| result.expect("no panic")).collect()
}
