//! From open steps to questions, to the engines that answer them, and back.

use candle_core::Device;

use super::foreseen::key;
use super::open::{Open, OpenStep, are_apart, rounds};
use super::{Answer, Stage, Totals};
use crate::engine::cpu::{self, Fold};
use crate::engine::device::Found;
use crate::engine::{
    Asked, Awaited, Elements, Engine, Job, Of, Origin, Question, Reduction, Round, Route, Step, TensorCall, Ticket, by_device, device,
    tensor,
};
use crate::error::Result;

/// Open steps, and the questions about them.
struct Inquiry<'j, 'a> {
    steps: Vec<OpenStep>,
    /// For each step the numbers of the questions for its [`Totals`].
    numbers: Vec<[Option<usize>; 2]>,
    asked: Vec<Asked<'j, 'a>>,
}

impl<'j, 'a> Inquiry<'j, 'a> {
    fn new(jobs: &'j [&mut Ticket<'a>], steps: Vec<OpenStep>) -> Self {
        let mut inquiry = Inquiry { numbers: Vec::with_capacity(steps.len()), asked: Vec::with_capacity(steps.len()), steps };
        for &OpenStep { job, place, .. } in &inquiry.steps {
            let job = &jobs[job].job;
            let mut ask = |of, fold, scale| {
                inquiry.asked.push(Asked { question: Question { elements: Elements { job, of }, fold }, scale });
                Some(inquiry.asked.len() - 1)
            };
            inquiry.numbers.push(match &job.steps[place] {
                _ if job.length == 0 => [None, None],
                Step::Check => [ask(Of::Gradient(place), Fold::Largest, 1.0), None],
                Step::Sums(sums) => sums.addends.as_ref().map_or([None; 2], |addends| {
                    let fold = |number: usize| if addends[number].magnitudes { Fold::Sum } else { Fold::Total };
                    [0, 1].map(|number| ask(Of::Addend(place, number), fold(number), 1.0))
                }),
                Step::Reduce(Reduction { p, of_parameter, .. }) => {
                    let fold = Fold::for_norm(*p);
                    let gradient = match power_of_two_before(job, place) {
                        Some(factor) => ask(Of::Gradient(0), fold, factor),
                        None => ask(Of::Gradient(place), fold, 1.0),
                    };
                    [gradient, of_parameter.then(|| ask(Of::Parameter, fold, 1.0)).flatten()]
                }
                Step::Map { .. } | Step::Tensor(_) => [None, None],
            });
        }
        inquiry
    }

    /// The answer about each step from the fold of each question; nothing where one of the folds could not be done.
    fn answers(&self, fold: impl Fn(usize) -> Option<f64>) -> impl Iterator<Item = Option<Answer>> {
        let answer = move |number: Option<usize>| number.map_or(Some(0.0), |number| Some(self.asked[number].answer(fold(number)?)));
        self.steps
            .iter()
            .zip(&self.numbers)
            .map(move |(&step, &[first, second])| Some(Answer { step, totals: [answer(first)?, answer(second)?] }))
    }

    /// The questions for a device, which is to find the numbers that follow from those of these steps that are `awaited`; with these steps.
    fn round(&self, jobs: &'j [&mut Ticket<'a>], is_awaited: impl Fn(&OpenStep) -> bool) -> (Round<'j, 'a>, Vec<OpenStep>) {
        let steps = || self.steps.iter().zip(&self.numbers);
        let mut shared: Vec<(Open, usize)> = Vec::new();
        let (mut followed, mut awaited) = (Vec::new(), Vec::new());
        for (&step, numbers) in steps().filter(|(step, _)| is_awaited(step)) {
            let mut total = |which: usize| {
                let asked = numbers[which]?;
                if !step.shares(which) {
                    return Some(Origin::Leaf(asked));
                }
                let known = shared.iter().position(|total| *total == (step.open, which));
                Some(Origin::Group(known.unwrap_or_else(|| {
                    shared.push((step.open, which));
                    shared.len() - 1
                })))
            };
            let totals = [total(0), total(1)];
            // Nothing follows from a check, and nothing happens to a leaf that asks for nothing.
            if step.open != Open::Check && totals[0].is_some() {
                followed.push(step);
                awaited.push(Awaited { job: &jobs[step.job].job, place: step.place, totals });
            }
        }
        let group = |&(open, which): &(Open, usize)| {
            steps().filter(|(step, _)| step.open == open).filter_map(|(_, numbers)| numbers[which]).collect()
        };
        let groups = shared.iter().map(group).collect();
        let function = |step: &OpenStep| TensorCall { job: &jobs[step.job].job, place: step.place };
        let functions = self.steps.iter().filter(|step| step.open == Open::Tensor).map(function);
        (Round { functions: functions.collect(), asked: self.asked.clone(), groups, awaited }, followed)
    }
}

