//! The crate's integration tests, one binary.

mod addressing;
mod adjusting;

mod auditing;
mod autocast;
mod averages;
mod bad_input;
mod batch_norm;
mod bytes;
mod checkpoint_errors;
mod checkpoint_files;
mod checkpoints;
mod clip_norm;
mod collected;
mod common;
#[cfg(all(feature = "cuda", feature = "emulate"))]
mod compiled;
mod concurrency;
#[cfg(feature = "config")]
mod configuring;
mod converting;
mod crafting;
mod cut_gradients;
mod cuts;
#[cfg(feature = "emulate")]
mod dependent_norms;
mod drop_in;
mod empty_batches;
#[cfg(feature = "emulate")]
mod emulated;
mod engines;
mod functional;
mod goldens;
mod gradient_lists;
mod hostile_files;
mod late_functions;
mod laws;
mod living;
mod masters;
#[cfg(feature = "config")]
mod misconfigured;
mod misplaced;
mod missing_gradients;
mod models;
mod narrow;
mod new_weights;
mod offload;
mod old_files;
mod panics;
mod precision;
mod precision_training;
mod precision_traps;
mod prelude;
mod random_models;
mod readme;
mod recurrences;
mod running_statistics;
mod scaling;
mod schedulers;
mod schedules;
mod shared_scaler;
mod soundness;
mod stillness;
mod structure;
mod tied;
mod traps;
mod trees;
mod views;
mod weights;
mod windows;
