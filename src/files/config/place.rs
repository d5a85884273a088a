//! Places in a configuration, for errors.

use std::fmt;
use std::sync::Arc;

use crate::error::{Error, ErrorKind};

/// A path into a configuration, such as `[1].AdamW.beta`. Paths share their beginnings in memory.
#[derive(Clone)]
pub(super) enum Place {
    Whole,
    /// A key of the table at a place.
    Key(Arc<(Place, Box<str>)>),
    /// A member of the list at a place.
    Index(Arc<(Place, usize)>),
}

impl Place {
    /// The place of a key in the table here.
    pub(super) fn key(&self, key: &str) -> Place {
        Place::Key(Arc::new((self.clone(), key.into())))
    }

    /// The place of a member of the list here.
    pub(super) fn index(&self, index: usize) -> Place {
        Place::Index(Arc::new((self.clone(), index)))
    }

    /// Adds this place to an error.
    pub(super) fn error(&self, error: Error) -> Error {
        error.in_place(&self.to_string())
    }

    /// The error that something else than expected is here.
    pub(super) fn expected(&self, expected: impl fmt::Display, got: &impl fmt::Display) -> Error {
        self.error(Error::new(ErrorKind::Argument, "got").with_got(got).with_expected(expected))
    }

    /// The error that `name` cannot be here, because of what it `does`.
    pub(super) fn misplaced(&self, name: &str, does: &str) -> Error {
        self.error(Error::new(ErrorKind::Argument, format!("{name} cannot be here: it {does}")))
    }
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Place::Whole => Ok(()),
            Place::Index(last) => write!(f, "{}[{}]", last.0, last.1),
            Place::Key(last) if matches!(last.0, Place::Whole) => f.write_str(&last.1),
            Place::Key(last) => write!(f, "{}.{}", last.0, last.1),
        }
    }
}
