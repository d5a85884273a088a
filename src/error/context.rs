//! Where an error happened.

use std::path::Path;

use super::{CheckpointError, Error, MasterError};

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

    /// The error of a part of a parameter, with the place of the element in the whole.
    pub(crate) fn counted_from(mut self, first: usize) -> Self {
        if let Error::Master(MasterError::Stale { index, .. } | MasterError::StaleCopy { index, .. }) = &mut self {
            *index += first;
        }
        self
    }
}
