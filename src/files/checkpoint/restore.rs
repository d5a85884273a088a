//! Restoring a checkpoint: all ranks check everything (`restoration.rs`) before any rank writes (`assign`).

use std::collections::BTreeMap;

use super::defaults::Restored;
use super::file::CheckpointFile;
use super::restoration::{EntryPart, LeafRestoration, Restoration};
use super::save::variables_by_path;
use crate::engine::{Buffer, rounded, set_lent_part};
use crate::error::{Error, ErrorKind, Result};
use crate::model::Model;
use crate::model::lent::Lent;
use crate::numbers::ranges_to_read;
use crate::ranks::{Aspect, Call};
use crate::rule::StateValues;
use crate::rule::field::Number;
use crate::tensors::Tensor;
use crate::tree::{Leaf, StateTree};

impl CheckpointFile {
    /// Takes over the state: tensors, counters, hyper-parameters and which parameters are frozen.
    ///
    /// The model stays as it is; [`restore_with_model`](CheckpointFile::restore_with_model) restores both.
    /// The state has to be set up with the same rules for the same parameters as the saved state, unless some
    /// parameters are [excepted](CheckpointFile::except). Everything is checked before anything is changed.
    /// The state then continues bit for bit as the saved state would have.
    ///
    /// Hyper-parameters may differ: the file's values count, unless the program
    /// [keeps its own](CheckpointFile::keeping_settings), and [`Restored`] lists the differences. If the
    /// program has set up other values than the program that wrote the file, the state
    /// [warns](crate::Warning::SettingsDiffer). A hyper-parameter that an older file lacks gets its default.
    /// A hyper-parameter that the rule lacks is an error.
    ///
    /// If the file has the model, too, the next update compares some parameters with the file's. If these
    /// differ, the update [warns](crate::Warning::ModelNotRestored) or, for a parameter with a master,
    /// refuses to go on.
    ///
    /// Over [ranks](crate::Setup::over) all ranks call this with the same file, and each takes over its
    /// parts. Any number of ranks may have written the file. If one rank refuses, all get an error before
    /// anything has changed on any rank.
    ///
    /// If the model's names have changed since the save, [rename](StateTree::rename) the state's parameters
    /// to the old names, restore, and rename the parameters back. Parameters in a list should have names: see
    /// [`Warning::OrderUnseen`](crate::Warning::OrderUnseen).
    ///
    /// # Errors
    /// If the file lacks a parameter or a tensor, or has one that the state lacks; if a rule, shape or dtype
    /// differs; if a hyper-parameter is out of range or a number is not finite; if the model has averages
    /// instead of its parameters, or these have [no names](crate::CandleOptimizer); if the file can no longer
    /// be read, or was changed after it was opened. After an error nothing has changed, unless the file
    /// failed or changed during the last step, which writes: the remedy of such an error is to restore again.
    /// A change in place that keeps length and time of modification is not noticed.
    pub fn restore(&self, state: &mut StateTree) -> Result<Restored> {
        self.restore_all(state, None::<&Tensor>)
    }

    /// [`CheckpointFile::restore`], and the model's variables as well.
    ///
    /// # Errors
    /// As [`CheckpointFile::restore`]. Also if the file has no model, or the model is not the state's or the
    /// file's.
    pub fn restore_with_model<M: Model + ?Sized>(
        &self,
        state: &mut StateTree,
        model: &M,
    ) -> Result<Restored> {
        self.restore_all(state, Some(model))
    }

    fn restore_all<M: Model + ?Sized>(&self, state: &mut StateTree, model: Option<&M>) -> Result<Restored> {
        let plan = state
            .check_names()
            .and_then(|()| state.check_parameters())
            .and_then(|()| {
                let mut variables = model.map(|model| variables_by_path(state, model)).transpose()?;
                self.check_patterns_match(state, variables.as_ref())?;
                // Excepted variables are removed only now: without them `check_patterns_match` would refuse a pattern
                // that matches nothing else.
                variables
                    .iter_mut()
                    .for_each(|by_path| by_path.retain(|path, _| !self.is_excepted(state, path)));
                let restoration = self.restoration(state, variables.as_ref())?;
                Ok((variables.unwrap_or_default(), restoration))
            });
        let (variables, mut restoration) = state.world.compare(Call::Restore, plan, |_| {
            Ok(vec![Aspect::new("what is restored", self.words(model.is_some()))])
        })?;
        let settings_warning = restoration.replaced.take();
        let assigned = self.assign(state, &variables, restoration);
        let restored = state.world.settle(Call::Restored, assigned)?;
        settings_warning.map(|warning| state.warnings.record(warning));
        state.warn_of_order();
        Ok(restored)
    }

