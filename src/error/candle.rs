//! Conversions of candle's errors to this crate's, and back.

use super::{Error, ErrorKind, Facts};

impl From<candle_core::Error> for Error {
    fn from(error: candle_core::Error) -> Self {
        Error::new(ErrorKind::Other, "").caused_by(error)
    }
}

/// Returns candle's own error if no path and no file was added to it, so that a caller can match on it. Wraps
/// any other error.
impl From<Error> for candle_core::Error {
    fn from(mut error: Error) -> Self {
        let Facts { kind, path, file, cause, .. } = &mut *error.0;
        let is_bare = *kind == ErrorKind::Other && path.is_none() && file.is_none();
        match cause.take_if(|cause| is_bare && cause.is::<candle_core::Error>()).map(|own| own.downcast()) {
            Some(Ok(own)) => *own,
            _ => candle_core::Error::wrap(error),
        }
    }
}
