use crate::error::Result;
use crate::numbers::value::{Value, above_zero};
use crate::rule::{Arithmetic, Flow, Gradient, Kind, Parameter, Parts, Rule, Slot, State, range};
use crate::rules::moments::decayed;

crate::hyper_parameters! {
    /// RMSProp, and centred RMSProp.
    ///
    /// Source: Hinton 2012, lecture 6 of "Neural Networks for Machine Learning"; centred: Graves 2013,
    /// [arXiv 1308.0850](https://arxiv.org/abs/1308.0850).
    ///
    /// ```text
    /// v   = ρ·v + (1 - ρ)·dx²
    /// dx' = η·dx / (√v + ε)                     centred = false
    ///
    /// m   = ρ·m + (1 - ρ)·dx
    /// dx' = η·dx / (√max(v - m², 0) + ε)        centred = true
    /// ```
    ///
    /// `centred` decides whether the state has an m: choose it before [`setup`](crate::setup).
    ///
    /// ```
    /// use candle_core::{Device, Tensor, Var};
    /// use optimisers::{RMSProp, setup, update};
    ///
    /// // v = 4, and then 0.75·4 + 0.25·16 = 7.
    /// let x = Var::new(&[0f32], &Device::Cpu)?;
    /// let mut state = setup(RMSProp { rho: 0.75, ..RMSProp::new(1.0) }, &x)?;
    /// for gradient in [[4f32], [4.0]] {
    ///     update(&mut state, &x, &[("", Tensor::new(&gradient, &Device::Cpu)?)])?;
    /// }
    /// assert_eq!(format!("{:.3?}", x.to_vec1::<f32>()?), "[-3.512]");
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Departures
    /// Defaults are those of Optimisers.jl; torch's are η = 0.01 and ρ = 0.99. Both libraries take the root
    /// of v - m² without the maximum, although rounding can make v - m² negative.
    ///
    /// torch's option `momentum` adds the steps that this rule makes with η = 1 to a velocity, and multiplies
    /// the velocity by the learning rate. The same steps come from a chain of this rule with η = 1,
    /// [`Momentum`](crate::Momentum) with η = 1, and [`Descent`](crate::Descent). The learning rate of the
    /// chain is [the product](crate::Adjust::adjust) of the three η, and is set in the last member:
    ///
    /// ```
    /// use candle_core::{Device, Var};
    /// use optimisers::{Descent, Momentum, OptimiserChain, RMSProp, Schedule, setup, update};
    ///
    /// let x = Var::new(&[1f64], &Device::Cpu)?;
    /// let rms_prop = RMSProp { rho: 0.99, ..RMSProp::new(1.0) };
    /// let momentum = Momentum { rho: 0.9, ..Momentum::new(1.0) };
    /// let mut state = setup(OptimiserChain::new((rms_prop, momentum, Descent::new(0.01))), &x)?;
    /// state.adjust(0.02)?;
    ///
    /// state.schedule(Schedule::linear(0.02, 0.0, 100))?;
    /// for _ in 0..50 {
    ///     update(&mut state, &x, &x.sqr()?.sum_all()?.backward()?)?;
    /// }
    /// let acting_rule = state.leaf("").expect("the leaf").acting();
    /// let rates = ["0.eta", "1.eta", "2.eta"].map(|place| acting_rule.field(place));
    /// assert_eq!(rates, [1.0, 1.0, 0.01].map(|eta| Some(eta.into())));
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub struct RMSProp: AdaptiveStep {
        /// η: the learning rate.
        eta: f64 = 1e-3 => range::non_negative,
        /// ρ: the decay of the means.
        rho: f64 = 0.9 => range::decay,
        /// ε: keeps the denominator from zero.
        epsilon: f64 = 1e-8 => range::non_negative,
        /// Whether the gradient is divided by its standard deviation instead of its root mean square.
        centred: bool = false => range::any,
    }
}

#[derive(Clone, Copy)]
struct RmsStep {
    eta: f64,
    rho: f64,
    epsilon: f64,
}

#[derive(Clone, Copy)]
struct CentredStep(RmsStep);

impl RmsStep {
    /// Updates v, and returns the step. `squared_mean`, the m² of the centred form, is subtracted from v
    /// before the root.
    #[inline(always)]
    fn update_and_divide<V: Value>(self, dx: V, v: &mut V, squared_mean: Option<V>) -> V {
        *v = decayed(*v, dx * dx, self.rho);
        // Rounding can make v - m² negative, and its root NaN.
        let variance = squared_mean.map_or(*v, |squared_mean| (*v - squared_mean).max(dx.constant(0.0)));
        dx * self.eta / (variance.sqrt() + self.epsilon)
    }
}

impl Arithmetic for RmsStep {
    type Slots<T> = [T; 1];
    const TAKES_PROLOGUE: bool = true;

    #[inline(always)]
    fn step<V: Value>(self, _x: V, dx: V, [v]: &mut [V; 1]) -> V {
        self.update_and_divide(dx, v, None)
    }
}

impl Arithmetic for CentredStep {
    type Slots<T> = [T; 2];

    #[inline(always)]
    fn step<V: Value>(self, _x: V, dx: V, [v, m]: &mut [V; 2]) -> V {
        *m = decayed(*m, dx, self.0.rho);
        self.0.update_and_divide(dx, v, Some(*m * *m))
    }
}

impl Rule for RMSProp {
    fn init(&self, x: Parameter<'_>) -> Result<State> {
        let v = Slot::zeros("v").second_moment();
        if self.centred {
            // v - m² is small if the gradient hardly changes.
            State::for_slots(x, &[v.at_least_f32(), Slot::zeros("m").at_least_f32()])
        } else {
            State::for_slots(x, &[v])
        }
    }

    fn apply<'a>(&'a self, state: &'a mut State, _x: Parameter<'a>, dx: Gradient<'a>) -> Result<Flow<'a>> {
        let Parts { slots, counters, .. } = state.parts();
        let (dx, _) = dx.next_step(counters)?;
        let step = RmsStep {
            eta: self.eta,
            rho: self.rho,
            epsilon: above_zero(self.epsilon),
        };
        // The state decides, because the field `centred` may have changed since the state was made.
        Ok(Flow::Step(match slots.len() {
            2 => dx.map(CentredStep(step), slots),
            _ => dx.map(step, slots),
        }))
    }

    fn kind(&self) -> Kind {
        Kind::Elementwise
    }
}
