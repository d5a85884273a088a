//! The momentum of rules that make a matrix orthogonal.

use crate::numbers::value::{Arithmetic, Value};
use crate::rules::moments::{NesterovWeights, correction, decayed};

/// Moves the decayed mean of the gradient, and returns the corrected mean or Nesterov's momentum.
#[derive(Clone, Copy, Debug)]
pub(super) struct Mean {
    beta: f64,
    /// 1 - βᵗ
    correction: f64,
    /// Replaces the correction, for Nesterov's momentum.
    lookahead: Option<NesterovWeights>,
}

impl Mean {
    pub(super) fn new(beta: f64, nesterov: bool, t: u64) -> Self {
        Mean {
            beta,
            correction: correction(beta, t),
            lookahead: nesterov.then(|| NesterovWeights::new(beta, t)),
        }
    }
}

impl Arithmetic for Mean {
    type Slots<T> = [T; 1];

    #[inline(always)]
    fn step<V: Value>(self, _x: V, dx: V, [m]: &mut [V; 1]) -> V {
        *m = decayed(*m, dx, self.beta);
        match self.lookahead {
            Some(lookahead) => lookahead.momentum(*m, dx),
            None => *m / self.correction,
        }
    }
}
