//! The crate's integration tests, one binary.

mod accum_grad;
mod accum_grad_pairwise;
mod accum_grad_weights;
mod adjust;
mod adjust_members;
mod audit;
mod autocast;
mod averages;
mod bad_input;
mod batch_norm;
mod blame;
mod broadcast;
mod candle_optimizer;
mod checkpoint_bytes;
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
#[cfg(feature = "config")]
mod config_recipes;
#[cfg(feature = "config")]
mod config_schedules;
#[cfg(feature = "config")]
mod config_written;
mod crafted_checkpoints;
mod cut_gradients;
mod cuts;
mod damaged_checkpoints;
#[cfg(feature = "emulate")]
mod dependent_norms;
mod described_states;
mod destructure;
mod device_worlds;
mod divided;
mod divided_checkpoint_errors;
mod divided_checkpoints;
mod divided_edits;
mod divided_errors;
mod driven_fields;
mod eight_bits;
mod empty_batches;
#[cfg(feature = "emulate")]
mod emulated;
mod engines;
#[cfg(feature = "config")]
mod every_model;
mod exchanged_storages;
mod figures;
mod functional;
mod fused_cuts;
mod goldens;
mod gradient_lists;
mod infinite_squares;
mod kahan;
mod late_functions;
mod laws;
mod learning_rates;
mod lenders;
mod letters;
mod locks;
mod loss_scaler;
mod loss_scaler_shared;
mod masters;
mod matrices;
mod micro_batches;
mod missing_gradients;
mod models;
mod modern;
#[cfg(feature = "nccl")]
mod nccl;
mod new_weights;
mod offload;
mod offloaded_states;
mod orders;
mod outliers;
mod outside;
mod panicking_rules;
mod parameters_come_back;
mod plateau;
mod precision;
mod precision_training;
mod precision_traps;
mod preconditioned;
mod prelude;
#[cfg(feature = "emulate")]
mod printed_kernels;
mod random_models;
mod readme;
mod recurrences;
mod regressions;
mod restore_converted;
mod rows;
mod rows_errors;
mod said;
mod sam;
mod saved_fields;
mod schedule;
mod scheduler;
mod slices;
mod soundness;
mod split_master;
mod stages;
mod state_bytes;
mod state_tree;
mod stochastic_rounding;
mod store_as;
mod structure;
mod texts;
mod threads;
mod tied_variables;
mod torch_errors;
mod torch_state;
mod traps;
mod tree_edits;
mod twin;
mod warnings;
mod weights;
mod worlds;
mod wrapper_faults;
mod wrappers;
mod zero_gradients;
