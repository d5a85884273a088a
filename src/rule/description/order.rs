//! Orders of rules that are certainly mistakes.

use super::Description;
use super::role::Role;
use crate::rule::state::place::ChildPlace;

impl Role {
    fn makes_steps(self) -> bool {
        matches!(self, Role::Step | Role::AdaptiveStep)
    }
}

/// A rule that has a role.
struct Placed {
    kind: &'static str,
    role: Role,
    /// The parts that it is in, outermost first: index, and whether it is an alternative.
    parts: Vec<(usize, bool)>,
}

impl Placed {
    /// Whether both can act in one step: not if they are in different alternatives.
    fn acts_with(&self, other: &Placed) -> bool {
        let apart = self.parts.iter().zip(&other.parts).find(|(own, others)| own != others);
        !matches!(apart, Some(((_, true), (_, true))))
    }
}

impl Description {
    /// Adds the rules that have a role, each at the place where the role was described. `parts` is what this
    /// is in.
    fn place(&self, parts: &[(usize, bool)], all: &mut Vec<Placed>) {
        let mut roles = self.roles.iter().peekable();
        let mut before_part = |before: usize, all: &mut Vec<Placed>| {
            while let Some((role, _)) = roles.next_if(|(_, named)| *named <= before) {
                all.push(Placed { kind: self.kind, role: *role, parts: parts.to_vec() });
            }
        };
        for (i, (place, part)) in self.parts.iter().enumerate() {
            before_part(i, all);
            let is_alternative = matches!(place, ChildPlace::Alternative(_));
            part.place(&[parts, &[(i, is_alternative)]].concat(), all);
        }
        before_part(self.parts.len(), all);
    }
}

/// A sentence for each rule of an optimiser that stands in the wrong place.
pub(crate) fn misplaced(rule: &Description) -> Vec<String> {
    let mut all = Vec::new();
    rule.place(&[], &mut all);
    let fault = |(i, own): (usize, &Placed)| {
        let before = |is_other: fn(Role) -> bool| {
            all[..i].iter().find(|other| is_other(other.role) && other.acts_with(own))
        };
        let (kind, is_adaptive) = (own.kind, |role| role == Role::AdaptiveStep);
        match own.role {
            Role::Step => None,
            Role::AdaptiveStep => before(is_adaptive).map(|other| {
                let first = other.kind;
                format!(
                    "{kind} stands behind {first}, whose steps have a size of their own, and makes steps of \
                     these in place of the gradient: leave one of them out, or put a rule such as Descent \
                     or Momentum for {kind}"
                )
            }),
            Role::Clip => before(is_adaptive).map(|other| {
                let first = other.kind;
                format!(
                    "{kind} stands behind {first} and limits its steps; the gradient has gone into the \
                     state of {first} as it was: put {kind} before {first}"
                )
            }),
            Role::Accumulation => before(Role::makes_steps).map(|other| {
                let first = other.kind;
                format!(
                    "{kind} stands behind {first}, which makes a step of each call's gradient, and collects \
                     these: put {kind} before {first}"
                )
            }),
            Role::Average => {
                all[i..].iter().find(|other| other.role.makes_steps() && other.acts_with(own)).map(|other| {
                    let last = other.kind;
                    format!(
                        "{kind} stands before {last}, so the weights that it averages are none that {last} \
                         makes: put {kind} behind {last}"
                    )
                })
            }
        }
    };
    all.iter().enumerate().filter_map(fault).collect()
}
