//! One step in stages. Each stage is a value with a method that leads to the next:
//!
//! ```text
//! stage         method        does                                                      writes
//! StepCall      plan     ──>  each leaf's optimiser makes a Job; StepSummary of all     nothing
//! PlannedStep   reduce   ──>  norms, sums and checks; decides the Ending                nothing
//! ReducedStep   commit   ──>  runs the jobs, if the ending is Committed                 leaves
//! EndedStep     outcome       counts, histories of norms, warnings, the Outcome         the tree
//! ```
//!
//! All checks come before `commit`: an error in `plan` or `reduce` leaves model and state as they were. The
//! [`Ending`] decides between commit, skip and refusal. All ranks find the same ending, because the ending
//! follows from agreed plans and shared norms.
//!
//! [`step`] takes all leaves of a state through the stages. A push (`step/streamed.rs`) takes one leaf up to
//! and including the commit. The step that ends a streamed step passes over pushed leaves, whose source is
//! [`GradientSource::Pushed`].

use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::slice;

use super::call::UpdateCall;
use super::leaf::{GradientSource, LeafPlan, LeafUpdate};
use super::outcome::{Outcome, SkipReason, Status};
use super::ranks::Ranks;
use super::summary::StepSummary;
#[cfg(feature = "candle")]
use super::wire::wire_warning;
use crate::engine::{Epilogue, Job, Progress, ReduceOutcome, UpdateTargets, for_all};
use crate::error::Result;
use crate::error::warning::Warning;
use crate::model::gradients::GradientLookUp;
use crate::model::lent::Lent;
use crate::ranks::{Call, KeptSums};
use crate::rule::Flow;
use crate::tree::{Leaf, NormHistories, StateTree};

/// Applies a step. `parameters` are in the order of the leaves. `by_leaf` is empty if all gradients are in the
/// collection `grads`; otherwise it has the source of each leaf.
pub(super) fn step<'g>(
    call: UpdateCall,
    state: &mut StateTree,
    parameters: &[Lent<'_>],
    grads: &'g dyn GradientLookUp,
    by_leaf: Vec<GradientSource<'g>>,
) -> Result<Outcome> {
    let mut call = call.with_state_settings(state);
    let not_restored = match open_step(state, parameters, call.options.keep_masters) {
        Ok(warning) => warning,
        Err(error) => return state.world.settle(Call::Update, Err(error)),
    };
    #[cfg(feature = "candle")]
    let may_warn_of_wire = state.world.is_divided()
        && state
            .warnings
            .would_record(|warning| matches!(warning, Warning::WireDiffers { .. }));
    let StateTree {
        leaves,
        jobs: pool,
        sums,
        norms,
        world,
        ..
    } = &mut *state;
    let (ranks, by_leaf) = Ranks::agree(world, &mut call, leaves, parameters, grads, by_leaf)?;
    let mut jobs = pool.take(leaves.len());
    let reduce_result = catch_unwind(AssertUnwindSafe(|| {
        let call = StepCall {
            call: &call,
            ranks: &ranks,
            leaves: &mut *leaves,
            parameters,
            grads,
            by_leaf,
        };
        call.plan(&mut jobs)?.reduce(norms, sums)
    }));
    let end_result = reduce_result.map(|result| result.and_then(ReducedStep::commit));
    // The jobs go back before `?`, so that their memory is also kept after an error.
    pool.recycle(jobs);
    let ended_step = end_result.unwrap_or_else(|panic| resume_unwind(panic))?;
    #[cfg(feature = "candle")]
    let wire_warning = may_warn_of_wire
        .then(|| wire_warning(&ranks.leaves, leaves))
        .flatten();
    // Each rank has updated only its own parts. The outcome comes later, because its warnings read samples of
    // whole parameters.
    state.share(
        ended_step
            .moved_leaves()
            .iter()
            .map(|&leaf| (leaf, &parameters[leaf])),
    )?;
    let mut outcome = ended_step.outcome(state, parameters)?;
    outcome.warnings.extend(not_restored);
    #[cfg(feature = "candle")]
    outcome
        .warnings
        .extend(wire_warning.and_then(|warning| state.warnings.record(warning)));
    Ok(outcome)
}

