//! The crate's integration tests, one binary. Its folders mirror the rooms of `src`.

mod engine;
mod error;
mod files;
mod model;
mod printed;
mod ranks;
mod rule;
mod rules;
mod step;
mod stores;
mod training;
mod tree;
mod whole;
mod wrappers;
