//! The place of a held rule: of its state among `children`, and of its part in a description.

/// How a rule is held.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[doc(hidden)]
pub enum ChildPlace {
    /// As the rule of a store such as `MixedPrecision`, or as what an `Offload` keeps on the CPU.
    Stored,
    /// As the one rule that another rule is around.
    Inner,
    /// As one of several rules that act one after another. Full names of its entries have its index in front.
    Member(usize),
    /// As one of several rules that act alternatively. Full names of its entries have its index in front.
    Alternative(usize),
}

impl ChildPlace {
    /// The index in front of full names, if this place has one.
    pub(in crate::rule) fn number(self) -> Option<usize> {
        match self {
            ChildPlace::Stored | ChildPlace::Inner => None,
            ChildPlace::Member(i) | ChildPlace::Alternative(i) => Some(i),
        }
    }
}
