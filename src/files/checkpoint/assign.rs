//! Writing the checked values into state and model.

use std::collections::BTreeMap;

use super::defaults::Restored;
use super::file::CheckpointFile;
use super::restoration::{EntryPart, LeafRestoration, Restoration};
use crate::engine::{Buffer, rounded, set_lent_part};
use crate::error::{Error, ErrorKind, Result};
use crate::model::lent::Lent;
use crate::numbers::ranges;
use crate::rule::StateParts;
use crate::rule::field::Number;
use crate::tensors::Tensor;
use crate::tree::{Leaf, StateTree};

impl CheckpointFile {
    /// Writes everything. This can fail only if a device fails, or if the file fails or changes just then.
    pub(super) fn assign(
        &self,
        state: &mut StateTree,
        variables: &BTreeMap<String, Lent<'_>>,
        restoration: Restoration,
    ) -> Result<Restored> {
        state.warnings.look_again();
        if !self.keep_settings {
            state.steps = self.record.steps;
            state.began_at = state.began_at.or(self.record.began_at);
        }
        state.calls = self.record.calls;
        state.schedules = restoration.schedules;
        state.norms = self.record.norms.clone();
        state.skipped = 0;
        state.saved_starts = restoration.saved_starts;
        state.acting_at = state.steps;
        let mut tensors = Vec::with_capacity(state.leaves.len());
        // All that cannot fail comes first: otherwise a leaf could act with another optimiser than its own.
        for (leaf, restoration) in state.leaves.iter_mut().zip(restoration.leaves) {
            tensors.push(self.assign_leaf(leaf, restoration));
        }
        for (leaf, sources) in state.leaves.iter_mut().zip(&tensors) {
            for (tensor, source) in leaf.state.parts_mut().tensors.into_iter().zip(sources) {
                self.take_over(source, |start, values| Ok(tensor.set_stored(start, values)?))?;
            }
        }
        for ((path, variable), source) in variables.iter().zip(&restoration.variables) {
            // Rounded to the master's dtype first, because a parameter is its stored master rounded.
            let master = state.leaf(path).and_then(|leaf| leaf.state.followed()).filter(|_| self.convert);
            let dtype = master.map(Buffer::stored_dtype);
            let set = self.take_over(source, |start, values| match dtype {
                Some(dtype) => set_lent_part(&**variable, start, &rounded(values, dtype)?),
                None => set_lent_part(&**variable, start, values),
            });
            set.map_err(|error| error.at(path))?;
        }
        Ok(restoration.restored)
    }

    /// Assigns everything but the tensors, and returns their sources.
    fn assign_leaf(&self, leaf: &mut Leaf, restoration: LeafRestoration) -> Vec<EntryPart> {
        (leaf.drives, leaf.acting) = (restoration.drives, restoration.acting);
        let record = self.record.leaves.get(leaf.path());
        let Some((values, record)) = restoration.values.zip(record) else { return Vec::new() };
        let StateParts { counters, numbers, .. } = leaf.state.parts_mut();
        for (counter, (_, count)) in counters.into_iter().zip(&record.counters) {
            *counter = *count;
        }
        for (number, (_, Number(value))) in numbers.into_iter().zip(&record.numbers) {
            *number = *value;
        }
        if !self.keep_settings {
            leaf.set(values.optimiser, record.frozen, true);
        }
        leaf.steps = record.steps;
        (leaf.waiting.calls, leaf.waiting.received) = (record.waited, record.received.into());
        // So that the next step compares parameter and master as before a first step: a program may have
        // loaded the parameter by itself.
        leaf.unsettle();
        values.tensors
    }

    /// Passes elements of an entry to `set` in windows, each with the index of its first element.
    fn take_over(&self, source: &EntryPart, mut set: impl FnMut(usize, &Tensor) -> Result<()>) -> Result<()> {
        let Some(entry) = self.entry(&source.entry) else { return Ok(()) };
        for window in ranges(source.elements.clone()) {
            let start = window.start - source.elements.start;
            let part = entry.part(window).map_err(|source| self.halfway(ErrorKind::Io, source))?;
            set(start, &part).map_err(|error| self.halfway(error.kind(), error))?;
        }
        Ok(())
    }

    /// The error that the file, a device or an owner of memory failed after a part was taken over.
    fn halfway(&self, kind: ErrorKind, source: impl Into<Box<dyn std::error::Error + Send + Sync>>) -> Error {
        Error::new(kind, "the restore failed after a part of the file was restored")
            .caused_by(source)
            .with_remedy("restore from a whole file before you go on")
            .in_file("checkpoint", &self.path)
    }
}

#[cfg(test)]
mod tests {
    use std::fs::File;

    use candle_core::{Device, Var};

    use super::*;
    use crate::{Momentum, setup};

    /// The file can change between the last check and the first write.
    #[test]
    fn a_file_that_is_cut_or_changed_while_it_is_taken_over() {
        let x = Var::ones(300_000, candle_core::DType::F32, &Device::Cpu).expect("a variable");
        let mut state = setup(Momentum::new(0.1), &x).expect("a state");
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("run");
        let resize = |length: u64| {
            File::options().write(true).open(&path).and_then(|file| file.set_len(length)).expect("a length")
        };
        let source = "it was changed after it had been opened; open it again";
        for length in [1_000_000, 2_000_000] {
            crate::Checkpoint::new(&state).save(&path).expect("a save");
            let file = CheckpointFile::open(&path).expect("a checkpoint");
            let restoration = file.restoration(&state, None).expect("a plan");
            resize(length);
            let error = file.assign(&mut state, &BTreeMap::new(), restoration).expect_err("an error");
            let problem = format!(
                "checkpoint {}: the restore failed after a part of the file was restored",
                path.display()
            );
            assert_eq!(
                error.to_string(),
                format!("{problem}: {source}; restore from a whole file before you go on")
            );
            assert_eq!((error.kind(), error.file()), (ErrorKind::Io, Some(&*path)));
        }
    }
}
