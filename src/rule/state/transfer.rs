//! Takes over entries from the state of another rule, when `replace` exchanges the optimiser.
//!
//! The new state and the states of its held rules each choose an old state, one after another in the order
//! of `State::walk`:
//!
//! 1. A state with tensors chooses the first old state that has all these tensors: with equal names, shapes
//!    and meanings (`State::fits`). If a tensor is missing, the rule starts anew, because all tensors share
//!    counters such as those of bias corrections.
//! 2. For a state with a master, a master of the same dtype in the old state is enough.
//! 3. A state with neither tensors nor a master chooses the old state at the same place among held rules, if
//!    the names of the entries of both states are equal.
//! 4. From the chosen old state, a state takes a master of the same dtype, the tensors with equal names,
//!    shapes and meanings, and the counters and numbers with equal names. No other state can choose this old
//!    state any more.
//!
//! Old entries that no state has taken are `dropped`; new entries that get no old value are `fresh`.

use std::borrow::Borrow;

use super::entry;
use crate::engine::Buffer;
use crate::error::Result;
use crate::numbers::Records;
use crate::rule::State;
use crate::tensors::Tensor;

/// The full names of entries, by their fate when a state gets another rule or other rows.
#[derive(Debug, Default)]
pub(crate) struct Transfer {
    pub(crate) kept: Vec<String>,
    pub(crate) fresh: Vec<String>,
    pub(crate) dropped: Vec<String>,
}

impl State {
    /// Whether `old_state` has a tensor that can replace the tensor `new` with this name.
    fn fits(&self, name: &str, new: &Buffer, old_state: &State) -> bool {
        // A tensor `rest` has the low bits of a master: all of them or one byte, in different units.
        let has_low_bits = |buffer: &Buffer| buffer.records() == Some(Records::LowBits);
        let can_replace = |old: &Buffer| old.shape() == new.shape() && has_low_bits(old) == has_low_bits(new);
        let (new_traits, old_traits) = (self.traits_of(name), old_state.traits_of(name));
        // A copy of the weights is no mean of gradients, and a rule may take the root of a tensor whose
        // numbers are promised to be 0 or more.
        new_traits.renewal == old_traits.renewal
            && (new_traits.sign.is_none() || old_traits.sign.is_some())
            && entry(&old_state.tensors, name).is_some_and(can_replace)
    }

    /// Takes over entries of `old`, the state of another rule, as described at the top of this file.
    pub(crate) fn take_over(&mut self, old: &State) -> Result<Transfer> {
        let mut transfer = Transfer::default();
        let mut old_states = Vec::new();
        old.walk("", &mut |prefix, state| {
            old_states.push((prefix.to_string(), state))
        });
        self.choose_and_take("", &mut old_states, &mut transfer)?;
        for (prefix, state) in old_states {
            transfer
                .dropped
                .extend(state.own_names().map(|name| format!("{prefix}{name}")));
        }
        Ok(transfer)
    }

    /// Chooses one of `old_states` for this state, and then for its held rules. `prefix` begins the full
    /// names of this state's entries.
    fn choose_and_take(
        &mut self,
        prefix: &str,
        old_states: &mut Vec<(String, &State)>,
        transfer: &mut Transfer,
    ) -> Result<()> {
        let can_choose = |(old_prefix, old): &(String, &State)| match (&self.tensors[..], &self.master) {
            ([], None) => old_prefix == prefix && old.own_names().eq(self.own_names()),
            (tensors, master) => {
                let is_complete = !self.is_taken_whole || tensors.len() == old.tensors.len();
                let all_fit = is_complete && tensors.iter().all(|(name, new)| self.fits(name, new, old));
                (!tensors.is_empty() && all_fit)
                    || masters_of_one_dtype(master.as_ref(), old.master.as_ref()).is_some()
            }
        };
        let choice = old_states
            .iter()
            .position(can_choose)
            .map(|index| old_states.remove(index));
        let mut fresh_names: Vec<&str> = self.own_names().collect();
        if let Some((old_prefix, old)) = choice {
            let fitting_tensors = self
                .tensors
                .iter()
                .filter(|(name, new)| self.fits(name, new, old));
            let fitting_names: Vec<&str> = fitting_tensors.map(|(name, _)| *name).collect();
            let mut taken_over = Vec::new();
            if let Some((new_master, old_master)) =
                masters_of_one_dtype(self.master.as_mut(), old.master.as_ref())
            {
                new_master.set(&old_master.tensor()?)?;
                taken_over.push("master");
            }
            taken_over.extend(self.take_entries(old, |name, _, old_tensor| {
                fitting_names
                    .contains(&name)
                    .then(|| old_tensor.tensor())
                    .transpose()
            })?);
            fresh_names.retain(|name| !taken_over.contains(name));
            let dropped_names = old
                .own_names()
                .filter(|name| !taken_over.contains(name))
                .map(|name| format!("{old_prefix}{name}"));
            transfer.dropped.extend(dropped_names);
            transfer
                .kept
                .extend(taken_over.into_iter().map(|name| format!("{prefix}{name}")));
        }
        transfer
            .fresh
            .extend(fresh_names.into_iter().map(|name| format!("{prefix}{name}")));
        self.children.iter_mut().try_for_each(|child| {
            let child_prefix = child.prefix(prefix);
            child.state.choose_and_take(&child_prefix, old_states, transfer)
        })
    }

