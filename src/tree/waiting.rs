//! The calls in which a leaf had no gradient, and whether that is allowed.

use crate::engine::{CounterWrites, Progress};
use crate::numbers::counts;

/// A leaf's calls without a gradient.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Waiting {
    /// Calls since the last gradient.
    pub(crate) calls: u64,
    /// 1 once a gradient went into an accumulator. A leaf with steps has had a gradient even if this is 0.
    pub(crate) received: u64,
    /// Whether the leaf may lack a gradient under `require_all`.
    pub(crate) is_allowed: bool,
}

impl Waiting {
    /// Counts a call when it is committed. A leaf with a gradient in every call writes no counter, because
    /// that would cost time with thousands of leaves.
    pub(crate) fn count<'a>(
        &'a mut self,
        has_gradient: bool,
        progress: Progress,
        counters: &mut CounterWrites<'a>,
    ) {
        let Waiting { calls, received, .. } = self;
        if !has_gradient {
            let next = counts::after(*calls, 1);
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
