//! States that a rule did not make: it cannot go on from them, and the gradient as it is would be a step of another size.

use super::Adjust;
use crate::error::{Error, ErrorKind, Result};

/// The error for a state of another layout than `rule` gives it.
pub(crate) fn foreign<T>(rule: &(impl Adjust + ?Sized)) -> Result<T> {
    Err(Error::new(ErrorKind::Contract, format!("the state is not one that {} made", rule.name()))
        .with_remedy("keep the state that each rule's `init` made, also that of a rule which is held"))
}
