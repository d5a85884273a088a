//! The crate's integration tests, one binary.

mod adjusting;
mod averages;
mod bad_input;
mod common;
mod concurrency;
#[cfg(feature = "config")]
mod configuring;
mod drop_in;
mod engines;
mod functional;
mod goldens;
mod laws;
mod living;
mod masters;
#[cfg(feature = "config")]
mod misconfigured;
mod misplaced;
mod models;
mod narrow;
mod readme;
mod scaling;
mod schedules;
mod structure;
mod traps;
mod trees;
mod views;
