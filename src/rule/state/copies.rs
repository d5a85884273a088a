//! The entries of a state that depend on the weights: copies, averages, and counts or sums from the first
//! weights on.
//!
//! New weights make such entries wrong. A copy or a norm of the old weights leads the parameter back to the
//! old weights, and the digits that roundings of the old weights lost move the parameter. [`State::renew`]
//! sets copies to the new weights and numbers to 0, and the store sets the lost digits. If `renew` was not
//! called, an update refuses the new weights: before the first step, `changed_copy` compares the copies with
//! the parameter; later, if `depends_on_weights` holds, the tree compares a sample of the parameter with the
//! sample after the last step.

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
    /// This is for a tensor, counter or number that counts or sums from the first weights on. The range of
    /// such a number has to contain 0. If the entry is a number, an [`update`](crate::update) after the first
    /// step refuses weights that were changed without `set_masters`, as for a [copy](crate::Slot::parameter).
    pub fn zeroed_by_new_weights(mut self, name: &'static str) -> Self {
        self.traits_mut(name).renewal = Some(Renewal::Zero);
        self
    }

    /// Adds a counter of steps of the model in which the parameter did not move.
    ///
    /// An average makes up for these steps in an evaluation, and when the parameter moves again. So a missed
    /// step does not write the tensor of the average.
    pub(crate) fn with_missed_step_counter(self, name: &'static str) -> Self {
        let mut state = self.with_counter(name).zeroed_by_new_weights(name);
        state.traits_mut(name).counts_missed_steps = true;
        state
    }

    /// Adds a tensor with the digits that roundings of the parameter lose.
    pub(crate) fn with_rounding_loss(self, name: &'static str, buffer: Buffer) -> Self {
        let mut state = self.with_buffer(name, buffer);
        state.traits_mut(name).is_rounding_loss = true;
        state
    }

    /// Counts a step of the model in which the parameter did not move.
    pub(crate) fn miss_step(&mut self) {
        let Self { traits, counters, children, .. } = self;
        for (name, _) in traits.iter().filter(|(_, traits)| traits.counts_missed_steps) {
            counters
                .iter_mut()
                .filter(|(entry, _)| entry == name)
                .for_each(|(_, count)| *count = counts::add(*count, 1));
        }
        children.iter_mut().for_each(|child| child.state.miss_step());
    }

    /// Whether a tensor of this state, or of a child, started as the parameter.
    pub(crate) fn has_copies(&self) -> bool {
        self.traits.iter().any(|(_, traits)| traits.is_copy())
            || self.children.iter().any(|child| child.state.has_copies())
    }

    /// Whether the state would move new weights, and no master shows that the weights are new.
    ///
    /// The state then has copies of the old weights, numbers that follow from the copies, or digits that
    /// roundings lost. Averages do not count, because an average never moves the parameter.
    pub(crate) fn depends_on_weights(&self) -> bool {
        let is_number = |name: &str| self.numbers.iter().any(|(entry, _)| *entry == name);
        let moves_weights = |(name, traits): &(&str, EntryTraits)| match traits.renewal {
            _ if traits.is_rounding_loss => true,
            Some(Renewal::Copy) => true,
            Some(Renewal::Zero) => is_number(name),
            Some(Renewal::Average) | None => false,
        };
        self.outer_master().is_none()
            && (self.traits.iter().any(moves_weights)
                || self.children.iter().any(|child| child.state.depends_on_weights()))
    }

    /// Lets all entries that depend on the weights fit new weights. `x` is the x of the rule.
    pub(crate) fn renew(&mut self, x: &Tensor) -> Result<()> {
        self.renew_where("", x, &|_| true)
    }

    /// [`State::renew`] for all entries except those with a full name in `except`.
    pub(crate) fn renew_except(&mut self, x: &Tensor, except: &[String]) -> Result<()> {
        self.renew_where("", x, &|name| !except.iter().any(|other| other == name))
    }

    fn renew_where(&mut self, prefix: &str, x: &Tensor, is_renewed: &dyn Fn(&str) -> bool) -> Result<()> {
        let Self { traits, tensors, counters, numbers, children, .. } = self;
        let renewals = traits.iter().filter_map(|(name, traits)| Some((name, traits.renewal?)));
        for (name, renewal) in renewals.filter(|(name, _)| is_renewed(&format!("{prefix}{name}"))) {
            for (_, buffer) in tensors.iter_mut().filter(|(entry, _)| entry == name) {
                match renewal {
                    // x is broadcast, because a slot may have another shape than x: see `with_slot`.
                    Renewal::Copy | Renewal::Average => {
                        buffer.set(&x.detach().broadcast_as(buffer.shape())?)?
                    }
                    Renewal::Zero => buffer.fill_zero()?,
                }
            }
            counters.iter_mut().filter(|(entry, _)| entry == name).for_each(|(_, count)| *count = 0);
            numbers.iter_mut().filter(|(entry, _)| entry == name).for_each(|(_, number)| *number = 0.0);
        }
        children.iter_mut().try_for_each(|child| {
            let prefix = child.prefix(prefix);
            child.state.renew_where(&prefix, x, is_renewed)
        })
    }

    /// The full name of the first copy of the parameter that differs from `x`, with the first difference.
    pub(crate) fn changed_copy(&self, x: &Tensor, extent: Extent) -> Result<Option<(String, Difference)>> {
        // Before the first step of a parameter, a rule in front of an open window may have changed its copy.
        // The counters of such a rule are not 0.
        let is_before_first_step =
            self.counters.iter().all(|(name, count)| *count == 0 || self.traits_of(name).counts_missed_steps);
        for (name, _) in self.traits.iter().filter(|(_, traits)| traits.is_copy() && is_before_first_step) {
            for (_, buffer) in self.tensors.iter().filter(|(entry, _)| entry == name) {
                if let Some(difference) = copy_difference(buffer, x, extent)? {
                    return Ok(Some((name.to_string(), difference)));
                }
            }
        }
        for child in &self.children {
            if let Some((name, difference)) = child.state.changed_copy(x, extent)? {
                return Ok(Some((child.prefix("") + &name, difference)));
            }
        }
        Ok(None)
    }

    /// The first own average, as the weights to evaluate the model with.
    pub(crate) fn own_average(&self) -> Option<Evaluation<'_>> {
        let (name, _) = self.traits.iter().find(|(_, traits)| traits.is_average())?;
        Evaluation::slot(self, name)
    }
}
