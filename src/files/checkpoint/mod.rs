//! A state tree, and the model with it, in one safetensors file.
//!
//! The file has an entry for each state tensor, named by the parameter's path and the tensor's name:
//! `encoder.0.weight/1.m` is the first moment of the second rule of a chain, `encoder.0.weight/master` a
//! master copy. A model that is saved along has its variables under their own paths, so `VarMap::load` and
//! other tools can read the model. Bytes of the program are entries too. Everything else (counters,
//! hyper-parameters) is JSON in the file's metadata, under the key `optimisers`. The page
//! `guide/checkpoints.md` has the format for users.

mod agreement;
mod defaults;
mod file;
pub(crate) mod layout;
mod pieces;
mod record;
mod replace;
mod restoration;
mod restore;
pub(crate) mod save;
mod saved_model;
mod saved_schedules;
mod saver;
pub(crate) mod write;

pub use defaults::{FieldDifference, Restored};
pub use file::CheckpointFile;
pub use save::Checkpoint;
pub use saver::{CheckpointSaver, NewestCheckpoint};
