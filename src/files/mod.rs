//! Files: weights, checkpoints, torch's optimiser states, configurations.

pub(crate) mod checkpoint;
#[cfg(feature = "config")]
pub mod config;
mod tensor_file;
#[cfg(feature = "torch")]
pub mod torch;
pub(crate) mod weights;
