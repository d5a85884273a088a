//! Numbers of the whole model, of which the state of each leaf has a copy.

use std::cmp::Ordering;

use super::State;

/// The numbers of the whole model that a rule's state has.
#[derive(Debug)]
pub(crate) struct SharedNumbers {
    /// The names of all entries of the state, by which states of one rule know each other.
    rule: Vec<&'static str>,
    values: Vec<f64>,
    /// Whether the last step has set them.
    is_new: bool,
    /// The steps that the rule has made with this state.
    steps: u64,
}

impl SharedNumbers {
    /// Adds them to those of other rules, or puts them in the place of older ones of this rule.
    pub(crate) fn join(self, all: &mut Vec<SharedNumbers>) {
        match all.iter_mut().find(|other| other.rule == self.rule) {
            Some(older) if self.age(older) == Ordering::Greater => *older = self,
            Some(_) => {}
            None => all.push(self),
        }
    }

    /// How much of the training they know, compared with others. The first number never falls, so that it is
    /// least in a state that has just been made.
    fn age(&self, other: &Self) -> Ordering {
        let first = |numbers: &Self| numbers.values.first().copied().unwrap_or(f64::NEG_INFINITY);
        first(self).total_cmp(&first(other)).then((self.is_new, self.steps).cmp(&(other.is_new, other.steps)))
    }
}

impl State {
    /// Makes the number of this name one of the whole model. The first of a state must never fall.
    pub(crate) fn shared_by_model(mut self, name: &'static str) -> Self {
        self.traits_mut(name).is_shared = true;
        self
    }

    /// Shows the numbers of the whole model, for each rule that has some.
    pub(crate) fn show_shared(&self, is_new: bool, show: &mut impl FnMut(SharedNumbers)) {
        let shared = self.numbers.iter().filter(|(name, _)| self.traits_of(name).is_shared);
        let values: Vec<f64> = shared.map(|(_, value)| *value).collect();
        if !values.is_empty() {
            let steps = self.counters.first().map_or(0, |(_, count)| *count);
            show(SharedNumbers { rule: self.own_names().collect(), values, is_new, steps });
        }
        self.children.iter().for_each(|child| child.state.show_shared(is_new, show));
    }

    /// Takes over the numbers of the whole model that are known of the same rules.
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
