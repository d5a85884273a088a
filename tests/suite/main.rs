//! The crate's integration tests, one binary.

mod adjusting;
#[cfg(feature = "emulate")]
mod asked_ahead;
mod autocast;
mod averages;
mod bad_input;
mod batch_norm;
mod bytes;
mod checkpoint_errors;
mod checkpoint_files;
mod checkpoints;
mod common;
#[cfg(all(feature = "cuda", feature = "emulate"))]
mod compiled;
mod concurrency;
#[cfg(feature = "config")]
mod configuring;
mod converting;
mod crafting;
mod drop_in;
#[cfg(feature = "emulate")]
mod emulated;
mod engines;
mod functional;
mod goldens;
mod hostile_files;
mod laws;
mod living;
mod masters;
#[cfg(feature = "config")]
mod misconfigured;
mod misplaced;
mod models;
mod narrow;
mod new_weights;
mod offload;
mod precision;
mod precision_training;
mod precision_traps;
mod readme;
mod recurrences;
mod running_statistics;
mod scaling;
mod schedules;
mod structure;
mod traps;
mod trees;
mod views;
mod weights;