/// Prepares a state for a step: leaves get the values of their schedules, and the model is compared with that
/// of a restored file. Returns the warning if the two differ.
///
/// The memory of the parameters is registered, so that two concurrent updates of one memory notice each
/// other. candle's variables are left out, because such variables stay where `setup` has registered them.
pub(super) fn open_step(
    state: &mut StateTree,
    parameters: &[Lent<'_>],
    keep_masters: bool,
) -> Result<Option<Warning>> {
    state.go_to_step(state.steps)?;
    let not_restored = state.check_restored(parameters, keep_masters)?;
    let elsewhere = state
        .leaves
        .iter()
        .zip(parameters)
        .filter(|(leaf, x)| leaf.storage.is_none() || x.tensor().is_none())
        .filter_map(|(leaf, x)| x.memory().filter(|memory| Some(*memory) != leaf.storage));
    // Plans read the registered memory (`UpdateTargets::all_registered`).
    state.other_targets.replace(elsewhere);
    Ok(not_restored)
}

/// A call on which all ranks have agreed, with all leaves or one pushed leaf.
pub(super) struct StepCall<'a> {
    pub(super) call: &'a UpdateCall,
    pub(super) ranks: &'a Ranks<'a>,
    pub(super) leaves: &'a mut [Box<Leaf>],
    /// In the order of the leaves.
    pub(super) parameters: &'a [Lent<'a>],
    /// The collection of the call.
    pub(super) grads: &'a dyn GradientLookUp,
    /// The source of each leaf; empty if all gradients are in the collection.
    pub(super) by_leaf: Vec<GradientSource<'a>>,
}

impl<'a> StepCall<'a> {
    /// Plans all leaves; `jobs` has a place for the job of each leaf.
    pub(super) fn plan<'j>(self, jobs: &'j mut [Option<Job<'a>>]) -> Result<PlannedStep<'j, 'a>> {
        let StepCall {
            call,
            ranks,
            leaves,
            parameters,
            grads,
            by_leaf,
        } = self;
        debug_assert!(by_leaf.is_empty() || by_leaf.len() == leaves.len());
        let gradients = GradientSource::for_all_leaves(by_leaf);
        let indexed_jobs = jobs.iter_mut().enumerate();
        let update = |((leaf, gradient), (index, job)): ((&'a mut Box<Leaf>, _), _)| LeafUpdate {
            leaf: Some(&mut **leaf),
            gradient,
            x: ranks.part(index, parameters),
            plan: LeafPlan::default(),
            job,
        };
        let mut updates: Vec<_> = leaves
            .iter_mut()
            .zip(gradients)
            .zip(indexed_jobs)
            .map(update)
            .collect();
        let targets = UpdateTargets::all_registered();
        let make = |update: &mut LeafUpdate<'_, 'a>| update.make(call, grads, &targets);
        let result = for_all(&mut updates, LeafUpdate::fetch, |update| {
            if update.reads_device() {
                Ok(())
            } else {
                make(update)
            }
        })
        // Updates that read a device still have their leaf, because the closure has passed over such updates.
        .and_then(|()| {
            updates
                .iter_mut()
                .filter(|update| update.leaf.is_some())
                .try_for_each(make)
        });
        let result = result.and_then(|()| ranks.check_required(call, &updates));
        ranks.world.settle(Call::Plan, result)?;
        let summary = StepSummary::new(call, updates.iter().map(|update| &update.plan));
        let plans = updates.into_iter().map(|update| update.plan);
        // Only a streamed step uses its plans again; other steps save the allocation.
        let plans = if call.is_streamed {
            plans.collect()
        } else {
            Vec::new()
        };
        Ok(PlannedStep {
            call,
            ranks,
            jobs,
            plans,
            summary,
        })
    }
}

/// A planned step. Nothing has been computed yet.
pub(super) struct PlannedStep<'j, 'a> {
    call: &'a UpdateCall,
    ranks: &'a Ranks<'a>,
    /// By leaf.
    jobs: &'j mut [Option<Job<'a>>],
    /// By leaf, in a streamed step.
    pub(super) plans: Vec<LeafPlan>,
    summary: StepSummary,
}

