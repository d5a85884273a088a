use candle_core::{DType, Tensor};

use super::wrapper;
use crate::engine::{Buffer, random_key, set_tensor};
use crate::error::{Error, Result};
use crate::rule::{
    Adjust, Child, Epilogue, FieldValue, Flow, Gradient, Kind, Leaf, Optimiser, OwnCounters, OwnTensors, Planned, Rule, State, set,
    wrong_type,
};

/// Trains f16 and bf16 parameters without a master, by stochastic rounding: a step goes to one of the two neighbouring numbers, to the nearer
/// with the greater probability, so that on average nothing is lost.
///
/// ```text
/// x = x - rule(x, dx), rounded up or down at random
/// ```
///
/// The random bits are a hash of the seed, the indices of step and element, and the parameter's path, so they are the same with any
/// number of threads and after a resumed run. Parameters in F32 or F64 are stored as without this wrapper. Source: Gupta et al. 2015, "Deep Learning
/// with Limited Numerical Precision", [arXiv 1502.02551](https://arxiv.org/abs/1502.02551).
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

    fn wraps(dtype: DType) -> Result<bool> {
        Ok(matches!(dtype, DType::F16 | DType::BF16))
    }

    fn own_state(_: &Tensor) -> Result<State> {
        Ok(State::empty().with_counter("rounded"))
    }

    fn whole(x: &Tensor, _: &Buffer) -> Result<Tensor> {
        Ok(x.copy()?)
    }

    fn seen_by_rule(x: &Tensor, _: &Buffer) -> Result<Tensor> {
        Ok(x.clone())
    }

    fn set_whole(x: &Tensor, _: &mut Buffer, values: &Tensor) -> Result<()> {
        Ok(set_tensor(x, values)?)
    }

    fn store<'a>(&'a self, flow: Flow<'a>, leaf: Leaf<'a>, _: OwnTensors<'a>, own: OwnCounters<'a>) -> Result<Planned<'a>> {
        let [(_, rounded)] = own else {
            return Err(Error::other("a state of StochasticRounding without its counter"));
        };
        let key = random_key(self.seed, *rounded, leaf.path);
        Ok(Planned::new(flow, leaf.path, leaf.x, Epilogue::Stochastic(key)).counting(rounded))
    }
}

wrapper!(StochasticRounding, own fields: [seed]);
