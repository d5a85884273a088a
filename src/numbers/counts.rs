//! Counts of calls and steps, and their limit.
//!
//! A program or a file may set a count, and a step raises it. All three stay within [`MOST`], because a
//! checkpoint has to restore what was saved, and the sum of two counts must not overflow.

/// The largest count. No program makes that many calls.
const MOST: u64 = u64::MAX / 2;

/// What is expected of a count that is too large; `None` for others.
pub(crate) fn too_large(count: u64) -> Option<&'static str> {
    (count > MOST).then_some("a number of calls that can be made")
}

/// A count after `more` calls or steps. At the limit it stays, which no program can reach by calls.
pub(crate) fn after(count: u64, more: u64) -> u64 {
    count.saturating_add(more).min(MOST)
}
