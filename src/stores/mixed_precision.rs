use crate::engine::{rounded, rounded_to, set_lent_and};
use crate::error::{Error, ErrorKind, Result};
use crate::model::lent::Lend;
use crate::numbers::{DType, is_wider};
use crate::rule::{
    Describe, Describer, Gradient, Optimiser, OwnState, Parameter, ParameterStore, Planned, Rule, State,
    StorageKind, StorageScheme, Target, state_of_another_rule,
};
use crate::tensors::Tensor;

/// Keeps a high-precision copy (the master) of each low-precision parameter for the inner rule.
///
/// ```text
/// dx  = the gradient, widened to the master's dtype
/// x̂   = x̂ - rule(x̂, dx)        x̂ is the master, kept in the state
/// x   = x̂ rounded to nearest even
/// ```
///
/// all in one pass. The rule's own state is in the master's precision, too. A parameter that is already at
/// least as precise as `dtype` gets no master, and the rule runs on it as if bare. So one optimiser serves a
/// model with f16 matrices and f32 norms.
///
/// `dtype` is F32 or F64; anything else is an error at [`setup`](crate::setup). State per parameter: the
/// master (4 bytes in F32) and the inner rule's. Beside a bf16, [`SplitMaster`](crate::SplitMaster) keeps the
/// same master in 2.125 bytes, with the same bits in every step.
///
/// The parameter follows its master, so the next step overwrites new weights that are put into the model.
/// [`StateTree::refresh_masters`](crate::StateTree::refresh_masters) makes the masters follow for once, and
/// [`StateTree::set_masters`](crate::StateTree::set_masters) sets both. [`update`](crate::update) refuses a
/// parameter that was changed, as far as it notices:
///
/// | | before the first step (also after a restore or [`rebind`](crate::StateTree::rebind)) | before the others |
/// | --- | --- | --- |
/// | on the CPU | every element is compared | a sample: runs of 64 elements, 16 at least and two for each million |
/// | on a device | the sample, which is brought to the CPU | nothing, because each step would wait for the device |
///
/// [`StateTree::check_masters`](crate::StateTree::check_masters) compares every element anywhere. Weights
/// that are loaded on a device in the middle of a training need one of the three, or are lost.
///
/// A parameter without a gradient is not compared. One that has had none so far may move: its master follows
/// before its first gradient. BatchNorm's running statistics do so, and need not be
/// [left out](crate::setup_with).
///
/// It stores the parameter, so it goes outermost. Any rule or chain can be inside, but it cannot be inside a
/// chain or itself; that does not compile.
///
/// ```
/// use candle_core::{DType::{BF16, F32}, Device, Var};
/// use optimisers::{Adam, ClipGrad, MixedPrecision, OptimiserChain, setup, update};
///
/// let x = Var::ones(3, BF16, &Device::Cpu)?;
/// let rule = MixedPrecision::new(F32, OptimiserChain::new((ClipGrad::new(1.0), Adam::new(1e-3))));
/// let mut state = setup(rule, &x)?;
/// for _ in 0..3 {
///     // Steps of 0.001 are lost in bf16 at 1.0 and add up in the master.
///     let grads = x.sum_all()?.backward()?;
///     update(&mut state, &x, &grads)?;
/// }
/// assert_eq!(x.to_dtype(F32)?.to_vec1::<f32>()?, [0.99609375; 3]);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// # Departures
/// Optimisers.jl copies Float32 parameters as well, and hands the low-precision gradient to the rule as it
/// is.
#[must_use = "a rule does nothing by itself: pass it to `setup`"]
#[derive(Clone, Debug, PartialEq)]
pub struct MixedPrecision<R> {
    dtype: DType,
    inner: R,
}

impl<R: Rule + Clone> MixedPrecision<R> {
    /// Keeps masters in `dtype` (F32 or F64) and runs `inner` on them.
    pub fn new(dtype: impl Into<DType>, inner: R) -> Self {
        MixedPrecision { dtype: dtype.into(), inner }
    }
}

impl<R: Rule + Clone> Describe for MixedPrecision<R> {
    fn describe(&mut self, rule: &mut Describer<'_>) {
        let dtype = self.dtype;
        rule.kind("MixedPrecision");
        rule.stores(StorageScheme::on_device(StorageKind::Master));
        rule.setting("dtype", dtype);
        rule.fixed("dtype");
        let narrow = || {
            Error::new(ErrorKind::Argument, "MixedPrecision is to keep its copy in")
                .with_got(format_args!("{dtype:?}"))
                .with_expected("F32 or F64")
        };
        rule.require(|| if matches!(dtype, DType::F32 | DType::F64) { Ok(()) } else { Err(narrow()) });
        rule.holds(&mut self.inner);
    }
}

impl<R: Rule + Clone> ParameterStore for MixedPrecision<R> {
    fn storage_kind(&self) -> StorageKind {
        StorageKind::Master
    }

    fn wraps(&self, dtype: DType) -> Result<bool> {
        Ok(is_wider(self.dtype, dtype))
    }

    fn state(&self, rule: &dyn Rule, x: &dyn Lend) -> Result<State> {
        let master = rounded(&x.to_tensor()?, self.dtype)?;
        State::with_master(&master, rule.init(Parameter::new(&master))?)
    }

    fn whole(&self, state: &State, _x: &dyn Lend) -> Result<Tensor> {
        state.master.as_ref().map_or_else(|| state_of_another_rule(self), |master| Ok(master.tensor()?))
    }

    fn set_whole(&self, state: &mut State, x: &dyn Lend, values: &Tensor) -> Result<()> {
        let Some(master) = &mut state.master else { return state_of_another_rule(self) };
        let values = rounded(values, master.dtype())?;
        set_lent_and(x, &values, &mut || Ok(master.set(&values)?))
    }

    fn keep(&self, state: &mut State, x: &dyn Lend, values: &Tensor) -> Result<bool> {
        let Some(master) = &mut state.master else { return state_of_another_rule(self) };
        master.set(&rounded_to(&x.to_tensor()?, values, self.dtype)?)?;
        Ok(true)
    }

    fn check_rounded(&self, state: &State, target: Target<'_>) -> Result<()> {
        state
            .master
            .as_ref()
            .map_or_else(|| state_of_another_rule(self), |master| target.check_rounded(master))
    }

    fn plan_stored<'a>(
        &'a self,
        rule: &'a dyn Rule,
        own: OwnState<'a>,
        target: Target<'a>,
        dx: Gradient<'a>,
    ) -> Result<Planned<'a>> {
        let Some(master) = own.master else { return state_of_another_rule(self) };
        let has_gradient = !dx.is_missing();
        let x = Parameter::new(target.x).as_master(master.dtype(), master.device().is_cpu());
        let flow = rule.apply(own.of_rule, x, dx)?;
        target.plan_with_master(flow, has_gradient, master)
    }
}

impl<R: Rule + Clone> Optimiser for MixedPrecision<R> {
    fn rule(&self) -> &dyn Rule {
        &self.inner
    }

    fn store(&self) -> Option<&dyn ParameterStore> {
        Some(self)
    }
}
