//! What the reduce stage asks about a leaf.

use candle_core::Tensor;

use super::cpu::Fold;
use super::{Addend, Job, Link, Step, Sums};

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
    /// The one or the other addend of the step at this place.
    Addend(usize, usize),
    /// What the arithmetic calls x.
    Parameter,
}

impl<'j, 'a> Question<'j, 'a> {
    /// The gradients that are read.
    pub(super) fn sources(self) -> &'j [Tensor] {
        match self.of {
            Of::Gradient(_) | Of::Addend(..) => &self.job.source,
            Of::Parameter => &[],
        }
    }

    /// The steps that the gradient goes through, each with its place.
    fn passed(self) -> impl Iterator<Item = (usize, &'j Step<'a>)> {
        let length = match self.of {
            Of::Gradient(length) | Of::Addend(length, _) => length,
            Of::Parameter => 0,
        };
        // Other open steps on the way only look at the gradient.
        let changes = |step: &Step<'_>| matches!(step, Step::Map { .. } | Step::Reduce(_) | Step::Sums(Sums { addends: Some(_), .. }));
        self.job.steps[..length].iter().enumerate().filter(move |(_, step)| changes(step))
    }

    /// The steps that the gradient goes through.
    pub(super) fn steps(self) -> impl Iterator<Item = &'j Step<'a>> {
        self.passed().map(|(_, step)| step)
    }

    /// What is made of the gradient at last.
    pub(super) fn addend(self) -> Option<&'j Addend<'a>> {
        match self.of {
            Of::Addend(place, number) => match &self.job.steps[place] {
                Step::Sums(Sums { addends, .. }) => addends.as_ref().map(|addends| &addends[number]),
                _ => None,
            },
            Of::Gradient(_) | Of::Parameter => None,
        }
    }

    /// The arithmetic that is run, as far as it is known.
    pub(super) fn links(self) -> impl Iterator<Item = Link<'j>> {
        self.steps().filter_map(Step::link).chain(self.addend().map(Addend::link))
    }

    /// The places of the steps on the way whose arithmetic is not known. If there are any, the question is asked ahead: it can only be answered
    /// where what they depend on is found.
    pub(super) fn awaits(self) -> impl Iterator<Item = usize> {
        self.passed().filter(|(_, step)| step.link().is_none()).map(|(place, _)| place)
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
    /// The numbers of the questions whose answers make up one total, in order.
    pub(super) groups: Vec<Vec<usize>>,
    /// What questions of later rounds depend on.
    pub(super) awaited: Vec<Awaited<'j, 'a>>,
}

impl<'j, 'a> Round<'j, 'a> {
    /// Questions whose answers nothing is made of.
    pub(super) fn new(questions: impl Iterator<Item = Question<'j, 'a>>) -> Self {
        Round { asked: questions.map(|question| Asked { question, scale: 1.0 }).collect(), groups: Vec::new(), awaited: Vec::new() }
    }
}

/// A number that a step's arithmetic depends on, and the questions that it follows from.
pub(super) struct Awaited<'j, 'a> {
    pub(super) job: &'j Job<'a>,
    /// Which of the job's steps it is.
    pub(super) place: usize,
    /// Of the gradient and the parameter, or of the addends.
    pub(super) totals: [Option<Total>; 2],
}

/// Where a total is from.
#[derive(Clone, Copy, Debug)]
pub(super) enum Total {
    /// The question of this number.
    Leaf(usize),
    /// The group of this number.
    Group(usize),
}

impl<'j, 'a> Awaited<'j, 'a> {
    pub(super) fn step(&self) -> &'j Step<'a> {
        &self.job.steps[self.place]
    }
}
