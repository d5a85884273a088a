//! Arithmetic that several rules share: decayed means, bias corrections, Nesterov's momentum.

use crate::numbers::value::Value;

/// β·mean + (1 - β)·value
#[inline(always)]
pub(super) fn decayed<V: Value>(mean: V, value: V, beta: f64) -> V {
    mean * beta + value * (1.0 - beta)
}

/// 1 - βᵗ: the weight of all values in a decayed mean after `t` steps. The rest, βᵗ, is the weight of the
/// mean's start.
pub(super) fn correction(beta: f64, t: u64) -> f64 {
    1.0 - beta.powf(t as f64)
}

/// The `t` for [`correction`]. Without bias correction this `t` is the largest `u64`, for which βᵗ is 0 and
/// each correction 1.
pub(super) fn t_for_correction(t: u64, is_corrected: bool) -> u64 {
    if is_corrected { t } else { u64::MAX }
}

/// The weights of Nesterov's momentum: the corrected mean after one more gradient that equals `dx`.
///
/// ```text
/// β·m / (1 - βᵗ⁺¹) + (1 - β)·dx / (1 - βᵗ)
/// ```
#[derive(Clone, Copy, Debug)]
pub struct NesterovWeights {
    pub(super) mean: f64,
    pub(super) gradient: f64,
}

impl NesterovWeights {
    pub(super) fn new(beta: f64, t: u64) -> Self {
        NesterovWeights {
            mean: beta / correction(beta, t + 1),
            gradient: (1.0 - beta) / correction(beta, t),
        }
    }

    #[inline(always)]
    pub(super) fn momentum<V: Value>(self, m: V, dx: V) -> V {
        m * self.mean + dx * self.gradient
    }
}
