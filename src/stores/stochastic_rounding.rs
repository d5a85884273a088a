use crate::engine::{Operand, set_lent};
use crate::error::Result;
use crate::model::lent::Lend;
use crate::numbers::{DType, random_key};
use crate::rule::{
    Describe, Describer, Epilogue, Gradient, Optimiser, OwnState, Parameter, ParameterStore, Planned, Rule,
    State, StorageKind, StorageScheme, Target, range, state_of_another_rule,
};
use crate::tensors::Tensor;

/// Trains f16 and bf16 parameters without a master, by stochastic rounding.
///
/// A step goes to one of the two neighbouring numbers, to the nearer with the greater probability, so that on
/// average nothing is lost.
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
/// State per parameter: the rule's, which is in f32 if not [said otherwise](crate::StoreAs).
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
    seed: u64,
    inner: R,
}

impl<R: Rule + Clone> StochasticRounding<R> {
    /// Runs `inner` and rounds its steps at random.
    pub fn new(seed: u64, inner: R) -> Self {
        StochasticRounding { seed, inner }
    }
}

impl<R: Rule + Clone> Describe for StochasticRounding<R> {
    fn describe(&mut self, rule: &mut Describer<'_>) {
        // A seed has no default.
        let own = self.seed;
        rule.kind("StochasticRounding");
        rule.stores(StorageScheme::on_device(StorageKind::Stochastic));
        rule.field("seed", &mut self.seed, own, range::any);
        rule.holds(&mut self.inner);
    }
}

impl<R: Rule + Clone> ParameterStore for StochasticRounding<R> {
    fn storage_kind(&self) -> StorageKind {
        StorageKind::Stochastic
    }

    fn wraps(&self, dtype: DType) -> Result<bool> {
        Ok(matches!(dtype, DType::F16 | DType::BF16))
    }

    fn state(&self, rule: &dyn Rule, x: &dyn Lend) -> Result<State> {
        Ok(State::empty().with_counter("rounded").stored_with(rule.init(Parameter::new(x))?))
    }

    fn whole(&self, _state: &State, x: &dyn Lend) -> Result<Tensor> {
        x.to_tensor()
    }

    fn set_whole(&self, _state: &mut State, x: &dyn Lend, values: &Tensor) -> Result<()> {
        set_lent(x, values)
    }

    fn keep(&self, _state: &mut State, _x: &dyn Lend, _values: &Tensor) -> Result<bool> {
        Ok(false)
    }

    fn plan_stored<'a>(
        &'a self,
        rule: &'a dyn Rule,
        own: OwnState<'a>,
        target: Target<'a>,
        dx: Gradient<'a>,
    ) -> Result<Planned<'a>> {
        let [(_, rounded)] = own.counters else { return state_of_another_rule(self) };
        let flow = rule.apply(own.of_rule, Parameter::new(target.x), dx)?;
        let key = random_key(self.seed, *rounded, target.path);
        Ok(Planned::new(flow, target.path, Operand::Lent(target.x), Epilogue::Stochastic(key))
            .counting(rounded))
    }
}

impl<R: Rule + Clone> Optimiser for StochasticRounding<R> {
    fn rule(&self) -> &dyn Rule {
        &self.inner
    }

    fn store(&self) -> Option<&dyn ParameterStore> {
        Some(self)
    }
}
