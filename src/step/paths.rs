//! The paths of some leaves (parameters with their state), at little cost.

use std::sync::Arc;

/// Paths of some parameters of a state, in the order of the state.
///
/// The names are shared with the state and not copied, so thousands of them cost one small allocation.
#[derive(Clone, Default)]
pub struct Paths {
    /// The path of every leaf.
    all: Arc<[String]>,
    chosen: Vec<usize>,
}

impl Paths {
    /// The paths of the leaves with these indices.
    pub(crate) fn new(all: &Arc<[String]>, chosen: Vec<usize>) -> Self {
        Paths { all: all.clone(), chosen }
    }

    /// The number of paths.
    pub fn len(&self) -> usize {
        self.chosen.len()
    }

    /// Whether there are no paths.
    pub fn is_empty(&self) -> bool {
        self.chosen.is_empty()
    }

    /// The paths.
    pub fn iter(&self) -> impl ExactSizeIterator<Item = &str> {
        self.chosen.iter().map(|&leaf| self.all[leaf].as_str())
    }
}

impl std::fmt::Debug for Paths {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_list().entries(self.iter()).finish()
    }
}

impl PartialEq for Paths {
    fn eq(&self, other: &Self) -> bool {
        self.iter().eq(other.iter())
    }
}

impl<S: AsRef<str>, const N: usize> PartialEq<[S; N]> for Paths {
    fn eq(&self, other: &[S; N]) -> bool {
        self.iter().eq(other.iter().map(AsRef::as_ref))
    }
}
