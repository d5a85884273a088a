//! A row of the table of rules.

use crate::rule::Rule;

/// A row of the [`catalogue`](crate::rules::catalogue), from which configurations and tests take the rules. A
/// test compares the documented table with the rows.
#[doc(hidden)]
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Listing {
    /// The rule's name.
    pub name: &'static str,
    /// What it computes, in short.
    pub recurrence: &'static str,
    /// Where it comes from.
    pub source: &'static str,
    /// The rule with its defaults.
    pub rule: Box<dyn Rule>,
}

/// The row of a rule.
pub(super) fn listing<R: Rule + Default>(recurrence: &'static str, source: &'static str) -> Listing {
    // The name of the type, so that no row can have another name than its rule.
    let path = std::any::type_name::<R>();
    let name = path.rsplit("::").next().unwrap_or(path);
    Listing { name, recurrence, source, rule: Box::new(R::default()) }
}
