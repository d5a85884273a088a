//! What users implement and what [`setup`](crate::setup) takes.

use candle_core::Tensor;
use dyn_clone::DynClone;

use super::{Adjust, Child, Describe, Describer, Flow, Gradient, Kind, Planned, State, Storage, StorageKind, Target};
use crate::engine::{Epilogue, set_tensor};
use crate::error::Result;

/// A gradient transformation: what stands in an [`OptimiserChain`](crate::OptimiserChain) or inside
/// [`MixedPrecision`](crate::MixedPrecision).
///
/// A rule is configuration; what it remembers is a [`State`] outside of it. Most rules are [`Elementwise`](crate::Elementwise), and get this trait from that.
/// A rule that needs the whole tensor implements `Rule` itself and plans a function with [`Gradient::with_tensors`]:
///
/// ```
/// use candle_core::{Device, Tensor, Var};
/// use optimisers::{Descent, Flow, Gradient, OptimiserChain, Result, Rule, State, hyper_parameters, range, setup, update};
///
/// hyper_parameters! {
///     /// Divides each row of the gradient by its largest absolute value.
///     pub struct ByLargest {
///         /// What that becomes.
///         size: f64 = 1.0 => range::positive,
///     }
/// }
///
/// impl Rule for ByLargest {
///     fn init(&self, _x: &Tensor) -> Result<State> {
///         Ok(State::empty())
///     }
///
///     fn apply<'a>(&'a self, state: &'a mut State, _x: &'a Tensor, dx: Gradient<'a>) -> Result<Flow<'a>> {
///         Ok(Flow::Step(dx.with_tensors(state, |_step, _x, dx, _slots| {
///             let largest = dx.abs()?.max_keepdim(1)?;
///             Ok((dx.broadcast_div(&largest)? * self.size)?)
///         })))
///     }
/// }
///
/// let x = Var::zeros((1, 3), candle_core::DType::F32, &Device::Cpu)?;
/// let mut state = setup(OptimiserChain::new((ByLargest::default(), Descent::new(3.0))), &x)?;
/// let grads = x.mul(&Tensor::new(&[[1f32, 2.0, -4.0]], &Device::Cpu)?)?.sum_all()?.backward()?;
/// update(&mut state, &x, &grads)?;
/// assert_eq!(x.to_vec2::<f32>()?, [[-0.75, -1.5, 3.0]]);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// # Panics
/// A rule says what is wrong by an error, here or in a function of `with_tensors`; nothing is written then. If it panics instead, the panic goes on to the
/// caller of [`update`](crate::update) when all threads have stopped. Nothing has been written either, if it comes from [`apply`](Rule::apply), from
/// [`Elementwise::scalars`](crate::Elementwise::scalars), from a function of `with_tensors`, or from arithmetic before a norm, a sum, a check or such a function, as this is evaluated
/// before the first write.
///
/// All other arithmetic of an [`Elementwise`](crate::Elementwise) rule runs while parameters are written. A panic there leaves
///
/// - the parameter that it was about in part: some elements have made the step together with their state, others have not, and its counters stay. Not
///   on a CUDA device, nor with [`Engine::Tensors`](crate::Engine::Tensors), where arithmetic is recorded first: there it is as it was;
/// - every other parameter as it was, or moved as a whole with its state and counters, whatever the order of the paths;
/// - the number of calls that windows of [`AccumGrad`](crate::AccumGrad) have counted as it was.
///
/// No lock stays held, so model and state can be used, but they do not belong together: take both from a checkpoint, or from a copy. With
/// [`Update::functional`](crate::Update::functional) the originals are whole.
#[diagnostic::on_unimplemented(
    message = "`{Self}` does not turn a gradient into a gradient, so it cannot stand in a chain or inside `MixedPrecision`",
    label = "not a gradient rule",
    note = "`MixedPrecision` decides how the parameter is stored and goes outermost: write `MixedPrecision::new(F32, OptimiserChain::new((ClipGrad::new(1.0), Adam::new(1e-3))))`"
)]
pub trait Rule: Describe + Adjust + DynClone + std::fmt::Debug + Send + Sync + 'static {
    /// The rule that this one is around, if its state is that rule's own: the other provided methods ask it.
    fn inner(&self) -> Option<&dyn Rule> {
        None
    }

    /// The state for a parameter (or its master) `x`. A tensor that starts as x is a [`Slot::parameter`](crate::Slot::parameter), so that it follows new weights.
    ///
    /// # Errors
    /// If the device has no memory left, or the rule does not fit the parameter.
    fn init(&self, x: &Tensor) -> Result<State>;

    /// Plans a step: takes the gradient as the rules before left it, and says how it goes on. Nothing is computed or written here.
    ///
    /// # Errors
    /// If the rule does not fit the parameter; nothing is written then.
    fn apply<'a>(&'a self, state: &'a mut State, x: &'a Tensor, dx: Gradient<'a>) -> Result<Flow<'a>>;

    /// What the step of one element depends on. Every [`Elementwise`](crate::Elementwise) says so itself; of others the whole tensor is assumed.
    fn kind(&self) -> Kind {
        self.inner().map_or(Kind::WholeTensor, |inner| inner.kind())
    }

    /// Whether a part of a parameter can be updated without the rest, as ranks do that [divide](crate::Setup::over) the state: x, gradient and state
    /// are then those of a run of neighbouring elements, of one dimension. That is right for arithmetic on elements, and for norms and sums that
    /// the gradient is asked for, which are taken over all parts. It is wrong for functions of tensors, and where shape, number or places of
    /// elements matter. A rule that does not say so keeps its parameters whole, each on one rank.
    fn is_divisible(&self) -> bool {
        self.inner().is_some_and(|inner| inner.is_divisible())
    }

    /// Forgets what was collected for a step that will not be taken. Rules that collect nothing have nothing to do; rules that hold
    /// others pass it on.
    ///
    /// # Errors
    /// If a device fails.
    fn end_window(&self, state: &mut State) -> Result<()> {
        self.inner().map_or(Ok(()), |inner| inner.end_window(state))
    }

    /// The weights to evaluate the model with in place of the parameter (or master) `x`, if this rule has better ones: by default the tensor
    /// that a [`Slot::average`](crate::Slot::average) made, if there is one. They have the parameter's shape and a float dtype. Rules that hold others ask these.
    ///
    /// # Errors
    /// If a device fails.
    fn evaluation(&self, state: &State, x: &Tensor) -> Result<Option<Tensor>> {
        self.inner().map_or_else(|| state.own_average(), |inner| inner.evaluation(state, x))
    }
}