    /// Sets the tensors, counters and numbers of this state that `old` has by the same names, and returns the
    /// names of the entries that were set. The master and the held rules stay.
    ///
    /// `make_values` makes the values of a tensor from its name, the new and the old tensor. If `make_values`
    /// returns `None`, the new tensor stays.
    pub(crate) fn take_entries(
        &mut self,
        old: &State,
        mut make_values: impl FnMut(&'static str, &Buffer, &Buffer) -> crate::tensors::Result<Option<Tensor>>,
    ) -> Result<Vec<&'static str>> {
        let mut taken_over = Vec::new();
        for (name, new) in &mut self.tensors {
            let Some(old_tensor) = entry(&old.tensors, name) else {
                continue;
            };
            if let Some(values) = make_values(name, new, old_tensor)? {
                new.set(&values)?;
                taken_over.push(*name);
            }
        }
        taken_over.extend(take_numbers(&mut self.counters, &old.counters));
        let Self { numbers, traits, .. } = self;
        let range_of = |name: &str| entry(traits, name)?.range;
        // An old number may be from another rule with another range.
        let is_in_range = |(name, number): &&(&'static str, f64)| {
            !number.is_finite() || range_of(name).is_none_or(|problem_with| problem_with(*number).is_none())
        };
        let valid_numbers: Vec<_> = old.numbers.iter().filter(is_in_range).copied().collect();
        taken_over.extend(take_numbers(numbers, &valid_numbers));
        Ok(taken_over)
    }

    /// The full names of the tensors that the innermost store with tensors has for the parameter.
    pub(crate) fn store_tensor_names(&self) -> Vec<String> {
        let Some(inner) = self.inside_store() else {
            return Vec::new();
        };
        match inner.store_tensor_names() {
            names if names.is_empty() => self.own_tensors().map(|(name, _)| name.to_string()).collect(),
            names => names,
        }
    }

    /// The names of this state's entries, without those of held rules.
    pub(crate) fn own_names(&self) -> impl Iterator<Item = &'static str> {
        let tensors = self.own_tensors().map(|(name, _)| name);
        tensors
            .chain(self.counters.iter().map(|(name, _)| *name))
            .chain(self.numbers.iter().map(|(name, _)| *name))
    }
}

/// Both masters, if their dtypes are equal. Otherwise `Leaf::transferred_state` lets the store convert the
/// old master.
fn masters_of_one_dtype<N: Borrow<Buffer>>(new: Option<N>, old: Option<&Buffer>) -> Option<(N, &Buffer)> {
    new.zip(old)
        .filter(|(new, old)| new.borrow().dtype() == old.dtype())
}

/// Sets the new numbers that `old` has by the same names, and returns these names.
fn take_numbers<'n, T: Copy>(
    new: &'n mut [(&'static str, T)],
    old: &'n [(&'static str, T)],
) -> impl Iterator<Item = &'static str> {
    new.iter_mut().filter_map(|(name, number)| {
        *number = *entry(old, name)?;
        Some(*name)
    })
}
