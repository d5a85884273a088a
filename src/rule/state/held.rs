//! The states of the rules that a rule holds.

use std::collections::HashSet;

use super::{ChildPlace, not_made_by};
use crate::error::{Error, ErrorKind, Result};
use crate::rule::{Child, Evaluation, Parameter, Rule, State};

/// Shows the rules that a rule holds: its `Holder::visit_held`. Neither it nor the name is generic, so that
/// the code behind them is compiled once, not for each type of rule.
type ShowHeld<'r> = &'r dyn Fn(&mut dyn FnMut(ChildPlace, &mut dyn Rule));

impl State {
    /// This state with those of the rules that its rule [holds](crate::Describer::holds).
    ///
    /// Their [`init`](crate::Rule::init) makes them. Own tensors, counters and numbers need other names than
    /// those of a rule that this one is around, as both are listed without a place: [`setup`](crate::setup)
    /// refuses two of one name.
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

    /// Ends the windows of the rules that this state's rule holds: see [`Rule::end_window`].
    pub(crate) fn end_held_windows(&mut self, held: ShowHeld<'_>, name: &dyn Fn() -> String) -> Result<()> {
        let (mut children, mut ended) = (self.children.iter_mut(), Ok(()));
        held(&mut |_, rule| {
            if ended.is_ok() {
                ended = children
                    .next()
                    .map_or_else(|| Err(not_made_by(&name())), |child| rule.end_window(&mut child.state));
            }
        });
        if ended.is_ok() && children.next().is_some() { Err(not_made_by(&name())) } else { ended }
    }

    /// What to evaluate with, by this state or by that of a held rule: see [`Rule::evaluation`].
    pub(crate) fn held_evaluation(
        &self,
        held: ShowHeld<'_>,
        name: &dyn Fn() -> String,
    ) -> Result<Option<Evaluation<'_>>> {
        let (mut children, mut last) = (self.children.iter(), Ok(None));
        held(&mut |place, rule| {
            if let Ok(found) = &mut last {
                match children
                    .next()
                    .map_or_else(|| Err(not_made_by(&name())), |child| rule.evaluation(&child.state))
                {
                    Ok(Some(_)) if matches!(place, ChildPlace::Alternative(_)) => {
                        let problem = format!(
                            "{} holds alternatives with weights to evaluate with, and does not say which of \
                             them acts",
                            name()
                        );
                        last = Err(Error::new(ErrorKind::Contract, problem).with_remedy(
                            "let its `evaluation` ask that one, with its state from `State::held`",
                        ));
                    }
                    Ok(own) => *found = own.or(found.take()),
                    Err(error) => last = Err(error),
                }
            }
        });
        let last = if last.is_ok() && children.next().is_some() { Err(not_made_by(&name())) } else { last };
        Ok(self.own_average().or(last?))
    }

    /// Refuses a state that lacks those of held rules, or that has two entries of one name.
    pub(crate) fn check_layout(&self, rule: &dyn Rule) -> Result<()> {
        self.check_held(rule)?;
        let (mut known, mut twice) = (HashSet::new(), None);
        self.walk("", &mut |prefix, state| {
            for name in state.own_names().map(|name| format!("{prefix}{name}")) {
                if !known.insert(name.clone()) {
                    twice.get_or_insert(name);
                }
            }
        });
        let Some(name) = twice else { return Ok(()) };
        Err(Error::new(ErrorKind::Contract, format!("the state of {} has two entries {name:?}", rule.name()))
            .with_remedy(
                "give the tensors, counters and numbers of a rule other names in its `init` than those of \
                 the rule that it is around, as both are listed without a place",
            ))
    }

    fn check_held(&self, rule: &dyn Rule) -> Result<()> {
        let (mut expected, mut inside) = (0, Ok(()));
        rule.visit_held(&mut |_, held| {
            if let (Some(child), Ok(())) = (self.children.get(expected), &inside) {
                inside = child.state.check_held(held);
            }
            expected += 1;
        });
        let got = self.children.len();
        if got == expected {
            return inside;
        }
        let problem = format!(
            "the number of states that the `init` of {} made for the rules which it holds is",
            rule.name()
        );
        Err(Error::new(ErrorKind::Contract, problem)
            .with_got(got)
            .with_expected(expected)
            .with_remedy("end an `init` of its own with `State::with_held`, once"))
    }
}
