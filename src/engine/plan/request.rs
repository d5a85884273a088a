//! What is asked about the elements of a leaf, reading only.

use super::{Job, Link, Step, TermOf};
use crate::engine::kernel::Reducer;
use crate::error::Result;
use crate::model::lent::Lent;
use crate::tensors::Tensor;

/// A view: what is read of each element of a leaf.
#[derive(Clone, Copy)]
pub(in crate::engine) struct GradientView<'j, 'a> {
    pub(in crate::engine) job: &'j Job<'a>,
    kind: ViewKind<'j>,
}

#[derive(Clone, Copy)]
enum ViewKind<'j> {
    /// What the arithmetic calls x.
    Parameter,
    /// The gradient after the first `steps` steps of the job, and what a probe makes of it.
    Gradient { steps: usize, probe: Option<Link<'j>> },
}

/// A number to which the elements of a leaf are to be reduced.
#[derive(Clone, Copy)]
pub(in crate::engine) struct ReductionRequest<'j, 'a> {
    pub(in crate::engine) view: GradientView<'j, 'a>,
    pub(in crate::engine) reducer: Reducer,
}

impl<'j, 'a> GradientView<'j, 'a> {
    /// What the arithmetic calls x.
    pub(in crate::engine) fn parameter(job: &'j Job<'a>) -> Self {
        GradientView { job, kind: ViewKind::Parameter }
    }

    /// The gradient after the first `steps` steps, which must all be resolved.
    pub(in crate::engine) fn gradient(job: &'j Job<'a>, steps: usize) -> Result<Self> {
        let is_open = |step: &Step<'_>| matches!(step, Step::Reduce(_) | Step::Tensor(_));
        if job.steps[..steps].iter().any(is_open) {
            return Err(job.broken("a step is asked for before those in front of it are resolved"));
        }
        Ok(GradientView { job, kind: ViewKind::Gradient { steps, probe: None } })
    }

    /// What a term of the reduction at `step` is reduced from.
    pub(in crate::engine) fn term(job: &'j Job<'a>, step: usize, term: usize) -> Result<Self> {
        let Step::Reduce(reduction) = &job.steps[step] else {
            return Err(job.broken("a term of a step that is no reduction"));
        };
        let mut view = Self::gradient(job, step)?;
        match &reduction.terms[term].of {
            TermOf::Parameter => view.kind = ViewKind::Parameter,
            TermOf::Gradient => {}
            TermOf::Probe { kernel, slots } => {
                let probe = Some(Link { kernel: &**kernel, slots: &reduction.slots[slots.clone()] });
                view.kind = ViewKind::Gradient { steps: step, probe };
            }
        }
        Ok(view)
    }

    pub(in crate::engine) fn is_parameter(self) -> bool {
        matches!(self.kind, ViewKind::Parameter)
    }

    /// The gradients that are read: the job's, or what the last function before these elements has returned.
    pub(in crate::engine) fn sources(self) -> &'j [Lent<'a>] {
        match self.kind {
            ViewKind::Parameter => &[],
            ViewKind::Gradient { steps, .. } => {
                let outputs = self.job.steps[..steps].iter().rev();
                let last = outputs
                    .filter_map(
                        |step| if let Step::Output(output) = step { Some(&output.gradient) } else { None },
                    )
                    .next();
                last.map_or(&self.job.sources, std::slice::from_ref)
            }
        }
    }

    /// The arithmetic that the gradients go through.
    pub(in crate::engine) fn links(self) -> impl Iterator<Item = Link<'j>> {
        let (steps, probe) = match self.kind {
            ViewKind::Parameter => (0..0, None),
            ViewKind::Gradient { steps, probe } => {
                let last_output =
                    self.job.steps[..steps].iter().rposition(|step| matches!(step, Step::Output(_)));
                (last_output.map_or(0, |output| output + 1)..steps, probe)
            }
        };
        self.job.steps[steps].iter().filter_map(Step::link).chain(probe)
    }

    /// The elements, if a tensor has them as they are.
    pub(in crate::engine) fn tensor(self) -> Option<&'j Tensor> {
        match (self.kind, self.sources()) {
            (ViewKind::Parameter, _) if self.job.low_bits.is_some() => None,
            (ViewKind::Parameter, _) => self.job.x.lender().tensor(),
            (ViewKind::Gradient { .. }, [source]) if self.links().next().is_none() => source.tensor(),
            _ => None,
        }
    }
}
