//! The momentum and the step of rules that make a matrix orthogonal.

use candle_core::{Result as Candle, Tensor};

use crate::error::Result;
use crate::numbers::value::{Arithmetic, Value};
use crate::rule::{Flow, Gradient, Parts, Rule, State, state_of_another_rule};
use crate::rules::gradient::weight_decay::with_decay;
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

/// Plans a step in three stages:
///
/// 1. `momentum(t)` is the arithmetic of step t, which moves the first tensor of the state.
/// 2. `direction` moves the other N tensors, and returns the direction.
/// 3. The parameter decays by `decay`.
pub(super) fn momentum_step<'a, A: Arithmetic, const N: usize>(
    rule: &'a impl Rule,
    state: &'a mut State,
    dx: Gradient<'a>,
    momentum: impl FnOnce(u64) -> A,
    direction: impl FnOnce(&Tensor, &mut [Tensor; N]) -> Candle<Tensor> + Send + Sync + 'a,
    decay: f64,
) -> Result<Flow<'a>> {
    let Parts { slots, counters, .. } = state.parts();
    let (dx, t) = dx.next_step(counters)?;
    // The function runs while parameters are written, too late to refuse anything.
    let Some((m, others)) = slots.split_at(1).filter(|(_, others)| others.len() == N) else {
        return state_of_another_rule(rule);
    };
    let with_momentum = dx.map(momentum(t), m);
    let with_direction = with_momentum.append_function(others.0, false, move |_, u, tensors| {
        let Ok(tensors) = tensors.try_into() else {
            return state_of_another_rule(rule);
        };
        Ok(direction(&u, tensors)?)
    });
    Ok(Flow::Step(with_decay(with_direction, decay)))
}
