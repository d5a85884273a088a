use crate::numbers::DType;
use crate::rule::{Describe, Describer, IntoOptimiser, Optimiser, Rule, Store};

/// Keeps a high-precision copy (the master) of each low-precision parameter for the inner rule.
///
/// ```text
/// dx  = the gradient, widened to the master's dtype
/// x̂   = x̂ - rule(x̂, dx)        x̂ is the master, kept in the state
/// x   = x̂ rounded to nearest even
/// ```
///
/// The three lines are one pass over memory. The rule's own state has the master's precision, too. A
/// parameter that is at least as precise as `dtype` gets no master, and its rule runs without this wrapper.
/// So one optimiser serves a model with f16 matrices and f32 norms.
///
/// `dtype` is F32 or F64; [`setup`](crate::setup) refuses any other dtype. State per parameter: the master (4
/// bytes in F32) and the inner rule's state. For bf16 parameters [`SplitMaster`](crate::SplitMaster) keeps
/// the same master in 2.125 bytes, with the same bits in every step.
///
/// The parameter follows its master, so the next step overwrites new weights that are put into the model.
/// [`StateTree::refresh_masters`](crate::StateTree::refresh_masters) copies such weights to the masters, and
/// [`StateTree::set_masters`](crate::StateTree::set_masters) sets masters and parameters.
/// [`update`](crate::update) refuses a parameter that was changed, as far as `update` compares it with its
/// master:
///
/// - On the CPU `update` compares every element before the first step (also the first after a restore or
///   [`rebind`](crate::StateTree::rebind)), and a sample before other steps. The sample is runs of 64
///   elements: one run for each 1024 elements, but at least 4 and at most 16 runs. In very long parameters it
///   has two runs for each million elements.
/// - On a device `update` brings the same sample to the CPU before the first step. Before other steps it
///   compares nothing, because each step would wait for the device.
///
/// [`StateTree::check_masters`](crate::StateTree::check_masters) compares every element anywhere. If weights
/// are loaded on a device in the middle of a training, call `refresh_masters`, `set_masters` or
/// `check_masters`; otherwise the new weights are lost.
///
/// A parameter without a gradient is not compared. Before its first gradient a parameter may change, and its
/// master follows. So BatchNorm's running statistics need not be [left out](crate::setup_with).
///
/// This wrapper stores the parameter, so it is the outermost one. Any rule or chain can be inside. The
/// wrapper does not compile inside a chain or inside itself.
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
/// Optimisers.jl copies Float32 parameters as well, and passes the low-precision gradient to the rule without
/// widening it.
#[must_use = "a rule does nothing by itself: pass it to `setup`"]
#[derive(Clone, Debug, PartialEq)]
pub struct MixedPrecision<R> {
    store: Store,
    inner: R,
}

impl<R: Rule + Clone> MixedPrecision<R> {
    /// Keeps masters in `dtype` (F32 or F64) and runs `inner` on them.
    pub fn new(dtype: impl MasterDType, inner: R) -> Self {
        MixedPrecision {
            store: Store::Master(dtype.into()),
            inner,
        }
    }
}

/// A dtype of masters: every type that is `Into<DType>`. The bound of [`MixedPrecision::new`] is not `Into`
/// itself, because this crate can give a compiler message of its own only to its own traits.
#[diagnostic::on_unimplemented(
    message = "`{Self}` is no dtype that this crate knows",
    label = "expected a dtype, as in `MixedPrecision::new(F32, rule)`",
    note = "if it is candle's `DType`, the program and this crate have two candles: run \
            `cargo update candle-nn@0.11 --precise 0.10.2` if the program's is 0.10.2, or \
            `cargo update candle-nn@0.10` if it is 0.11"
)]
pub trait MasterDType: Into<DType> {}

#[diagnostic::do_not_recommend]
impl<D: Into<DType>> MasterDType for D {}

impl<R: Rule + Clone> Describe for MixedPrecision<R> {
    fn describe(&mut self, rule: &mut Describer<'_>) {
        self.store.describe(&mut self.inner, rule);
    }
}

impl<R: Rule + Clone> IntoOptimiser for MixedPrecision<R> {
    fn into_optimiser(self) -> Optimiser {
        Optimiser::with_store(self.store, self.inner)
    }
}
