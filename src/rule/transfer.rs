//! What the state of one rule is worth to another.

use super::State;
use crate::engine::{Buffer, set_tensor};
use crate::error::Result;

/// What became of the parts of a state when it got another rule or other rows, by their full names.
#[derive(Debug, Default)]
pub(crate) struct Transfer {
    pub(crate) kept: Vec<String>,
    pub(crate) fresh: Vec<String>,
    pub(crate) dropped: Vec<String>,
}

impl State {
    /// Whether a tensor of another state can take the place of this state's of the same name.
    fn fits(&self, name: &str, new: &Buffer, old: &State) -> bool {
        let same = |(other, old): &(&str, Buffer)| *other == name && old.shape() == new.shape();
        self.is_average(name) == old.is_average(name) && old.tensors.iter().any(same)
    }

    /// Takes over from the state of another rule what has the same name, shape and meaning. A rule that finds all its tensors
    /// keeps its counters and numbers; one that does not starts anew, because a bias correction belongs to all of them.
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

    fn take_over_from(&mut self, prefix: &str, sources: &mut Vec<(String, &State)>, transfer: &mut Transfer) -> Result<()> {
        let fits = |(place, old): &(String, &State)| match (&self.tensors[..], &self.master) {
            ([], None) => place == prefix && old.own_names().eq(self.own_names()),
            (tensors, master) => {
                let as_many = !self.is_one || tensors.len() == old.tensors.len();
                let all_fit = as_many && tensors.iter().all(|(name, new)| self.fits(name, new, old));
                (!tensors.is_empty() && all_fit) || (master.is_some() && old.master.is_some())
            }
        };
        let found = sources.iter().position(fits).map(|place| sources.remove(place));
        let mut names: Vec<&str> = self.own_names().collect();
        if let Some((place, old)) = found {
            let fitting = self.tensors.iter().filter(|(name, new)| self.fits(name, new, old)).map(|(name, _)| *name);
            let fitting: Vec<&str> = fitting.collect();
            let mut kept = Vec::new();
            if let (Some(new), Some(old)) = (&self.master, &old.master) {
                set_tensor(new, old)?;
                kept.push("master");
            }
            for (name, new) in &mut self.tensors {
                if let Some((_, old)) = old.tensors.iter().find(|(other, _)| other == name).filter(|_| fitting.contains(name)) {
                    new.set(&old.tensor()?)?;
                    kept.push(name);
                }
            }
            for (name, count) in &mut self.counters {
                if let Some((_, old)) = old.counters.iter().find(|(other, _)| other == name) {
                    *count = *old;
                    kept.push(name);
                }
            }
            for (name, value) in &mut self.numbers {
                if let Some((_, old)) = old.numbers.iter().find(|(other, _)| other == name) {
                    *value = *old;
                    kept.push(name);
                }
            }
            names.retain(|name| !kept.contains(name));
            let dropped = old.own_names().filter(|name| !kept.contains(name)).map(|name| format!("{place}{name}"));
            transfer.dropped.extend(dropped);
            transfer.kept.extend(kept.into_iter().map(|name| format!("{prefix}{name}")));
        }
        transfer.fresh.extend(names.into_iter().map(|name| format!("{prefix}{name}")));
        self.children.iter_mut().try_for_each(|child| {
            let prefix = child.prefixed(prefix);
            child.state.take_over_from(&prefix, sources, transfer)
        })
    }

    /// The names of the rule's own tensors, counters and numbers.
    pub(super) fn own_names(&self) -> impl Iterator<Item = &'static str> {
        let master = self.master.iter().map(|_| "master");
        let tensors = self.tensors.iter().map(|(name, _)| *name);
        let counters = self.counters.iter().map(|(name, _)| *name);
        master.chain(tensors).chain(counters).chain(self.numbers.iter().map(|(name, _)| *name))
    }
}
