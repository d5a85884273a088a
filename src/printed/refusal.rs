//! Refuses optimisers that cannot be printed, with a remedy.

use crate::engine::{Job, Step};
use crate::error::{Error, ErrorKind, Result};
use crate::rule::{Average, Kind, Optimiser};
use crate::rules::catalogue;

const FACTOR: &str = "if the rule multiplies by a factor that depends on a norm, compute the factor \
                      yourself, replace the rule by `Scale`, and adjust the `alpha` of `Scale` before each \
                      step; otherwise use an elementwise rule, or `update` (a rule of your own that is only \
                      arithmetic declares that by `Rule::kind`)";

const ONE_ELEMENT: &str = "sees one element at a time";

/// Refuses an optimiser whose step of an element depends on other elements, on a second device, on a choice
/// by path and shape, or on weights of a mean.
pub(super) fn check_elementwise(optimiser: &Optimiser) -> Result<()> {
    let refuse = |need, limit, remedy| Err(not_elementwise_error(optimiser, need, limit, remedy));
    match optimiser.rule().kind() {
        Kind::WholeModel => return refuse("a number computed over the whole model", ONE_ELEMENT, FACTOR),
        Kind::WholeTensor => return refuse("the whole parameter", ONE_ELEMENT, FACTOR),
        Kind::Elementwise => {}
    }
    if optimiser.is_offloaded() {
        return refuse(
            "two devices",
            "runs on one",
            "print the optimiser inside of `Offload`, and move the buffers yourself",
        );
    }
    if optimiser.description().has_choice() {
        return refuse(
            "a choice by the parameter's path and shape",
            "gets neither of them",
            "print each of the rules to choose from",
        );
    }
    let weighted = Average::Weighted.into();
    if optimiser.fields().iter().any(|(_, value)| *value == weighted) {
        return refuse(
            "the weight of each call for a weighted mean",
            "gets none",
            "set `Average::Sum`; put before `AccumGrad` a `Scale` by the weight of each call, and after \
             `AccumGrad` a `Scale` by 1 / the sum of these weights",
        );
    }
    Ok(())
}

/// Refuses a plan in which a step is more than arithmetic.
pub(super) fn check_arithmetic(optimiser: &Optimiser, job: &Job<'_>) -> Result<()> {
    let need = job.steps.iter().find_map(|step| match step {
        Step::Map { .. } | Step::Identity => None,
        Step::Reduce(_) => Some("a norm or a sum"),
        Step::Check => Some("a check of the whole gradient"),
        Step::Tensor(_) | Step::Output(_) => Some("a function of the whole parameter"),
    });
    need.map_or(Ok(()), |need| {
        Err(not_elementwise_error(optimiser, need, ONE_ELEMENT, FACTOR))
    })
}

/// The error for an optimiser with a `need` that no printed kernel meets. `limit` says what a kernel does.
fn not_elementwise_error(optimiser: &Optimiser, need: &str, limit: &str, remedy: &'static str) -> Error {
    let rules = rules_at_fault(optimiser);
    let problem = format!("{rules} needs {need}, but a printed kernel {limit}");
    Error::new(ErrorKind::Unsupported, problem).with_remedy(remedy)
}

/// The names of the rules that are not elementwise. If no such rule is in the list: the name of the
/// optimiser.
fn rules_at_fault(optimiser: &Optimiser) -> String {
    let listings = catalogue();
    let is_not_elementwise = |name: &&str| {
        listings
            .iter()
            .any(|listing| listing.name == *name && listing.rule.kind() != Kind::Elementwise)
    };
    let kinds = optimiser
        .description()
        .all()
        .into_iter()
        .map(|member| member.rule.kind);
    let names: Vec<&str> = kinds.filter(is_not_elementwise).collect();
    if names.is_empty() {
        optimiser.name()
    } else {
        names.join(", ")
    }
}