    /// The file and options in words, which have to be the same on all ranks.
    fn words(&self, with_model: bool) -> String {
        let switches = [
            (with_model, "with the model"),
            (self.convert, "converting"),
            (self.accept_non_finite, "accepting what is not finite"),
            (self.keep_settings, "keeping settings"),
        ];
        let switches = switches
            .iter()
            .filter(|(is_on, _)| *is_on)
            .map(|(_, name)| format!(", {name}"));
        let except = self
            .except
            .texts()
            .iter()
            .map(|pattern| format!(", except {pattern:?}"));
        let options = switches.chain(except).collect::<String>();
        format!("a file with the checksum {}{options}", self.record.checksum)
    }
}

impl CheckpointFile {
    /// Writes everything. This can fail only if a device fails, or if the file fails or changes meanwhile.
    pub(super) fn assign(
        &self,
        state: &mut StateTree,
        variables: &BTreeMap<String, Lent<'_>>,
        restoration: Restoration,
    ) -> Result<Restored> {
        state.warnings.clear_cache();
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
        // Assignments that cannot fail come first. Otherwise, after a failure, a leaf could act with an
        // optimiser that is not its own.
        for (leaf, leaf_restoration) in state.leaves.iter_mut().zip(restoration.leaves) {
            tensors.push(self.assign_leaf(leaf, leaf_restoration));
        }
        for (leaf, sources) in state.leaves.iter_mut().zip(&tensors) {
            for (tensor, source) in leaf.state.values_mut().tensors.into_iter().zip(sources) {
                self.read_ranges(source, |start, values| Ok(tensor.set_stored(start, values)?))?;
            }
        }
        for ((path, variable), source) in variables.iter().zip(&restoration.variables) {
            // Values are rounded to the master's dtype first, because a parameter is its stored master
            // rounded.
            let master = state
                .leaf(path)
                .and_then(|leaf| leaf.state.outer_master())
                .filter(|_| self.convert);
            let dtype = master.map(Buffer::stored_dtype);
            self.read_ranges(source, |start, values| match dtype {
                Some(dtype) => set_lent_part(&**variable, start, &rounded(values, dtype)?),
                None => set_lent_part(&**variable, start, values),
            })
            .map_err(|error| error.at(path))?;
        }
        Ok(restoration.restored)
    }

    /// Assigns everything but the tensors, and returns the sources of the tensors.
    fn assign_leaf(&self, leaf: &mut Leaf, restoration: LeafRestoration) -> Vec<EntryPart> {
        (leaf.drives, leaf.acting) = (restoration.drives, restoration.acting);
        let record = self.record.leaves.get(leaf.path());
        let Some((tensors, record)) = restoration.tensors.zip(record) else {
            return Vec::new();
        };
        let StateValues {
            counters, numbers, ..
        } = leaf.state.values_mut();
        for (counter, (_, count)) in counters.into_iter().zip(&record.counters) {
            *counter = *count;
        }
        for (number, (_, Number(value))) in numbers.into_iter().zip(&record.numbers) {
            *number = *value;
        }
        if !self.keep_settings {
            leaf.set_optimiser(restoration.optimiser, record.frozen, true);
        }
        leaf.steps = record.steps;
        (leaf.missing_gradients.calls, leaf.missing_gradients.received) =
            (record.waited, record.received.into());
        // The next step compares parameter and master, as before a first step, because the program may have
        // loaded the parameter itself.
        leaf.unsettle();
        tensors
    }

    /// Passes elements of an entry to `set` in ranges, each with the index of its first element.
    fn read_ranges(
        &self,
        source: &EntryPart,
        mut set: impl FnMut(usize, &Tensor) -> Result<()>,
    ) -> Result<()> {
        let Some(entry) = self.entry(&source.entry) else {
            return Ok(());
        };
        for range in ranges_to_read(source.elements.clone()) {
            let start = range.start - source.elements.start;
            let part = entry
                .part(range)
                .map_err(|source| self.partial_error(ErrorKind::Io, source))?;
            set(start, &part).map_err(|error| self.partial_error(error.kind(), error))?;
        }
        Ok(())
    }

    /// The error that the file, a device or an owner of memory failed after a part was taken over.
    fn partial_error(
        &self,
        kind: ErrorKind,
        source: impl Into<Box<dyn std::error::Error + Send + Sync>>,
    ) -> Error {
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
            File::options()
                .write(true)
                .open(&path)
                .and_then(|file| file.set_len(length))
                .expect("a length")
        };
        let source = "it was changed after it had been opened; open it again";
        for length in [1_000_000, 2_000_000] {
            crate::Checkpoint::new(&state).save(&path).expect("a save");
            let file = CheckpointFile::open(&path).expect("a checkpoint");
            let restoration = file.restoration(&state, None).expect("a plan");
            resize(length);
            let error = file
                .assign(&mut state, &BTreeMap::new(), restoration)
                .expect_err("an error");
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
