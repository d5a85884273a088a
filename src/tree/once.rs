//! A cache: values that several leaves share are made once.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::hash::Hash;

use crate::error::Result;

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
