//! Rules that treat every element alike.

use crate::error::Result;
use crate::numbers::value::{Arithmetic, Array, Prologue, Value};
use crate::rule::{Adjust, Describe, Flow, Gradient, Kind, Parameter, Parts, Rule, Slot, Slots, State};

/// A rule that treats every element of a parameter alike, by arithmetic that is written once.
///
/// Every `Elementwise` is a [`Rule`]. In a chain, such a rule costs no pass over memory of its own: the
/// engine runs all steps of a chain on a block of elements that stays in the first-level cache. Some steps
/// right before a rule even become a part of that rule's loop: the factor of a clipped norm or a
/// [`Scale`](crate::Scale), then [`ClipGrad`](crate::ClipGrad), then [`WeightDecay`](crate::WeightDecay).
///
/// # How to write such a rule
///
/// - [`hyper_parameters!`](crate::hyper_parameters) declares the struct.
/// - [`scalars`](Elementwise::scalars) prepares all numbers that do not depend on the element, once per step
///   and in f64.
/// - [`step`](Elementwise::step) is the formula. It may branch on flags of the rule, but not on values; use
///   [`Value::select`] for values.
///
/// ```
/// use candle_core::{Device, Tensor, Var};
/// use optimisers::{Elementwise, OptimiserChain, Slot, hyper_parameters, range, setup, update, value::Value};
///
/// hyper_parameters! {
///     /// Lion (Chen et al. 2023): dx' = η·sign(β₁·m + (1 - β₁)·dx), m = β₂·m + (1 - β₂)·dx.
///     pub struct TinyLion {
///         /// η: the learning rate.
///         eta: f64 = 1e-4 => range::non_negative,
///         /// β₁, β₂: the weight of the momentum in the step, and its decay.
///         beta: (f64, f64) = (0.9, 0.99) => range::decays,
///     }
/// }
///
/// impl Elementwise for TinyLion {
///     type Scalars = (f64, (f64, f64));
///     type Slots<T> = [T; 1];
///
///     fn slots(&self) -> [Slot; 1] {
///         [Slot::zeros("m")]
///     }
///
///     fn scalars(&self, _t: u64) -> Self::Scalars {
///         (self.eta, self.beta)
///     }
///
///     fn step<V: Value>((eta, beta): Self::Scalars, _x: V, dx: V, [m]: &mut [V; 1]) -> V {
///         let direction = (*m * beta.0 + dx * (1.0 - beta.0)).sign();
///         *m = *m * beta.1 + dx * (1.0 - beta.1);
///         direction * eta
///     }
/// }
///
/// let x = Var::new(&[1f32, -2.0], &Device::Cpu)?;
/// let mut state = setup(OptimiserChain::new((TinyLion::new(0.1),)), &x)?;
/// let grads = (x.sqr()? / 2.0)?.sum_all()?.backward()?;
/// update(&mut state, &x, &grads)?;
/// assert_eq!(x.to_vec1::<f32>()?, [0.9, -1.9]);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub trait Elementwise: Describe + Adjust + Clone + std::fmt::Debug + Send + Sync + 'static {
    /// The numbers of the formula besides the element: hyper-parameters, bias corrections.
    type Scalars: Copy + Send + Sync + 'static;
    /// The state: `[T; N]` for N numbers per element.
    type Slots<T>: Array<T>;

    /// The formula as a prologue of the next rule's loop, if it is simple enough.
    #[doc(hidden)]
    const AS_PROLOGUE: Option<fn(Self::Scalars) -> Prologue> = None;

    /// The names and initial values of the state. A [`Slot::average`] holds weights to evaluate with.
    fn slots(&self) -> Self::Slots<Slot>;

    /// The scalars of step `t`, which is 1 for the first step that is applied to a parameter.
    fn scalars(&self, t: u64) -> Self::Scalars;

    /// The formula for one element: from the parameter x and the gradient dx to the new gradient.
    ///
    /// The formula also updates the slots. It must not panic, because it runs while parameters are written;
    /// see [`Rule`](crate::Rule#panics) for the state of the model after a panic.
    fn step<V: Value>(scalars: Self::Scalars, x: V, dx: V, slots: &mut Self::Slots<V>) -> V;
}

/// A rule's arithmetic with the scalars of one step.
struct ElementwiseStep<E: Elementwise>(E::Scalars);

// `Clone` and `Copy` are not derived, because a derive would require that `E` itself is `Copy`.
impl<E: Elementwise> Clone for ElementwiseStep<E> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<E: Elementwise> Copy for ElementwiseStep<E> {}

impl<E: Elementwise> Arithmetic for ElementwiseStep<E> {
    type Slots<T> = E::Slots<T>;
    // A rule that can be a prologue gets no loop that takes another prologue, because such a rule is rarely
    // the last of a chain.
    const TAKES_PROLOGUE: bool = E::AS_PROLOGUE.is_none();

    fn as_prologue(self) -> Option<Prologue> {
        E::AS_PROLOGUE.map(|prologue| prologue(self.0))
    }

    #[inline(always)]
    fn step<V: Value>(self, x: V, dx: V, slots: &mut E::Slots<V>) -> V {
        E::step(self.0, x, dx, slots)
    }
}

/// The arithmetic of step `t` of `rule`, for another rule that holds `rule`.
pub(crate) fn arithmetic_at<E: Elementwise>(rule: &E, t: u64) -> impl Arithmetic + use<E> {
    ElementwiseStep::<E>(rule.scalars(t))
}

#[diagnostic::do_not_recommend]
impl<E: Elementwise> Rule for E {
    fn init(&self, x: Parameter<'_>) -> Result<State> {
        State::for_slots(x, self.slots().as_ref())
    }

    fn apply<'a>(&'a self, state: &'a mut State, _x: Parameter<'a>, dx: Gradient<'a>) -> Result<Flow<'a>> {
        let Parts { slots, counters, .. } = state.parts();
        let (dx, t) = dx.next_step(counters)?;
        Ok(Flow::Step(dx.step_of(self, t, slots)))
    }

    fn kind(&self) -> Kind {
        Kind::Elementwise
    }
}

impl<'a> Gradient<'a> {
    /// Appends step `t` of an elementwise rule that is a part of another rule.
    ///
    /// `slots` are the slots of `rule` alone.
    pub fn step_of<E: Elementwise>(self, rule: &E, t: u64, slots: Slots<'a>) -> Self {
        self.map(arithmetic_at(rule, t), slots)
    }
}
