//! The entries of a state that depend on the values of the parameter: copies, averages, and what is counted
//! from the first weights on.
//!
//! New weights make such entries wrong: a copy or a norm of the old ones leads the parameter back, and what
//! their roundings have lost moves it. [`State::renew`] sets copies to the new weights and numbers to 0, and
//! the store sets what roundings lose. An update refuses weights that came without that call: before the
//! first step `changed_copy` compares the copies with the parameter; later, if `is_led_back` holds, the tree
//! compares a sample of the parameter with what the last step left.

use super::State;
use super::slot::{EntryTraits, Renewal};
use crate::engine::Buffer;
use crate::error::Result;
use crate::numbers::counts;
use crate::rule::{Difference, Evaluation, Extent, copy_difference};
use crate::tensors::Tensor;

impl State {
    /// Lets the entry `name` become 0 again when the parameter gets
    /// [new weights](crate::StateTree::set_masters).
    ///
    /// For a tensor, counter or number that is counted or summed up from the first weights on. The range of
    /// such a number has to contain 0. A number also lets an [`update`](crate::update) refuse weights that
    /// were changed without such a call, as a [copy](crate::Slot::parameter) does after the first step.
    pub fn zeroed_by_new_weights(mut self, name: &'static str) -> Self {
        self.traits_mut(name).renewal = Some(Renewal::Zero);
        self
    }

    /// Adds a counter of steps of the model in which the parameter did not move.
    ///
    /// An average makes up for these steps in an evaluation, and when the parameter moves again. Until then
    /// the tensor of the average need not be written.
    pub(crate) fn with_missed_steps(self, name: &'static str) -> Self {
        let mut state = self.with_counter(name).zeroed_by_new_weights(name);
        state.traits_mut(name).counts_missed = true;
        state
    }

    /// Adds a tensor of what roundings of the parameter have lost.
    pub(crate) fn with_lost(self, name: &'static str, lost: Buffer) -> Self {
        let mut state = self.with_buffer(name, lost);
        state.traits_mut(name).is_lost = true;
        state
    }

    /// Counts a step of the model in which the parameter did not move.
    pub(crate) fn miss_step(&mut self) {
        let Self { traits, counters, children, .. } = self;
        for (name, _) in traits.iter().filter(|(_, traits)| traits.counts_missed) {
            counters
                .iter_mut()
                .filter(|(own, _)| own == name)
                .for_each(|(_, count)| *count = counts::after(*count, 1));
        }
        children.iter_mut().for_each(|child| child.state.miss_step());
    }

    /// Whether a tensor of this state, or of a held one, started as the parameter.
    pub(crate) fn has_copies(&self) -> bool {
        self.traits.iter().any(|(_, traits)| traits.is_copy())
            || self.children.iter().any(|child| child.state.has_copies())
    }

    /// Whether new weights would be moved unnoticed: the state has copies of the old ones, numbers that
    /// follow from these, or what they have lost, and there is no master to compare with. Averages do not
    /// count, because they never lead the parameter.
    pub(crate) fn is_led_back(&self) -> bool {
        let is_number = |name: &str| self.numbers.iter().any(|(own, _)| *own == name);
        let leads = |(name, traits): &(&str, EntryTraits)| match traits.renewal {
            _ if traits.is_lost => true,
            Some(Renewal::Copy) => true,
            Some(Renewal::Zero) => is_number(name),
            Some(Renewal::Average) | None => false,
        };
        self.followed().is_none()
            && (self.traits.iter().any(leads) || self.children.iter().any(|child| child.state.is_led_back()))
    }

    /// Sets all that depends on the weights to the new weights `x`, which are as the rule sees them.
    pub(crate) fn renew(&mut self, x: &Tensor) -> Result<()> {
        self.renew_where("", x, &|_| true)
    }

    /// [`State::renew`] for all entries except those with a full name in `kept`.
    pub(crate) fn renew_fresh(&mut self, x: &Tensor, kept: &[String]) -> Result<()> {
        self.renew_where("", x, &|name| !kept.iter().any(|kept| kept == name))
    }

    fn renew_where(&mut self, prefix: &str, x: &Tensor, wanted: &dyn Fn(&str) -> bool) -> Result<()> {
        let Self { traits, tensors, counters, numbers, children, .. } = self;
        let renewals = traits.iter().filter_map(|(name, traits)| Some((name, traits.renewal?)));
        for (name, renewal) in renewals.filter(|(name, _)| wanted(&format!("{prefix}{name}"))) {
            for (_, buffer) in tensors.iter_mut().filter(|(own, _)| own == name) {
                match renewal {
                    // Broadcast, because a slot may have a shape of its own: see `with_slot`.
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

    /// The full name of the first copy of the parameter that is not `x`, with the first different element.
    pub(crate) fn changed_copy(&self, x: &Tensor, extent: Extent) -> Result<Option<(String, Difference)>> {
        // Before the first step of a parameter, a rule in front of an open window may already have moved the
        // copy. The counters of such a rule are not 0.
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

    /// The first own average, which is what to evaluate the model with.
    pub(crate) fn own_average(&self) -> Option<Evaluation<'_>> {
        let (name, _) = self.traits.iter().find(|(_, traits)| traits.is_average())?;
        Evaluation::slot(self, name)
    }
}
