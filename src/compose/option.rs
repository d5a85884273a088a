//! A rule that may be left out.

use candle_core::Tensor;

use super::OptimiserChain;
use crate::error::Result;
use crate::rule::{Describe, Describer, Flow, Gradient, Rule, State};

/// The rule, or the identity for `None`.
fn rule_of<R: Rule>(option: &Option<R>) -> &dyn Rule {
    option.as_ref().map_or(&OptimiserChain(()) as &dyn Rule, |rule| rule)
}

impl<R: Rule + Clone> Describe for Option<R> {
    fn describe(&mut self, description: &mut Describer<'_>) {
        match self {
            Some(rule) => rule.describe(description),
            None => description.kind("None"),
        }
    }
}

/// `None` is the identity.
impl<R: Rule + Clone> Rule for Option<R> {
    fn inner(&self) -> Option<&dyn Rule> {
        Some(rule_of(self))
    }

    fn init(&self, x: &Tensor) -> Result<State> {
        rule_of(self).init(x)
    }

    fn apply<'a>(&'a self, state: &'a mut State, x: &'a Tensor, dx: Gradient<'a>) -> Result<Flow<'a>> {
        rule_of(self).apply(state, x, dx)
    }
}
