//! States that a rule did not make: it cannot go on from them, and the gradient as it is would be a step of another size.

use super::{Adjust, OwnCounters};
use crate::error::{Error, Result};

/// The error for a state of another layout than `rule` gives it.
pub(crate) fn foreign<T>(rule: &(impl Adjust + ?Sized)) -> Result<T> {
    Err(Error::ForeignState { rule: rule.name() })
}

/// The counters of a rule that counts its steps in the first.
pub(crate) fn counting<'a>(rule: &(impl Adjust + ?Sized), counters: OwnCounters<'a>) -> Result<OwnCounters<'a>> {
    if counters.is_empty() { foreign(rule) } else { Ok(counters) }
}
