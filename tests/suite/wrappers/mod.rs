//! Wrappers, of this crate and of users.

mod faults;
mod store_as;
mod wrappers_of_users;
