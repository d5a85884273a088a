//! Counts of calls and steps, and their limit.
//!
//! A program or a file may set a count, and a step raises it. All three stay within [`MOST`], because a
//! checkpoint has to restore what was saved, and the sum of two counts must not overflow.

use crate::error::{Error, ErrorKind, Result};

/// The largest count. No program makes that many calls.
const MOST: u64 = u64::MAX / 2;

/// What is expected of a count that is too large; `None` for others.
pub(crate) fn too_large(count: u64) -> Option<&'static str> {
    (count > MOST).then_some("a number of calls that can be made")
}

/// Refuses a count that is too large.
pub(crate) fn check(problem: impl Into<String>, count: u64) -> Result<()> {
    let unfit = |expected| {
        Err(Error::new(ErrorKind::Argument, problem.into()).with_got(count).with_expected(expected))
    };
    too_large(count).map_or(Ok(()), unfit)
}

/// A count after `more` calls or steps. At the limit it stays, which no program can reach by calls.
pub(crate) fn after(count: u64, more: u64) -> u64 {
    count.saturating_add(more).min(MOST)
}
