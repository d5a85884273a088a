//! What several test programs need: models and gradients, ranks, examples as programs, files.

pub mod common;
pub mod crafted_checkpoints;
pub mod examples;
pub mod random_programs;
pub mod reports;
pub mod tested;
pub mod threads;
pub mod torch_runs;
