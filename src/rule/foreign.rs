//! States that a rule did not make: it cannot go on from them, and the gradient as it is would be a step of another size.

use super::{Adjust, Counters};
use crate::error::{Result, StateError};

/// The error for a state of another layout than `rule` gives it.
pub(crate) fn foreign<T>(rule: &(impl Adjust + ?Sized)) -> Result<T> {
    Err(StateError::Foreign { rule: rule.name() }.into())
}

/// The counters of a rule that counts its steps in the first.
pub(crate) fn counting<'a>(rule: &(impl Adjust + ?Sized), counters: Counters<'a>) -> Result<Counters<'a>> {
    if counters.0.is_empty() { foreign(rule) } else { Ok(counters) }
}
