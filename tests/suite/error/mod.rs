//! Errors and warnings.

mod texts;
mod warnings;
