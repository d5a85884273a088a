//! The states of the rules that a rule holds.
//!
//! `Holder::visit_held` passes the held rules one after another to a closure and cannot be stopped. Each
//! function here therefore pairs rules and `children` by position, remembers the first error while the visit
//! continues, and refuses a state with more or fewer children than rules.

use std::collections::HashSet;

use super::another_rule_error;
use crate::error::{Error, ErrorKind, Result};
use crate::rule::description::ChildPlace;
use crate::rule::{Child, Evaluation, Parameter, Rule, State};

/// The `Holder::visit_held` of a rule. The type is a trait object, so that the functions with a parameter of
/// this type are compiled once, not for each type of rule.
type VisitHeld<'r> = &'r dyn Fn(&mut dyn FnMut(ChildPlace, &mut dyn Rule));

impl State {
    /// Adds the states of the rules that `rule` [holds](crate::Describer::holds).
    ///
    /// The [`init`](crate::Rule::init) of each held rule makes its state. If `rule` is around another rule,
    /// the entries of both rules are listed without an index and need different names:
    /// [`setup`](crate::setup) refuses two entries of one name.
    ///
    /// # Errors
    /// As [`Rule::init`](crate::Rule::init).
    pub fn with_held<R: Rule + ?Sized>(mut self, rule: &R, x: Parameter<'_>) -> Result<Self> {
        let mut result = Ok(());
        rule.visit_held(&mut |place, held| {
            if result.is_ok() {
                result = held
                    .init(x)
                    .map(|state| self.children.push(Child { place, state }));
            }
        });
        result.map(|()| self)
    }

    /// Calls [`Rule::end_window`] of each held rule. `name` makes the name of the holder, for errors.
    pub(crate) fn end_held_windows(
        &mut self,
        visit_held: VisitHeld<'_>,
        name: &dyn Fn() -> String,
    ) -> Result<()> {
        let (mut children, mut result) = (self.children.iter_mut(), Ok(()));
        visit_held(&mut |_, rule| {
            if result.is_ok() {
                result = children.next().map_or_else(
                    || Err(another_rule_error(&name())),
                    |child| rule.end_window(&mut child.state),
                );
            }
        });
        if result.is_ok() && children.next().is_some() {
            Err(another_rule_error(&name()))
        } else {
            result
        }
    }

    /// The default of [`Rule::evaluation`]: the own average, else the last evaluation of a held rule.
    pub(crate) fn held_evaluation(
        &self,
        visit_held: VisitHeld<'_>,
        name: &dyn Fn() -> String,
    ) -> Result<Option<Evaluation<'_>>> {
        let (mut children, mut result) = (self.children.iter(), Ok(None));
        visit_held(&mut |place, rule| {
            if let Ok(last) = &mut result {
                match children.next().map_or_else(
                    || Err(another_rule_error(&name())),
                    |child| rule.evaluation(&child.state),
                ) {
                    // The weights are refused, because only one alternative acts at a time, and the state
                    // does not show which alternative.
                    Ok(Some(_)) if matches!(place, ChildPlace::Alternative(_)) => {
                        let problem = format!(
                            "{} holds alternatives with weights to evaluate with, but does not choose one of \
                             them by `evaluation`",
                            name()
                        );
                        result = Err(Error::new(ErrorKind::Contract, problem).with_remedy(
                            "implement `Rule::evaluation`: return that of the alternative that acts, with \
                             its state from `State::held`",
                        ));
                    }
                    Ok(evaluation) => *last = evaluation.or(last.take()),
                    Err(error) => result = Err(error),
                }
            }
        });
        if result.is_ok() && children.next().is_some() {
            return Err(another_rule_error(&name()));
        }
        Ok(self.own_average().or(result?))
    }

    /// Refuses a state without the states of held rules, or with wrong entries.
    ///
    /// Entries are wrong if two have one full name, if a number is out of its range, or if a property is that
    /// of an entry that the state does not have.
    pub(crate) fn check_layout(&self, rule: &dyn Rule) -> Result<()> {
        self.check_held(rule)?;
        for (name, number) in self.numbers() {
            if let Some(expected) = self.number_fault(&name, number) {
                let problem = format!(
                    "the `init` of {} makes the number {name:?}, which is",
                    rule.name()
                );
                return Err(Error::new(ErrorKind::Contract, problem)
                    .with_got(number)
                    .with_expected(expected)
                    .with_remedy("start in the range that `State::with_number` gets, or make it wider"));
            }
        }
        let mut without_entry = None;
        self.walk("", &mut |_, state| {
            let mut names = state.traits.iter().map(|(name, _)| *name);
            without_entry =
                without_entry.or_else(|| names.find(|name| state.own_names().all(|entry| entry != *name)));
        });
        if let Some(name) = without_entry {
            let problem = format!(
                "the `init` of {} gives a property to {name:?}, which is",
                rule.name()
            );
            return Err(Error::new(ErrorKind::Contract, problem)
                .with_got("no entry of the state")
                .with_expected("a tensor, counter or number of the same state")
                .with_remedy("call `zeroed_by_new_weights` and the like with the name of an entry"));
        }
        let (mut names, mut duplicate) = (HashSet::new(), None);
        // Two entries with one name are indistinguishable in checkpoints, which have only full names.
        self.walk("", &mut |prefix, state| {
            for name in state.own_names().map(|name| format!("{prefix}{name}")) {
                if !names.insert(name.clone()) {
                    duplicate.get_or_insert(name);
                }
            }
        });
        let Some(name) = duplicate else { return Ok(()) };
        Err(Error::new(
            ErrorKind::Contract,
            format!("the state of {} has two entries {name:?}", rule.name()),
        )
        .with_remedy(
            "in the `init` of the outer rule, give tensors, counters and numbers other names than in the \
                 held rule, because both are listed without a place",
        ))
    }

    fn check_held(&self, rule: &dyn Rule) -> Result<()> {
        let (mut expected, mut result) = (0, Ok(()));
        rule.visit_held(&mut |_, held| {
            if let (Some(child), Ok(())) = (self.children.get(expected), &result) {
                result = child.state.check_held(held);
            }
            expected += 1;
        });
        let count = self.children.len();
        if count == expected {
            return result;
        }
        let problem = format!(
            "the number of states that the `init` of {} made for its held rules is",
            rule.name()
        );
        Err(Error::new(ErrorKind::Contract, problem)
            .with_got(count)
            .with_expected(expected)
            .with_remedy("call `State::with_held` once, at the end of the `init`"))
    }
}
