//! A leaf's parameter: the checks that it is unchanged, and what its master and copies become with new
//! weights.

use super::{Leaf, StateTree};
use crate::engine::owned_on;
use crate::error::warning::Warning;
use crate::error::{Error, ErrorKind, Result};
use crate::model::lent::{Lend, Lent, copied};
use crate::rule::{Difference, Extent, State, check_rounded, difference, sample_checksum};
use crate::tensors::{Tensor, dtype_of, in_dtype};

impl Leaf {
    /// The parameter of the training: `x`, or its copy aside while `x` is something else.
    pub(crate) fn parameter<'x>(&'x self, x: &'x dyn Lend) -> &'x dyn Lend {
        self.parameter_aside.as_ref().map_or(x, |aside| aside)
    }

    /// The most precise copy of the parameter `x`.
    pub(crate) fn master(&self, x: &dyn Lend) -> Result<Tensor> {
        let x = self.parameter(x);
        // Before the first step a changed parameter counts, and not its master: BatchNorm's running
        // statistics, for example, move without steps.
        let master = if self.steps == 0 && self.is_stale(x, Extent::Whole)? {
            let like = self.optimiser.precise(&self.state, x)?;
            owned_on(like.device(), &in_dtype(&x.tensor_or_copy()?, dtype_of(&like))?)
        } else {
            self.optimiser.master(&self.state, x)
        };
        master.map_err(|error| error.at(&self.path))
    }

    /// Refuses a parameter `x` that is not its master rounded; before the first step also one that differs
    /// from the copies that rules keep.
    pub(crate) fn check_unchanged(&self, x: &dyn Lend, extent: Extent) -> Result<()> {
        self.check_fitting(&self.state, x, extent)
    }

    /// [`Leaf::check_unchanged`] for a state that the leaf is to get.
    pub(super) fn check_fitting(&self, state: &State, x: &dyn Lend, extent: Extent) -> Result<()> {
        if let Some(master) = state.followed() {
            check_rounded(master, x, extent).map_err(|error| error.at(&self.path))?;
        }
        self.check_copies_in(state, x, extent)
    }

    /// Refuses a parameter `x` that differs before its first step from the copies that rules keep of it.
    pub(crate) fn check_copies(&self, x: &dyn Lend, extent: Extent) -> Result<()> {
        self.check_copies_in(&self.state, x, extent)
    }

    fn check_copies_in(&self, state: &State, x: &dyn Lend, extent: Extent) -> Result<()> {
        if self.steps > 0 || !state.has_copies() {
            return Ok(());
        }
        let seen = self.optimiser.seen_by_rule(state, x)?;
        match state.changed_copy(&seen, extent).map_err(|error| error.at(&self.path))? {
            Some((slot, Difference { index, parameter, master: copy })) => {
                let error = Error::new(ErrorKind::Changed, "its value is").with_got(parameter);
                let expected =
                    format!("{copy}, as in {slot:?}, which the rule started as a copy of the parameter");
                let remedy = "the parameter was changed after the state was made: call `refresh_masters` to \
                              start from the parameters, or `Update::keep_masters` to keep the copy as it is";
                Err(error.at_element(index).with_expected(expected).with_remedy(remedy).at(&self.path))
            }
            None => Ok(()),
        }
    }

    fn is_stale(&self, x: &dyn Lend, extent: Extent) -> Result<bool> {
        match self.check_unchanged(x, extent) {
            Err(error) if error.kind() == ErrorKind::Changed => Ok(true),
            outcome => outcome.map(|()| false),
        }
    }

    /// If the parameter `x` was changed, sets master and copies to it, before the leaf's first gradient.
    ///
    /// The call may still fail, but nothing is lost, because until its first gradient a leaf follows `x`
    /// anyway.
    pub(crate) fn catch_up(&mut self, x: &dyn Lend) -> Result<()> {
        if self.is_stale(x, Extent::First)? { self.refresh(x) } else { Ok(()) }
    }

    /// Sets master and copies to the parameter `x`.
    pub(crate) fn refresh(&mut self, x: &dyn Lend) -> Result<()> {
        self.set_weights(x, &copied("parameter", x)?)
    }

    /// Gives the parameter `x`, its master and copies new weights.
    pub(crate) fn set_weights(&mut self, x: &dyn Lend, values: &Tensor) -> Result<()> {
        let Leaf { optimiser, state, path, left, .. } = self;
        let set = optimiser
            .set_precise(state, x, values)
            .and_then(|()| state.renew(&optimiser.seen_by_rule(state, x)?));
        if set.is_ok() {
            // Not after an error: copies may be those of the old weights, and then `left` shows a change.
            *left = None;
        }
        set.map_err(|error| error.at(path))
    }

    /// Keeps a checksum of the parameter `x` after a step, if only that shows new weights.
    pub(crate) fn remember(&mut self, x: &dyn Lend) {
        if self.is_led_back {
            self.left = self.own_part(x).ok().and_then(|part| sample_checksum(&*part));
        }
    }

    /// Refuses a parameter `x` that is not what the last step has `left`; for a parameter without a master,
    /// because then no tensor of the state is equal to it.
    pub(crate) fn check_left(left: Option<u32>, x: &dyn Lend) -> Result<()> {
        let (Some(left), Some(now)) = (left, left.and_then(|_| sample_checksum(x))) else { return Ok(()) };
        if left == now {
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
        Err(Error::new(ErrorKind::Changed, problem).at(&self.path).with_remedy(remedy))
    }
}

impl StateTree {
    /// Compares parameters with those of the file from which the state was restored, once. With a master,
    /// another parameter is refused, unless the step `keeps_masters`; without one it is a warning.
    pub(crate) fn check_restored(
        &mut self,
        parameters: &[Lent<'_>],
        keeps_masters: bool,
    ) -> Result<Option<Warning>> {
        for (path, start) in std::mem::take(&mut self.saved_starts) {
            let Some(place) = self.place(&path).flatten() else { continue };
            let part = parameters[place].part(0..start.elem_count());
            let compared = part.and_then(|part| difference(&start, &*part, Extent::Whole));
            // What cannot be compared here is refused by the checks of the step, if it is wrong.
            let Some(Difference { index, parameter, master: saved }) = compared.ok().flatten() else {
                continue;
            };
            if self.leaves[place].state.followed().is_none() {
                return Ok(self.warnings.meet(Warning::ModelNotRestored { path }));
            }
            if !keeps_masters {
                let remedy = "restore both by `CheckpointFile::restore_with_model`; or call `refresh_masters` \
                              to go on from the parameters, or `Update::keep_masters` to go on from the masters";
                let problem =
                    "it is not the parameter of the file that the state was restored from: its value is";
                let expected = format!("{saved}, as in the file");
                let error = Error::new(ErrorKind::Changed, problem).with_got(parameter).at_element(index);
                return Err(error.with_expected(expected).with_remedy(remedy).at(&path));
            }
        }
        Ok(None)
    }
}
