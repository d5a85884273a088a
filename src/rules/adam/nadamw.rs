use super::adam::AdamScalars;
use crate::error::Result;
use crate::numbers::value::Value;
use crate::rule::{Arithmetic, Flow, Gradient, Kind, Parameter, Parts, Rule, Slot, State, range};
use crate::rules::moments::NesterovWeights;

crate::hyper_parameters! {
    /// Adam with Nesterov's momentum of growing weight, and decoupled weight decay.
    ///
    /// Source: Dozat 2016,
    /// ["Incorporating Nesterov Momentum into Adam"](https://openreview.net/forum?id=OM0jvwB8jIp57ZJjtNEZ).
    ///
    /// ```text
    /// μₜ  = β₁·(1 - ½·0.96^(ψ·t)),   M = μ₁·…·μₜ
    /// u   = μₜ₊₁·m / (1 - M·μₜ₊₁) + (1 - μₜ)·dx / (1 - M)
    /// dx' = η·(u / (√v̂ + ε) + λ·x)
    /// ```
    ///
    /// with the moments of [`Adam`](crate::Adam). The state also has M, as the number `momentum_product`.
    ///
    /// Weight decay is on by default, with λ = 0.01. `NAdamW { lambda: 0.0, ..NAdamW::new(eta) }` switches it
    /// off.
    ///
    /// ```
    /// use candle_core::{Device, Tensor, Var};
    /// use optimisers::{NAdamW, setup, update};
    ///
    /// // Here μ = β₁ / 2: the step is (0.25·0.5 / (1 - 0.25²) + 0.75 / 0.75)·η = 17 / 15·η, the decay η·λ.
    /// let x = Var::new(&[1f32], &Device::Cpu)?;
    /// let mut state = setup(NAdamW { beta: (0.5, 0.25), momentum_decay: 0.0, lambda: 1.0, ..NAdamW::new(0.15) }, &x)?;
    /// update(&mut state, &x, &[("", Tensor::new(&[1f32], &Device::Cpu)?)])?;
    /// assert_eq!(format!("{:.3?}", x.to_vec1::<f32>()?), "[0.680]");
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Departures
    /// The rule is torch's `NAdam(decoupled_weight_decay=True)` with torch's defaults, except for λ, which is
    /// 0 in torch. With λ = 0 the rule is torch's `NAdam`. [`NAdam`](crate::NAdam) is the form of
    /// Optimisers.jl, with a constant β₁ and a β₂ under the root. optax's `nadamw` also has a constant β₁.
    /// The rule is checked against torch.
    pub struct NAdamW: AdaptiveStep {
        /// η: the learning rate.
        eta: f64 = 2e-3 => range::non_negative,
        /// β₁, β₂: the decays of the first and second moment.
        beta: (f64, f64) = (0.9, 0.999) => range::decays,
        /// λ: the weight decay, multiplied by the learning rate.
        lambda: f64 = 0.01 => range::non_negative,
        /// ε: keeps the denominator from zero.
        epsilon: f64 = 1e-8 => range::non_negative,
        /// ψ: how fast the weight of the momentum grows from β₁ / 2 to β₁.
        momentum_decay: f64 = 4e-3 => range::non_negative,
    }
}

/// The check of a product of numbers below 1.
fn up_to_one(value: f64) -> Option<&'static str> {
    (!(0.0..=1.0).contains(&value)).then_some("a number in [0, 1]")
}

impl NAdamW {
    /// μ at step `t`.
    fn momentum_at(&self, t: u64) -> f64 {
        self.beta.0 * (1.0 - 0.5 * 0.96f64.powf(self.momentum_decay * t as f64))
    }

    /// The product of all μ up to step `t`.
    fn product_until(&self, t: u64) -> f64 {
        let mut product = 1.0;
        for step in 1..=t {
            product *= self.momentum_at(step);
            // The loop ends early, because `t` may be large. The product soon underflows, because each μ is
            // below 1, but rounding can keep a subnormal product from becoming 0.
            if !product.is_normal() {
                break;
            }
        }
        product
    }
}

#[derive(Clone, Copy)]
struct NAdamWStep {
    adam: AdamScalars,
    eta: f64,
    lookahead: NesterovWeights,
    /// η·λ
    decay: f64,
}

impl Arithmetic for NAdamWStep {
    type Slots<T> = [T; 2];
    const TAKES_PROLOGUE: bool = true;

    #[inline(always)]
    fn step<V: Value>(self, x: V, dx: V, [m, v]: &mut [V; 2]) -> V {
        self.adam.update_mean(m, dx);
        self.adam.update_square(v, dx);
        self.lookahead.momentum(*m, dx) * self.eta / self.adam.denominator(*v) + x * self.decay
    }
}

impl Rule for NAdamW {
    fn init(&self, x: Parameter<'_>) -> Result<State> {
        Ok(
            State::for_slots(x, &[Slot::zeros("m"), Slot::zeros("v").second_moment()])?.with_number(
                "momentum_product",
                1.0,
                up_to_one,
            ),
        )
    }

    fn apply<'a>(&'a self, state: &'a mut State, _x: Parameter<'a>, dx: Gradient<'a>) -> Result<Flow<'a>> {
        let Parts {
            slots,
            counters,
            numbers,
            ..
        } = state.parts();
        let ((dx, t), [product]) = (dx.next_step(counters)?, numbers.array()?);
        if dx.is_missing() {
            return Ok(Flow::Step(dx));
        }
        // After a step the product is below 1. If it is 1, the moments were taken over from another rule,
        // which has no product.
        let product_before = if t > 1 && *product == 1.0 {
            self.product_until(t - 1)
        } else {
            *product
        };
        let (momentum, next_momentum) = (self.momentum_at(t), self.momentum_at(t + 1));
        let next_product = product_before * momentum;
        let kernel = NAdamWStep {
            adam: AdamScalars::new(self.eta, self.beta, self.epsilon, t),
            eta: self.eta,
            lookahead: NesterovWeights {
                mean: next_momentum / (1.0 - next_product * next_momentum),
                gradient: (1.0 - momentum) / (1.0 - next_product),
            },
            decay: self.eta * self.lambda,
        };
        Ok(Flow::Step(
            dx.set_number(product, next_product).map(kernel, slots),
        ))
    }

    fn kind(&self) -> Kind {
        Kind::Elementwise
    }
}
