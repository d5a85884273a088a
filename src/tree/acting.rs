//! What acts in a leaf: its own optimiser, or a copy with the values of its schedules.
//!
//! A schedule never writes the own optimiser, because edits and files need the own values. Leaves with the
//! same own optimiser and the same schedules share one copy ([`Once`]), so that a step of thousands of leaves
//! is fast.
//!
//! A copy is made by code of its rule, which may fail or panic. So all copies of a change are made first
//! ([`acting`]), and then assigned together with all else that changes. The end of a step cannot make its
//! copies before it counts the step. `StateTree::acting_at` therefore has the count whose values act. If that
//! count is another one, the next update makes the copies, and reports what fails before anything is written.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::hash::Hash;
use std::sync::Arc;

use super::drives::{Drives, GivenSchedule, ResolvedSchedules, ScheduleResolver, check_same_own};
use super::{Leaf, StateTree};
use crate::error::Result;
use crate::rule::Optimiser;

/// The optimisers that act in a step, for leaves with these own optimisers and schedules. `None` if the own
/// one acts.
///
/// # Errors
/// If a rule describes other fields than when it got its schedules.
pub(crate) fn acting<'l>(
    leaves: impl Iterator<Item = (&'l str, &'l Arc<Optimiser>, Option<&'l Arc<Drives>>)>,
    step: u64,
) -> Result<Acting> {
    let mut made = Once::default();
    // Not collected into a `Result`, which would allocate several times in each step.
    let mut acting = Vec::with_capacity(leaves.size_hint().0);
    for (path, own, drives) in leaves {
        let of_leaf = drives.map(|drives| {
            let make = || drives.acting(own, step).map(Arc::new).map_err(|error| error.at(path));
            // If no other leaf has these schedules, a look-up would only take time.
            match Arc::strong_count(drives) {
                1 => make(),
                _ => made.get((Arc::as_ptr(own).cast::<()>(), Arc::as_ptr(drives)), make),
            }
        });
        acting.push(of_leaf.transpose()?);
    }
    Ok(acting)
}

/// The optimiser that acts in each leaf; `None` for the own one.
pub(crate) type Acting = Vec<Option<Arc<Optimiser>>>;

impl StateTree {
    /// What acts in all leaves at a count of steps; `None` if that acts already.
    ///
    /// # Errors
    /// As [`acting`].
    pub(super) fn acting_for(&self, steps: u64) -> Result<Option<Acting>> {
        let changes = self.acting_at != steps && self.leaves.iter().any(|leaf| leaf.drives.is_some());
        let own = self.leaves.iter().map(|leaf| (leaf.path(), &leaf.optimiser, leaf.drives.as_ref()));
        changes.then(|| acting(own, steps)).transpose()
    }

    /// Sets the count of steps, with what [acts](StateTree::acting_for) at it.
    pub(super) fn go_to(&mut self, steps: u64, acting: Option<Acting>) {
        let leaves = self.leaves.iter_mut().zip(acting.into_iter().flatten());
        leaves.for_each(|(leaf, acting)| leaf.acting = acting);
        (self.steps, self.acting_at) = (steps, steps);
    }

    /// Sets the count of steps, and gives leaves its values.
    ///
    /// # Errors
    /// As [`acting`]. Nothing changes then.
    pub(crate) fn act(&mut self, steps: u64) -> Result<()> {
        let acting = self.acting_for(steps)?;
        self.go_to(steps, acting);
        Ok(())
    }
}

impl Leaf {
    /// The optimiser that acts in the next step, with the values that schedules give it.
    ///
    /// ```
    /// use candle_core::{Device, Var};
    /// use optimisers::{AdamW, Schedule, setup};
    ///
    /// let x = Var::new(&[1f32], &Device::Cpu)?;
    /// let mut state = setup(AdamW { lambda: 0.1, ..AdamW::new(1e-3) }, &x)?;
    /// state.schedule(Schedule::linear(0.5, 0.0, 100).relative().field("lambda"))?;
    /// let leaf = state.leaf("").expect("the leaf");
    /// assert_eq!(leaf.acting().field("lambda"), Some(0.05.into()));
    /// assert_eq!(leaf.optimiser().field("lambda"), Some(0.1.into()));
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn acting(&self) -> &Optimiser {
        self.acting.as_deref().unwrap_or(&self.optimiser)
    }

    /// The schedules of this leaf, in the order in which they were given.
    pub(crate) fn schedules(&self) -> impl Iterator<Item = &GivenSchedule> {
        self.drives.iter().flat_map(|drives| drives.given())
    }

    /// The leaf's schedules resolved in another optimiser.
    ///
    /// # Errors
    /// As [`ScheduleResolver::of`]; if an own value differs under a schedule that is not relative.
    pub(super) fn drives_in(
        &self,
        optimiser: &Arc<Optimiser>,
        resolver: &mut ScheduleResolver,
    ) -> Result<ResolvedSchedules> {
        let resolved = resolver.of(optimiser, self.schedules().cloned()).and_then(|resolved| {
            check_same_own(self.drives.as_deref(), resolved.drives.as_deref()).map(|()| resolved)
        });
        resolved.map_err(|error| error.at(&self.path))
    }
}

/// Values by the key that they were made from.
pub(crate) struct Once<K, T> {
    made: HashMap<K, T>,
    /// The last value, because leaves in a row often have one key.
    last: Option<(K, T)>,
}

impl<K, T> Default for Once<K, T> {
    fn default() -> Self {
        Once { made: HashMap::new(), last: None }
    }
}

impl<K: Hash + Eq + Copy, T: Clone> Once<K, T> {
    /// The value for a key, made at the first time.
    pub(crate) fn get(&mut self, key: K, make: impl FnOnce() -> Result<T>) -> Result<T> {
        if let Some((last, made)) = &self.last
            && *last == key
        {
            return Ok(made.clone());
        }
        let made = match self.made.entry(key) {
            Entry::Occupied(made) => made.get().clone(),
            Entry::Vacant(place) => place.insert(make()?).clone(),
        };
        self.last = Some((key, made.clone()));
        Ok(made)
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;
    use std::hash::Hasher;

    use super::*;

    thread_local! {
        static COMPARED: Cell<usize> = const { Cell::new(0) };
    }

    #[derive(Clone, Copy)]
    struct Counted(usize);

    impl Hash for Counted {
        fn hash<H: Hasher>(&self, state: &mut H) {
            self.0.hash(state);
        }
    }

    impl PartialEq for Counted {
        fn eq(&self, other: &Self) -> bool {
            COMPARED.set(COMPARED.get() + 1);
            self.0 == other.0
        }
    }

    impl Eq for Counted {}

    /// Thousands of leaves, each with an optimiser of its own, get another acting one in every step of a
    /// schedule.
    #[test]
    fn comparisons_grow_with_the_keys_and_not_with_their_square() {
        const KEYS: usize = 10_000;
        let (mut once, mut made) = (Once::default(), 0);
        for key in (0..KEYS).chain(0..KEYS) {
            let got = once.get(Counted(key), || {
                made += 1;
                Ok(key)
            });
            assert_eq!(got.expect("nothing fails"), key);
        }
        assert_eq!(made, KEYS);
        assert!(COMPARED.get() < 8 * KEYS, "{} comparisons", COMPARED.get());
    }
}
