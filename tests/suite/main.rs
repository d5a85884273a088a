//! The crate's integration tests, one binary.

mod adjusting;
mod bad_input;
mod common;
mod concurrency;
mod engines;
mod functional;
mod goldens;
mod laws;
mod living;
mod misplaced;
mod models;
mod narrow;
mod readme;
mod scaling;
mod structure;
mod traps;
mod trees;
