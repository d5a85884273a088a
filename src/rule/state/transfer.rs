//! What a state takes over from the state of another rule, when `replace` exchanges the optimiser.
//!
//! The new state and those of its held rules choose in turn, in the order of `State::walk`:
//!
//! 1. A state with tensors chooses the first old state that has all of them: same name, same shape, same
//!    meaning. With fewer of them the rule starts anew, because counters such as those of bias corrections
//!    belong to all tensors.
//! 2. A state with a master may also choose an old state with a master of the same dtype.
//! 3. A state without tensors and master chooses the one at the same place, if its entries have equal names.
//! 4. Of the chosen state it takes the master, the tensors that fit, and counters and numbers of the same
//!    names. Nobody else can choose that state.
//!
//! What was not taken of the old states is `dropped`; what got nothing in the new state is `fresh`.

use std::borrow::Borrow;

use super::Child;
use crate::engine::Buffer;
use crate::error::Result;
use crate::numbers::Records;
use crate::rule::State;
use crate::rule::description::ChildPlace;
use crate::tensors::Tensor;

/// What became of the parts of a state when it got another rule or other rows, by their full names.
#[derive(Debug, Default)]
pub(crate) struct Transfer {
    pub(crate) kept: Vec<String>,
    pub(crate) fresh: Vec<String>,
    pub(crate) dropped: Vec<String>,
}

impl State {
    /// Whether `old` has a tensor that can replace the tensor `new` of this name.
    fn fits(&self, name: &str, new: &Buffer, old: &State) -> bool {
        // All low bits of a master are in other units than one byte of them, though the name is the same.
        let low_bits = |buffer: &Buffer| buffer.records() == Some(Records::LowBits);
        let same = |(other, old): &(&str, Buffer)| {
            *other == name && old.shape() == new.shape() && low_bits(old) == low_bits(new)
        };
        self.traits_of(name).is_average() == old.traits_of(name).is_average() && old.tensors.iter().any(same)
    }

    /// Takes over what fits of `old`, the state of another rule.
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
        let fits = |(place, old): &(String, &State)| match (&self.tensors[..], &self.master) {
            ([], None) => place == prefix && old.own_names().eq(self.own_names()),
            (tensors, master) => {
                let as_many = !self.is_one || tensors.len() == old.tensors.len();
                let all_fit = as_many && tensors.iter().all(|(name, new)| self.fits(name, new, old));
                (!tensors.is_empty() && all_fit)
                    || same_masters(master.as_ref(), old.master.as_ref()).is_some()
            }
        };
        let found = sources.iter().position(fits).map(|place| sources.remove(place));
        let mut names: Vec<&str> = self.own_names().collect();
        if let Some((place, old)) = found {
            let fitting =
                self.tensors.iter().filter(|(name, new)| self.fits(name, new, old)).map(|(name, _)| *name);
            let fitting: Vec<&str> = fitting.collect();
            let mut kept = Vec::new();
            if let Some((new, old)) = same_masters(self.master.as_mut(), old.master.as_ref()) {
                new.set(&old.tensor()?)?;
                kept.push("master");
            }
            kept.extend(self.take_entries(old, |name, _, old| {
                fitting.contains(&name).then(|| old.tensor()).transpose()
            })?);
            names.retain(|name| !kept.contains(name));
            let dropped =
                old.own_names().filter(|name| !kept.contains(name)).map(|name| format!("{place}{name}"));
            transfer.dropped.extend(dropped);
            transfer.kept.extend(kept.into_iter().map(|name| format!("{prefix}{name}")));
        }
        transfer.fresh.extend(names.into_iter().map(|name| format!("{prefix}{name}")));
        self.children.iter_mut().try_for_each(|child| {
            let prefix = child.prefixed(prefix);
            child.state.take_over_from(&prefix, sources, transfer)
        })
    }

    /// Takes over own entries of the same names, and returns the names of those that got a value.
    ///
    /// `values` makes the values of a tensor from the new and the old one; with `None` the new one stays.
    pub(crate) fn take_entries(
        &mut self,
        old: &State,
        mut values: impl FnMut(&'static str, &Buffer, &Buffer) -> crate::tensors::Result<Option<Tensor>>,
    ) -> Result<Vec<&'static str>> {
        let mut kept = Vec::new();
        for (name, new) in &mut self.tensors {
            let Some((_, old)) = old.tensors.iter().find(|(other, _)| other == name) else { continue };
            if let Some(values) = values(name, new, old)? {
                new.set(&values)?;
                kept.push(*name);
            }
        }
        kept.extend(take_numbers(&mut self.counters, &old.counters));
        let Self { numbers, traits, .. } = self;
        let range = |name: &str| traits.iter().find(|(own, _)| *own == name)?.1.range;
        // A number of another rule may have another range.
        let fits = |(name, number): &&(&'static str, f64)| {
            !number.is_finite() || range(name).is_none_or(|range| range(*number).is_none())
        };
        let fitting: Vec<_> = old.numbers.iter().filter(fits).copied().collect();
        kept.extend(take_numbers(numbers, &fitting));
        Ok(kept)
    }

    /// The full names of the tensors that the innermost store with tensors keeps for the parameter.
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

/// Both masters, if they have one dtype. Otherwise `Leaf::convert_master` lets the store convert the old one.
fn same_masters<N: Borrow<Buffer>>(new: Option<N>, old: Option<&Buffer>) -> Option<(N, &Buffer)> {
    new.zip(old).filter(|(new, old)| new.borrow().dtype() == old.dtype())
}

/// Takes over the numbers of the same names, and returns these names.
fn take_numbers<'n, T: Copy>(
    new: &'n mut [(&'static str, T)],
    old: &'n [(&'static str, T)],
) -> impl Iterator<Item = &'static str> {
    new.iter_mut().filter_map(|(name, number)| {
        *number = old.iter().find(|(other, _)| other == name)?.1;
        Some(*name)
    })
}
