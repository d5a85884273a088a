//! Counts of calls and steps, and their limit.
//!
//! A program or a file may set a count, and a step raises it. A count never exceeds [`MOST`], because a
//! checkpoint must be able to restore each count that it saved, and the sum of two counts must not overflow.

use crate::error::{Error, ErrorKind, Result};

/// The largest count. No program can make that many calls.
const MOST: u64 = u64::MAX / 2;

/// For a count that is too large, the expectation that an error names; `None` for other counts.
pub(crate) fn too_large(count: u64) -> Option<&'static str> {
    (count > MOST).then_some("a number of calls that can be made")
}

/// Refuses a count that is too large.
pub(crate) fn check(problem: impl Into<String>, count: u64) -> Result<()> {
    let refuse = |expected| {
        Err(Error::new(ErrorKind::Argument, problem.into())
            .with_got(count)
            .with_expected(expected))
    };
    too_large(count).map_or(Ok(()), refuse)
}

/// A count after `more` calls or steps, at most [`MOST`].
pub(crate) fn add(count: u64, more: u64) -> u64 {
    count.saturating_add(more).min(MOST)
}
