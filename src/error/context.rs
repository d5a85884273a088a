//! Where an error happened.

use std::path::Path;

use super::{CheckpointError, Error, MasterError, StorageError};
use crate::field::FieldValue;

impl Error {
    /// Wraps any error, for rules outside this crate.
    ///
    /// ```
    /// let error = optimisers::Error::other("the matrix is singular");
    /// assert_eq!(error.to_string(), "the matrix is singular");
    /// ```
    pub fn other(error: impl Into<Box<dyn std::error::Error + Send + Sync>>) -> Self {
        Error::Other(error.into())
    }

    /// The error that a number of a rule is outside of its range.
    pub(crate) fn out_of_range(rule: impl Into<String>, field: &str, value: impl Into<FieldValue>, expected: impl Into<String>) -> Self {
        Error::HyperParameter { rule: rule.into(), field: field.to_string(), value: value.into(), expected: expected.into() }
    }

    /// An error with a checkpoint file.
    pub(crate) fn checkpoint(file: &Path, source: CheckpointError) -> Self {
        Error::Checkpoint { file: file.to_path_buf(), source: Box::new(source) }
    }

    /// The same error with the parameter's path, if it has none yet.
    pub(crate) fn at(self, path: &str) -> Self {
        match self {
            Error::Master(MasterError::Stale { .. } | MasterError::StaleCopy { .. }) | Error::Parameter { .. } => self,
            error => Error::Parameter { path: path.to_string(), source: Box::new(error) },
        }
    }

    /// The error of a commit in which these leaves had moved before.
    pub(crate) fn after<'p>(mut self, moved: impl Iterator<Item = &'p str>) -> Self {
        let mut error = &mut self;
        while let Error::Parameter { source, .. } = error {
            error = source;
        }
        use StorageError::{Exchanged, Lent, NotLent, Owner};
        if let Error::Storage(
            Exchanged { moved: before, .. } | Lent { moved: before, .. } | NotLent { moved: before, .. } | Owner { moved: before, .. },
        ) = error
        {
            *before = moved.map(str::to_string).collect();
        }
        self
    }

    /// The error of a tensor, with what that is to the program.
    pub(crate) fn naming(mut self, name: &'static str) -> Self {
        use StorageError::{Exchanged, Lent, NotLent, OtherOrder, Owner, ReadOnly};
        if let Error::Storage(
            Exchanged { tensor, .. }
            | Lent { tensor, .. }
            | NotLent { tensor, .. }
            | Owner { tensor, .. }
            | OtherOrder { tensor }
            | ReadOnly { tensor },
        ) = &mut self
            && *tensor == "tensor"
        {
            *tensor = name;
        }
        self
    }

    /// The error of a part of a parameter, with the place of the element in the whole.
    pub(crate) fn counted_from(mut self, first: usize) -> Self {
        if let Error::Master(MasterError::Stale { index, .. } | MasterError::StaleCopy { index, .. }) = &mut self {
            *index += first;
        }
        self
    }
}
