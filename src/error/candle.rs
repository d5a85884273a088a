//! Conversions of candle's errors to this crate's, and back.

use super::{Error, ErrorKind, Facts};

impl From<candle_core::Error> for Error {
    fn from(error: candle_core::Error) -> Self {
        Error::new(ErrorKind::Candle, "").caused_by(error)
    }
}

/// An error of candle's comes out as it went in.
impl From<Error> for candle_core::Error {
    fn from(mut error: Error) -> Self {
        if let Facts { kind: ErrorKind::Candle, path: None, file: None, cause, .. } = &mut *error.0
            && let Some(cause) = cause.take()
        {
            return match cause.downcast::<candle_core::Error>() {
                Ok(own) => *own,
                Err(other) => candle_core::Error::wrap(Error::new(ErrorKind::Candle, "").caused_by(other)),
            };
        }
        candle_core::Error::wrap(error)
    }
}
