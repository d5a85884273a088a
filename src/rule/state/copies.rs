//! The entries of a state that depend on the weights: copies, averages, rounding losses, and the counts and
//! sums that begin when the parameter gets its weights.
//!
//! New weights make such entries wrong. A copy or a norm of the old weights leads the parameter back to the
//! old weights, and a rounding loss of the old weights is added to the new weights. [`State::renew`] sets
//! copies to the new weights, and counts and sums to 0. The rounding loss is set by the store of the
//! parameter (`rule/optimiser/store.rs`).
//!
//! If `renew` was not called, an update refuses the new weights. Before the first step, `changed_copy`
//! compares the copies with the parameter. After a step, the tree compares a checksum of a sample of the
//! parameter with the checksum after the last step, if `needs_checksum` holds.

use super::slot::{EntryTraits, Renewal};
use super::{State, entry, entry_mut};
use crate::engine::Buffer;
use crate::error::Result;
use crate::numbers::counts;
use crate::rule::{Difference, Evaluation, Extent, copy_difference};
use crate::tensors::Tensor;

impl State {
    /// Lets the entry `name` become 0 again when the parameter gets
    /// [new weights](crate::StateTree::set_masters).
    ///
    /// The entry is a tensor, counter or number that counts or sums since the parameter got its weights.
    /// [`setup`](crate::setup) refuses a name that no entry has. The range of such a number has to contain 0.
    /// If the entry is a number and the weights were changed without `set_masters`, an
    /// [`update`](crate::update) after the first step refuses the weights, as it does for a
    /// [copy](crate::Slot::parameter).
    pub fn zeroed_by_new_weights(mut self, name: &'static str) -> Self {
        self.traits_mut(name).renewal = Some(Renewal::Zero);
        self
    }

    /// Adds a counter of steps of the model in which the parameter did not move.
    ///
    /// The rule of an average reads the counter in an evaluation and when the parameter moves again, and then
    /// makes up for the missed steps. So a missed step itself does not write the tensor of the average.
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
        let Self {
            traits,
            counters,
            children,
            ..
        } = self;
        for (name, count) in counters {
            if entry(traits, name).is_some_and(|traits| traits.counts_missed_steps) {
                *count = counts::add(*count, 1);
            }
        }
        children.iter_mut().for_each(|child| child.state.miss_step());
    }

    /// Whether this state or a child has a tensor that was made as a copy of the parameter.
    pub(crate) fn has_copies(&self) -> bool {
        self.traits.iter().any(|(_, traits)| traits.is_copy())
            || self.children.iter().any(|child| child.state.has_copies())
    }

    /// Whether the state would move new weights, and only a checksum, not a master, shows that the weights
    /// are new.
    ///
    /// The state then has copies of the old weights, numbers that follow from the old weights, or a rounding
    /// loss. Averages do not count, because an average never moves the parameter.
    pub(crate) fn needs_checksum(&self) -> bool {
        self.outer_master().is_none()
            && (self.own_weight_movers().next().is_some()
                || self.children.iter().any(|child| child.state.needs_checksum()))
    }

    /// Whether one of the entries with these full names would move new weights.
    pub(crate) fn moves_weights(&self, names: &[String]) -> bool {
        let mut moves = false;
        self.walk("", &mut |prefix, state| {
            let mut own_names = state.own_weight_movers().map(|name| format!("{prefix}{name}"));
            moves |= own_names.any(|name| names.contains(&name));
        });
        moves
    }

    /// The names of this state's entries, not those of a child, that would move new weights.
    fn own_weight_movers(&self) -> impl Iterator<Item = &'static str> {
        let moves_weights = move |(name, traits): &&(&str, EntryTraits)| match traits.renewal {
            _ if traits.is_rounding_loss => true,
            Some(Renewal::Copy) => true,
            Some(Renewal::Zero) => entry(&self.numbers, name).is_some(),
            Some(Renewal::Average) | None => false,
        };
        self.traits.iter().filter(moves_weights).map(|(name, _)| *name)
    }

    /// Sets copies and averages to new weights, and counts and sums to 0, except for entries with a full name
    /// in `except`. `x` is the x of the rule, which has the new weights.
    pub(crate) fn renew(&mut self, x: &Tensor, except: &[String]) -> Result<()> {
        self.renew_below("", x, except)
    }

    fn renew_below(&mut self, prefix: &str, x: &Tensor, except: &[String]) -> Result<()> {
        let Self {
            traits,
            tensors,
            counters,
            numbers,
            children,
            ..
        } = self;
        let renewals = traits
            .iter()
            .filter_map(|(name, entry_traits)| Some((name, entry_traits.renewal?)));
        for (name, renewal) in renewals.filter(|(name, _)| !except.contains(&format!("{prefix}{name}"))) {
            if let Some(buffer) = entry_mut(tensors, name) {
                match renewal {
                    // x is broadcast, because a slot may have another shape than x: see `with_slot`.
                    Renewal::Copy | Renewal::Average => {
                        buffer.set(&x.detach().broadcast_as(buffer.shape())?)?
                    }
                    Renewal::Zero => buffer.fill_zero()?,
                }
            } else if let Some(count) = entry_mut(counters, name) {
                *count = 0;
            } else if let Some(number) = entry_mut(numbers, name) {
                *number = 0.0;
            }
        }
        children.iter_mut().try_for_each(|child| {
            let child_prefix = child.prefix(prefix);
            child.state.renew_below(&child_prefix, x, except)
        })
    }

    /// The full name of the first copy of the parameter that differs from `x`, with the first difference.
    pub(crate) fn changed_copy(&self, x: &Tensor, extent: Extent) -> Result<Option<(String, Difference)>> {
        // A window of `AccumGrad` may be open before the parameter's first step. A rule before `AccumGrad` may
        // then have changed its copy. Such a rule has counted the calls of the window.
        let has_counted_nothing = self
            .counters
            .iter()
            .all(|(name, count)| *count == 0 || self.traits_of(name).counts_missed_steps);
        for (name, _) in self
            .traits
            .iter()
            .filter(|(_, traits)| traits.is_copy() && has_counted_nothing)
        {
            if let Some(buffer) = entry(&self.tensors, name)
                && let Some(difference) = copy_difference(buffer, x, extent)?
            {
                return Ok(Some((name.to_string(), difference)));
            }
        }
        for child in &self.children {
            if let Some((name, difference)) = child.state.changed_copy(x, extent)? {
                return Ok(Some((child.prefix("") + &name, difference)));
            }
        }
        Ok(None)
    }

    /// The first average of this state, not of a child, as the weights to evaluate the model with.
    pub(crate) fn own_average(&self) -> Option<Evaluation<'_>> {
        let (name, _) = self.traits.iter().find(|(_, traits)| traits.is_average())?;
        Evaluation::slot(self, name)
    }
}
