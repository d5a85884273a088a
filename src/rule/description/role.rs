//! What a rule is for in a chain.

/// What a rule is for in a chain, as far as that decides where it has to stand.
///
/// A rule [says](crate::Describer::role) its role itself. [`Warning::WrongOrder`](crate::Warning::WrongOrder)
/// follows from it. A rule without a role may stand anywhere.
///
/// ```
/// use optimisers::{Adam, Adjust, OptimiserChain, Warning, hyper_parameters, range, setup};
/// # use candle_core::{Device, Var};
/// # use optimisers::{Flow, Gradient, Parameter, Result, Rule, State};
///
/// hyper_parameters! {
///     /// Divides a gradient by its largest element, where that is too large.
///     pub struct ClipLargest: Clip {
///         /// How large it may be.
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
/// assert!(matches!(&state.warnings()[0], Warning::WrongOrder { faults, .. } if faults[0].starts_with("ClipLargest stands behind Adam")));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Role {
    /// Makes a step in proportion to the gradient, as [`Descent`](crate::Descent) and
    /// [`Momentum`](crate::Momentum) do.
    ///
    /// Several of these may stand behind one another, and behind an adaptive one.
    Step,
    /// Makes a step whose size is not that of the gradient, as [`Adam`](crate::Adam) does. A chain has one.
    AdaptiveStep,
    /// Limits the gradient, as [`ClipNorm`](crate::ClipNorm) does. It stands before an adaptive step.
    Clip,
    /// Collects the gradients of several calls, as [`AccumGrad`](crate::AccumGrad) does. It stands before
    /// what makes steps.
    Accumulation,
    /// Averages the weights that the steps before it lead to, as [`Ema`](crate::Ema) does. It stands behind
    /// what makes steps.
    Average,
}
