//! What the rules of the Adam family share.

use crate::numbers::value::Value;

/// β·mean + (1 - β)·value
#[inline(always)]
pub(super) fn decayed<V: Value>(mean: V, value: V, beta: f64) -> V {
    mean * beta + value * (1.0 - beta)
}

/// 1 - βᵗ: the part of a decayed mean that is not its start.
pub(super) fn correction(beta: f64, t: u64) -> f64 {
    1.0 - beta.powf(t as f64)
}

/// The step that corrections go by: without them one so late that each is 1, whatever its β.
pub(super) fn step_of_correction(t: u64, is_corrected: bool) -> u64 {
    if is_corrected { t } else { u64::MAX }
}

/// Nesterov's momentum in a decayed mean of the gradient: the mean after the next gradient, for which this
/// one stands.
///
/// ```text
/// β·m / (1 - βᵗ⁺¹) + (1 - β)·dx / (1 - βᵗ)
/// ```
#[derive(Clone, Copy, Debug)]
pub(super) struct NesterovWeights {
    mean: f64,
    gradient: f64,
}

impl NesterovWeights {
    pub(super) fn new(beta: f64, t: u64) -> Self {
        NesterovWeights::weighing(beta / correction(beta, t + 1), (1.0 - beta) / correction(beta, t))
    }

    /// With these weights of the mean and of the gradient.
    pub(super) fn weighing(mean: f64, gradient: f64) -> Self {
        NesterovWeights { mean, gradient }
    }

    #[inline(always)]
    pub(super) fn of<V: Value>(self, m: V, dx: V) -> V {
        m * self.mean + dx * self.gradient
    }
}
