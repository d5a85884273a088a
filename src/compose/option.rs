//! A rule that may be left out.

use super::OptimiserChain;
use crate::error::Result;
use crate::rule::{Adjust, Rule, adjust_by, rule_by};

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
