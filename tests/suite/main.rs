//! The crate's integration tests, one binary.

mod adjusting;
mod bad_input;
mod checkpoint_errors;
mod checkpoint_files;
mod checkpoints;
mod common;
mod concurrency;
mod converting;
mod crafting;
mod engines;
mod goldens;
mod hostile_files;
mod laws;
mod misplaced;
mod models;
mod readme;
mod structure;
mod traps;
mod trees;