impl Stage {
    /// Evaluates all these steps, which are ready.
    pub(super) fn answers(&mut self, jobs: &[&mut Ticket<'_>], steps: Vec<OpenStep>) -> Result<Vec<Answer>> {
        let known: Vec<_> = steps.iter().map(|step| self.foreseen.take(key(jobs, step.job, step.place))).collect();
        let unknown = steps.iter().zip(&known).filter(|(_, known)| known.is_none()).map(|(step, _)| *step).collect();
        let inquiry = Inquiry::new(jobs, unknown);
        let folds = folds(self.engine, inquiry.asked.iter().map(|asked| asked.question))?;
        let mut asked = inquiry.answers(|number| Some(folds[number])).flatten();
        let answer = |(step, known): (OpenStep, Option<Totals>)| known.map(|totals| Answer { step, totals }).or_else(|| asked.next());
        Ok(steps.into_iter().zip(known).filter_map(answer).collect())
    }

    /// Asks each device everything that the turns will ask it, lets all functions run, and keeps what comes of it. Where leaves of several devices
    /// ask for something together this is left to the turns. The CPU has nothing to gain by it.
    pub(super) fn foresee(&mut self, jobs: &[&mut Ticket<'_>]) -> Result<()> {
        let engine = self.engine;
        let is_asked = |ticket: &Ticket<'_>| ticket.open && ticket.job.length > 0 && engine.route(ticket.on_cpu) == Route::Device;
        let devices = by_device(jobs.iter().filter(|ticket| is_asked(ticket)), |ticket| ticket.job.x.device());
        if devices.is_empty() {
            return Ok(());
        }
        let rounds = rounds(jobs);
        for (device, _) in devices {
            let is_on_device = |job: usize| jobs[job].job.x.device().same_device(&device);
            // Nobody waits for what a leaf without elements has.
            let has_elements = |job: usize| jobs[job].job.length > 0;
            let is_here = |job| has_elements(job) && is_on_device(job);
            if are_apart(&rounds, is_here, |job| has_elements(job) && !is_on_device(job)) {
                let here = |round: &Vec<OpenStep>| round.iter().copied().filter(|step| is_here(step.job)).collect();
                self.foresee_on(&device, jobs, rounds.iter().map(here).filter(|round: &Vec<_>| !round.is_empty()).collect())?;
            }
        }
        Ok(())
    }

    /// Runs these functions, which are ready, with inputs that the fused engines of their devices make, as far as these can and they have not run
    /// ahead.
    pub(super) fn run_on_devices(&self, jobs: &[&mut Ticket<'_>], functions: &[OpenStep]) -> Result<()> {
        let is_left = |ticket: &Ticket<'_>, place: usize| {
            let is_on_device = self.engine.route(ticket.on_cpu) == Route::Device;
            is_on_device && ticket.job.length > 0 && matches!(&ticket.job.steps[place], Step::Tensor(step) if !step.has_run())
        };
        let left = functions.iter().filter(|step| is_left(jobs[step.job], step.place));
        let calls = left.map(|step| TensorCall { job: &jobs[step.job].job, place: step.place });
        for (device, functions) in by_device(calls, |call| call.job.x.device()) {
            device::found_on(&device, &[Round { functions, ..Round::new(std::iter::empty()) }])?;
        }
        Ok(())
    }

    fn foresee_on(&mut self, device: &Device, jobs: &[&mut Ticket<'_>], rounds: Vec<Vec<OpenStep>>) -> Result<()> {
        // What the first turn asks at once need not be asked ahead.
        if rounds.len() < 2 && rounds.iter().flatten().all(|step| step.open != Open::Tensor) {
            return Ok(());
        }
        let inquiries: Vec<_> = rounds.into_iter().map(|steps| Inquiry::new(jobs, steps)).collect();
        // Nothing in a job comes after its last round, so that no number has to follow from that.
        let mut last = vec![0; jobs.len()];
        for (number, inquiry) in inquiries.iter().enumerate() {
            inquiry.steps.iter().for_each(|step| last[step.job] = number);
        }
        let inquired = inquiries.iter().enumerate();
        let rounds = inquired.map(|(number, inquiry)| inquiry.round(jobs, |step| last[step.job] > number));
        let (rounds, awaited): (Vec<_>, Vec<_>) = rounds.unzip();
        let Found { folds, numbers } = device::found_on(device, &rounds)?;
        for (step, number) in awaited.iter().flatten().zip(numbers.concat()) {
            if let Some(number) = number {
                self.foreseen.add_number(key(jobs, step.job, step.place), number);
            }
        }
        for (inquiry, folds) in inquiries.iter().zip(folds) {
            for Answer { step, totals } in inquiry.answers(|number| folds[number]).flatten() {
                self.foreseen.add_answer(key(jobs, step.job, step.place), totals);
            }
        }
        Ok(())
    }
}

/// The answers of whatever engine has the leaf.
pub(super) fn folds<'j, 'a: 'j>(engine: Engine, questions: impl ExactSizeIterator<Item = Question<'j, 'a>>) -> Result<Vec<f64>> {
    let mut totals = vec![0.0; questions.len()];
    let (mut fused, mut on_device) = (Places::default(), Places::default());
    let mut isa = cpu::Isa::Portable;
    for (place, question) in questions.enumerate() {
        match engine.route(question.elements.job.x.device().is_cpu()) {
            _ if question.elements.job.length == 0 => {}
            Route::Cpu(best) => {
                isa = best;
                fused.push(place, question);
            }
            Route::Device => on_device.push(place, question),
            Route::Tensors => totals[place] = tensor::fold(question)?,
        }
    }
    fused.fill(&mut totals, |questions| cpu::fold(isa, questions))?;
    on_device.fill(&mut totals, |questions| device::fold(&questions))?;
    Ok(totals)
}

/// Questions, and the places of their answers.
#[derive(Default)]
struct Places<'j, 'a> {
    places: Vec<usize>,
    questions: Vec<Question<'j, 'a>>,
}

impl<'j, 'a> Places<'j, 'a> {
    fn push(&mut self, place: usize, question: Question<'j, 'a>) {
        self.places.push(place);
        self.questions.push(question);
    }

    fn fill(self, totals: &mut [f64], folds: impl FnOnce(Vec<Question<'j, 'a>>) -> Result<Vec<f64>>) -> Result<()> {
        for (place, total) in self.places.into_iter().zip(folds(self.questions)?) {
            totals[place] = total;
        }
        Ok(())
    }
}

/// The factor before an open step, where that is all there is before it, and a power of two: it is made up for after the gradients have been
/// folded as they are, and so need no arithmetic.
fn power_of_two_before(job: &Job<'_>, place: usize) -> Option<f64> {
    let mut before = job.steps[..place].iter().filter(|step| !matches!(step, Step::Check));
    match (before.next(), before.next(), &job.source[..]) {
        (Some(Step::Map { kernel, .. }), None, [_]) => kernel.exact_scale(),
        _ => None,
    }
}
