//! The role of a rule in a chain.

/// The role of a rule in a chain, which decides where the rule has to stand.
///
/// A rule [describes](crate::Describer::role) its own role. A rule in a wrong place causes a
/// [`Warning::WrongOrder`](crate::Warning::WrongOrder). A rule without a role may stand anywhere.
///
/// ```
/// use optimisers::{Adam, Adjust, OptimiserChain, Warning, hyper_parameters, range, setup};
/// # use candle_core::{Device, Var};
/// # use optimisers::{Flow, Gradient, Parameter, Result, Rule, State};
///
/// hyper_parameters! {
///     /// Divides a gradient by its largest element, if that element is too large.
///     pub struct ClipLargest: Clip {
///         /// The largest allowed element.
///         limit: f64 = 1.0 => range::positive,
///     }
/// }
/// # impl Rule for ClipLargest {
/// #     fn apply<'a>(&'a self, _state: &'a mut State, _x: Parameter<'a>, dx: Gradient<'a>) -> Result<Flow<'a>> {
/// #         Ok(Flow::Step(dx))
/// #     }
/// # }
///
/// let x = Var::new(1f32, &Device::Cpu)?;
/// let state = setup(OptimiserChain::new((Adam::new(1e-3), ClipLargest::default())), &x)?;
/// assert!(matches!(&state.warnings()[0], Warning::WrongOrder { faults, .. } if faults[0].starts_with("ClipLargest comes after Adam")));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Role {
    /// Makes a step in proportion to the gradient, as [`Descent`](crate::Descent) and
    /// [`Momentum`](crate::Momentum) do.
    ///
    /// Several such rules may follow one another, and may follow a rule of the role `AdaptiveStep`.
    Step,
    /// Makes a step whose size does not follow the size of the gradient, as [`Adam`](crate::Adam) does.
    ///
    /// A second such rule in a chain is a mistake.
    AdaptiveStep,
    /// Limits the gradient, as [`ClipNorm`](crate::ClipNorm) does. Such a rule stands before an adaptive
    /// step.
    Clip,
    /// Collects the gradients of several calls, as [`AccumGrad`](crate::AccumGrad) does.
    ///
    /// Such a rule stands before all rules that make steps.
    Accumulation,
    /// Averages the weights after the steps of the rules before it, as [`Ema`](crate::Ema) does.
    ///
    /// Such a rule stands after all rules that make steps.
    Average,
    /// Bounds the weights after the steps of the rules before it, as [`Clamp`](crate::Clamp) does.
    ///
    /// Such a rule stands after all rules that make steps.
    Bound,
}
