//! `Option` of a rule as a rule: `None` is the identity.

use super::OptimiserChain;
use crate::error::Result;
use crate::rule::{Describe, Describer, Flow, Gradient, Parameter, Rule, State};

/// The rule, or the identity for `None`.
fn rule_of<R: Rule>(option: &Option<R>) -> &dyn Rule {
    option
        .as_ref()
        .map_or(&OptimiserChain(()) as &dyn Rule, |rule| rule)
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
    fn delegate(&self) -> Option<&dyn Rule> {
        Some(rule_of(self))
    }

    fn apply<'a>(&'a self, state: &'a mut State, x: Parameter<'a>, dx: Gradient<'a>) -> Result<Flow<'a>> {
        rule_of(self).apply(state, x, dx)
    }
}
