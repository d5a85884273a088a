//! Numbers of the whole model. The state of each leaf has a copy of these numbers.
//!
//! A step sets the copies in the leaves that took part. The copies in other leaves are older, because these
//! leaves are frozen, wait in a window, or were just added. After the step the tree therefore
//!
//! 1. collects the numbers of all leaves (`visit_shared`) and selects the newest for each rule
//!    (`merge_into`),
//! 2. writes the newest numbers into all leaves (`set_shared`).
//!
//! The newest numbers have the largest first number, which must never fall. A fresh state has the smallest
//! first number, so a leaf that is added late does not set the other leaves back.

use std::cmp::Ordering;

use super::{State, entry};

/// The numbers of the whole model in the state of a rule.
#[derive(Debug)]
pub(crate) struct SharedNumbers {
    /// The names of all own entries of the state. States with equal names count as states of one rule.
    entry_names: Vec<&'static str>,
    values: Vec<f64>,
    /// Whether the last step has set the values.
    is_new: bool,
    /// The number of applied steps of the rule.
    steps: u64,
}

impl SharedNumbers {
    /// Adds these numbers to `newest`, or replaces older numbers of the rule in `newest`.
    pub(crate) fn merge_into(self, newest: &mut Vec<SharedNumbers>) {
        match newest
            .iter_mut()
            .find(|other| other.entry_names == self.entry_names)
        {
            Some(older) if self.compare_newness(older) == Ordering::Greater => *older = self,
            Some(_) => {}
            None => newest.push(self),
        }
    }

    /// Compares by the first number, then by whether the last step has set the values, then by the applied
    /// steps. The greater numbers are newer.
    fn compare_newness(&self, other: &Self) -> Ordering {
        let first = |numbers: &Self| numbers.values.first().copied().unwrap_or(f64::NEG_INFINITY);
        first(self)
            .total_cmp(&first(other))
            .then((self.is_new, self.steps).cmp(&(other.is_new, other.steps)))
    }
}

impl State {
    /// Makes `name` a number of the whole model. The first such number of a state must never fall.
    pub(crate) fn shared_by_model(mut self, name: &'static str) -> Self {
        self.traits_mut(name).is_shared = true;
        self
    }

    /// Calls `show` with the numbers of the whole model of each rule that has such numbers.
    pub(crate) fn visit_shared(&self, is_new: bool, show: &mut impl FnMut(SharedNumbers)) {
        let shared = self
            .numbers
            .iter()
            .filter(|(name, _)| self.traits_of(name).is_shared);
        let values: Vec<f64> = shared.map(|(_, value)| *value).collect();
        if !values.is_empty() {
            let steps = self.counters.first().map_or(0, |(_, count)| *count);
            show(SharedNumbers {
                entry_names: self.own_names().collect(),
                values,
                is_new,
                steps,
            });
        }
        self.children
            .iter()
            .for_each(|child| child.state.visit_shared(is_new, show));
    }

    /// Sets the numbers of the whole model to the numbers in `newest` for each rule.
    pub(crate) fn set_shared(&mut self, newest: &[SharedNumbers]) {
        let is_same_rule = |other: &&SharedNumbers| self.own_names().eq(other.entry_names.iter().copied());
        if let Some(SharedNumbers { values, .. }) = newest.iter().find(is_same_rule) {
            let Self { numbers, traits, .. } = self;
            numbers
                .iter_mut()
                .filter(|(name, _)| entry(traits, name).is_some_and(|traits| traits.is_shared))
                .zip(values)
                .for_each(|((_, number), value)| *number = *value);
        }
        self.children
            .iter_mut()
            .for_each(|child| child.state.set_shared(newest));
    }
}
