//! The state of a whole model, and what changes it.

mod averages;
pub(crate) mod edits;
mod entries;
mod new_weights;
pub(crate) mod rows;
mod rows_errors;
mod state_bytes;
mod tied_variables;
mod whole_models;
