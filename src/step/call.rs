//! A call of an update: its options, its data from state and ranks, and the gradient that its rules get.

use super::loss_scaler::{LossScaler, check_unscaled};
use crate::engine::{Engine, Sources, check_gradient};
use crate::error::Result;
use crate::model::gradients::GradientLookUp;
use crate::model::lent::{Lend, Lent};
use crate::numbers::counts;
use crate::rule::{Gradient, LeafNorms};
use crate::tree::StateTree;

/// The options that the user chose.
#[derive(Clone, Copy, Debug)]
pub(crate) struct UpdateOptions {
    pub(crate) engine: Engine,
    /// Whether a gradient that is not finite skips the call.
    pub(crate) finite_only: bool,
    /// Whether a gradient may become infinite in the dtype in which it travels between ranks. `Sam` sets this
    /// option, and checks the norm instead.
    pub(crate) takes_overflow: bool,
    /// The weight of this call in a weighted mean.
    pub(crate) weight: u64,
    /// Whether masters overwrite parameters that were changed.
    pub(crate) keep_masters: bool,
    /// Whether a call without any gradient is accepted.
    pub(crate) allow_no_gradients: bool,
    /// Whether the outcome has figures of each leaf that moves.
    pub(crate) figures: bool,
    /// Whether the call ends the open windows, and has no gradients.
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

/// The options of a call, with its data from scaler, state and ranks.
#[derive(Clone, Debug)]
pub(crate) struct UpdateCall {
    pub(crate) options: UpdateOptions,
    /// The loss scale that the gradients are divided by.
    pub(crate) loss_scale: f64,
    /// The weight of the call in a weighted mean: the sum over all ranks.
    pub(crate) weight: u64,
    /// The divisor of the sum of gradients: the weight of all ranks, or 1 without ranks.
    pub(crate) divisor: u64,
    /// The calls that windows of accumulation counted before this call.
    pub(crate) calls: u64,
    /// The steps of the state before this call.
    pub(crate) steps: u64,
    /// A hash of the norms of earlier calls, so that ranks can compare them; 0 without ranks.
    pub(crate) norms: u64,
    /// Whether the state requires all gradients.
    pub(crate) requires_all: bool,
    /// Whether gradients come one at a time, so that some leaves have moved before others are planned.
    pub(crate) is_streamed: bool,
    /// The path of the first pushed gradient that was not finite.
    pub(crate) overflow: Option<String>,
}

impl UpdateCall {
    /// A call with the loss scale of `scaler`. `reported_scale` is the scale that the gradients report
    /// for their loss. If the state `is_divided`, a rank with weight 0 has no data.
    ///
    /// # Errors
    /// If `scaler` is out of range or has scaled no loss, or if the update would not divide by
    /// `reported_scale`.
    pub(crate) fn new(
        options: UpdateOptions,
        scaler: Option<&LossScaler>,
        reported_scale: Option<f64>,
        is_divided: bool,
    ) -> Result<Self> {
        let has_data = !is_divided || options.weight > 0;
        let scale = match scaler {
            Some(scaler) => scaler.divisor(reported_scale, has_data)?,
            None => check_unscaled(reported_scale).map(|()| None)?,
        };
        counts::check("Update: weight is", options.weight)?;
        // A scaler lowers its scale only for an overflow that a check has found.
        let options = UpdateOptions {
            finite_only: options.finite_only || scale.is_some(),
            ..options
        };
        Ok(UpdateCall {
            options,
            loss_scale: scale.unwrap_or(1.0),
            weight: options.weight,
            divisor: 1,
            calls: 0,
            steps: 0,
            norms: 0,
            requires_all: false,
            is_streamed: false,
            overflow: None,
        })
    }

    /// The call with the requirements, counts and norms of `state`.
    pub(crate) fn with_state_settings(self, state: &StateTree) -> Self {
        let norms = if state.world.is_divided() {
            state.norms.fingerprint()
        } else {
            0
        };
        // A window that ends early may lack gradients of the calls that it did not wait for.
        let requires_all = state.requires_all && !self.options.releases_windows;
        UpdateCall {
            calls: state.calls,
            steps: state.steps,
            norms,
            requires_all,
            ..self
        }
    }

    /// The gradient that the rules get: the mean over ranks, without the loss scale.
    pub(crate) fn gradient<'a>(
        &self,
        sources: Sources<'a>,
        path: &'a str,
        norms: Option<&LeafNorms>,
    ) -> Gradient<'a> {
        let releases = self.options.releases_windows;
        let mut gradient = Gradient::new(sources, self.weight, path).after_calls(self.calls, releases);
        let (divisor, mut scale) = (self.divisor as f64, self.loss_scale.recip());
        if self.divisor.is_power_of_two() {
            // The division is exact, so one multiplication has the bits of two, and a norm that follows can
            // absorb the factor.
            scale /= divisor;
        } else {
            gradient = gradient.divide(divisor);
        }
        if scale != 1.0 {
            gradient = gradient.scale(scale);
        }
        // The check follows the division, because the check also finds numbers too large to be squared.
        if self.options.finite_only {
            gradient = gradient.finite_only();
        }
        if let Some(norms) = norms {
            gradient.request_norms(norms)
        } else {
            gradient
        }
    }
}

/// The checked gradients of a parameter, one for each path that has a gradient. A gradient that comes under
/// several paths counts once, because a map made by visiting the model has a tied gradient under each path.
pub(crate) fn sources<'l, 'g>(
    paths: impl Iterator<Item = &'l str>,
    x: &'l dyn Lend,
    grads: &'g dyn GradientLookUp,
) -> Result<Sources<'g>> {
    let mut gradients = Sources::new();
    for path in paths.take(if grads.has_paths() { usize::MAX } else { 1 }) {
        let Some(gradient) = grads.find(path, x).map(Lent::new) else {
            continue;
        };
        check_gradient(path, x, &*gradient)?;
        if !is_among(&gradients, &gradient).map_err(|error| error.at(path))? {
            gradients.push(gradient);
        }
    }
    Ok(gradients)
}

/// Whether `gradient` is in `sources`. Handles that cannot be compared count as equal if they share memory.
fn is_among(sources: &[Lent<'_>], gradient: &Lent<'_>) -> Result<bool> {
    for source in sources {
        if source
            .has_same_elements(gradient)
            .map_or_else(|| source.has_same_address(gradient), Ok)?
        {
            return Ok(true);
        }
    }
    Ok(false)
}
