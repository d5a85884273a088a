use super::OptimiserChain;
use crate::error::Result;
use crate::rule::{Adjust, Rule, adjust_by, rule_by};

/// One of two rules, decided at run time, without a box.
///
/// ```
/// use candle_core::{Device, Tensor, Var};
/// use optimisers::{ClipGrad, Descent, Either, Lion, OptimiserChain, setup, update};
///
/// for (by_sign, moved) in [(true, -0.5), (false, -2.0)] {
///     let x = Var::new(&[0f32], &Device::Cpu)?;
///     let rule = if by_sign { Either::Left(Lion::new(0.5)) } else { Either::Right(Descent::new(0.5)) };
///     let mut state = setup(OptimiserChain::new((ClipGrad::new(4.0), rule)), &x)?;
///     update(&mut state, &x, &[("", Tensor::new(&[30f32], &Device::Cpu)?)])?;
///     assert_eq!(x.to_vec1::<f32>()?, [moved]);
/// }
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[must_use = "a rule does nothing by itself: pass it to `setup`"]
#[derive(Clone, Debug, PartialEq)]
pub enum Either<A, B> {
    /// The first.
    Left(A),
    /// The second.
    Right(B),
}

impl<A: Rule + Clone, B: Rule + Clone> Either<A, B> {
    fn rule(&self) -> &dyn Rule {
        match self {
            Either::Left(rule) => rule,
            Either::Right(rule) => rule,
        }
    }

    fn rule_mut(&mut self) -> &mut dyn Rule {
        match self {
            Either::Left(rule) => rule,
            Either::Right(rule) => rule,
        }
    }
}

impl<A: Rule + Clone, B: Rule + Clone> Adjust for Either<A, B> {
    adjust_by!(all, self => self.rule(), self.rule_mut());
}

impl<A: Rule + Clone, B: Rule + Clone> Rule for Either<A, B> {
    rule_by!(all, self => self.rule());
}

/// The rule, or the identity for `None`.
fn rule_of<R: Rule>(option: &Option<R>) -> &dyn Rule {
    option.as_ref().map_or(&OptimiserChain(()) as &dyn Rule, |rule| rule)
}

impl<R: Rule + Clone> Adjust for Option<R> {
    fn name(&self) -> String {
        self.as_ref().map_or("None".to_string(), Adjust::name)
    }

    fn check(&self) -> Result<()> {
        rule_of(self).check()
    }

    adjust_by!(fields, self => rule_of(self), match self {
        Some(rule) => rule as &mut dyn Rule,
        None => &mut OptimiserChain(()),
    });
}

/// `None` is the identity.
impl<R: Rule + Clone> Rule for Option<R> {
    rule_by!(all, self => rule_of(self));
}
