//! The states of the rules that a rule holds.

use std::collections::HashSet;

use crate::error::{Error, ErrorKind, Result};
use crate::rule::{Child, Parameter, Rule, State};

impl State {
    /// This state as a rule's own, with the states of the rules that it [holds](crate::Describer::holds), as their
    /// [`init`](crate::Rule::init) makes them. Its own tensors, counters and numbers need other names than those of a
    /// rule that it is around, as both are listed without a place: [`setup`](crate::setup) refuses two of one name.
    ///
    /// # Errors
    /// As [`Rule::init`](crate::Rule::init).
    pub fn with_held<R: Rule + ?Sized>(mut self, rule: &R, x: Parameter<'_>) -> Result<Self> {
        let mut made = Ok(());
        rule.visit_held(&mut |place, held| {
            if made.is_ok() {
                made = held.init(x).map(|state| self.children.push(Child { place, state }));
            }
        });
        made.map(|()| self)
    }

    /// Refuses a state that lacks those of rules which its rule holds, or that has two entries of one name.
    pub(crate) fn expect_layout(&self, rule: &dyn Rule) -> Result<()> {
        self.expect_held(rule)?;
        let (mut known, mut twice) = (HashSet::new(), None);
        self.walk("", &mut |prefix, state| {
            for name in state.own_names().map(|name| format!("{prefix}{name}")) {
                if !known.insert(name.clone()) {
                    twice.get_or_insert(name);
                }
            }
        });
        let Some(name) = twice else { return Ok(()) };
        Err(Error::new(ErrorKind::Contract, format!("the state of {} has two entries {name:?}", rule.name())).with_remedy(
            "give the tensors, counters and numbers of a rule other names in its `init` than those of the rule that it is around, \
             as both are listed without a place",
        ))
    }

    fn expect_held(&self, rule: &dyn Rule) -> Result<()> {
        let (mut expected, mut inside) = (0, Ok(()));
        rule.visit_held(&mut |_, held| {
            if let (Some(child), Ok(())) = (self.children.get(expected), &inside) {
                inside = child.state.expect_held(held);
            }
            expected += 1;
        });
        let got = self.children.len();
        if got == expected {
            return inside;
        }
        let problem = format!("the number of states that the `init` of {} made for the rules which it holds is", rule.name());
        Err(Error::new(ErrorKind::Contract, problem)
            .with_got(got)
            .with_expected(expected)
            .with_remedy("end an `init` of its own with `State::with_held`, once"))
    }
}
