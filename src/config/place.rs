//! Where in a configuration something stands.

use super::data::Data;
use crate::error::{ConfigurationError, Error};

/// A path into a configuration, such as `[1].AdamW.beta`; empty for the whole.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct Place(String);

impl Place {
    /// The value of a key of the table here.
    pub(super) fn key(&self, key: &str) -> Place {
        Place(if self.0.is_empty() { key.to_string() } else { format!("{}.{key}", self.0) })
    }

    /// A member of the list here.
    pub(super) fn index(&self, index: usize) -> Place {
        Place(format!("{}[{index}]", self.0))
    }

    /// The error with this place.
    pub(super) fn error(&self, source: impl Into<ConfigurationError>) -> Error {
        Error::Configuration { place: self.0.clone(), source: Box::new(source.into()) }
    }

    /// That something else is here.
    pub(super) fn expected(&self, expected: impl Into<String>, got: &Data) -> Error {
        self.error(ConfigurationError::Value { expected: expected.into(), got: got.to_string() })
    }
}
