//! Where numbers are kept: state tensors, their bytes, roundings between dtypes, and what of it is shared with the program.

mod buffer;
mod bytes;
mod consistency;
mod rounding;
mod split;
mod values;
mod variables;

pub(crate) use buffer::Buffer;
pub(in crate::engine) use buffer::Memory;
pub(crate) use bytes::write_tensor;
pub(crate) use consistency::{Difference, Extent, copy_difference, difference, is_wider};
pub(crate) use rounding::{gaussian, random_key};
pub(in crate::engine) use rounding::{join, key_at, random_bits, round_to_odd, split, stochastic_bf16, stochastic_f16};
pub(crate) use split::{joined, set_split};
pub(crate) use values::{compute_dtype, filled, is_supported, owned_on, rounded, set_tensor};
pub(in crate::engine) use values::{on_host, scalar};
pub(in crate::engine) use variables::unshared;
pub(crate) use variables::{Addresses, Written, WrittenStorages, storage_address};
