//! Numbers in few bits, and random ones: for one element or a block of them, without tensors.

pub(crate) mod codes;
mod random;
mod rounding;

pub(crate) use codes::Code;
pub(crate) use random::{gaussian, key_at, random_bits, random_key};
pub(crate) use rounding::{join, round_to_odd, split, stochastic_bf16, stochastic_f16};
