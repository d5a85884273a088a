//! Refuses optimisers that cannot be printed, with a remedy.

use crate::engine::{Job, Step};
use crate::error::{Error, ErrorKind, FLOATS, Result};
use crate::numbers::{DType, is_supported};
use crate::rule::{Kind, Optimiser};
use crate::rules::catalogue;

const FACTOR: &str = "if the rule multiplies by a factor that depends on a norm, compute the factor \
                      yourself, replace the rule by `Scale`, and adjust the `alpha` of `Scale` before each \
                      step; otherwise use an elementwise rule, or `update` (a rule of your own that is only \
                      arithmetic declares that by `Rule::kind`)";

const ONE_ELEMENT: &str = "sees one element at a time";

/// Refuses dtypes that no kernel reads.
pub(super) fn check_dtypes(parameter: DType, gradient: DType) -> Result<()> {
    match [("parameter", parameter), ("gradient", gradient)]
        .into_iter()
        .find(|(_, dtype)| !is_supported(*dtype))
    {
        None => Ok(()),
        Some((what, dtype)) => Err(Error::new(ErrorKind::Argument, format!("the dtype of the {what} is"))
            .with_got(format_args!("{dtype:?}"))
            .with_expected(FLOATS)),
    }
}

/// Refuses an optimiser whose step of an element depends on other elements.
pub(super) fn check_elementwise(optimiser: &Optimiser) -> Result<()> {
    let refused = |needs, limit, remedy| Err(not_elementwise(optimiser, needs, limit, remedy));
    match optimiser.rule().kind() {
        Kind::WholeModel => return refused("a number computed over the whole model", ONE_ELEMENT, FACTOR),
        Kind::WholeTensor => return refused("the whole parameter", ONE_ELEMENT, FACTOR),
        Kind::Elementwise => {}
    }
    if optimiser.is_offloaded() {
        return refused(
            "two devices",
            "runs on one",
            "print the optimiser inside of `Offload`, and move the buffers yourself",
        );
    }
    if optimiser.description().has_choice() {
        return refused(
            "a choice by the parameter's path and shape",
            "gets neither of them",
            "print each of the rules to choose from",
        );
    }
    Ok(())
}

/// Refuses a plan with more than arithmetic in it.
pub(super) fn check_arithmetic(optimiser: &Optimiser, job: &Job<'_>) -> Result<()> {
    let needs = job.steps.iter().find_map(|step| match step {
        Step::Map { .. } | Step::Identity => None,
        Step::Reduce(_) => Some("a norm or a sum"),
        Step::Check => Some("a check of the whole gradient"),
        Step::Tensor(_) | Step::Output(_) => Some("a function of the whole parameter"),
    });
    needs.map_or(Ok(()), |needs| Err(not_elementwise(optimiser, needs, ONE_ELEMENT, FACTOR)))
}

/// The error that an optimiser `needs` more than a printed kernel has. `limit` is what the kernel does.
fn not_elementwise(optimiser: &Optimiser, needs: &str, limit: &str, remedy: &'static str) -> Error {
    let rule = at_fault(optimiser);
    let problem = format!("{rule} needs {needs}, but a printed kernel {limit}");
    Error::new(ErrorKind::Unsupported, problem).with_remedy(remedy)
}

/// The rules that are not elementwise, if they can be told apart; else the whole optimiser.
fn at_fault(optimiser: &Optimiser) -> String {
    let listed = catalogue();
    let is_other = |name: &&str| {
        listed.iter().any(|listing| listing.name == *name && listing.rule.kind() != Kind::Elementwise)
    };
    let kinds = optimiser.description().all().into_iter().map(|member| member.rule.kind);
    let names: Vec<&str> = kinds.filter(is_other).collect();
    if names.is_empty() { optimiser.name() } else { names.join(", ") }
}
