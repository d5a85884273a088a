//! How long a leaf has been without a gradient, and whether it may be.

use crate::engine::CounterWrites;
use crate::rule::Progress;

/// A leaf's calls without a gradient.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Waiting {
    /// Since the last gradient.
    pub(crate) calls: u64,
    /// 1 once a gradient went into an accumulator. That of a leaf with steps shows in these.
    pub(crate) received: u64,
    /// Whether the leaf may be without one where all need one.
    pub(crate) is_allowed: bool,
}

impl Waiting {
    /// Counts a call when it is committed. A leaf that has its gradient in every call has nothing to count,
    /// as thousands of them cost time.
    pub(crate) fn count<'a>(&'a mut self, has_gradient: bool, progress: Progress, counters: &mut CounterWrites<'a>) {
        let Waiting { calls, received, .. } = self;
        if !has_gradient {
            let next = *calls + 1;
            return counters.push((calls, next));
        }
        if *calls > 0 {
            counters.push((calls, 0));
        }
        if progress == Progress::Accumulated && *received == 0 {
            counters.push((received, 1));
        }
    }
}
