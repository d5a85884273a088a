//! Ranks, and states that are divided among them.

mod broadcast;
mod device_ranks;
pub(crate) mod divided;
mod divided_checkpoint_errors;
mod divided_checkpoints;
mod divided_edits;
mod divided_errors;
mod divided_faults;
mod local_ranks;
#[cfg(feature = "nccl")]
mod nccl;
mod stages;
