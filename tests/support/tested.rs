//! The result of a test, so that `?` stands in a test where `expect` would.

use std::fmt;
use std::panic::Location;

/// What a test returns.
pub type Tested<T = ()> = Result<T, Failure>;

/// Any error, with the place of the `?` that returned it.
pub struct Failure(String);

impl<E: fmt::Display> From<E> for Failure {
    #[track_caller]
    fn from(error: E) -> Self {
        Failure(format!("{}: {error}", Location::caller()))
    }
}

/// The test harness prints a failure by `Debug`.
impl fmt::Debug for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}
