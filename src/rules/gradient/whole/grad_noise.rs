use candle_core::{Device, Tensor};

use crate::error::Result;
use crate::numbers::normal::gaussian;
use crate::numbers::random_key;
use crate::rule::{Flow, Gradient, Parameter, Rule, State, range};

crate::hyper_parameters! {
    /// Adds noise to the gradient, less in later steps (Neelakantan et al. 2015,
    /// [arXiv 1511.06807](https://arxiv.org/abs/1511.06807)).
    ///
    /// ```text
    /// dx' = dx + N(0, σ² / t^γ)
    /// ```
    ///
    /// The random numbers are a hash of the seed, the indices of step and element, and the parameter's path,
    /// and therefore the same with any number of threads and after a restart. The rule comes before the rule
    /// that turns the gradient into a step. The host computes the noise, one tensor at a time.
    ///
    /// ```
    /// use candle_core::{Device, Tensor, Var};
    /// use optimisers::{Descent, GradNoise, OptimiserChain, setup, update};
    ///
    /// let weights_after_step = |seed: u64| -> Result<Vec<f32>, Box<dyn std::error::Error>> {
    ///     let x = Var::new(&[0f32, 0.0], &Device::Cpu)?;
    ///     let noise = GradNoise { seed, ..GradNoise::new(0.1) };
    ///     let mut state = setup(OptimiserChain::new((noise, Descent::new(1.0))), &x)?;
    ///     update(&mut state, &x, &[("", Tensor::new(&[1f32, 1.0], &Device::Cpu)?)])?;
    ///     Ok(x.to_vec1()?)
    /// };
    /// assert_eq!(weights_after_step(7)?, weights_after_step(7)?);
    /// assert_ne!(weights_after_step(7)?, weights_after_step(8)?);
    /// assert!(weights_after_step(7)?.iter().all(|x| (x + 1.0).abs() < 0.6), "six standard deviations");
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Departures
    /// The paper's η, with the values 0.01, 0.3 and 1, is σ² here, because η is the learning rate of this
    /// crate's rules. As in optax's `add_noise`, the first step has the whole variance. torch and
    /// Optimisers.jl have no counterpart.
    ///
    /// # Features
    /// The noise is added by candle's tensor operations, so the rule needs the feature `candle`.
    pub struct GradNoise {
        /// σ: the standard deviation in the first step.
        sigma: f64 = 0.1 => range::non_negative,
        /// γ: the exponent by which the variance falls.
        gamma: f64 = 0.55 => range::non_negative,
        /// The seed of the numbers.
        seed: u64 = 0 => range::any,
    }
}

impl Rule for GradNoise {
    fn init(&self, _x: Parameter<'_>) -> Result<State> {
        Ok(State::empty().with_counter("t"))
    }

    fn apply<'a>(&'a self, state: &'a mut State, _x: Parameter<'a>, dx: Gradient<'a>) -> Result<Flow<'a>> {
        let path = dx.path();
        Ok(Flow::Step(dx.with_tensors_late(state, move |t, _, dx, _| {
            let key = random_key(self.seed, t, path);
            let deviation = self.sigma * (t as f64).powf(-0.5 * self.gamma);
            let noise = Tensor::from_iter(
                (0..dx.elem_count()).map(|element| deviation * gaussian(key, element)),
                &Device::Cpu,
            )?;
            Ok((&dx
                + noise
                    .to_dtype(dx.dtype())?
                    .to_device(dx.device())?
                    .reshape(dx.shape())?)?)
        })))
    }
}
