//! Numbers of the whole model. The state of each leaf has a copy of them.
//!
//! A step sets the copies of the leaves that took part. Others are older: their leaves are frozen, wait in a
//! window, or were just added. After the step the tree therefore
//!
//! 1. collects the numbers of all leaves (`show_shared`) and keeps the newest for each rule (`join`),
//! 2. writes these into all leaves (`share`).
//!
//! The newest numbers are those with the largest first number, which must never fall. A fresh state has the
//! smallest one, so a leaf that joins late does not set the others back.

use std::cmp::Ordering;

use super::State;

/// The numbers of the whole model that a rule's state has.
#[derive(Debug)]
pub(crate) struct SharedNumbers {
    /// The names of all own entries of the state. States with equal names are taken for those of one rule.
    rule: Vec<&'static str>,
    values: Vec<f64>,
    /// Whether the last step has set the values.
    is_new: bool,
    /// The applied steps of the rule with this state.
    steps: u64,
}

impl SharedNumbers {
    /// Adds these numbers to `all`, or replaces older numbers of the same rule there.
    pub(crate) fn join(self, all: &mut Vec<SharedNumbers>) {
        match all.iter_mut().find(|other| other.rule == self.rule) {
            Some(older) if self.age(older) == Ordering::Greater => *older = self,
            Some(_) => {}
            None => all.push(self),
        }
    }

    /// Compares the first number, then whether the last step has set the values, then the applied steps.
    fn age(&self, other: &Self) -> Ordering {
        let first = |numbers: &Self| numbers.values.first().copied().unwrap_or(f64::NEG_INFINITY);
        first(self).total_cmp(&first(other)).then((self.is_new, self.steps).cmp(&(other.is_new, other.steps)))
    }
}

impl State {
    /// Makes the number `name` one of the whole model. The first such number of a state must never fall.
    pub(crate) fn shared_by_model(mut self, name: &'static str) -> Self {
        self.traits_mut(name).is_shared = true;
        self
    }

    /// Calls `show` with the numbers of the whole model of each rule that has some.
    pub(crate) fn show_shared(&self, is_new: bool, show: &mut impl FnMut(SharedNumbers)) {
        let shared = self.numbers.iter().filter(|(name, _)| self.traits_of(name).is_shared);
        let values: Vec<f64> = shared.map(|(_, value)| *value).collect();
        if !values.is_empty() {
            let steps = self.counters.first().map_or(0, |(_, count)| *count);
            show(SharedNumbers { rule: self.own_names().collect(), values, is_new, steps });
        }
        self.children.iter().for_each(|child| child.state.show_shared(is_new, show));
    }

    /// Sets the numbers of the whole model to those that `known` has for the same rules.
    pub(crate) fn share(&mut self, known: &[SharedNumbers]) {
        let of_rule = known.iter().find(|known| self.own_names().eq(known.rule.iter().copied()));
        if let Some(SharedNumbers { values, .. }) = of_rule {
            let Self { numbers, traits, .. } = self;
            let is_shared = |name: &str| traits.iter().any(|(own, traits)| *own == name && traits.is_shared);
            numbers
                .iter_mut()
                .filter(|(name, _)| is_shared(name))
                .zip(values)
                .for_each(|((_, number), value)| *number = *value);
        }
        self.children.iter_mut().for_each(|child| child.state.share(known));
    }
}
