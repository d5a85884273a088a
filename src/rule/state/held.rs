//! The states of the rules that a rule holds.
//!
//! `Holder::visit_held` shows the held rules one after another to a closure and cannot be stopped. Each
//! function here therefore pairs rules and `children` by position, keeps the first error while the visit goes
//! on, and refuses a state with more or fewer children than rules.

use std::collections::HashSet;

use super::not_made_by;
use crate::error::{Error, ErrorKind, Result};
use crate::rule::description::ChildPlace;
use crate::rule::{Child, Evaluation, Parameter, Rule, State};

/// The `Holder::visit_held` of a rule. Not generic, so that the functions with a parameter of this type are
/// compiled once, not for each type of rule.
type ShowHeld<'r> = &'r dyn Fn(&mut dyn FnMut(ChildPlace, &mut dyn Rule));

impl State {
    /// Adds the states of the rules that `rule` [holds](crate::Describer::holds).
    ///
    /// Their [`init`](crate::Rule::init) makes these states. If `rule` is around another rule, the entries of
    /// both are listed without an index. They therefore need different names: [`setup`](crate::setup) refuses
    /// two entries of one name.
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

    /// Calls [`Rule::end_window`] of each held rule. `name` is that of the holder, for errors.
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

    /// The default of [`Rule::evaluation`]: the own average, else that of the last held rule that has one.
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
                    // Refused, because one alternative acts at a time and nothing here shows which one.
                    Ok(Some(_)) if matches!(place, ChildPlace::Alternative(_)) => {
                        let problem = format!(
                            "{} holds alternatives with weights to evaluate with, but does not choose one of \
                             them by `evaluation`",
                            name()
                        );
                        last = Err(Error::new(ErrorKind::Contract, problem).with_remedy(
                            "implement `Rule::evaluation`: return that of the alternative that acts, with \
                             its state from `State::held`",
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

    /// Refuses a state without the states of held rules, with two entries of one full name, or with a number
    /// out of its range.
    pub(crate) fn check_layout(&self, rule: &dyn Rule) -> Result<()> {
        self.check_held(rule)?;
        for (name, number) in self.numbers() {
            if let Some(expected) = self.number_fault(&name, number) {
                let problem = format!("the `init` of {} makes the number {name:?}, which is", rule.name());
                return Err(Error::new(ErrorKind::Contract, problem)
                    .with_got(number)
                    .with_expected(expected)
                    .with_remedy("start in the range that `State::with_number` gets, or make it wider"));
            }
        }
        let (mut known, mut twice) = (HashSet::new(), None);
        // Two entries of one name could not be told apart, because checkpoints have only full names.
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
                "in the `init` of the outer rule, give tensors, counters and numbers other names than in the \
                 held rule, because both are listed without a place",
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
        let problem =
            format!("the number of states that the `init` of {} made for its held rules is", rule.name());
        Err(Error::new(ErrorKind::Contract, problem)
            .with_got(got)
            .with_expected(expected)
            .with_remedy("call `State::with_held` once, at the end of the `init`"))
    }
}
