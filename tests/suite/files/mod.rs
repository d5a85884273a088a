//! Weights, checkpoints, configurations, files of torch.

mod checkpoint_bytes;
mod checkpoint_errors;
pub(crate) mod checkpoint_files;
mod checkpoint_saver;
pub(crate) mod checkpoints;
pub(crate) mod config;
mod config_errors;
mod config_recipes;
mod config_schedules;
pub(crate) mod config_written;
mod damaged_checkpoints;
mod extreme_numbers;
mod outside_values;
mod restore_converted;
mod restored_parts;
mod saved_extras;
mod saved_fields;
mod torch_errors;
pub(crate) mod torch_state;
mod weights;