impl<'j, 'a> PlannedStep<'j, 'a> {
    /// Computes norms, sums and checks, and decides how the step ends. Writes nothing.
    pub(super) fn reduce(
        mut self,
        norms: &NormHistories,
        sums: &mut KeptSums,
    ) -> Result<ReducedStep<'j, 'a>> {
        if self.call.is_streamed {
            self.give_up_windows()?;
        }
        if let Some(ending) = self.ending_of_plans() {
            return Ok(ReducedStep {
                planned_step: self,
                ending,
                late_leaves: Vec::new(),
            });
        }
        let (ranks, engine) = (self.ranks, self.call.options.engine);
        let late_leaves = ranks.add_up(engine, self.jobs, sums)?;
        let ReduceOutcome {
            offender,
            group_norms,
            limited,
        } = ranks.reduce(engine, self.jobs)?;
        self.summary.group_norms = group_norms.into_iter().collect();
        self.summary.limited = limited;
        let ending = match offender {
            None => match norms.outlier(&self.summary.limited) {
                Some(outlier) => Ending::Skipped {
                    // If windows have collected the gradients of this norm, the windows are given up.
                    ends_windows: self.summary.limited[&outlier.group].1.is_collected,
                    reason: SkipReason::Outlier(outlier),
                },
                None => Ending::Committed,
            },
            Some(path) => self.ending_of_overflow(path, sums)?,
        };
        Ok(ReducedStep {
            planned_step: self,
            ending,
            late_leaves,
        })
    }

    /// The ending, if the plans alone decide it.
    fn ending_of_plans(&self) -> Option<Ending> {
        match &self.call.overflow {
            Some(path) if !self.summary.has_gradient => {
                Some(Ending::skipped(SkipReason::NotFinite { path: path.clone() }))
            }
            _ if self.summary.is_refused() => Some(Ending::Refused),
            // No window has collected: open windows have counted empty calls, or their leaves are frozen.
            _ if self.call.options.releases_windows && !self.summary.moves_or_collects() => {
                Some(Ending::Skipped {
                    reason: SkipReason::NothingToMove,
                    ends_windows: true,
                })
            }
            _ if !self.summary.moves => Some(Ending::skipped(SkipReason::NothingToMove)),
            _ => None,
        }
    }

    /// Gives up the windows of leaves that were not pushed, if their sums are not finite. Only a streamed
    /// step needs this: its pushed leaves have moved, so the call cannot be skipped as a whole.
    fn give_up_windows(&mut self) -> Result<()> {
        let (engine, mut any_given_up) = (self.call.options.engine, false);
        for (job, plan) in self
            .jobs
            .iter_mut()
            .zip(&mut self.plans)
            .filter(|(_, plan)| !plan.has_gradient)
        {
            // Each leaf is reduced by itself, because a reduction of all leaves ends at the first offender.
            if self
                .ranks
                .reduce(engine, slice::from_mut(job))?
                .offender
                .is_some()
            {
                *job = None;
                (plan.progress, plan.gives_up_window) = (Some(Progress::WithoutGradient), true);
                any_given_up = true;
            }
        }
        if any_given_up {
            self.summary = StepSummary::new(self.call, &self.plans);
        }
        Ok(())
    }

    /// The ending for a gradient or a window that is not finite. If all gradients of the call are finite, the
    /// sum of a window is not: no later call could end that window, so all windows are given up.
    fn ending_of_overflow(&mut self, path: String, sums: &mut KeptSums) -> Result<Ending> {
        let ends_windows = self.summary.windows.released && self.are_gradients_finite(sums)?;
        let reason = if ends_windows {
            SkipReason::WindowsGivenUp { path }
        } else {
            SkipReason::NotFinite { path }
        };
        Ok(Ending::Skipped { reason, ends_windows })
    }

    /// Replaces each job by a check of its gradients, and runs the checks. The jobs are not needed any more,
    /// because the call is skipped in any case.
    fn are_gradients_finite(&mut self, sums: &mut KeptSums) -> Result<bool> {
        let mut call = self.call.clone();
        call.options.finite_only = true;
        for entry in self.jobs.iter_mut() {
            *entry = entry.take().map(
                |Job {
                     path,
                     x,
                     leaf_length,
                     sources,
                     offloaded,
                     addresses,
                     ..
                 }| {
                    let gradient = call.gradient(sources, path, None);
                    Job {
                        leaf_length,
                        offloaded,
                        addresses,
                        ..Flow::Step(gradient).into_job(x, Epilogue::StateOnly)
                    }
                },
            );
        }
        let engine = call.options.engine;
        self.ranks.add_up(engine, self.jobs, sums)?;
        Ok(self.ranks.reduce(engine, self.jobs)?.offender.is_none())
    }
}

