//! A short list of sizes.

use std::fmt;

/// Up to six sizes above 0: the lengths of the parts of a whole, in order. The list is empty if the whole is
/// not cut.
///
/// ```
/// use optimisers::Sizes;
///
/// let query_key_value = Sizes::from([4096, 1024, 1024]);
/// assert_eq!(query_key_value.iter().sum::<usize>(), 6144);
/// assert_eq!(query_key_value.to_string(), "[4096, 1024, 1024]");
/// assert_eq!(Sizes::default().iter().count(), 0);
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Sizes([u32; Sizes::MOST]);

impl Sizes {
    pub(crate) const MOST: usize = 6;

    /// Makes a list of these sizes; `None` for more than six, or if a size is 0 or above `u32::MAX`.
    pub fn new(sizes: &[u64]) -> Option<Self> {
        let mut array = [0; Sizes::MOST];
        for (i, &size) in sizes.iter().enumerate() {
            *array.get_mut(i)? = u32::try_from(size).ok().filter(|&size| size > 0)?;
        }
        Some(Sizes(array))
    }

    /// The sizes in their order.
    pub fn iter(&self) -> impl Iterator<Item = usize> + '_ {
        // 0 fills the unused places of the array.
        self.0
            .iter()
            .take_while(|&&size| size > 0)
            .map(|&size| size as usize)
    }
}

/// # Panics
/// If a size is 0. More than six do not compile.
impl<const N: usize> From<[u32; N]> for Sizes {
    fn from(sizes: [u32; N]) -> Self {
        const { assert!(N <= Sizes::MOST, "at most six sizes") };
        Sizes::new(&sizes.map(u64::from)).expect("sizes above 0")
    }
}

impl fmt::Display for Sizes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(self.iter()).finish()
    }
}