dyn_clone::clone_trait_object!(Rule);

impl Rule for Box<dyn Rule> {
    fn inner(&self) -> Option<&dyn Rule> {
        Some(&**self)
    }

    fn init(&self, x: &Tensor) -> Result<State> {
        (**self).init(x)
    }

    fn apply<'a>(&'a self, state: &'a mut State, x: &'a Tensor, dx: Gradient<'a>) -> Result<Flow<'a>> {
        (**self).apply(state, x, dx)
    }
}

impl Describe for Box<dyn Rule> {
    fn describe(&mut self, rule: &mut Describer<'_>) {
        (**self).describe(rule);
    }
}

/// What [`setup`](crate::setup) takes: a rule together with how the parameter is stored.
///
/// Every [`Rule`] is one: the parameter is `x - dx`, rounded to its own dtype. [`MixedPrecision`](crate::MixedPrecision) keeps a
/// high-precision copy. A `Box<dyn Optimiser>` is one too.
///
/// The trait is sealed, as types that it needs are private: the engines have to know every way in which a parameter is stored. What is of one's own is a
/// [`Rule`].
#[diagnostic::on_unimplemented(
    message = "`{Self}` is not an optimiser",
    label = "expected a rule, a chain of rules or `MixedPrecision`",
    note = "several rules one after another are a chain: `OptimiserChain::new((ClipGrad::new(1.0), Adam::new(1e-3)))`"
)]
pub trait Optimiser: Describe + Adjust + DynClone + std::fmt::Debug + Send + Sync + 'static {
    /// The state for the parameter `x`.
    ///
    /// # Errors
    /// If a hyper-parameter is out of range, or the device has no memory left.
    fn make_state(&self, x: &Tensor) -> Result<State>;

    /// The rule without how the parameter is stored.
    #[doc(hidden)]
    fn rule(&self) -> &dyn Rule;

    /// The name of that rule.
    #[doc(hidden)]
    fn rule_name(&self) -> String {
        self.rule().name()
    }

    /// See [`Rule::kind`].
    #[doc(hidden)]
    fn rule_kind(&self) -> Kind {
        self.rule().kind()
    }

    /// How parameters are stored.
    #[doc(hidden)]
    fn storage(&self) -> Storage;

    /// The most precise copy of the parameter `x` that there is. It may share storage with the state or the parameter.
    #[doc(hidden)]
    fn precise(&self, _state: &State, x: &Tensor) -> Result<Tensor> {
        Ok(x.clone())
    }

    /// Sets that copy, and the parameter to it rounded.
    #[doc(hidden)]
    fn set_master(&self, _state: &mut State, x: &Tensor, values: &Tensor) -> Result<()> {
        Ok(set_tensor(x, values)?)
    }

    /// What the rule inside sees of the parameter `x`: its master, if it has one. It may share storage with the state or the parameter.
    #[doc(hidden)]
    fn seen(&self, _state: &State, x: &Tensor) -> Result<Tensor> {
        Ok(x.clone())
    }

    /// Refuses a parameter that is not its master rounded.
    #[doc(hidden)]
    fn expect_rounded(&self, _state: &State, _target: Target<'_>) -> Result<()> {
        Ok(())
    }

    /// A copy of the state for the parameter `x`, which is on another device than the one before.
    #[doc(hidden)]
    fn state_for(&self, state: &State, x: &Tensor) -> Result<State> {
        state.to_device(x.device())
    }

    /// Plans a step for the parameter `x`.
    #[doc(hidden)]
    fn plan<'a>(&'a self, state: &'a mut State, target: Target<'a>, dx: Gradient<'a>) -> Result<Planned<'a>>;
}

