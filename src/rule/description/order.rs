//! Finds rules that stand in a wrong place of a chain, if the order is certainly a mistake.
//!
//! 1. `Description::list_roles` lists the rules with a [`Role`] in the order in which they act.
//! 2. `order_faults` compares each rule with the rules before it, and a rule that averages or bounds weights
//!    with the rules after it. Two alternatives (rules that act one at a time, such as those of a `Fallback`)
//!    never act in one step, so their order is no mistake.

use super::role::Role;
use super::{ChildPlace, Description};

impl Role {
    fn makes_steps(self) -> bool {
        matches!(self, Role::Step | Role::AdaptiveStep)
    }
}

/// A rule with one of its roles, and its place.
struct PlacedRole {
    kind: &'static str,
    role: Role,
    /// The parts that contain the rule, outermost first: index, and whether the part is an alternative.
    parts: Vec<(usize, bool)>,
}

impl PlacedRole {
    /// Whether both rules can act in one step. Rules in different alternatives of one rule cannot.
    fn acts_with(&self, other: &PlacedRole) -> bool {
        let first_difference = self
            .parts
            .iter()
            .zip(&other.parts)
            .find(|(part, other)| part != other);
        !matches!(first_difference, Some(((_, true), (_, true))))
    }
}

impl Description {
    /// Adds this rule once for each of its roles, and the rules inside, in the order in which they act.
    /// `parts` has the parts that contain this rule, outermost first.
    fn list_roles(&self, parts: &[(usize, bool)], placed_roles: &mut Vec<PlacedRole>) {
        // A rule that describes a part before its role acts on the steps of that part. So the rule is listed
        // after the part.
        let mut roles = self.roles.iter().peekable();
        let mut list_roles_before = |part: usize, placed_roles: &mut Vec<PlacedRole>| {
            while let Some((role, _)) = roles.next_if(|(_, parts_before)| *parts_before <= part) {
                placed_roles.push(PlacedRole {
                    kind: self.kind,
                    role: *role,
                    parts: parts.to_vec(),
                });
            }
        };
        for (i, (place, part)) in self.parts.iter().enumerate() {
            list_roles_before(i, placed_roles);
            let is_alternative = matches!(place, ChildPlace::Alternative(_));
            part.list_roles(&[parts, &[(i, is_alternative)]].concat(), placed_roles);
        }
        list_roles_before(self.parts.len(), placed_roles);
    }
}

/// A sentence for each rule in a wrong place.
pub(crate) fn order_faults(rule: &Description) -> Vec<String> {
    let mut placed_roles = Vec::new();
    rule.list_roles(&[], &mut placed_roles);
    let fault = |(i, placed): (usize, &PlacedRole)| {
        let find_before = |is_other: fn(Role) -> bool| {
            placed_roles[..i]
                .iter()
                .find(|other| is_other(other.role) && other.acts_with(placed))
        };
        let find_step_after = || {
            placed_roles[i..]
                .iter()
                .find(|other| other.role.makes_steps() && other.acts_with(placed))
        };
        let (kind, is_adaptive) = (placed.kind, |role| role == Role::AdaptiveStep);
        match placed.role {
            // A `Step` may follow any rule. An average before a `Step`, or an accumulation after it, is
            // reported as a fault of the average or the accumulation.
            Role::Step => None,
            Role::AdaptiveStep => find_before(is_adaptive).map(|other| {
                let first = other.kind;
                format!(
                    "{kind} comes after {first}, whose step sizes do not follow the gradient, so {kind} gets \
                     the steps of {first} instead of the gradient: leave one of the two out, or replace \
                     {kind} by a rule such as Descent or Momentum"
                )
            }),
            Role::Clip => find_before(is_adaptive).map(|other| {
                let first = other.kind;
                format!(
                    "{kind} comes after {first}, so {kind} limits the steps of {first}, but the state of \
                     {first} has gradients without a limit: put {kind} before {first}"
                )
            }),
            Role::Accumulation => find_before(Role::makes_steps).map(|other| {
                let first = other.kind;
                format!(
                    "{kind} comes after {first}, so {kind} collects the steps of {first} instead of \
                     gradients: put {kind} before {first}"
                )
            }),
            Role::Average => find_step_after().map(|other| {
                let last = other.kind;
                format!(
                    "{kind} comes before {last}, so the averaged weights lack the steps of {last}: put {kind} \
                     after {last}"
                )
            }),
            Role::Bound => find_step_after().map(|other| {
                let last = other.kind;
                format!(
                    "{kind} comes before {last}, so the steps of {last} can leave the bounds: put {kind} after \
                     {last}; to limit gradients use ClipGrad"
                )
            }),
        }
    };
    placed_roles.iter().enumerate().filter_map(fault).collect()
}
