//! A call of an update: what the user chose, what the call found, and the gradients as the rules get them.

use super::loss_scaler::{LossScaler, check_unscaled};
use crate::engine::{Engine, Sources, check_gradient};
use crate::error::Result;
use crate::model::gradients::GradientLookUp;
use crate::model::lent::{Lend, Lent};
use crate::rule::{Gradient, LeafNorms};
use crate::tree::{Leaf, StateTree};

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
        }
    }
}

/// A call: its options, and what it found in scaler, state and ranks.
#[derive(Clone, Copy, Debug)]
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
        })
    }

    /// The call with the state's counts and norms of earlier calls.
    pub(crate) fn of_state(self, state: &StateTree) -> Self {
        let norms = if state.is_divided() { state.norms.fingerprint() } else { 0 };
        UpdateCall { calls: state.calls, norms, ..self }
    }

    /// The gradient that the rules get, and the norms to find of it.
    pub(crate) fn gradient<'a>(
        &self,
        sources: Sources<'a>,
        path: &'a str,
        norms: Option<&LeafNorms>,
    ) -> Gradient<'a> {
        let mut gradient = Gradient::new(sources, self.weight, path).after(self.calls);
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

/// The gradients of a parameter: one, or one for each of its paths that has one. Each comes with its path.
pub(crate) fn gradients_of<'l, 'g>(
    paths: impl Iterator<Item = &'l str>,
    x: &'l dyn Lend,
    grads: &'g dyn GradientLookUp,
) -> impl Iterator<Item = (&'l str, &'g dyn Lend)> {
    let paths = paths.take(if grads.has_paths() { usize::MAX } else { 1 });
    paths.filter_map(move |path| Some((path, grads.find(path, x)?)))
}

/// The gradients that the caller of a step has.
#[derive(Clone, Copy)]
pub(crate) enum OwnGradients<'g, 'a> {
    /// To be looked up.
    LookUp(&'a dyn GradientLookUp),
    /// Looked up before, by leaf, in handles of their own.
    Found(&'g [Sources<'static>]),
}

impl<'a> OwnGradients<'_, 'a> {
    /// The gradients of a leaf, of all its paths; each once.
    pub(crate) fn sources(self, index: usize, leaf: &Leaf, x: &dyn Lend) -> Result<Sources<'a>> {
        match self {
            OwnGradients::LookUp(grads) => sources(leaf.paths(), x, grads),
            OwnGradients::Found(found) => {
                let found: &[Lent<'a>] = &found[index];
                Ok(found.iter().cloned().collect())
            }
        }
    }
}

/// The checked gradients of a parameter. The same gradient under several paths counts once.
pub(crate) fn sources<'l, 'g>(
    paths: impl Iterator<Item = &'l str>,
    x: &'l dyn Lend,
    grads: &'g dyn GradientLookUp,
) -> Result<Sources<'g>> {
    let mut sources = Sources::new();
    for (path, gradient) in gradients_of(paths, x, grads) {
        let gradient = Lent::new(gradient);
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
