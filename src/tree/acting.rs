//! The optimiser that acts in a leaf: the leaf's own, or a copy with the values of its schedules.
//!
//! A schedule never writes the own optimiser, because edits and files need the own values. Leaves with the
//! same own optimiser and the same schedules share one copy ([`KeyedCache`]), so that a step of thousands of
//! leaves is fast.
//!
//! A copy is made by code of its rule, which may fail or panic. So a change makes all copies first
//! ([`acting_optimisers`]) and then assigns them together with all else that changes. The end of a step is an
//! exception: the step is counted first, so the copies can fail afterwards. `StateTree::acting_at` has the
//! count of steps for which the copies were made. If that count differs from `steps`, the next update
//! makes the copies and returns the error before anything is written.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::hash::Hash;
use std::sync::Arc;

use super::drives::{Drives, ResolvedSchedules, ScheduleAssignment, ScheduleResolver, check_same_own_value};
use super::{Leaf, StateTree};
use crate::error::Result;
use crate::rule::Optimiser;

/// The optimisers that act in a step, for leaves with these paths, own optimisers and schedules.
///
/// # Errors
/// If a rule describes other fields than when it got its schedules, or if two schedules on numbers of one
/// field leave the range together.
pub(crate) fn acting_optimisers<'l>(
    leaves: impl Iterator<Item = (&'l str, &'l Arc<Optimiser>, Option<&'l Arc<Drives>>)>,
    step: u64,
) -> Result<ActingOptimisers> {
    let mut copies = KeyedCache::default();
    // A loop, because collecting into a `Result` would allocate several times in each step.
    let mut acting = Vec::with_capacity(leaves.size_hint().0);
    for (path, optimiser, drives) in leaves {
        let copy = drives.map(|drives| {
            let make = || {
                drives
                    .acting_optimiser(optimiser, step)
                    .map(Arc::new)
                    .map_err(|error| error.at(path))
            };
            // If no other leaf has these schedules, a look-up would only take time.
            match Arc::strong_count(drives) {
                1 => make(),
                _ => copies.get_or_make((Arc::as_ptr(optimiser).cast::<()>(), Arc::as_ptr(drives)), make),
            }
        });
        acting.push(copy.transpose()?);
    }
    Ok(acting)
}

/// The optimiser that acts in each leaf; `None` if it is the leaf's own.
pub(crate) type ActingOptimisers = Vec<Option<Arc<Optimiser>>>;

impl StateTree {
    /// The optimisers that act at a count of steps; `None` if none of them changes.
    ///
    /// # Errors
    /// As [`acting_optimisers`].
    pub(super) fn acting_for(&self, steps: u64) -> Result<Option<ActingOptimisers>> {
        let is_outdated = self.acting_at != steps && self.leaves.iter().any(|leaf| leaf.drives.is_some());
        let leaves = self
            .leaves
            .iter()
            .map(|leaf| (leaf.path(), &leaf.optimiser, leaf.drives.as_ref()));
        is_outdated.then(|| acting_optimisers(leaves, steps)).transpose()
    }

    /// Sets the count of steps, and the optimisers that [act](StateTree::acting_for) at this count.
    pub(super) fn set_step_count(&mut self, steps: u64, acting: Option<ActingOptimisers>) {
        let leaves = self.leaves.iter_mut().zip(acting.into_iter().flatten());
        leaves.for_each(|(leaf, acting)| leaf.acting = acting);
        (self.steps, self.acting_at) = (steps, steps);
    }

    /// Sets the count of steps, and gives the leaves the values of their schedules at this count.
    ///
    /// # Errors
    /// As [`acting_optimisers`]. Nothing changes then.
    pub(crate) fn go_to_step(&mut self, steps: u64) -> Result<()> {
        let acting = self.acting_for(steps)?;
        self.set_step_count(steps, acting);
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
    pub(crate) fn schedules(&self) -> impl Iterator<Item = &ScheduleAssignment> {
        self.drives.iter().flat_map(|drives| drives.assignments())
    }

    /// The leaf's schedules resolved in another optimiser.
    ///
    /// # Errors
    /// As [`ScheduleResolver::resolve`]; if an own value differs under a schedule that is not relative.
    pub(super) fn drives_in(
        &self,
        optimiser: &Arc<Optimiser>,
        resolver: &mut ScheduleResolver,
    ) -> Result<ResolvedSchedules> {
        let resolved = resolver
            .resolve(optimiser, self.schedules().cloned())
            .and_then(|resolved| {
                check_same_own_value(self.drives.as_deref(), resolved.drives.as_deref()).map(|()| resolved)
            });
        resolved.map_err(|error| error.at(&self.path))
    }
}

/// Values by the key from which they are made.
pub(crate) struct KeyedCache<K, T> {
    values: HashMap<K, T>,
    /// The last value, because leaves in a row often have the same key.
    last: Option<(K, T)>,
}

impl<K, T> Default for KeyedCache<K, T> {
    fn default() -> Self {
        KeyedCache {
            values: HashMap::new(),
            last: None,
        }
    }
}

impl<K: Hash + Eq + Copy, T: Clone> KeyedCache<K, T> {
    /// The value for a key, made in the first call with this key.
    pub(crate) fn get_or_make(&mut self, key: K, make: impl FnOnce() -> Result<T>) -> Result<T> {
        if let Some((last_key, value)) = &self.last
            && *last_key == key
        {
            return Ok(value.clone());
        }
        let value = match self.values.entry(key) {
            Entry::Occupied(entry) => entry.get().clone(),
            Entry::Vacant(entry) => entry.insert(make()?).clone(),
        };
        self.last = Some((key, value.clone()));
        Ok(value)
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;
    use std::hash::Hasher;

    use super::*;

    thread_local! {
        /// The number of comparisons of keys.
        static COMPARISONS: Cell<usize> = const { Cell::new(0) };
    }

    #[derive(Clone, Copy)]
    struct CountedKey(usize);

    impl Hash for CountedKey {
        fn hash<H: Hasher>(&self, state: &mut H) {
            self.0.hash(state);
        }
    }

    impl PartialEq for CountedKey {
        fn eq(&self, other: &Self) -> bool {
            COMPARISONS.set(COMPARISONS.get() + 1);
            self.0 == other.0
        }
    }

    impl Eq for CountedKey {}

    /// Thousands of leaves, each with an optimiser of its own, get another acting optimiser in every step of
    /// a schedule.
    #[test]
    fn comparisons_grow_with_the_keys_and_not_with_their_square() {
        const KEYS: usize = 10_000;
        let (mut cache, mut calls) = (KeyedCache::default(), 0);
        for key in (0..KEYS).chain(0..KEYS) {
            let value = cache.get_or_make(CountedKey(key), || {
                calls += 1;
                Ok(key)
            });
            assert_eq!(value.expect("nothing fails"), key);
        }
        assert_eq!(calls, KEYS);
        assert!(COMPARISONS.get() < 8 * KEYS, "{} comparisons", COMPARISONS.get());
    }
}
