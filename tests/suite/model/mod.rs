//! Models, gradients, and the memory that they lend.

mod every_model;
mod exchanged_storages;
mod failing_owners;
mod gradient_lists;
mod lenders;
pub(crate) mod locks;
pub(crate) mod models;
mod shapes;
pub(crate) mod slices;
