use candle_core::{DType, Tensor};

use crate::error::{Result, StateError};
use crate::rule::{Adjust, Flow, Gradient, Rule, State, adjust_by, expect_dtype, rule_by};

/// Keeps state tensors of a rule in other dtypes, each chosen by its name.
///
/// The arithmetic is the same, in f32 or f64; a tensor is widened before a step and rounded to nearest even after it, in the same pass. So a
/// moment takes 2 bytes instead of 4:
///
/// ```
/// use candle_core::{DType::{BF16, F32}, Device, Var};
/// use optimisers::{AccumGrad, AdamW, MixedPrecision, OptimiserChain, StoreAs, setup};
///
/// let x = Var::zeros(1000, BF16, &Device::Cpu)?;
/// let adam = StoreAs::new([("m", BF16)], AdamW::new(1e-3));
/// assert_eq!(setup(adam.clone(), &x)?.bytes(), 1000 * (2 + 4));
///
/// // A name reaches into chains: gradients accumulated in the dtype of the model, as in DeepSpeed's `data_types.grad_accum_dtype`.
/// let chain = StoreAs::new([("acc", BF16)], OptimiserChain::new((AccumGrad::new(4), adam)));
/// assert_eq!(setup(MixedPrecision::new(F32, chain), &x)?.bytes(), 1000 * (4 + 2 + 2 + 4));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// # What is lost
/// - BF16 has the range of F32 and 8 significant bits. A step of a second moment with β₂ = 0.999 is a thousandth of it, which is lost: it stands still
///   and does not work. The first moment with β₁ = 0.9 does.
/// - F16 has 11 significant bits, and numbers below 3e-8 are 0. That is where the squares of gradients are, so a second moment in F16 is refused
///   ([`Slot::second_moment`](crate::Slot::second_moment)). Sums of gradients (`acc`) lose what a loss scale has saved, and above 65504 they are infinite:
///   [`AccumGrad`](crate::AccumGrad) says what becomes of that.
#[derive(Clone, Debug, PartialEq)]
pub struct StoreAs<R> {
    dtypes: Vec<(String, DType)>,
    inner: R,
}

impl<R: Rule + Clone> StoreAs<R> {
    /// Keeps the tensors of these names in these dtypes, wherever they are in `inner`.
    pub fn new<N: Into<String>>(dtypes: impl IntoIterator<Item = (N, DType)>, inner: R) -> Self {
        StoreAs { dtypes: dtypes.into_iter().map(|(name, dtype)| (name.into(), dtype)).collect(), inner }
    }
}

impl<R: Rule + Clone> Adjust for StoreAs<R> {
    fn name(&self) -> String {
        let dtypes: Vec<String> = self.dtypes.iter().map(|(name, dtype)| format!("{name}: {dtype:?}")).collect();
        format!("StoreAs({}, {})", dtypes.join(", "), self.inner.name())
    }

    adjust_by!(fields, self => &self.inner, &mut self.inner);

    fn check(&self) -> Result<()> {
        self.dtypes.iter().try_for_each(|(slot, dtype)| expect_dtype(slot, false, *dtype))?;
        self.inner.check()
    }
}

impl<R: Rule + Clone> Rule for StoreAs<R> {
    fn init(&self, x: &Tensor) -> Result<State> {
        let mut state = self.inner.init(x)?;
        for (name, dtype) in &self.dtypes {
            if state.store_as(name, *dtype)? == 0 {
                let available = state.tensors().into_iter().map(|(name, _)| name).collect();
                return Err(StateError::Unknown { slot: name.clone(), rule: self.inner.name(), available }.into());
            }
        }
        Ok(state)
    }

    fn apply<'a>(&'a self, state: &'a mut State, x: &'a Tensor, dx: Gradient<'a>) -> Result<Flow<'a>> {
        self.inner.apply(state, x, dx)
    }

    rule_by!(provided, self => &self.inner);
}
