//! What a rule is: its description, hyper-parameters, order; rules of users.

mod adjust;
mod described_states;
pub(crate) mod learning_rates;
mod orders;
mod other_fields;
mod panicking_rules;
mod rules_of_users;
