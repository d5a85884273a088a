//! How a parameter is stored.

mod handed_over;
mod kahan;
mod masters;
pub(crate) mod offload;
mod offloaded_states;
mod precision_traps;
mod split_master;
mod stochastic_rounding;
