use crate::compose::OptimiserChain;
use crate::rule::Rule;
use crate::rules::Scale;

/// The rule for an objective that is to grow: it gets the gradient with the opposite sign.
///
/// Everything else about the rule stays: weight decay still makes the parameters smaller, as with torch's `maximize=True`.
///
/// ```
/// use candle_core::{Device, Var};
/// use optimisers::{Descent, maximise, setup, update};
///
/// let x = Var::new(&[1f32], &Device::Cpu)?;
/// let mut state = setup(maximise(Descent::new(0.5)), &x)?;
/// update(&mut state, &x, &x.sum_all()?.backward()?)?;
/// assert_eq!(x.to_vec1::<f32>()?, [1.5]);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub fn maximise<R: Rule + Clone>(rule: R) -> OptimiserChain<(Scale, R)> {
    OptimiserChain::new((Scale::new(-1.0), rule))
}
