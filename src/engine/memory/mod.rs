//! The memory of numbers: state tensors, rounding between dtypes, and storages that are shared with the
//! program.

mod buffer;
mod split;
pub(super) mod values;
mod variables;

pub(crate) use buffer::{Buffer, Memory};
pub(crate) use split::{compensated, joined, rounded_to, set_low_bits, split};
pub(crate) use values::{
    filled, on_device, owned_on, rounded, set_lent, set_lent_and, set_lent_part, set_part,
};
pub(in crate::engine) use variables::Addresses;
pub(crate) use variables::{UpdateTargets, WrittenStorages, unshared};
