//! Requests for elements of a leaf (a parameter with its state), or for numbers computed from the elements,
//! such as a sum. Requests only read.

use super::{Job, Link, Step, TermOf, sources_after};
use crate::engine::kernel::Reducer;
use crate::error::Result;
use crate::model::lent::Lent;
use crate::tensors::Tensor;

/// What is read of each element of a leaf.
#[derive(Clone, Copy)]
pub(in crate::engine) struct LeafView<'j, 'a> {
    pub(in crate::engine) job: &'j Job<'a>,
    kind: ViewKind<'j>,
}

#[derive(Clone, Copy)]
enum ViewKind<'j> {
    /// What the arithmetic calls x.
    Parameter,
    /// The gradient after the first `steps` steps of the job and then the probe.
    Gradient { steps: usize, probe: Option<Link<'j>> },
}

/// A number to which the elements of a leaf are to be reduced.
#[derive(Clone, Copy)]
pub(in crate::engine) struct ReductionRequest<'j, 'a> {
    pub(in crate::engine) view: LeafView<'j, 'a>,
    pub(in crate::engine) reducer: Reducer,
}

impl<'j, 'a> LeafView<'j, 'a> {
    pub(in crate::engine) fn parameter(job: &'j Job<'a>) -> Self {
        LeafView {
            job,
            kind: ViewKind::Parameter,
        }
    }

    /// The gradient after the first `steps` steps, which must all be resolved.
    pub(in crate::engine) fn gradient(job: &'j Job<'a>, steps: usize) -> Result<Self> {
        let is_pending = |step: &Step<'_>| matches!(step, Step::Reduce(_) | Step::Tensor(_));
        if job.steps[..steps].iter().any(is_pending) {
            return Err(job.defect("a step is read before earlier steps are resolved"));
        }
        Ok(LeafView {
            job,
            kind: ViewKind::Gradient { steps, probe: None },
        })
    }

    /// The view that a term of the reduction at `step` reduces.
    pub(in crate::engine) fn term(job: &'j Job<'a>, step: usize, term: usize) -> Result<Self> {
        let Step::Reduce(reduction) = &job.steps[step] else {
            return Err(job.defect("a term of a step that is no reduction"));
        };
        let mut view = Self::gradient(job, step)?;
        match &reduction.terms[term].of {
            TermOf::Parameter => view.kind = ViewKind::Parameter,
            TermOf::Gradient => {}
            TermOf::Probe { kernel, slots } => {
                let probe = Some(Link {
                    kernel: &**kernel,
                    slots: &reduction.slots[slots.clone()],
                });
                view.kind = ViewKind::Gradient { steps: step, probe };
            }
        }
        Ok(view)
    }

    pub(in crate::engine) fn is_parameter(self) -> bool {
        matches!(self.kind, ViewKind::Parameter)
    }

    /// The gradients that are read: those of the job, or the result of the view's last function.
    pub(in crate::engine) fn sources(self) -> &'j [Lent<'a>] {
        match self.kind {
            ViewKind::Parameter => &[],
            ViewKind::Gradient { steps, .. } => sources_after(&self.job.steps[..steps], &self.job.sources),
        }
    }

    /// The arithmetic between [`LeafView::sources`] and the view.
    pub(in crate::engine) fn links(self) -> impl Iterator<Item = Link<'j>> {
        let (steps, probe) = match self.kind {
            ViewKind::Parameter => (0..0, None),
            ViewKind::Gradient { steps, probe } => {
                let last_output = self.job.steps[..steps]
                    .iter()
                    .rposition(|step| matches!(step, Step::Output(_)));
                (last_output.map_or(0, |output| output + 1)..steps, probe)
            }
        };
        self.job.steps[steps].iter().filter_map(Step::link).chain(probe)
    }

    /// A tensor that has the elements already. `None` if the elements have to be computed.
    pub(in crate::engine) fn tensor(self) -> Option<&'j Tensor> {
        match (self.kind, self.sources()) {
            (ViewKind::Parameter, _) if self.job.low_bits.is_some() => None,
            (ViewKind::Parameter, _) => self.job.x.tensor(),
            (ViewKind::Gradient { .. }, [source]) if self.links().next().is_none() => source.tensor(),
            _ => None,
        }
    }
}
