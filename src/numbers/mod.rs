//! Numbers: in which dtypes, in how few bits, and random ones. For one element or a block of them, without tensors.

pub(crate) mod codes;
mod dtypes;
mod random;
mod rounding;

pub(crate) use codes::Code;
pub(crate) use dtypes::{compute_dtype, is_supported, is_wider};
pub(crate) use random::{gaussian, key_at, random_bits, random_key};
pub(crate) use rounding::{LowBits, round_to_odd, stochastic_bf16, stochastic_f16};
