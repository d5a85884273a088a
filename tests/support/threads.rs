//! Ranks that are threads of a test.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::channel;
use std::time::Duration;

use optimisers::{CommunicationError, Communicator, LocalRank, ranks};

/// What the ranks return, each in a thread of its own, in order; `None` for one that panicked. Fails instead
/// of hanging.
pub fn together<T: Send + 'static>(
    ranks: Vec<LocalRank>,
    work: impl Fn(LocalRank) -> T + Clone + Send + 'static,
) -> Vec<Option<T>> {
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

/// A rank that fails at one of its words.
#[derive(Clone, Debug)]
pub struct Leaving {
    rank: LocalRank,
    /// How many words it still says.
    left: Arc<AtomicUsize>,
    failure: Failure,
}

/// How a rank fails.
#[derive(Clone, Copy, Debug)]
pub enum Failure {
    /// With an error in place of a word.
    Before,
    /// With an error after a word, which the others have heard.
    After,
    /// With a panic in place of a word.
    Panic,
    /// Not at all: after a word this happens in a folder, and the rank goes on.
    Then(fn(&Path), &'static Path),
}

impl Leaving {
    pub fn new(rank: LocalRank, words: usize, failure: Failure) -> Self {
        Leaving {
            rank,
            left: Arc::new(AtomicUsize::new(words)),
            failure,
        }
    }

    /// Says so many more words.
    pub fn say(&self, words: usize) {
        self.left.store(words, Ordering::Relaxed);
    }

    /// Says a word, or leaves.
    fn word(&self, word: impl FnOnce() -> Result<(), CommunicationError>) -> Result<(), CommunicationError> {
        let left = self
            .left
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, |left| left.checked_sub(1));
        if left.is_ok() {
            return word();
        }
        match self.failure {
            Failure::Before => {}
            Failure::After => word()?,
            Failure::Panic => panic!("this rank leaves"),
            Failure::Then(happens, folder) => {
                self.say(usize::MAX);
                word()?;
                happens(folder);
                return Ok(());
            }
        }
        Err(CommunicationError::Other {
            reason: "this rank leaves".to_string(),
        })
    }
}

impl Communicator for Leaving {
    fn rank(&self) -> usize {
        self.rank.rank()
    }

    fn size(&self) -> usize {
        self.rank.size()
    }

    fn exchange(&self, to: &[Vec<&[u8]>], from: &mut [Vec<&mut [u8]>]) -> Result<(), CommunicationError> {
        self.word(|| self.rank.exchange(to, from))
    }

    fn gather(&self, own: &[&[u8]], from: &mut [Vec<&mut [u8]>]) -> Result<(), CommunicationError> {
        self.word(|| self.rank.gather(own, from))
    }
}

/// What each of so many ranks returns, in their order.
pub fn on<T: Send + 'static>(size: usize, work: impl Fn(LocalRank) -> T + Send + Sync + 'static) -> Vec<T> {
    let work = Arc::new(work);
    together(ranks(size), move |own| work(own))
        .into_iter()
        .map(|result| result.expect("no panic"))
        .collect()
}
