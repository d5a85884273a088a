//! candle's errors among this crate's, and the other way round.

use super::{Error, ErrorKind, Facts};

impl From<candle_core::Error> for Error {
    fn from(error: candle_core::Error) -> Self {
        Error::new(ErrorKind::Candle, "").caused_by(error)
    }
}

/// candle's own errors come out as they went in.
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
