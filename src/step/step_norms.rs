//! Norms for a step whose gradients come one at a time, and what they suffice for.

use std::sync::Arc;

use super::call::UpdateCall;
use crate::engine::{GivenNorms, Group, Job, Sources};
use crate::error::{Error, ErrorKind, Result};
use crate::model::lent::Lent;
use crate::numbers::compute_dtype;
use crate::rule::{Kind, Optimiser, Target};
use crate::tensors::Tensor;
use crate::tree::Leaf;

/// Norms by group for a step whose gradients come one at a time.
///
/// Groups are those of [`ClipGlobalNorm::group`](crate::ClipGlobalNorm::group), 0 by default.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum StepNorms<'n> {
    /// The norms of the gradients of this very step, as a pass before has found them.
    ///
    /// They are without the loss scale, of the gradients that the clipping rule gets, as in
    /// [`Outcome::group_norms`](crate::Outcome::group_norms). With the norms of `update` the bits are those
    /// of `update`. Every group needs one.
    Exact(&'n [(u64, f64)]),
    /// The norms of the last step ([`Outcome::group_norms`](crate::Outcome::group_norms)), as an
    /// approximation of those of this one.
    ///
    /// A gradient that has exploded is clipped in the next step only: by the norm of this one. A group
    /// without a norm, as in the first step, is not clipped.
    OfLastStep(&'n [(u64, f64)]),
}

impl StepNorms<'_> {
    pub(super) fn by_group(self) -> Result<GivenNorms> {
        let (StepNorms::Exact(list) | StepNorms::OfLastStep(list)) = self;
        let mut norms = GivenNorms::new();
        for (group, norm) in list {
            if !(*norm >= 0.0 && norm.is_finite()) {
                let error = Error::new(ErrorKind::Argument, format!("the norm given for group {group} is"));
                return Err(error.with_got(norm).with_expected("a finite number of 0 or more"));
            }
            if norms.insert(*group, *norm).is_some() {
                return Err(Error::new(
                    ErrorKind::Argument,
                    format!("there are two norms for group {group}"),
                )
                .with_remedy("give one"));
            }
        }
        Ok(norms)
    }
}

/// The norms that a step was given.
pub(super) struct NormsOfStep {
    pub(super) by_group: GivenNorms,
    /// Whether every group needs one.
    is_exact: bool,
}

impl NormsOfStep {
    pub(super) fn new(norms: StepNorms<'_>) -> Result<Self> {
        Ok(NormsOfStep { by_group: norms.by_group()?, is_exact: matches!(norms, StepNorms::Exact(_)) })
    }
}

/// Refuses a job that needs other numbers of other leaves than these norms.
pub(super) fn check_enough(norms: Option<&NormsOfStep>, job: &Job<'_>) -> Result<()> {
    const LATER: &str =
        "collect the gradients and call `update`, or `Update::apply_owned`, which frees each as it goes";
    let refused = |problem: String, remedy: &'static str| {
        Err(Error::new(ErrorKind::Unsupported, problem).at(job.path).with_remedy(remedy))
    };
    for group in job.groups() {
        match (group, norms) {
            (Group::Norm(group), Some(norms)) if norms.is_exact && !norms.by_group.contains_key(&group) => {
                let remedy = "give the norm of every group to `Update::begin_with_norms`";
                return refused(
                    format!("its rule needs the norm of group {group}, which was not given"),
                    remedy,
                );
            }
            (Group::Norm(_), Some(_)) => {}
            (Group::Norm(_), None) => {
                let remedy =
                    "give the norm to `Update::begin_with_norms`, or collect the gradients and call `update`";
                return refused(
                    "its rule needs the norm of all gradients, which come one at a time".to_string(),
                    remedy,
                );
            }
            (Group::Limit(_), _) => {
                return refused(
                    "its rule may skip the whole call, and other parameters have moved then".to_string(),
                    LATER,
                );
            }
            (Group::Sums(_), _) => {
                return refused(
                    "its rule needs sums over all gradients, which come one at a time".to_string(),
                    LATER,
                );
            }
        }
    }
    Ok(())
}

/// Refuses leaves whose rules need numbers of other leaves that are not given.
pub(super) fn check_all_enough(
    norms: Option<&NormsOfStep>,
    leaves: &mut [Leaf],
    parameters: &[Lent<'_>],
    call: &UpdateCall,
) -> Result<()> {
    let mut last: Option<(Arc<dyn Optimiser>, usize)> = None;
    for (leaf, x) in leaves.iter_mut().zip(parameters).filter(|(leaf, _)| !leaf.frozen) {
        // Neighbours often share an optimiser.
        let is_known = last
            .as_ref()
            .is_some_and(|(known, rank)| Arc::ptr_eq(known, &leaf.optimiser) && *rank == leaf.shape().len());
        if is_known || leaf.optimiser.rule().kind() != Kind::WholeModel {
            continue;
        }
        last = Some((leaf.optimiser.clone(), leaf.shape().len()));
        // What is asked for stands in the plan of a gradient that is only promised, which is not carried out.
        let promised =
            Tensor::zeros((), compute_dtype(x.dtype()).into(), x.device())?.broadcast_as(x.shape())?;
        let Leaf { path, optimiser, state, .. } = leaf;
        let gradient = call.gradient(Sources::from_iter([Lent::Tensor(promised)]), path, None);
        let planned = optimiser
            .plan(state, Target { path, x: &**x, extent: None }, gradient)
            .map_err(|error| error.at(path))?;
        check_enough(norms, &planned.job)?;
        if norms.is_none() {
            // A call that only collects asks for nothing yet.
            let error = Error::new(
                ErrorKind::Unsupported,
                "its rule depends on other parameters, and gradients come one at a time",
            );
            return Err(error
                .at(path)
                .with_remedy("give norms to `Update::begin_with_norms`, or call `update`"));
        }
    }
    Ok(())
}
