use crate::error::Result;
use crate::numbers::value::Value;
use crate::rule::{Arithmetic, Flow, Gradient, Kind, Parameter, Parts, Rule, Slot, State, range};

crate::hyper_parameters! {
    /// MADGRAD: dual averaging with momentum, and a cube root where AdaGrad has a square root.
    ///
    /// The sums of all gradients decide how far the parameter is from its start. Source: Defazio and Jelassi
    /// 2021, [arXiv 2101.11075](https://arxiv.org/abs/2101.11075).
    ///
    /// ```text
    /// l  = (η + ε)·√t
    /// s  = s + l·dx
    /// q  = q + l·dx²
    /// z  = x₀ - s / (∛q + ε)
    /// x  = ρ·x + (1 - ρ)·z,   so that dx' = (1 - ρ)·(x - z)
    /// ```
    ///
    /// x₀ is the parameter at the start. If η = 0, then l = 0. If ε = 0, an element stays at x₀ as long as
    /// its q is 0. The state has 3 tensors, where Adam's has 2. Learning rates differ from Adam's: the
    /// paper's are 1e-4 to 2.5e-2. For a weight decay put [`WeightDecay`](crate::WeightDecay) before this
    /// rule. A usual λ is smaller than for SGD, and often 0.
    ///
    /// If [`set_masters`](crate::StateTree::set_masters) or
    /// [`refresh_masters`](crate::StateTree::refresh_masters) gives the model new weights, x₀ becomes these
    /// weights and s starts again at 0; q and t stay. Without such a call the next update refuses new
    /// weights, because the rule would lead x back to the old z.
    ///
    /// ```
    /// use candle_core::{Device, Tensor, Var};
    /// use optimisers::{MADGRAD, setup, update};
    ///
    /// // l = 0.008, s = 0.008, q = 0.008: the first step is 0.008 / 0.2.
    /// let x = Var::new(&[0f64], &Device::Cpu)?;
    /// let mut state = setup(MADGRAD { rho: 0.0, epsilon: 0.0, ..MADGRAD::new(0.008) }, &x)?;
    /// update(&mut state, &x, &[("", Tensor::new(&[1f64], &Device::Cpu)?)])?;
    /// assert_eq!(format!("{:.6?}", x.to_vec1::<f64>()?), "[-0.040000]");
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Departures
    /// The rule is that of the authors' code (madgrad 1.3), which adds ε to η. The paper does not. The rule
    /// is checked against that code, against pytorch_optimizer's `MADGRAD`, and against optax's `madgrad` to
    /// the precision of f32. torch and Optimisers.jl have no counterpart.
    pub struct MADGRAD: AdaptiveStep {
        /// η: the learning rate.
        eta: f64 = 1e-2 => range::non_negative,
        /// ρ: the momentum, the fraction of the parameter that stays.
        rho: f64 = 0.9 => range::decay,
        /// ε: keeps the denominator from zero.
        epsilon: f64 = 1e-6 => range::non_negative,
    }
}

/// ∛x of a number that is not negative, by operations that every engine has.
///
/// 1. Begin with x^(1/4 + 1/16 + 1/64 + 1/256), by square roots. The exponent is 1/3 to within 0.4 %.
/// 2. Make four steps of Halley's method. Each step turns a relative error e into 2/3·e³, which is enough
///    from 1e-300 to 1e300.
///
/// The weights in the fraction of a step are 1/4 and 1/2 instead of 1 and 2, so that sums do not overflow.
#[inline(always)]
fn cube_root<V: Value>(x: V) -> V {
    let mut power = x.sqrt().sqrt();
    let mut root = power;
    for _ in 0..3 {
        power = power.sqrt().sqrt();
        root = root * power;
    }
    for _ in 0..4 {
        let cube = root * root * root;
        root = root * ((cube * 0.25 + x * 0.5) / (cube * 0.5 + x * 0.25));
    }
    // The steps make NaN of zero and of infinity, which are their own roots. A number whose half is rounded
    // to zero also gets 0: its root is below any ε.
    let half = x * 0.5;
    V::select(half.equal(half + half), half, root)
}

#[derive(Clone, Copy)]
struct MADGRADStep {
    /// l
    weight: f64,
    rho: f64,
    epsilon: f64,
}

impl Arithmetic for MADGRADStep {
    type Slots<T> = [T; 3];

    #[inline(always)]
    fn step<V: Value>(self, x: V, dx: V, [start, sum, squares]: &mut [V; 3]) -> V {
        let weighted = dx * self.weight;
        *sum = *sum + weighted;
        *squares = *squares + weighted * dx;
        let divisor = cube_root(*squares) + self.epsilon;
        // If ε is 0, the divisor is 0 for an element without gradients or with squares that underflow. Such
        // an element stays.
        let distance = V::select(divisor.equal(divisor.constant(0.0)), divisor, *sum / divisor);
        (x - (*start - distance)) * (1.0 - self.rho)
    }
}

impl Rule for MADGRAD {
    fn init(&self, x: Parameter<'_>) -> Result<State> {
        let slots = [
            Slot::parameter("start"),
            Slot::zeros("weighted_sum"),
            Slot::zeros("weighted_squares").second_moment(),
        ];
        Ok(State::for_slots(x, &slots)?.zeroed_by_new_weights("weighted_sum"))
    }

    fn apply<'a>(&'a self, state: &'a mut State, _x: Parameter<'a>, dx: Gradient<'a>) -> Result<Flow<'a>> {
        let Parts { slots, counters, .. } = state.parts();
        let (dx, t) = dx.next_step(counters)?;
        // η = 0 has to stop the rule, although ε is added to all other rates.
        let rate = if self.eta == 0.0 {
            0.0
        } else {
            self.eta + self.epsilon
        };
        let step = MADGRADStep {
            weight: rate * (t as f64).sqrt(),
            rho: self.rho,
            epsilon: self.epsilon,
        };
        Ok(Flow::Step(dx.map(step, slots)))
    }

    fn kind(&self) -> Kind {
        Kind::Elementwise
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::numbers::value::Lane;

    #[test]
    fn a_cube_root_is_right_for_every_magnitude() {
        for exponent in -300..=300 {
            let x = 1.7 * 10f64.powi(exponent);
            let error = (cube_root(Lane(x)).0 / x.cbrt() - 1.0).abs();
            assert!(error < 1e-15, "{x:e}: {error:e}");
        }
        for exponent in -37..=38 {
            let x = 1.7 * 10f32.powi(exponent);
            let error = (cube_root(Lane(x)).0 / x.cbrt() - 1.0).abs();
            assert!(error < 3e-7, "{x:e}: {error:e}");
        }
        for bits in 0..64 {
            let roots = [
                cube_root(Lane(f64::from_bits(bits))).0,
                f64::from(cube_root(Lane(f32::from_bits(bits as u32))).0),
            ];
            assert!(
                roots.iter().all(|root| (0.0..1e-13).contains(root)),
                "{bits}: {roots:?}"
            );
        }
        assert_eq!(
            [0.0, f64::INFINITY].map(|x| cube_root(Lane(x)).0),
            [0.0, f64::INFINITY]
        );
        assert!(cube_root(Lane(f32::NAN)).0.is_nan());
    }
}
