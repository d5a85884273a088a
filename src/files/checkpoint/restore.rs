//! Restoring a checkpoint: all ranks check everything (`restoration.rs`) before any rank writes
//! (`assign.rs`).

use super::defaults::Restored;
use super::file::CheckpointFile;
use super::save::variables;
use crate::error::Result;
use crate::model::Model;
use crate::ranks::{Agreement, Aspect, Call};
use crate::tensors::Tensor;
use crate::tree::StateTree;

impl CheckpointFile {
    /// Takes over the state: tensors, counters, hyper-parameters and which parameters are frozen.
    ///
    /// The model stays as it is; [`restore_with_model`](CheckpointFile::restore_with_model) restores both.
    /// The state has to be set up with the same rules for the same parameters as the saved one, unless some
    /// are [excepted](CheckpointFile::except). Everything is checked before anything is changed. The state
    /// then continues bit for bit as the saved one would have.
    ///
    /// Hyper-parameters may differ: those of the file count, unless the program
    /// [keeps its own](CheckpointFile::keeping_settings), and [`Restored`] lists the differences. If the
    /// program has set up others than the program of the file, the state
    /// [warns](crate::Warning::SettingsDiffer). A hyper-parameter that an older file lacks gets its default.
    /// One that the rule lacks is an error.
    ///
    /// If the file has the model, too, the next update compares some parameters with it, and
    /// [warns](crate::Warning::ModelNotRestored) or, for a parameter with a master, refuses to go on.
    ///
    /// Over [ranks](crate::Setup::over) all ranks call this with the same file, and each takes over its
    /// parts. Any number of ranks may have written the file. If one rank refuses, all get an error before
    /// anything has changed on any rank.
    ///
    /// If the model's names have changed since the save, [rename](StateTree::rename) those of the state to
    /// the old ones, restore, and rename them back. Parameters in a list should have names: see
    /// [`Warning::OrderUnseen`](crate::Warning::OrderUnseen).
    ///
    /// # Errors
    /// If the file lacks a parameter or a tensor, or has one too many; if a rule, shape or dtype differs; if
    /// a hyper-parameter is out of range or a number is not finite; if the model has averages instead of its
    /// parameters, or these have [no names](crate::CandleOptimizer); if the file can no longer be read, or
    /// was changed after it was opened. After an error nothing has changed, unless the file failed or changed
    /// just while it was taken over: the remedy of that error is to restore again. A change in place that
    /// keeps length and time of modification is not noticed.
    pub fn restore(&self, state: &mut StateTree) -> Result<Restored> {
        self.take_over_all(state, None::<&Tensor>)
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
        self.take_over_all(state, Some(model))
    }

    fn take_over_all<M: Model + ?Sized>(&self, state: &mut StateTree, model: Option<&M>) -> Result<Restored> {
        let planned = state.check_names().and_then(|()| state.check_parameters()).and_then(|()| {
            let mut variables = model.map(|model| variables(state, model)).transpose()?;
            self.check_excepted(state, variables.as_ref())?;
            // After `check_excepted`, because a pattern that matches only one of these variables is not an
            // unused one.
            variables.iter_mut().for_each(|all| all.retain(|path, _| !self.leaves_out(state, path)));
            let restoration = self.restoration(state, variables.as_ref())?;
            let agreement = Agreement::on(vec![Aspect::new("what is restored", self.words(model.is_some()))]);
            Ok(((variables.unwrap_or_default(), restoration), agreement, Vec::new()))
        });
        let ((variables, mut restoration), _) = state.agree_on(Call::Restore, planned)?;
        let replaced = restoration.replaced.take();
        let restored = self.assign(state, &variables, restoration);
        let restored = state.settle(Call::Restored, restored)?;
        replaced.map(|warning| state.warnings.meet(warning));
        state.warn_of_order();
        Ok(restored)
    }

    /// The file and options in words, which have to be the same on all ranks.
    fn words(&self, with_model: bool) -> String {
        let options = [
            (with_model, "with the model"),
            (self.convert, "converting"),
            (self.accept_non_finite, "accepting what is not finite"),
            (self.keep_settings, "keeping settings"),
        ];
        let options = options.iter().filter(|(is_on, _)| *is_on).map(|(_, name)| format!(", {name}"));
        let except = self.except.texts().iter().map(|pattern| format!(", except {pattern:?}"));
        let options = options.chain(except).collect::<String>();
        format!("a file with the checksum {}{options}", self.record.checksum)
    }
}
