//! Where numbers are kept: state tensors, their bytes, roundings between dtypes, and what of it is shared with the program.

mod buffer;
mod bytes;
mod split;
mod stored;
mod values;
mod variables;

pub(crate) use buffer::{Buffer, Memory};
pub(in crate::engine) use bytes::bytes;
pub(crate) use bytes::{bytes_mut, bytes_of};
pub(crate) use split::{joined, set_split};
#[cfg(feature = "cuda")]
pub(in crate::engine) use stored::expect_on_cuda;
pub(crate) use stored::{expect_on_cpu, storage_of, write_tensor};
pub(crate) use values::{filled, moved, owned_on, rounded, set_part, set_tensor};
pub(in crate::engine) use values::{on_host, scalar};
pub(crate) use variables::{Addresses, Written, WrittenStorages, storage_address, unshared};
