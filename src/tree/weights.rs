//! A leaf's parameter: the checks that it is unchanged, and setting master and copies to new weights.

use super::{Leaf, StateTree};
use crate::engine::owned_on;
use crate::error::warning::Warning;
use crate::error::{Error, ErrorKind, Result};
use crate::model::lent::{Lend, Lent, copy_of};
use crate::rule::{Extent, State, check_rounded, difference, sample_checksum};
use crate::tensors::{Tensor, dtype_of, in_dtype};

impl Leaf {
    /// The parameter of the training: the copy aside, if the model has other values instead; otherwise `x`.
    pub(crate) fn parameter<'x>(&'x self, x: &'x dyn Lend) -> &'x dyn Lend {
        self.parameter_aside.as_ref().map_or(x, |copy| copy)
    }

    /// The most precise copy of the parameter `x`.
    pub(crate) fn master(&self, x: &dyn Lend) -> Result<Tensor> {
        let x = self.parameter(x);
        // Before the first step a changed parameter replaces its master, because some parameters, such as
        // BatchNorm's running statistics, move without steps.
        let master = if self.steps == 0 && self.is_stale(x, Extent::Whole)? {
            let old_master = self.optimiser.precise(&self.state, x)?;
            owned_on(
                old_master.device(),
                &in_dtype(&x.tensor_or_copy()?, dtype_of(&old_master))?,
            )
        } else {
            self.optimiser.master(&self.state, x)
        };
        master.map_err(|error| error.at(&self.path))
    }

    /// Refuses a parameter `x` that is not its master rounded; before the first step also a parameter that
    /// differs from the copies that rules keep.
    ///
    /// `state` is the leaf's, or a state that the leaf is to get.
    pub(super) fn check_unchanged(&self, state: &State, x: &dyn Lend, extent: Extent) -> Result<()> {
        if let Some(master) = state.outer_master() {
            check_rounded(master, x, extent).map_err(|error| error.at(&self.path))?;
        }
        self.check_copies(state, x, extent)
    }

    /// Refuses a parameter `x` that, before its first step, differs from the copies that rules keep of it in
    /// `state`.
    pub(crate) fn check_copies(&self, state: &State, x: &dyn Lend, extent: Extent) -> Result<()> {
        if self.steps > 0 || !state.has_copies() {
            return Ok(());
        }
        let x_of_rule = self.optimiser.x_of_rule(state, x)?;
        match state
            .changed_copy(&x_of_rule, extent)
            .map_err(|error| error.at(&self.path))?
        {
            Some((slot, difference)) => {
                let expected = format_args!(
                    "{}, as in {slot:?}, which the rule started as a copy of the parameter",
                    difference.master
                );
                let remedy = "the parameter was changed after the state was made: call `refresh_masters` to \
                              start from the parameters, or `Update::keep_masters` to keep the copy as it is";
                Err(difference
                    .error("its value is", expected)
                    .with_remedy(remedy)
                    .at(&self.path))
            }
            None => Ok(()),
        }
    }

    /// Whether [`Leaf::check_unchanged`] refuses the parameter `x`.
    fn is_stale(&self, x: &dyn Lend, extent: Extent) -> Result<bool> {
        match self.check_unchanged(&self.state, x, extent) {
            Err(error) if error.kind() == ErrorKind::Changed => Ok(true),
            outcome => outcome.map(|()| false),
        }
    }

    /// Sets master and copies to the parameter `x`, if `x` was changed before the leaf's first gradient.
    ///
    /// If the call fails later, nothing is lost, because a leaf follows its parameter until the first
    /// gradient.
    pub(crate) fn catch_up(&mut self, x: &dyn Lend) -> Result<()> {
        if self.is_stale(x, Extent::First)? {
            self.refresh(x)
        } else {
            Ok(())
        }
    }

    /// Sets master and copies to the parameter `x`.
    pub(crate) fn refresh(&mut self, x: &dyn Lend) -> Result<()> {
        self.set_weights(x, &copy_of("parameter", x)?)
    }

