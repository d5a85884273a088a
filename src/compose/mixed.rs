use candle_core::{DType, Tensor};

use crate::engine::{is_wider, set_tensor};
use crate::error::{Error, MasterError, Result};
use crate::rule::{Adjust, FieldValue, Gradient, Kind, Optimiser, Planned, Rule, State, Target, names};

/// Keeps a high-precision copy (the master) of each low-precision parameter and lets the inner rule work on that.
///
/// ```text
/// dx  = the gradient, widened to the master's dtype
/// x̂   = x̂ - rule(x̂, dx)        x̂ is the master, kept in the state
/// x   = x̂ rounded to nearest even
/// ```
///
/// all in one pass. The rule's own state is in the master's precision, too. A parameter that is already at least as precise as
/// `dtype` gets no master, and the rule runs on it as if bare, so one optimiser serves a model with f16 matrices and f32 norms.
///
/// `dtype` is F32 or F64; anything else is an error at [`setup`](crate::setup). State per parameter: the master (4 bytes in F32) and the
/// inner rule's.
///
/// The parameter follows its master, so new weights that are put into the model are overwritten by the next step.
/// [`StateTree::refresh_masters`](crate::StateTree::refresh_masters) makes the masters follow for once, and
/// [`StateTree::set_masters`](crate::StateTree::set_masters) sets both. [`update`](crate::update) refuses a parameter that was changed, as far as it notices:
///
/// | | before the first step (also after a restore or [`rebind`](crate::StateTree::rebind)) | before the others |
/// | --- | --- | --- |
/// | on the CPU | every element is compared | a sample: runs of 64 elements, 16 at least and two for each million |
/// | on a device | the sample, which is brought to the CPU | nothing, because each step would wait for the device |
///
/// [`StateTree::check_masters`](crate::StateTree::check_masters) compares every element anywhere. Weights that are loaded on a device in the middle of a
/// training need one of the three, or are lost.
///
/// A parameter without a gradient is not compared. One that has had none in all calls so far may move: its master follows before its first gradient.
/// So it is with BatchNorm's running statistics, which need not be [left out](crate::setup_with).
///
/// It stores the parameter, so it goes outermost. Any rule or chain can be inside, but it cannot be inside a chain or itself; that does not compile.
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
/// Optimisers.jl copies Float32 parameters as well, and hands the low-precision gradient to the rule as it is.
#[derive(Clone, Debug, PartialEq)]
pub struct MixedPrecision<R> {
    dtype: DType,
    inner: R,
}

impl<R: Rule + Clone> MixedPrecision<R> {
    /// Keeps masters in `dtype` (F32 or F64) and runs `inner` on them.
    pub fn new(dtype: DType, inner: R) -> Self {
        MixedPrecision { dtype, inner }
    }

    /// The dtype of the masters.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// The rule that works on the masters.
    pub fn inner(&self) -> &R {
        &self.inner
    }

    fn needs_master(&self, parameter: DType) -> bool {
        is_wider(self.dtype, parameter)
    }
}

impl<R: Rule + Clone> Adjust for MixedPrecision<R> {
    fn name(&self) -> String {
        format!("MixedPrecision({:?}, {})", self.dtype, self.inner.name())
    }

    fn fields(&self) -> Vec<(&'static str, FieldValue)> {
        self.inner.fields()
    }

    fn places(&self) -> Vec<String> {
        self.inner.places()
    }

    fn set_field(&mut self, field: &str, value: FieldValue) -> Result<bool> {
        if field == "dtype" {
            return Err(Error::FixedField { rule: self.name(), field: field.to_string(), available: names(self) });
        }
        self.inner.set_field(field, value)
    }

    fn set_fields(&mut self, values: &[FieldValue]) -> Result<()> {
        self.inner.set_fields(values)
    }

    fn defaults(&self) -> Vec<(String, Vec<(&'static str, FieldValue)>)> {
        self.inner.defaults()
    }

    fn check(&self) -> Result<()> {
        match self.dtype {
            DType::F32 | DType::F64 => self.inner.check(),
            got => Err(MasterError::Dtype { got }.into()),
        }
    }
}

impl<R: Rule + Clone> Optimiser for MixedPrecision<R> {
    fn init(&self, x: &Tensor) -> Result<State> {
        self.check()?;
        if !self.needs_master(x.dtype()) {
            return Rule::init(&self.inner, x);
        }
        let master = x.to_dtype(self.dtype)?;
        State::with_master(&master, self.inner.init(&master)?)
    }

    fn rule_name(&self) -> String {
        self.inner.name()
    }

    fn rule_kind(&self) -> Kind {
        self.inner.kind()
    }

    fn end_window(&self, state: &mut State) -> Result<()> {
        match (&state.master, &mut state.children[..]) {
            (Some(_), [inner]) => Rule::end_window(&self.inner, &mut inner.state),
            _ => Rule::end_window(&self.inner, state),
        }
    }

    fn master(&self, state: &State, x: &Tensor) -> Result<Tensor> {
        Ok(state.master.as_deref().unwrap_or(x).detach().copy()?)
    }

    fn evaluation(&self, state: &State, x: &Tensor) -> Result<Option<Tensor>> {
        match (&state.master, &state.children[..]) {
            (Some(master), [inner]) => Rule::evaluation(&self.inner, &inner.state, master),
            _ => Rule::evaluation(&self.inner, state, x),
        }
    }

    fn set_master(&self, state: &mut State, x: &Tensor, values: &Tensor) -> Result<()> {
        match &state.master {
            None => Ok(set_tensor(x, values)?),
            Some(master) => {
                set_tensor(master, values)?;
                Ok(set_tensor(x, master)?)
            }
        }
    }

    fn seen(&self, state: &State, x: &Tensor) -> Result<Tensor> {
        Ok(state.master.as_deref().unwrap_or(x).clone())
    }

    fn expect_rounded(&self, state: &State, target: Target<'_>) -> Result<()> {
        state.master.as_ref().map_or(Ok(()), |master| target.expect_rounded(master))
    }

    fn plan<'a>(&'a self, state: &'a mut State, target: Target<'a>, dx: Gradient<'a>) -> Result<Planned<'a>> {
        if !self.needs_master(target.x.dtype()) {
            return Optimiser::plan(&self.inner, state, target, dx);
        }
        let State { master, children, .. } = state;
        let (Some(master), Some(inner)) = (master, children.first_mut()) else {
            return Err(Error::other("a state of MixedPrecision without its master"));
        };
        let has_gradient = !dx.is_missing();
        let flow = self.inner.apply(&mut inner.state, master, dx)?;
        target.checked(target.plan_with_master(flow, master), has_gradient, master)
    }
}
