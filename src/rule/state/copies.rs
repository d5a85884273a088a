//! The parts of a state that depend on the parameter's values: copies, averages, and what is counted from
//! them on.

use super::State;
use super::slot::{EntryTraits, Renewal};
use crate::error::Result;
use crate::rule::Evaluation;
use crate::rule::{Difference, Extent, copy_difference};
use crate::tensors::Tensor;

impl State {
    /// Makes the entry of this name 0 again when the parameter is given
    /// [new weights](crate::StateTree::set_masters).
    ///
    /// The entry is a tensor, counter or number that is counted or summed up from the weights at the start.
    pub fn zeroed_by_new_weights(mut self, name: &'static str) -> Self {
        self.traits_mut(name).renewal = Some(Renewal::Zero);
        self
    }

    /// Adds a counter of the steps of the model in which the parameter did not move.
    pub(crate) fn with_missed_steps(self, name: &'static str) -> Self {
        let mut state = self.with_counter(name).zeroed_by_new_weights(name);
        state.traits_mut(name).counts_missed = true;
        state
    }

    /// Counts a step of the model in which the parameter did not move.
    pub(crate) fn miss_step(&mut self) {
        let Self { traits, counters, children, .. } = self;
        for (name, _) in traits.iter().filter(|(_, traits)| traits.counts_missed) {
            counters.iter_mut().filter(|(own, _)| own == name).for_each(|(_, count)| *count += 1);
        }
        children.iter_mut().for_each(|child| child.state.miss_step());
    }

    /// Whether a tensor of this state, or of one that it holds, started as the parameter.
    pub(crate) fn has_copies(&self) -> bool {
        self.traits.iter().any(|(_, traits)| traits.is_copy())
            || self.children.iter().any(|child| child.state.has_copies())
    }

    /// Whether rules would lead the parameter back from new weights, because they keep copies of it, and no
    /// master shows that it has some. Averages do not lead it.
    pub(crate) fn is_led_back(&self) -> bool {
        let leads = |(_, traits): &(&str, EntryTraits)| traits.is_copy() && !traits.is_average();
        self.followed().is_none()
            && (self.traits.iter().any(leads) || self.children.iter().any(|child| child.state.is_led_back()))
    }

    /// Renews all that depends on the weights; `x` are the new ones, as the rule sees them.
    pub(crate) fn renew(&mut self, x: &Tensor) -> Result<()> {
        self.renew_where("", x, &|_| true)
    }

    /// [`State::renew`] for what was not kept from another rule's state.
    pub(crate) fn renew_fresh(&mut self, x: &Tensor, kept: &[String]) -> Result<()> {
        self.renew_where("", x, &|name| !kept.iter().any(|kept| kept == name))
    }

    fn renew_where(&mut self, prefix: &str, x: &Tensor, wanted: &dyn Fn(&str) -> bool) -> Result<()> {
        let Self { traits, tensors, counters, numbers, children, .. } = self;
        let renewals = traits.iter().filter_map(|(name, traits)| Some((name, traits.renewal?)));
        for (name, renewal) in renewals.filter(|(name, _)| wanted(&format!("{prefix}{name}"))) {
            for (_, buffer) in tensors.iter_mut().filter(|(own, _)| own == name) {
                match renewal {
                    Renewal::Copy | Renewal::Average => {
                        buffer.set(&x.detach().broadcast_as(buffer.shape())?)?
                    }
                    Renewal::Zero => buffer.fill_zero()?,
                }
            }
            counters.iter_mut().filter(|(own, _)| own == name).for_each(|(_, count)| *count = 0);
            numbers.iter_mut().filter(|(own, _)| own == name).for_each(|(_, number)| *number = 0.0);
        }
        children.iter_mut().try_for_each(|child| {
            let prefix = child.prefixed(prefix);
            child.state.renew_where(&prefix, x, wanted)
        })
    }

    /// The first tensor that started as the parameter and is not `x`, by its full name, with the first
    /// element that differs. A rule in front of an open window has made steps already, which its counter
    /// tells.
    pub(crate) fn changed_copy(&self, x: &Tensor, extent: Extent) -> Result<Option<(String, Difference)>> {
        let is_new =
            self.counters.iter().all(|(name, count)| *count == 0 || self.traits_of(name).counts_missed);
        for (name, _) in self.traits.iter().filter(|(_, traits)| traits.is_copy() && is_new) {
            for (_, buffer) in self.tensors.iter().filter(|(own, _)| own == name) {
                if let Some(difference) = copy_difference(buffer, x, extent)? {
                    return Ok(Some((name.to_string(), difference)));
                }
            }
        }
        for child in &self.children {
            if let Some((name, difference)) = child.state.changed_copy(x, extent)? {
                return Ok(Some((child.prefixed("") + &name, difference)));
            }
        }
        Ok(None)
    }

    /// The weights to evaluate with that this state's own rule keeps.
    pub(crate) fn own_average(&self) -> Option<Evaluation<'_>> {
        let (name, _) = self.traits.iter().find(|(_, traits)| traits.is_average())?;
        Evaluation::slot(self, name)
    }
}
