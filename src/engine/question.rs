//! What the reduce stage asks about a leaf.

use candle_core::Tensor;

use super::cpu::Fold;
use super::{Job, Reduction, Step};

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
        self.job.steps[..length].iter().filter(|step| matches!(step, Step::Map { .. } | Step::Reduce(_))).chain(last)
    }

    /// The places of the norms on the way. If there are any, the question is asked ahead: it can only be answered where their factors are
    /// found.
    pub(super) fn awaits(self) -> impl Iterator<Item = usize> {
        let length = if let Of::Gradient(length) | Of::Addend(length) = self.of { length } else { 0 };
        (0..length).filter(move |&place| matches!(self.job.steps[place], Step::Reduce(_)))
    }
}

/// A question whose answer may be one about other elements, too.
#[derive(Clone, Copy)]
pub(super) struct Asked<'j, 'a> {
    pub(super) question: Question<'j, 'a>,
    /// By how much the elements are larger that the answer is to be about: a power of two.
    pub(super) scale: f64,
}

impl Asked<'_, '_> {
    /// The answer, from what the fold of the question's elements is.
    pub(super) fn answer(self, total: f64) -> f64 {
        self.question.fold.scaled(total, self.scale)
    }

    /// What a fold is multiplied by for the answer; to the bit, if the square of the scale is a normal number.
    pub(super) fn multiplier(self) -> f64 {
        self.answer(1.0)
    }
}

/// Questions of which none depends on the answer to another.
pub(super) struct Round<'j, 'a> {
    pub(super) asked: Vec<Asked<'j, 'a>>,
    /// The numbers of the questions whose answers make up one norm, in order.
    pub(super) groups: Vec<Vec<usize>>,
    /// The factors that questions of later rounds depend on.
    pub(super) awaited: Vec<Awaited<'j, 'a>>,
}

impl<'j, 'a> Round<'j, 'a> {
    /// Questions whose answers nothing is made of.
    pub(super) fn new(questions: impl Iterator<Item = Question<'j, 'a>>) -> Self {
        Round { asked: questions.map(|question| Asked { question, scale: 1.0 }).collect(), groups: Vec::new(), awaited: Vec::new() }
    }
}

/// The factor of a norm, and the questions that it follows from.
pub(super) struct Awaited<'j, 'a> {
    pub(super) job: &'j Job<'a>,
    /// Which of the job's steps the norm is.
    pub(super) place: usize,
    pub(super) gradient: GradientNorm,
    /// The number of the question for the parameter's norm.
    pub(super) parameter: Option<usize>,
}

/// Where the norm of the gradient is from.
#[derive(Clone, Copy)]
pub(super) enum GradientNorm {
    /// The question of this number.
    Leaf(usize),
    /// The group of this number.
    Group(usize),
}

impl<'j> Awaited<'j, '_> {
    /// The norm, if it is one.
    pub(super) fn reduction(&self) -> Option<&'j Reduction> {
        if let Step::Reduce(reduction) = &self.job.steps[self.place] { Some(reduction) } else { None }
    }
}
