//! States that a rule did not make: it cannot go on from them, and the gradient as it is would be a step of another size.

use super::Adjust;
use crate::error::{Result, StateError};

/// The error for a state of another layout than `rule` gives it.
pub(crate) fn foreign<T>(rule: &(impl Adjust + ?Sized)) -> Result<T> {
    Err(StateError::Foreign { rule: rule.name() }.into())
}
