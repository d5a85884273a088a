//! Memory that its owner lends while it is worked on: candle's tensors, slices, and tensors of other
//! frameworks.
//!
//! A [`Lent`] lives for one call. Two lenders are one parameter if they are one object, or if they say so by
//! [`Lend::offset`].

mod handle;
mod known;
mod lend;
mod memory;
mod part;
pub(crate) mod stored;
mod tensor;
mod view;

pub(crate) use handle::Lent;
pub use lend::Lend;
pub(crate) use lend::{
    check_parameter, copied, defect, other_memory, owned, read, read_only, write, write_lent,
};
pub use memory::{MemoryMut, MemoryRef};
pub(crate) use memory::{TypedSlice, TypedSliceMut};
pub(crate) use stored::{check_on_cpu, storage_of, write_tensor};
pub(crate) use tensor::unsupported;
pub use view::View;
