//! The list of rules. Recurrences and sources are only in the table of the page, `table.md`.

use crate::rule::Rule;

/// A row of the [`catalogue`](crate::rules::catalogue), from which configurations and tests take the rules.
#[doc(hidden)]
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Listing {
    /// The rule's name.
    pub name: &'static str,
    /// The rule with its defaults.
    pub rule: Box<dyn Rule>,
}

/// The row of a rule.
pub(super) fn listing<R: Rule + Default>() -> Listing {
    // The name is that of the type, so that no row can have another name than its rule.
    let path = std::any::type_name::<R>();
    let name = path.rsplit("::").next().unwrap_or(path);
    Listing {
        name,
        rule: Box::new(R::default()),
    }
}

/// What a rule computes, in short. `None` for a name that the table of the page lacks.
#[doc(hidden)]
pub fn recurrence(rule: &str) -> Option<&'static str> {
    let begin = format!("| `{rule}` | ");
    let row = include_str!("table.md")
        .lines()
        .find_map(|line| line.strip_prefix(&begin))?;
    row.split(" | ").next()
}
