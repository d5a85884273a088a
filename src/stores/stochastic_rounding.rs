use crate::rule::{Describe, Describer, IntoOptimiser, Optimiser, Rule, Store};

/// Trains f16 and bf16 parameters without a master, by stochastic rounding.
///
/// The result of a step is rounded to one of its two neighbours in the dtype, more probably to the nearer
/// one, so that on average nothing is lost.
///
/// ```text
/// x = x - rule(x, dx), rounded up or down at random
/// ```
///
/// Beyond the largest finite number a step is rounded to nearest, so that the wrapper makes no infinity that
/// rounding to nearest does not make.
///
/// The random bits are a hash of the seed, the indices of step and element, and the parameter's path, so they
/// are the same with any number of threads and after a resumed run. Parameters in F32 or F64 are stored as
/// without this wrapper. Source: Gupta et al. 2015, "Deep Learning with Limited Numerical Precision",
/// [arXiv 1502.02551](https://arxiv.org/abs/1502.02551).
///
/// State per parameter: the rule's state, in f32 unless [`StoreAs`](crate::StoreAs) changes the dtype.
///
/// ```
/// use candle_core::{DType::{BF16, F32}, Device, Var};
/// use optimisers::{Descent, StochasticRounding, setup, update};
///
/// let x = Var::ones(1000, BF16, &Device::Cpu)?;
/// let mut state = setup(StochasticRounding::new(0, Descent::new(1e-4)), &x)?;
/// for _ in 0..100 {
///     // Each step alone is lost in bf16, with rounding to nearest.
///     update(&mut state, &x, &x.sum_all()?.backward()?)?;
/// }
/// let mean = x.to_dtype(F32)?.mean_all()?.to_scalar::<f32>()?;
/// assert!((mean - 0.99).abs() < 0.001);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[must_use = "a rule does nothing by itself: pass it to `setup`"]
#[derive(Clone, Debug, PartialEq)]
pub struct StochasticRounding<R> {
    store: Store,
    inner: R,
}

impl<R: Rule + Clone> StochasticRounding<R> {
    /// Runs `inner` and rounds its steps at random.
    pub fn new(seed: u64, inner: R) -> Self {
        StochasticRounding {
            store: Store::Stochastic { seed },
            inner,
        }
    }
}

impl<R: Rule + Clone> Describe for StochasticRounding<R> {
    fn describe(&mut self, rule: &mut Describer<'_>) {
        self.store.describe(&mut self.inner, rule);
    }
}

impl<R: Rule + Clone> IntoOptimiser for StochasticRounding<R> {
    fn into_optimiser(self) -> Optimiser {
        Optimiser::with_store(self.store, self.inner)
    }
}
