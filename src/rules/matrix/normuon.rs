use candle_core::{D, Result as Candle, Tensor};

use super::momentum::{Mean, momentum_step};
use super::tensors::lerp;
use super::{StepScale, norms, orthogonal_parameters};
use crate::error::Result;
use crate::rule::{Flow, Gradient, Parameter, Rule, Slot, State, range, state_of_another_rule};

orthogonal_parameters! {
    /// NorMuon: [`Muon`](crate::Muon) with a second moment for each row.
    ///
    /// The steps of all neurons then have about the same length. Source: Li et al. 2025, [arXiv
    /// 2510.05491](https://arxiv.org/abs/2510.05491).
    ///
    /// ```text
    /// u   = Muon's momentum with singular values of about 1
    /// v   = β₂·v + (1 - β₂)·(mean of u² over columns)       one number per row
    /// w   = u / (√v + ε)
    /// dx' = η·(scale·w·‖u‖ / (‖w‖ + ε) + λ·x)               norms of each matrix
    /// ```
    ///
    /// [`Muon`](crate::Muon) describes what counts as a matrix, and which parameters need another rule. The
    /// state has 4 more bytes per row.
    ///
    /// ```
    /// use candle_core::{DType, Device, Tensor, Var};
    /// use optimisers::{NorMuon, setup, update};
    ///
    /// let x = Var::zeros((4, 2), DType::F32, &Device::Cpu)?;
    /// let mut state = setup(NorMuon::new(0.1), &x)?;
    /// assert_eq!(state.bytes(), 4 * (4 * 2 + 4));
    /// update(&mut state, &x, &[("", Tensor::new(&[[9f32, 1.0], [0.5, 1.0], [0.1, 0.1], [0.0, 3.0]], &Device::Cpu)?)])?;
    /// // In the first step all rows have one length.
    /// let lengths: Vec<String> = x.sqr()?.sum(1)?.sqrt()?.to_vec1::<f32>()?.iter().map(|length| format!("{length:.4}")).collect();
    /// assert!(lengths.iter().all(|length| *length == lengths[0]), "{lengths:?}");
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Bits
    /// candle computes sums and matrix products. In F32 their bits depend on the kind of processor, whatever
    /// [`Isa`](crate::Isa) is chosen. The rule needs the feature `candle`.
    ///
    /// # Departures
    /// For matrices the rule is that of the authors' code. The paper's step has the root mean square 0.2.
    /// With `scale: StepScale::MatchAdamW` a step of this rule has it, too, as far as the singular values are
    /// near 1. The momentum is corrected for its start, see [`Muon`](crate::Muon). torch, optax and
    /// Optimisers.jl have no such rule.
    ///
    /// With `MatrixForm::Flat` a kernel of four dimensions has one second moment per output channel, and one
    /// norm, as in pytorch_optimizer 4.1.0: a kernel of [8, 4, 3, 3] has 8 second moments. The authors' code
    /// (zichongli5/NorMuon) uses the flat matrix only to make the kernel orthogonal. That code has a second
    /// moment for each row of each 3 × 3 filter, hence 96, and a norm for each filter.
    pub struct NorMuon, StepScale::Original, {
        /// η: the learning rate.
        eta: f64 = 0.02 => range::non_negative,
        /// β₁, β₂: the decays of the momentum and of the second moment.
        beta: (f64, f64) = (0.95, 0.95) => range::decays,
        /// λ: the weight decay, multiplied by the learning rate.
        lambda: f64 = 0.0 => range::non_negative,
        /// Whether the momentum is Nesterov's.
        nesterov: bool = true => range::any,
        /// ε: keeps norms and roots from zero.
        epsilon: f64 = 1e-8 => range::non_negative,
    }
}

impl NorMuon {
    fn direction(&self, momentum: &Tensor, v: &mut Tensor) -> Candle<Tensor> {
        let orthogonal = self.orthogonal();
        let [direction, next_v] = orthogonal.matrices.map([momentum, v], |[momentum, v]| {
            let u = orthogonal.orthogonalise(&momentum)?;
            let next_v = lerp(&v, &u.sqr()?.mean_keepdim(D::Minus1)?, 1.0 - self.beta.1)?;
            let w = u.broadcast_div(&(next_v.sqrt()? + orthogonal.epsilon)?)?;
            let factor =
                ((norms(&u)? / (norms(&w)? + orthogonal.epsilon)?)? * (self.eta * orthogonal.scale(&u)?))?;
            Ok([w.broadcast_mul(&factor)?, next_v])
        })?;
        *v = next_v;
        Ok(direction)
    }
}

impl Rule for NorMuon {
    fn init(&self, x: Parameter<'_>) -> Result<State> {
        self.matrices().check_shape("NorMuon", x)?;
        let column_shape = self.matrices().column_shape(x);
        State::for_slots(x, &[Slot::zeros("m")])?.with_slot(
            Slot::zeros("orthogonal_row_v").second_moment(),
            x,
            column_shape,
        )
    }

    fn apply<'a>(&'a self, state: &'a mut State, x: Parameter<'a>, dx: Gradient<'a>) -> Result<Flow<'a>> {
        self.matrices().check_shape("NorMuon", x)?;
        // The shapes differ if `matrix` was changed after the state was made.
        if state
            .tensors
            .get(1)
            .is_none_or(|(_, v)| *v.shape() != self.matrices().column_shape(x))
        {
            return state_of_another_rule(self);
        }
        let momentum = |t| Mean::new(self.beta.0, self.nesterov, t);
        let decay = self.eta * self.lambda;
        momentum_step(self, state, dx, momentum, |u, [v]| self.direction(u, v), decay)
    }
}
