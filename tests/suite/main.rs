//! The crate's integration tests, one binary.

mod accum_grad;
mod accum_grad_weights;
mod adjust;
mod adjust_members;
mod audit;
mod autocast;
mod averages;
mod bad_input;
mod batch_norm;
mod candle_optimizer;
mod checkpoint_errors;
mod checkpoint_files;
mod checkpoints;
mod clip_norm;
mod common;
mod compile_fail;
#[cfg(all(feature = "cuda", feature = "emulate"))]
mod compiled;
mod concurrency;
#[cfg(feature = "config")]
mod config;
#[cfg(feature = "config")]
mod config_errors;
mod crafted_checkpoints;
mod cut_gradients;
mod cuts;
mod damaged_checkpoints;
#[cfg(feature = "emulate")]
mod dependent_norms;
mod destructure;
mod empty_batches;
#[cfg(feature = "emulate")]
mod emulated;
mod engines;
mod goldens;
mod gradient_lists;
mod kahan;
mod late_functions;
mod laws;
mod loss_scaler;
mod loss_scaler_shared;
mod masters;
mod missing_gradients;
mod models;
mod new_weights;
mod offload;
mod offloaded_states;
mod old_checkpoints;
mod outside;
mod panicking_rules;
mod precision;
mod precision_training;
mod precision_traps;
mod prelude;
mod random_models;
mod readme;
mod recurrences;
mod regressions;
mod restore_converted;
mod running_statistics;
mod schedule;
mod scheduler;
mod soundness;
mod split_master;
mod state_bytes;
mod state_tree;
mod stochastic_rounding;
mod store_as;
mod structure;
mod tied_variables;
mod traps;
mod tree_edits;
mod twin;
mod updated;
mod weights;
mod zero_gradients;
