//! Places in a configuration, for errors.

use std::fmt;
use std::sync::Arc;

use crate::error::{Error, ErrorKind};

/// A path into a configuration, such as `[1].AdamW.beta`; empty for the whole. Places share their beginnings.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct Place(Option<Arc<PlaceEnd>>);

/// The last step of a path, and the path before it.
#[derive(Debug, PartialEq)]
struct PlaceEnd {
    before: Place,
    step: PlaceStep,
}

#[derive(Debug, PartialEq)]
enum PlaceStep {
    Key(Box<str>),
    Index(usize),
}

impl Place {
    fn then(&self, step: PlaceStep) -> Place {
        Place(Some(Arc::new(PlaceEnd { before: self.clone(), step })))
    }

    /// The place of a key in the table here.
    pub(super) fn key(&self, key: &str) -> Place {
        self.then(PlaceStep::Key(key.into()))
    }

    /// The place of a member of the list here.
    pub(super) fn index(&self, index: usize) -> Place {
        self.then(PlaceStep::Index(index))
    }

    /// The error with this place.
    pub(super) fn error(&self, error: Error) -> Error {
        error.in_place(&self.to_string())
    }

    /// The error that something else is here.
    pub(super) fn expected(&self, expected: impl fmt::Display, got: &impl fmt::Display) -> Error {
        self.error(Error::new(ErrorKind::Argument, "got").with_got(got).with_expected(expected))
    }

    /// The error that `name` belongs elsewhere, because of what it does.
    pub(super) fn misplaced(&self, name: &str, does: &str) -> Error {
        self.error(Error::new(ErrorKind::Argument, format!("{name} cannot stand here: it {does}")))
    }
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let steps = std::iter::successors(self.0.as_deref(), |last| last.before.0.as_deref());
        let steps: Vec<&PlaceStep> = steps.map(|last| &last.step).collect();
        for (i, step) in steps.into_iter().rev().enumerate() {
            match step {
                PlaceStep::Index(index) => write!(f, "[{index}]")?,
                PlaceStep::Key(key) if i == 0 => f.write_str(key)?,
                PlaceStep::Key(key) => write!(f, ".{key}")?,
            }
        }
        Ok(())
    }
}
