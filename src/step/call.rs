//! A call of an update: what the user chose, what the call found, and the gradients as the rules get them.

use super::loss_scaler::{LossScaler, check_unscaled};
use crate::engine::{Engine, Sources, check_gradient};
use crate::error::Result;
use crate::model::gradients::GradientLookUp;
use crate::model::lent::{Lend, Lent};
use crate::rule::{Gradient, LeafNorms};
use crate::tree::StateTree;

/// The options that the user chose.
#[derive(Clone, Copy, Debug)]
pub(crate) struct UpdateOptions {
    pub(crate) engine: Engine,
    /// Whether a gradient that is not finite skips the call.
    pub(crate) finite_only: bool,
    /// Whether a gradient may become infinite in the dtype in which it travels between ranks.
    pub(crate) takes_overflow: bool,
    /// How much this call counts in a weighted mean.
    pub(crate) weight: u64,
    /// Whether to go on from the masters if parameters were changed.
    pub(crate) keep_masters: bool,
    /// Whether a call without any gradient is accepted.
    pub(crate) allow_no_gradients: bool,
    /// Whether the outcome has figures of every leaf that moves.
    pub(crate) figures: bool,
    /// Whether the call brings no gradients, and ends the open windows instead.
    pub(crate) releases_windows: bool,
}

impl Default for UpdateOptions {
    fn default() -> Self {
        UpdateOptions {
            engine: Engine::default(),
            finite_only: false,
            takes_overflow: false,
            weight: 1,
            keep_masters: false,
            allow_no_gradients: false,
            figures: false,
            releases_windows: false,
        }
    }
}

/// A call: its options, and what it found in scaler, state and ranks.
#[derive(Clone, Debug)]
pub(crate) struct UpdateCall {
    pub(crate) options: UpdateOptions,
    /// The loss scale that the gradients are divided by.
    pub(crate) loss_scale: f64,
    /// How much the call counts in a weighted mean, over all ranks.
    pub(crate) weight: u64,
    /// The divisor of the sum of gradients: the weight of all ranks, or 1 without ranks.
    pub(crate) divisor: u64,
    /// The calls that windows of accumulation have counted before this one.
    pub(crate) calls: u64,
    /// A hash of the norms of earlier calls, which decide on outliers.
    pub(crate) norms: u64,
    /// Whether the state requires all gradients.
    pub(crate) requires_all: bool,
    /// Whether gradients come one at a time, so that leaves have moved before others are planned.
    pub(crate) is_streamed: bool,
    /// The path of the first pushed gradient that was not finite.
    pub(crate) overflow: Option<String>,
}

impl UpdateCall {
    /// A call, with the loss scale of the scaler, if there is one. `known` is the scale that the gradients
    /// know.
    pub(crate) fn new(
        options: UpdateOptions,
        scaler: Option<&LossScaler>,
        known: Option<f64>,
    ) -> Result<Self> {
        let scale = match scaler {
            Some(scaler) => scaler.of_loss(known)?,
            None => check_unscaled(known).map(|()| None)?,
        };
        let options = UpdateOptions { finite_only: options.finite_only || scale.is_some(), ..options };
        Ok(UpdateCall {
            options,
            loss_scale: scale.unwrap_or(1.0),
            weight: options.weight,
            divisor: 1,
            calls: 0,
            norms: 0,
            requires_all: false,
            is_streamed: false,
            overflow: None,
        })
    }

    /// The call with what the state requires, and its counts and norms of earlier calls.
    pub(crate) fn of_state(self, state: &StateTree) -> Self {
        let norms = if state.is_divided() { state.norms.fingerprint() } else { 0 };
        // An incomplete window may lack gradients that a complete one would have.
        let requires_all = state.requires_all && !self.options.releases_windows;
        UpdateCall { calls: state.calls, norms, requires_all, ..self }
    }

    /// The gradient that the rules get, and the norms to find of it.
    pub(crate) fn gradient<'a>(
        &self,
        sources: Sources<'a>,
        path: &'a str,
        norms: Option<&LeafNorms>,
    ) -> Gradient<'a> {
        let releases = self.options.releases_windows;
        let mut gradient = Gradient::new(sources, self.weight, path).after(self.calls, releases);
        let (divisor, mut scale) = (self.divisor as f64, self.loss_scale.recip());
        if self.divisor.is_power_of_two() {
            // One factor has the same bits, and a norm that follows can absorb it.
            scale /= divisor;
        } else {
            gradient = gradient.divide(divisor);
        }
        if scale != 1.0 {
            gradient = gradient.scale(scale);
        }
        let gradient = if self.options.finite_only { gradient.finite_only() } else { gradient };
        if let Some(norms) = norms { gradient.measured(norms) } else { gradient }
    }
}

/// The checked gradients of a parameter: one, or one for each of its paths that has one. The same gradient
/// under several paths counts once.
pub(crate) fn sources<'l, 'g>(
    paths: impl Iterator<Item = &'l str>,
    x: &'l dyn Lend,
    grads: &'g dyn GradientLookUp,
) -> Result<Sources<'g>> {
    let mut sources = Sources::new();
    for path in paths.take(if grads.has_paths() { usize::MAX } else { 1 }) {
        let Some(gradient) = grads.find(path, x).map(Lent::new) else { continue };
        check_gradient(path, x, &*gradient)?;
        if !is_among(&sources, &gradient).map_err(|error| error.at(path))? {
            sources.push(gradient);
        }
    }
    Ok(sources)
}

/// Whether this gradient is known already. If the owners do not say, slices are the same if their memory is.
fn is_among(known: &[Lent<'_>], gradient: &Lent<'_>) -> Result<bool> {
    for known in known {
        if known.is(gradient).map_or_else(|| known.lies_with(gradient), Ok)? {
            return Ok(true);
        }
    }
    Ok(false)
}