/// How a step ends.
#[derive(PartialEq)]
pub(super) enum Ending {
    /// A required gradient is missing, or the call has no gradient at all.
    Refused,
    Skipped {
        reason: SkipReason,
        /// Whether all windows are given up.
        ends_windows: bool,
    },
    Committed,
}

impl Ending {
    fn skipped(reason: SkipReason) -> Self {
        Ending::Skipped {
            reason,
            ends_windows: false,
        }
    }
}

/// A step whose ending is known; nothing is written yet.
pub(super) struct ReducedStep<'j, 'a> {
    planned_step: PlannedStep<'j, 'a>,
    pub(super) ending: Ending,
    /// The leaves whose gradients come from other ranks in the commit.
    late_leaves: Vec<usize>,
}

impl ReducedStep<'_, '_> {
    /// Writes parameters and state, if the ending is `Committed`.
    pub(super) fn commit(mut self) -> Result<EndedStep> {
        let numbered_leaf = |(leaf, job): (usize, &Option<Job<'_>>)| {
            job.as_ref().filter(|job| !job.numbers.is_empty()).map(|_| leaf)
        };
        // Collected before the commit, which takes the numbers out of the jobs.
        let numbered_leaves = self
            .planned_step
            .jobs
            .iter()
            .enumerate()
            .filter_map(numbered_leaf)
            .collect();
        self.write()?;
        let ReducedStep {
            planned_step: PlannedStep { summary, .. },
            ending,
            ..
        } = self;
        Ok(EndedStep {
            summary,
            ending,
            numbered_leaves,
        })
    }

    /// Commits, and keeps the step, so that [`ReducedStep::may_have_moved`] can be called after an error.
    pub(super) fn write(&mut self) -> Result<()> {
        let ReducedStep {
            planned_step: PlannedStep {
                call, ranks, jobs, ..
            },
            ending,
            late_leaves,
        } = self;
        if *ending == Ending::Committed {
            ranks.commit(call.options.engine, jobs, late_leaves)
        } else {
            Ok(())
        }
    }

    /// Whether anything may have been written. On a device any error may leave parameters moved in part.
    pub(super) fn may_have_moved(&self) -> bool {
        self.planned_step
            .jobs
            .iter()
            .flatten()
            .any(|job| job.has_moved || !job.x.device().is_cpu())
    }
}

/// A step that was committed, skipped or refused.
pub(super) struct EndedStep {
    summary: StepSummary,
    ending: Ending,
    /// The leaves in which the commit has set numbers.
    numbered_leaves: Vec<usize>,
}

impl EndedStep {
    /// The leaves that have moved.
    fn moved_leaves(&self) -> &[usize] {
        if self.ending == Ending::Committed {
            &self.summary.moved_leaves
        } else {
            &[]
        }
    }

    /// Updates the state as a whole, and makes the outcome for the caller.
    fn outcome(self, state: &mut StateTree, parameters: &[Lent<'_>]) -> Result<Outcome> {
        let EndedStep {
            summary,
            ending,
            numbered_leaves,
        } = self;
        match ending {
            Ending::Refused => Err(summary.refusal(state)),
            Ending::Skipped { reason, ends_windows } => {
                if matches!(reason, SkipReason::Outlier(_)) {
                    // The norm of an outlier is recorded, so that norms that stay large stop being outliers.
                    state.norms.record(&summary.limited);
                }
                if ends_windows {
                    state.end_windows()?;
                }
                let given_up_warning = match &reason {
                    SkipReason::WindowsGivenUp { path } => state
                        .warnings
                        .record(Warning::WindowsGivenUp { path: path.clone() }),
                    _ => None,
                };
                let skip_warning = reason.advice().and_then(|advice| state.warn_of_skipped(advice));
                let warnings = given_up_warning.into_iter().chain(skip_warning).collect();
                Ok(Outcome {
                    warnings,
                    ..summary.outcome(state, Status::Skipped(reason))
                })
            }
            Ending::Committed => {
                state.norms.record(&summary.limited);
                state.share_numbers(&numbered_leaves);
                summary.committed_outcome(state, parameters)
            }
        }
    }
}
