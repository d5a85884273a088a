//! Memory that its owner lends for the length of a function: candle's tensors, slices, and tensors of other
//! frameworks.
//!
//! Owners ([`Lend`]) are foreign code, and a call uses their memory several times. So every use is checked:
//! 1. `Lent::new` reads shape and dtype, once per call (`handle.rs`). The call is planned with these values.
//! 2. `read` and `write` compare each loan with these values, and run the function at most once (`lend.rs`).
//! 3. The storage of a candle tensor is compared with its layout while it is locked (`stored.rs`).
//!
//! Two lenders are one parameter if they are one object, or if they report the same [`Lend::memory`],
//! [`Lend::offset`], shape and dtype.

mod handle;
mod lend;
mod memory;
mod stored;
mod tensor;

pub(crate) use handle::Lent;
pub use lend::Lend;
pub(crate) use lend::{
    check_parameter, copy_of, defect, flat_copy, read, read_only_error, send_bytes, serialise_lent, write,
    wrong_memory,
};
pub use memory::{MemoryMut, MemoryRef, View};
use stored::with_bytes;
pub(crate) use stored::{check_extent, storage_of, write_tensor};
pub(crate) use tensor::unsupported_error;