dyn_clone::clone_trait_object!(Optimiser);

/// What follows from the rule, however the parameter is stored.
impl dyn Optimiser {
    /// See [`Rule::end_window`].
    pub(crate) fn end_window(&self, state: &mut State) -> Result<()> {
        self.rule().end_window(of_rule_mut(state))
    }

    /// See [`Rule::evaluation`].
    pub(crate) fn evaluation(&self, state: &State, x: &Tensor) -> Result<Option<Tensor>> {
        self.rule().evaluation(of_rule(state), &self.precise(state, x)?)
    }

    /// A copy of [`Optimiser::precise`] with storage of its own.
    pub(crate) fn master(&self, state: &State, x: &Tensor) -> Result<Tensor> {
        Ok(self.precise(state, x)?.detach().copy()?)
    }
}

/// The state of the rule in the state of an optimiser.
fn of_rule(state: &State) -> &State {
    match &state.children[..] {
        [Child { prefix: None, state }] => of_rule(state),
        _ => state,
    }
}

fn of_rule_mut(mut state: &mut State) -> &mut State {
    while let [Child { prefix: None, .. }] = &state.children[..] {
        state = &mut state.children[0].state;
    }
    state
}

#[diagnostic::do_not_recommend]
impl<R: Rule> Optimiser for R {
    fn make_state(&self, x: &Tensor) -> Result<State> {
        self.check()?;
        self.init(x)
    }

    fn rule(&self) -> &dyn Rule {
        self
    }

    fn storage(&self) -> Storage {
        Storage::beside(StorageKind::Rounded)
    }

    fn plan<'a>(&'a self, state: &'a mut State, target: Target<'a>, dx: Gradient<'a>) -> Result<Planned<'a>> {
        let flow = self.apply(state, target.shown, dx)?;
        Ok(Planned::new(flow, target.path, target.x, Epilogue::Subtract))
    }
}

impl Optimiser for Box<dyn Optimiser> {
    fn make_state(&self, x: &Tensor) -> Result<State> {
        (**self).make_state(x)
    }

    fn rule(&self) -> &dyn Rule {
        (**self).rule()
    }

    fn storage(&self) -> Storage {
        (**self).storage()
    }

    fn precise(&self, state: &State, x: &Tensor) -> Result<Tensor> {
        (**self).precise(state, x)
    }

    fn set_master(&self, state: &mut State, x: &Tensor, values: &Tensor) -> Result<()> {
        (**self).set_master(state, x, values)
    }

    fn seen(&self, state: &State, x: &Tensor) -> Result<Tensor> {
        (**self).seen(state, x)
    }

    fn expect_rounded(&self, state: &State, target: Target<'_>) -> Result<()> {
        (**self).expect_rounded(state, target)
    }

    fn state_for(&self, state: &State, x: &Tensor) -> Result<State> {
        (**self).state_for(state, x)
    }

    fn plan<'a>(&'a self, state: &'a mut State, target: Target<'a>, dx: Gradient<'a>) -> Result<Planned<'a>> {
        (**self).plan(state, target, dx)
    }
}

impl Describe for Box<dyn Optimiser> {
    fn describe(&mut self, rule: &mut Describer<'_>) {
        (**self).describe(rule);
    }
}
