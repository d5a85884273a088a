//! What the reduce stage asks about a leaf.

use candle_core::Tensor;

use super::cpu::Fold;
use super::{Job, Step};

/// A number that a leaf's elements are folded into, reading only.
#[derive(Clone, Copy)]
pub(super) struct Question<'j, 'a> {
    pub(super) job: &'j Job<'a>,
    pub(super) of: Of,
    pub(super) fold: Fold,
}

/// The elements that are folded.
#[derive(Clone, Copy)]
pub(super) enum Of {
    /// The gradient after so many steps of the job.
    Gradient(usize),
    /// What the step at this place adds up.
    Addend(usize),
    /// What the arithmetic calls x.
    Parameter,
}

impl<'j, 'a> Question<'j, 'a> {
    /// The gradients that are read.
    pub(super) fn sources(self) -> &'j [Tensor] {
        match self.of {
            Of::Gradient(_) | Of::Addend(_) => &self.job.source,
            Of::Parameter => &[],
        }
    }

    /// The arithmetic that is run.
    pub(super) fn steps(self) -> impl Iterator<Item = &'j Step<'a>> {
        let (length, last) = match self.of {
            Of::Gradient(length) => (length, None),
            Of::Addend(place) => (place, self.job.steps.get(place)),
            Of::Parameter => (0, None),
        };
        // Other open steps on the way only look at the gradient.
        self.job.steps[..length].iter().filter(|step| matches!(step, Step::Map { .. })).chain(last)
    }
}
