use candle_core::{Result as Candle, Tensor};

use super::momentum::{Mean, momentum_step};
use super::tensors::lerp;
use super::{StepScale, norms, orthogonal_parameters};
use crate::error::Result;
use crate::numbers::value::{Arithmetic, Value};
use crate::rule::{Flow, Gradient, Parameter, Rule, Slot, State, range};

orthogonal_parameters! {
    /// AdaMuon: [`Muon`](crate::Muon) of the momentum's sign, with a second moment for each element.
    ///
    /// Source: Si et al. 2025, [arXiv 2507.11005](https://arxiv.org/abs/2507.11005).
    ///
    /// ```text
    /// u   = the sign of Muon's momentum, with singular values of about 1
    /// v   = β₂·v + (1 - β₂)·u²
    /// w   = u / (√v + ε)
    /// dx' = η·(scale·w·√min(rows, columns) / (‖w‖ + ε) + λ·x)       ‖w‖ of each matrix
    /// ```
    ///
    /// √min(rows, columns) is the norm of an orthogonal matrix. With this rule's default scale,
    /// 0.2·√max(rows, columns), the root mean square of a step is 0.2·η.
    ///
    /// [`Muon`](crate::Muon) describes what counts as a matrix, and which parameters need another rule.
    ///
    /// ```
    /// use candle_core::{DType, Device, Tensor, Var};
    /// use optimisers::{AdaMuon, setup, update};
    ///
    /// let x = Var::zeros((3, 2), DType::F32, &Device::Cpu)?;
    /// let mut state = setup(AdaMuon::new(0.1), &x)?;
    /// update(&mut state, &x, &[("", Tensor::new(&[[9f32, 1.0], [0.5, -1.0], [0.1, 0.1]], &Device::Cpu)?)])?;
    /// assert_eq!(format!("{:.4}", x.sqr()?.mean_all()?.sqrt()?.to_scalar::<f32>()?), "0.0200");
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Bits
    /// candle computes sums and matrix products. In F32 their bits depend on the kind of processor, whatever
    /// [`Isa`](crate::Isa) is chosen. The rule needs the feature `candle`.
    ///
    /// # Departures
    /// The rule is the paper's second version. The paper's momentum is a sum; here it is a mean, corrected
    /// for its start as in [`Muon`](crate::Muon). Sum and mean have the same sign, except with Nesterov's
    /// momentum. The first version, that of timm 1.0.31 and pytorch_optimizer 4.1.0, does not take the sign.
    /// torch, optax and Optimisers.jl have no such rule.
    ///
    /// With `MatrixForm::Flat` a kernel of four dimensions has a step of root mean square 0.2·η, as any
    /// matrix has, and as in timm: for [8, 4, 3, 3] the norm of the step is 0.2·√(8·36)·η = 3.39·η. The
    /// authors' code takes the smallest and the largest of all four dimensions for rows and columns:
    /// 0.2·√(3·8)·η = 0.98·η. Their first version (Chongjie-Si/AdaMuon, 3b84e03) takes the smallest of all
    /// and the larger of the last two: 0.2·√(3·3)·η = 0.6·η.
    pub struct AdaMuon, StepScale::MatchAdamW, {
        /// η: the learning rate.
        eta: f64 = 1e-3 => range::non_negative,
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

/// The sign of the momentum.
#[derive(Clone, Copy)]
struct MeanSign(Mean);

impl Arithmetic for MeanSign {
    type Slots<T> = [T; 1];

    #[inline(always)]
    fn step<V: Value>(self, x: V, dx: V, slots: &mut [V; 1]) -> V {
        self.0.step(x, dx, slots).sign()
    }
}

impl AdaMuon {
    fn direction(&self, signs: &Tensor, v: &mut Tensor) -> Candle<Tensor> {
        let orthogonal = self.orthogonal();
        let [direction, next_v] = orthogonal.matrices.map([signs, v], |[signs, v]| {
            let u = orthogonal.orthogonalise(&signs)?;
            let next_v = lerp(&v, &u.sqr()?, 1.0 - self.beta.1)?;
            let w = (u / (next_v.sqrt()? + orthogonal.epsilon)?)?;
            let (_, rows, columns) = w.dims3()?;
            let length = self.eta * orthogonal.scale(&w)? * (rows.min(columns) as f64).sqrt();
            // The factor is limited, because for w = 0 and ε = 0 it would be infinite, and the product NaN.
            let factor =
                ((norms(&w)? + orthogonal.epsilon)?.recip()? * length)?.minimum(f64::from(f32::MAX))?;
            Ok([w.broadcast_mul(&factor)?, next_v])
        })?;
        *v = next_v;
        Ok(direction)
    }
}

impl Rule for AdaMuon {
    fn init(&self, x: Parameter<'_>) -> Result<State> {
        self.matrices().check_shape("AdaMuon", x)?;
        State::for_slots(
            x,
            &[Slot::zeros("m"), Slot::zeros("orthogonal_v").second_moment()],
        )
    }

    fn apply<'a>(&'a self, state: &'a mut State, x: Parameter<'a>, dx: Gradient<'a>) -> Result<Flow<'a>> {
        self.matrices().check_shape("AdaMuon", x)?;
        let momentum = |t| MeanSign(Mean::new(self.beta.0, self.nesterov, t));
        let decay = self.eta * self.lambda;
        momentum_step(self, state, dx, momentum, |u, [v]| self.direction(u, v), decay)
    }
}
