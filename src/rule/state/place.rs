//! Whose state a state is, and which part of a description it belongs to.

/// Whose state it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[doc(hidden)]
pub enum ChildPlace {
    /// The state of the rule under masters, or under another way to store the parameter.
    Stored,
    /// The state of the rule that another is around.
    Inner,
    /// The state of one rule of several: its names begin with the index.
    Member(usize),
    /// As [`ChildPlace::Member`], of rules of which one acts at a time.
    Alternative(usize),
}

impl ChildPlace {
    /// The number that names inside begin with, if they begin with one.
    pub(in crate::rule) fn number(self) -> Option<usize> {
        match self {
            ChildPlace::Stored | ChildPlace::Inner => None,
            ChildPlace::Member(i) | ChildPlace::Alternative(i) => Some(i),
        }
    }
}
