//! Takes over entries from the state of another rule, when `replace` exchanges the optimiser.
//!
//! The new state and the states of its held rules choose in turn, in the order of `State::walk`:
//!
//! 1. A state with tensors chooses the first old state that has all these tensors: with equal names, shapes
//!    and meanings. If a tensor is missing, the rule starts anew, because counters such as those of bias
//!    corrections belong to all tensors.
//! 2. A state with a master may also choose an old state with a master of the same dtype.
//! 3. A state without tensors and master chooses the old state at its own place, if both have entries with
//!    equal names.
//! 4. From the chosen old state, a state takes the master, the tensors that fit, and the counters and numbers
//!    with equal names. No other state can choose this old state any more.
//!
//! Old entries that no state has taken are `dropped`; new entries that have taken nothing are `fresh`.

use std::borrow::Borrow;

use super::Child;
use crate::engine::Buffer;
use crate::error::Result;
use crate::numbers::Records;
use crate::rule::State;
use crate::rule::description::ChildPlace;
use crate::tensors::Tensor;

/// The full names of entries, by their fate when a state gets another rule or other rows.
#[derive(Debug, Default)]
pub(crate) struct Transfer {
    pub(crate) kept: Vec<String>,
    pub(crate) fresh: Vec<String>,
    pub(crate) dropped: Vec<String>,
}

impl State {
    /// Whether `old` has a tensor that can replace the tensor `new` with this name.
    fn fits(&self, name: &str, new: &Buffer, old: &State) -> bool {
        // A `rest` with all low bits of a master and a `rest` with one byte of these bits have different
        // units.
        let has_low_bits = |buffer: &Buffer| buffer.records() == Some(Records::LowBits);
        let can_replace = |(other, old): &(&str, Buffer)| {
            *other == name && old.shape() == new.shape() && has_low_bits(old) == has_low_bits(new)
        };
        self.traits_of(name).is_average() == old.traits_of(name).is_average()
            && old.tensors.iter().any(can_replace)
    }

    /// Takes over all fitting entries of `old`, the state of another rule.
    pub(crate) fn take_over(&mut self, old: &State) -> Result<Transfer> {
        let mut transfer = Transfer::default();
        let mut sources = Vec::new();
        old.walk("", &mut |prefix, state| sources.push((prefix.to_string(), state)));
        self.take_over_from("", &mut sources, &mut transfer)?;
        for (prefix, state) in sources {
            transfer.dropped.extend(state.own_names().map(|name| format!("{prefix}{name}")));
        }
        Ok(transfer)
    }

    fn take_over_from(
        &mut self,
        prefix: &str,
        sources: &mut Vec<(String, &State)>,
        transfer: &mut Transfer,
    ) -> Result<()> {
        let can_choose = |(old_prefix, old): &(String, &State)| match (&self.tensors[..], &self.master) {
            ([], None) => old_prefix == prefix && old.own_names().eq(self.own_names()),
            (tensors, master) => {
                let is_complete = !self.is_one_sum || tensors.len() == old.tensors.len();
                let all_fit = is_complete && tensors.iter().all(|(name, new)| self.fits(name, new, old));
                (!tensors.is_empty() && all_fit)
                    || masters_of_one_dtype(master.as_ref(), old.master.as_ref()).is_some()
            }
        };
        let choice = sources.iter().position(can_choose).map(|index| sources.remove(index));
        let mut fresh: Vec<&str> = self.own_names().collect();
        if let Some((old_prefix, old)) = choice {
            let fitting = self.tensors.iter().filter(|(name, new)| self.fits(name, new, old));
            let fitting_names: Vec<&str> = fitting.map(|(name, _)| *name).collect();
            let mut taken_over = Vec::new();
            if let Some((new, old)) = masters_of_one_dtype(self.master.as_mut(), old.master.as_ref()) {
                new.set(&old.tensor()?)?;
                taken_over.push("master");
            }
            taken_over.extend(self.take_entries(old, |name, _, old| {
                fitting_names.contains(&name).then(|| old.tensor()).transpose()
            })?);
            fresh.retain(|name| !taken_over.contains(name));
            let dropped = old
                .own_names()
                .filter(|name| !taken_over.contains(name))
                .map(|name| format!("{old_prefix}{name}"));
            transfer.dropped.extend(dropped);
            transfer.kept.extend(taken_over.into_iter().map(|name| format!("{prefix}{name}")));
        }
        transfer.fresh.extend(fresh.into_iter().map(|name| format!("{prefix}{name}")));
        self.children.iter_mut().try_for_each(|child| {
            let prefix = child.prefix(prefix);
            child.state.take_over_from(&prefix, sources, transfer)
        })
    }

    /// Takes over own entries with equal names, and returns the names of the entries that got a value.
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
            let Some((_, old)) = old.tensors.iter().find(|(other, _)| other == name) else { continue };
            if let Some(values) = make_values(name, new, old)? {
                new.set(&values)?;
                taken_over.push(*name);
            }
        }
        taken_over.extend(take_numbers(&mut self.counters, &old.counters));
        let Self { numbers, traits, .. } = self;
        let range = |name: &str| traits.iter().find(|(entry, _)| *entry == name)?.1.range;
        // The number may come from another rule with another range.
        let is_in_range = |(name, number): &&(&'static str, f64)| {
            !number.is_finite() || range(name).is_none_or(|range| range(*number).is_none())
        };
        let fitting: Vec<_> = old.numbers.iter().filter(is_in_range).copied().collect();
        taken_over.extend(take_numbers(numbers, &fitting));
        Ok(taken_over)
    }

    /// The full names of a store's tensors for the parameter. The store is the innermost one that has
    /// tensors.
    pub(crate) fn names_of_store(&self) -> Vec<String> {
        match &self.children[..] {
            [Child { place: ChildPlace::Stored, state: inner }] => match inner.names_of_store() {
                names if names.is_empty() => {
                    let tensors = self.tensors.iter().map(|(name, _)| *name);
                    self.master.iter().map(|_| "master").chain(tensors).map(str::to_string).collect()
                }
                names => names,
            },
            _ => Vec::new(),
        }
    }

    /// The names of own tensors, counters and numbers.
    pub(crate) fn own_names(&self) -> impl Iterator<Item = &'static str> {
        let master = self.master.iter().map(|_| "master");
        let tensors = self.tensors.iter().map(|(name, _)| *name);
        let counters = self.counters.iter().map(|(name, _)| *name);
        master.chain(tensors).chain(counters).chain(self.numbers.iter().map(|(name, _)| *name))
    }
}

/// Both masters, if their dtypes are equal. Otherwise `Leaf::convert_master` lets the store convert the old
/// master.
fn masters_of_one_dtype<N: Borrow<Buffer>>(new: Option<N>, old: Option<&Buffer>) -> Option<(N, &Buffer)> {
    new.zip(old).filter(|(new, old)| new.borrow().dtype() == old.dtype())
}

/// Takes over the numbers with equal names, and returns these names.
fn take_numbers<'n, T: Copy>(
    new: &'n mut [(&'static str, T)],
    old: &'n [(&'static str, T)],
) -> impl Iterator<Item = &'static str> {
    new.iter_mut().filter_map(|(name, number)| {
        *number = old.iter().find(|(other, _)| other == name)?.1;
        Some(*name)
    })
}
