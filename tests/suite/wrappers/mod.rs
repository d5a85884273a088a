//! Wrappers of users.

mod faults;
mod wrappers_of_users;
