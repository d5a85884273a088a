//! What a call gets, and how it is treated before the rules get it.

use candle_core::Tensor;

use crate::engine::{Engine, Sources, expect_gradient};
use crate::error::Result;
use crate::gradients::GradientLookUp;
use crate::lent::{Lend, Lent};
use crate::loss_scaler::LossScaler;
use crate::rule::{Gradient, LeafNorms};
use crate::tree::Leaf;

/// How the gradients of a call are treated before the rules get them.
#[derive(Clone, Copy, Debug)]
pub(crate) struct How {
    pub(crate) engine: Engine,
    /// What the gradients are divided by.
    pub(crate) loss_scale: f64,
    /// Whether a gradient that is not finite makes the call a skipped one.
    pub(crate) finite_only: bool,
    /// Whether a gradient may become infinite in the dtype in which it travels between ranks.
    pub(crate) takes_overflow: bool,
    /// How much this call counts in a weighted mean.
    pub(crate) weight: u64,
    /// What the sum of the gradients is divided by: the weight of all ranks, 1 without ranks.
    pub(crate) divisor: u64,
    /// The calls that windows of accumulation have counted before this one.
    pub(crate) calls: u64,
    /// A number for the norms of the calls before, which decide on outliers.
    pub(crate) norms: u64,
    /// Whether to go on from masters of which the parameters are not copies any more.
    pub(crate) keep_masters: bool,
    /// Whether a call without any gradient is none to refuse.
    pub(crate) allow_no_gradients: bool,
    /// Whether norms of every leaf that moves are asked for.
    pub(crate) figures: bool,
}

impl Default for How {
    fn default() -> Self {
        How {
            engine: Engine::default(),
            loss_scale: 1.0,
            finite_only: false,
            takes_overflow: false,
            weight: 1,
            divisor: 1,
            calls: 0,
            norms: 0,
            keep_masters: false,
            allow_no_gradients: false,
            figures: false,
        }
    }
}

impl How {
    /// This for the gradients of a loss that the scaler has scaled.
    pub(super) fn with_scale(self, scaler: Option<&LossScaler>) -> Result<Self> {
        let scale = scaler.map_or(Ok(None), LossScaler::of_loss)?;
        Ok(scale.map_or(self, |loss_scale| How { loss_scale, finite_only: true, ..self }))
    }
}

/// The gradients of a leaf: one, or one for each of its paths that has one, together with it.
pub(super) fn gradients_of<'l, 'g>(
    leaf: &'l Leaf,
    x: &'l dyn Lend,
    grads: &'g dyn GradientLookUp,
) -> impl Iterator<Item = (&'l str, &'g dyn Lend)> {
    let paths = leaf.paths().take(if grads.has_paths() { usize::MAX } else { 1 });
    paths.filter_map(move |path| Some((path, grads.find(path, x)?)))
}

/// The checked gradients of a leaf, those of its twin among them. One under several of its paths is one gradient.
pub(super) fn sources<'g>(leaf: &Leaf, x: &dyn Lend, low: Option<&Tensor>, grads: &'g dyn GradientLookUp) -> Result<Sources<'g>> {
    let mut sources = Sources::new();
    for x in low.map(|low| low as &dyn Lend).into_iter().chain([x]) {
        for (path, gradient) in gradients_of(leaf, x, grads) {
            let gradient = Lent::new(gradient);
            expect_gradient(path, x, &*gradient)?;
            if !is_among(&sources, &gradient).map_err(|error| error.at(path))? {
                sources.push(gradient);
            }
        }
    }
    Ok(sources)
}

/// Whether this is one of those that are known. Where the owners do not say, slices are one if they lie in one place.
fn is_among(known: &[Lent<'_>], gradient: &Lent<'_>) -> Result<bool> {
    for known in known {
        if known.is(gradient).map_or_else(|| known.lies_with(gradient), Ok)? {
            return Ok(true);
        }
    }
    Ok(false)
}

/// The gradient that the rules get, with the norms that are asked for of it.
pub(super) fn gradient<'a>(how: How, sources: Sources<'a>, path: &'a str, norms: Option<&LeafNorms>) -> Gradient<'a> {
    let mut gradient = Gradient::new(sources, how.weight, path).after(how.calls);
    let (divisor, mut scale) = (how.divisor as f64, how.loss_scale.recip());
    if how.divisor.is_power_of_two() {
        // The same bits, and a norm can make up for it.
        scale /= divisor;
    } else {
        gradient = gradient.divide(divisor);
    }
    if scale != 1.0 {
        gradient = gradient.scale(scale);
    }
    let gradient = if how.finite_only { gradient.finite_only() } else { gradient };
    if let Some(norms) = norms { gradient.measured(norms) } else { gradient }
}
