//! What the reduce stage asks about a leaf.

use candle_core::Tensor;

use super::cpu::Fold;
use super::{Addend, Job, Link, Step};

/// What the arithmetic makes of each element of a leaf, reading only.
#[derive(Clone, Copy)]
pub(super) struct Elements<'j, 'a> {
    pub(super) job: &'j Job<'a>,
    pub(super) of: Of,
}

#[derive(Clone, Copy)]
pub(super) enum Of {
    /// The gradient after so many steps of the job.
    Gradient(usize),
    /// The one or the other addend of the step at this place.
    Addend(usize, usize),
    /// What the arithmetic calls x.
    Parameter,
}

impl<'j, 'a> Elements<'j, 'a> {
    /// How many steps of the job are before these elements.
    fn place(self) -> usize {
        match self.of {
            Of::Gradient(place) | Of::Addend(place, _) => place,
            Of::Parameter => 0,
        }
    }

    /// The last function on the way that has run ahead, with its place.
    fn output(self) -> Option<(usize, &'j Tensor)> {
        self.job.steps[..self.place()].iter().enumerate().rev().find_map(|(place, step)| Some((place, step.output()?)))
    }

    /// The gradients that are read.
    pub(super) fn sources(self) -> &'j [Tensor] {
        match (self.of, self.output()) {
            (Of::Parameter, _) => &[],
            (Of::Gradient(_) | Of::Addend(..), Some((_, output))) => std::slice::from_ref(output),
            (Of::Gradient(_) | Of::Addend(..), None) => &self.job.source,
        }
    }

    /// The steps that the gradient goes through, each with its place.
    fn passed(self) -> impl Iterator<Item = (usize, &'j Step<'a>)> {
        let start = self.output().map_or(0, |(place, _)| place + 1);
        let changes = |step: &Step<'_>| match step {
            Step::Map { .. } | Step::Reduce(_) | Step::Tensor(_) => true,
            Step::Check => false,
            Step::Sums(sums) => sums.addends.is_some(),
        };
        (start..self.place()).zip(&self.job.steps[start..]).filter(move |(_, step)| changes(step))
    }

    /// The steps that the gradient goes through.
    pub(super) fn steps(self) -> impl Iterator<Item = &'j Step<'a>> {
        self.passed().map(|(_, step)| step)
    }

    /// What is made of the gradient at last.
    pub(super) fn addend(self) -> Option<&'j Addend<'a>> {
        match self.of {
            Of::Addend(place, number) => match &self.job.steps[place] {
                Step::Sums(sums) => sums.addends.as_ref().map(|addends| &addends[number]),
                _ => None,
            },
            Of::Gradient(_) | Of::Parameter => None,
        }
    }

    /// The arithmetic that is run, as far as it is known.
    pub(super) fn links(self) -> impl Iterator<Item = Link<'j>> {
        self.steps().filter_map(Step::link).chain(self.addend().map(Addend::link))
    }

    /// The places of the steps on the way whose arithmetic is not known. If there are any, something is asked ahead: it can only be had where what
    /// they depend on is found.
    pub(super) fn awaits(self) -> impl Iterator<Item = usize> {
        self.passed().filter(|(_, step)| step.link().is_none()).map(|(place, _)| place)
    }

    /// The elements, if they are a tensor as it is.
    pub(super) fn tensor(self) -> Option<&'j Tensor> {
        match (self.of, self.sources()) {
            (Of::Parameter, _) if !self.job.is_split => Some(self.job.x),
            (Of::Gradient(_), [source]) if self.steps().next().is_none() => Some(source),
            _ => None,
        }
    }
}

/// A number that elements are folded into.
#[derive(Clone, Copy)]
pub(super) struct Question<'j, 'a> {
    pub(super) elements: Elements<'j, 'a>,
    pub(super) fold: Fold,
}

/// A question, and by which factor its elements differ from those that the answer is about.
#[derive(Clone, Copy)]
pub(super) struct Asked<'j, 'a> {
    pub(super) question: Question<'j, 'a>,
    /// The answer is about the elements times this power of two.
    pub(super) scale: f64,
}

impl Asked<'_, '_> {
    /// The answer, from what the fold of the question's elements is.
    pub(super) fn answer(self, total: f64) -> f64 {
        self.question.fold.scaled(total, self.scale)
    }

    /// What a fold is multiplied by for the answer: twice, if it is of squares.
    pub(super) fn multiplier(self) -> f64 {
        match self.question.fold {
            Fold::Squares => self.scale,
            fold => fold.scaled(1.0, self.scale),
        }
    }
}

/// A function of the tensor that a leaf's gradient is.
#[derive(Clone, Copy)]
pub(super) struct TensorCall<'j, 'a> {
    pub(super) job: &'j Job<'a>,
    /// Which of the job's steps it is.
    pub(super) place: usize,
}

impl<'j, 'a> TensorCall<'j, 'a> {
    /// The parameter and the gradient.
    pub(super) fn inputs(self) -> [Elements<'j, 'a>; 2] {
        [Of::Parameter, Of::Gradient(self.place)].map(|of| Elements { job: self.job, of })
    }
}

/// Functions, and questions of which none depends on the answer to another. The functions run first.
pub(super) struct Round<'j, 'a> {
    pub(super) functions: Vec<TensorCall<'j, 'a>>,
    pub(super) asked: Vec<Asked<'j, 'a>>,
    /// The numbers of the questions whose answers make up one total, in order.
    pub(super) groups: Vec<Vec<usize>>,
    /// What questions of later rounds depend on.
    pub(super) awaited: Vec<Awaited<'j, 'a>>,
}

impl<'j, 'a> Round<'j, 'a> {
    /// Questions whose answers nothing is made of.
    pub(super) fn new(questions: impl Iterator<Item = Question<'j, 'a>>) -> Self {
        let asked = questions.map(|question| Asked { question, scale: 1.0 }).collect();
        Round { functions: Vec::new(), asked, groups: Vec::new(), awaited: Vec::new() }
    }
}

/// A number that a step's arithmetic depends on, and the questions that it follows from.
pub(super) struct Awaited<'j, 'a> {
    pub(super) job: &'j Job<'a>,
    /// Which of the job's steps it is.
    pub(super) place: usize,
    /// Of the gradient and the parameter, or of the addends.
    pub(super) totals: [Option<Origin>; 2],
}

/// Where a total is from.
#[derive(Clone, Copy, Debug)]
pub(super) enum Origin {
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
