//! Conversions of candle's errors to this crate's, and back.

use super::{Error, ErrorKind, Facts};

impl From<candle_core::Error> for Error {
    fn from(error: candle_core::Error) -> Self {
        // candle passes on only the text of CUDA's error.
        let text = error.to_string();
        let is_out_of_memory = ["OUT_OF_MEMORY", "ALLOC_FAILED"]
            .iter()
            .any(|code| text.contains(code));
        let wrapper = if is_out_of_memory {
            Error::out_of_memory()
        } else {
            Error::new(ErrorKind::Other, "")
        };
        wrapper.caused_by(error)
    }
}

/// Returns candle's own error, so that a caller can match on it, unless a path or a file was added. Wraps any
/// other error.
impl From<Error> for candle_core::Error {
    fn from(mut error: Error) -> Self {
        let Facts {
            kind,
            path,
            file,
            cause,
            ..
        } = &mut *error.0;
        let is_of_candle = matches!(kind, ErrorKind::Other | ErrorKind::OutOfMemory);
        let is_bare = is_of_candle && path.is_none() && file.is_none();
        match cause
            .take_if(|cause| is_bare && cause.is::<candle_core::Error>())
            .map(|cause| cause.downcast())
        {
            Some(Ok(candle_error)) => *candle_error,
            _ => candle_core::Error::wrap(error),
        }
    }
}