    /// Gives the parameter `x`, its master and copies new weights.
    pub(crate) fn set_weights(&mut self, x: &dyn Lend, values: &Tensor) -> Result<()> {
        let Leaf {
            optimiser,
            state,
            path,
            last_checksum,
            ..
        } = self;
        let outcome = optimiser
            .set_precise(state, x, values)
            .and_then(|()| state.renew(&optimiser.x_of_rule(state, x)?, &[]));
        if outcome.is_ok() {
            // After an error the checksum stays, because a copy may still have the old weights, and only the
            // checksum reveals such a copy.
            *last_checksum = None;
        }
        outcome.map_err(|error| error.at(path))
    }

    /// Keeps a checksum of the parameter `x` after a step, if only a checksum can reveal new weights.
    pub(crate) fn keep_checksum(&mut self, x: &dyn Lend) {
        if self.needs_checksum {
            let checksum = self.own_part(x).ok().and_then(|part| sample_checksum(&*part));
            self.last_checksum = checksum.map(|checksum| (self.steps, checksum));
        }
    }

    /// Refuses a parameter `x` that differs from the checksum of the last of `steps` steps. Without a master
    /// only the checksum can tell, because no tensor of the state is equal to the parameter.
    pub(crate) fn check_last_checksum(
        last_checksum: Option<(u64, u32)>,
        steps: u64,
        x: &dyn Lend,
    ) -> Result<()> {
        let Some((_, before)) = last_checksum.filter(|(steps_then, _)| *steps_then == steps) else {
            return Ok(());
        };
        if sample_checksum(x).is_none_or(|now| now == before) {
            return Ok(());
        }
        let problem = "it was changed outside of `update`, but its state follows from the old values: a \
                       copy, a norm, or what roundings have lost";
        let remedy = "call `refresh_masters` to go on from the parameters, or `Update::keep_masters` to go \
                      on with that state, which moves the parameter";
        Err(Error::new(ErrorKind::Changed, problem).with_remedy(remedy))
    }

    /// Refuses a call while the model has other weights instead of the parameter.
    pub(crate) fn check_parameter(&self) -> Result<()> {
        if self.parameter_aside.is_none() {
            return Ok(());
        }
        let problem = "the model has other weights instead of this parameter (averages, or weights that \
                       `Sam` has moved), because a `Climbed` was forgotten or a device has failed";
        let remedy = "call `with_averages` or `Sam::ascend`, which put the parameters back first";
        Err(Error::new(ErrorKind::Changed, problem)
            .at(&self.path)
            .with_remedy(remedy))
    }
}

impl StateTree {
    /// Compares parameters, once, with those of the file from which the state was restored.
    ///
    /// If a parameter with a master differs, the result is an error, unless the step `keeps_masters`. If a
    /// parameter without a master differs, the result is a warning.
    pub(crate) fn check_restored(
        &mut self,
        parameters: &[Lent<'_>],
        keeps_masters: bool,
    ) -> Result<Option<Warning>> {
        for (path, start) in std::mem::take(&mut self.saved_starts) {
            let Some(place) = self.leaf_index(&path).flatten() else {
                continue;
            };
            let part = parameters[place].part(0..start.elem_count());
            let comparison = part.and_then(|part| difference(&start, &*part, Extent::Whole));
            // An error is dropped, because the checks of the step refuse such a parameter.
            let Some(difference) = comparison.ok().flatten() else {
                continue;
            };
            if self.leaves[place].state.outer_master().is_none() {
                return Ok(self.warnings.record(Warning::ModelNotRestored { path }));
            }
            if !keeps_masters {
                let remedy = "restore both by `CheckpointFile::restore_with_model`; or call `refresh_masters` \
                              to go on from the parameters, or `Update::keep_masters` to go on from the masters";
                let problem =
                    "it is not the parameter of the file that the state was restored from: its value is";
                let expected = format_args!("{}, as in the file", difference.master);
                return Err(difference.error(problem, expected).with_remedy(remedy).at(&path));
            }
        }
        Ok(None)
    }
}
