use crate::engine::{Buffer, Operand, compensated, set_lent_and};
use crate::error::Result;
use crate::model::lent::Lend;
use crate::numbers::DType;
use crate::rule::{
    Describe, Describer, Epilogue, Gradient, Optimiser, OwnState, Parameter, ParameterStore, Planned, Rule,
    State, StorageKind, StorageScheme, Target, state_of_another_rule,
};
use crate::tensors::{Tensor, difference, in_dtype, sum};

/// Trains f16 and bf16 parameters without a master, by Kahan's summation.
///
/// What the rounding of a step loses is kept in a second number of the parameter's dtype, and goes into the
/// next step.
///
/// ```text
/// y = c - rule(x, dx)
/// x' = x + y, rounded
/// c = y - (x' - x), rounded          the arithmetic is in f32
/// ```
///
/// Parameter and compensation together carry about twice the digits of the dtype. Source: Zamirai et al.
/// 2020, "Revisiting BFloat16 Training", [arXiv 2010.06192](https://arxiv.org/abs/2010.06192). Parameters in
/// F32 or F64 are stored as without this wrapper.
///
/// State per parameter: `compensation` (2 bytes) and the rule's, which is in f32 if not
/// [said otherwise](crate::StoreAs).
///
/// ```
/// use candle_core::{DType::{BF16, F32}, Device, Var};
/// use optimisers::{Descent, Kahan, setup, update};
///
/// let x = Var::ones(1, BF16, &Device::Cpu)?;
/// let mut state = setup(Kahan::new(Descent::new(1e-4)), &x)?;
/// for _ in 0..1000 {
///     // Each step alone is lost in bf16.
///     update(&mut state, &x, &x.sum_all()?.backward()?)?;
/// }
/// assert!((x.to_dtype(F32)?.to_vec1::<f32>()?[0] - 0.9).abs() < 0.004);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[must_use = "a rule does nothing by itself: pass it to `setup`"]
#[derive(Clone, Debug, PartialEq)]
pub struct Kahan<R> {
    inner: R,
}

impl<R: Rule + Clone> Kahan<R> {
    /// Runs `inner`, and keeps what its steps lose.
    pub fn new(inner: R) -> Self {
        Kahan { inner }
    }
}

impl<R: Rule + Clone> Describe for Kahan<R> {
    fn describe(&mut self, rule: &mut Describer<'_>) {
        rule.kind("Kahan");
        rule.stores(StorageScheme::on_device(StorageKind::Compensated));
        rule.holds(&mut self.inner);
    }
}

impl<R: Rule + Clone> ParameterStore for Kahan<R> {
    fn storage_kind(&self) -> StorageKind {
        StorageKind::Compensated
    }

    fn wraps(&self, dtype: DType) -> Result<bool> {
        Ok(matches!(dtype, DType::F16 | DType::BF16))
    }

    fn state(&self, rule: &dyn Rule, x: &dyn Lend) -> Result<State> {
        Ok(State::empty()
            .with_buffer(
                "compensation",
                Buffer::new(&Tensor::zeros(x.shape(), x.dtype().into(), x.device())?)?,
            )
            .stored_with(rule.init(Parameter::new(x))?))
    }

    fn whole(&self, state: &State, x: &dyn Lend) -> Result<Tensor> {
        let [(_, compensation)] = &state.tensors[..] else { return state_of_another_rule(self) };
        let [x, lost] = [x.to_tensor()?, compensation.tensor()?]
            .map(|tensor| in_dtype(&tensor, crate::tensors::DType::F32));
        Ok(sum(&x?, &lost?)?)
    }

    fn seen_by_rule(&self, _state: &State, x: &dyn Lend) -> Result<Tensor> {
        x.to_tensor()
    }

    fn set_whole(&self, state: &mut State, x: &dyn Lend, values: &Tensor) -> Result<()> {
        let [(_, compensation)] = &mut state.tensors[..] else { return state_of_another_rule(self) };
        let (next, lost) = compensated(&x.to_tensor()?, compensation, values)?;
        set_lent_and(x, &next, &mut || Ok(compensation.set(&lost)?))
    }

    fn keep(&self, state: &mut State, x: &dyn Lend, values: &Tensor) -> Result<bool> {
        let [(_, compensation)] = &mut state.tensors[..] else { return state_of_another_rule(self) };
        compensation.set(&difference(values, &in_dtype(&x.to_tensor()?, values.dtype())?)?)?;
        Ok(true)
    }

    fn plan_stored<'a>(
        &'a self,
        rule: &'a dyn Rule,
        own: OwnState<'a>,
        target: Target<'a>,
        dx: Gradient<'a>,
    ) -> Result<Planned<'a>> {
        let [(_, compensation)] = own.tensors else { return state_of_another_rule(self) };
        let flow = rule.apply(own.of_rule, Parameter::new(target.x), dx)?;
        Ok(Planned::new(flow, target.path, Operand::Lent(target.x), Epilogue::Kahan(compensation)))
    }
}

impl<R: Rule + Clone> Optimiser for Kahan<R> {
    fn rule(&self) -> &dyn Rule {
        &self.inner
    }

    fn store(&self) -> Option<&dyn ParameterStore> {
        Some(self)
    }
}
