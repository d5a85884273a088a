//! Wrappers, of this crate and of users.

mod faults;
mod hyperball;
mod store_as;
mod wrappers_of_users;
