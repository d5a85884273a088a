use super::Error;
use super::names::meant;
use super::shown::errors;

errors! {
/// What is wrong with a part of a configuration.
#[derive(thiserror::Error)]
#[non_exhaustive]
pub enum ConfigurationError {
    /// A configuration has something else where a certain thing belongs.
    #[error("expected {expected}, got {got}")]
    Value {
        /// What belongs there.
        expected: String,
        /// What is there, as JSON.
        got: String,
    },

    /// A configuration has a key that nothing reads.
    #[error("there is no key {key:?} here{}; there are: {}", meant(key, available), available.join(", "))]
    UnknownKey {
        /// The key.
        key: String,
        /// The keys that exist.
        available: Vec<String>,
    },

    /// A name that no rule has.
    #[error("no rule is called {name:?}{}; there are: {}", meant(name, available), available.join(", "))]
    UnknownRule {
        /// The name.
        name: String,
        /// The names that exist.
        available: Vec<String>,
    },

    /// A name that no schedule has.
    #[error("no schedule is called {name:?}{}; there are: {}", meant(name, available), available.join(", "))]
    UnknownSchedule {
        /// The name.
        name: String,
        /// The names that exist.
        available: Vec<String>,
    },

    /// A configuration has something that stands outermost, or needs a model, elsewhere.
    #[error("{name} cannot stand here: it {remedy}")]
    Misplaced {
        /// The name.
        name: String,
        /// Where it belongs.
        remedy: &'static str,
    },

    /// What the part says can be read, and is refused by the rule or the model that it is for.
    #[error(transparent)]
    Refused(Box<Error>),
}
}

impl From<Error> for ConfigurationError {
    fn from(error: Error) -> Self {
        ConfigurationError::Refused(Box::new(error))
    }
}
