//! Answers to questions, round by round in one go: a later round reads the numbers that the device makes of the answers of earlier ones, and
//! what functions make of these.
//!
//! The parts of each fold are joined in the order of the host and with its roundings, so that a number has the bits of the one that the host
//! makes of the same answers. Powers of other exponents than 1 and 2 are as exact as the device's `pow`.

use std::collections::HashMap;
use std::ops::Range;

use candle_core::{Device, Tensor, Var};

use super::batch::{Batch, Blocks, Data, Parts, Slot};
use super::machine::Machine;
use super::recording::{Join, Work};
use crate::engine::cpu::Fold;
#[cfg(feature = "emulate")]
use crate::engine::emulation::{self, Emulated};
use crate::engine::{Asked, Elements, Job, Origin, Question, Round, Step, TensorCall, by_device, tensor, warn_once};
use crate::error::Result;

/// What a device found in the rounds that it was asked.
#[derive(Debug, Default, PartialEq)]
pub(in crate::engine) struct Found {
    /// The folds that were asked for, by round; nothing for what could not be done.
    pub(in crate::engine) folds: Vec<Vec<Option<f64>>>,
    /// The numbers that were awaited, by round.
    pub(in crate::engine) numbers: Vec<Vec<Option<f64>>>,
}

impl Found {
    fn nothing(rounds: &[Round<'_, '_>]) -> Self {
        let folds = rounds.iter().map(|round| vec![None; round.asked.len()]).collect();
        Found { folds, numbers: rounds.iter().map(|round| vec![None; round.awaited.len()]).collect() }
    }
}

/// The folds that are asked for: one transfer for all that are about leaves of one device.
pub(in crate::engine) fn fold(questions: &[Question<'_, '_>]) -> Result<Vec<f64>> {
    let mut totals = vec![0.0; questions.len()];
    for (device, here) in by_device(questions.iter().enumerate(), |(_, question)| question.elements.job.x.device()) {
        let round = Round::new(here.iter().map(|(_, question)| **question));
        let found = found_on(&device, &[round])?.folds.concat();
        for ((answered, question), total) in here.into_iter().zip(found) {
            totals[answered] = match total {
                Some(total) => total,
                None => tensor::fold(*question)?,
            };
        }
    }
    Ok(totals)
}

/// What one device finds about its leaves, in one transfer. Functions of which the inputs can be had have run then.
pub(in crate::engine) fn found_on(device: &Device, rounds: &[Round<'_, '_>]) -> Result<Found> {
    match device {
        #[cfg(feature = "emulate")]
        Device::Cpu if rounds.len() > 1 && emulation::goes_in_turns() => Ok(Found::nothing(rounds)),
        // What nothing computes does not follow from the norms either.
        #[cfg(feature = "emulate")]
        Device::Cpu if emulation::only_prints() => {
            let found = find_with(Emulated::new(), rounds)?;
            Ok(Found { numbers: Found::nothing(rounds).numbers, ..found })
        }
        #[cfg(feature = "emulate")]
        Device::Cpu => find_with(Emulated::new(), rounds),
        #[cfg(feature = "cuda")]
        Device::Cuda(device) => find_with(crate::engine::cuda::Cuda::new(device), rounds),
        device => {
            warn_once(&format!("no fused engine for {:?}", device.location()));
            Ok(Found::nothing(rounds))
        }
    }
}

/// The numbers of the results on which steps depend, by [`step_id`].
type Known = HashMap<(usize, usize), usize>;

/// Which step it is.
fn step_id(job: &Job<'_>, place: usize) -> (usize, usize) {
    (std::ptr::from_ref(job).addr(), place)
}

pub(super) fn find_with<'a, M: Machine<'a>>(machine: M, rounds: &[Round<'a, '_>]) -> Result<Found> {
    let mut batch = Batch::new(machine);
    let mut known = Known::new();
    let mut found = Vec::with_capacity(rounds.len());
    for round in rounds {
        run_functions(&mut batch, &round.functions, &known)?;
        let ask =
            |&Asked { question: Question { elements, fold }, .. }: &Asked<'a, '_>| read(&mut batch, elements, Some(fold), None, &known);
        let blocks = round.asked.iter().map(ask).collect::<Result<Vec<_>>>()?;
        let firsts = batch.enqueue();
        let parts: Vec<_> = blocks.iter().map(|blocks| blocks.as_ref().map(|blocks| blocks.results(&firsts))).collect();
        let numbers = follow(&mut batch, round, &parts)?;
        for (awaited, number) in round.awaited.iter().zip(&numbers) {
            known.extend(number.map(|number| (step_id(awaited.job, awaited.place), number)));
        }
        found.push((parts, numbers));
    }
    let results = batch.run()?;
    let mut answers = Found::default();
    for (round, (parts, numbers)) in rounds.iter().zip(found) {
        let total = |parts: Range<usize>, fold: Fold| results[parts].iter().fold(0.0, |total, &part| fold.join(total, part));
        let totals = parts.into_iter().zip(&round.asked).map(|(parts, asked)| parts.map(|parts| total(parts, asked.question.fold)));
        answers.folds.push(totals.collect());
        answers.numbers.push(numbers.into_iter().map(|number| number.map(|number| results[number])).collect());
    }
    Ok(answers)
}

/// How many elements, about, are inputs of functions at the same time: they take memory.
const INPUTS: usize = 1 << 26;

/// Runs functions, after all that they depend on.
fn run_functions<'a, M: Machine<'a>>(batch: &mut Batch<'a, M>, mut functions: &[TensorCall<'a, '_>], known: &Known) -> Result<()> {
    while !functions.is_empty() {
        let (now, later) = functions.split_at(at_once(functions.iter().map(|function| function.job.length)));
        functions = later;
        let inputs = now.iter().map(|function| {
            let [x, dx] = function.inputs().map(|elements| input(batch, elements, known));
            Ok(x?.zip(dx?))
        });
        let inputs = inputs.collect::<Result<Vec<_>>>()?;
        batch.launch()?;
        for (&function, inputs) in now.iter().zip(inputs) {
            if let Some((x, dx)) = inputs {
                tensor::run_function(function, || Ok([x, dx]));
            }
        }
    }
    Ok(())
}

/// How many of the leaves of these lengths have their functions run at once: one at least.
fn at_once(lengths: impl Iterator<Item = usize>) -> usize {
    let totals = lengths.scan(0, |total, length| {
        *total += length;
        Some(*total)
    });
    totals.take_while(|total| *total <= INPUTS).count().max(1)
}

/// Elements as a tensor of the compute dtype, which has its values once everything has been launched; nothing, if they cannot be had.
fn input<'a, M: Machine<'a>>(batch: &mut Batch<'a, M>, elements: Elements<'a, '_>, known: &Known) -> Result<Option<Tensor>> {
    let Job { x, compute, .. } = elements.job;
    if let Some(tensor) = elements.tensor() {
        return Ok(Some(tensor.to_dtype(*compute)?));
    }
    let copy = Var::zeros(x.shape(), *compute, x.device())?;
    let tensor = copy.as_detached_tensor();
    Ok(read(batch, elements, None, Some(copy), known)?.map(|_| tensor))
}

/// Adds what reads elements, and folds or copies them; nothing, if it cannot be done.
fn read<'a, M: Machine<'a>>(
    batch: &mut Batch<'a, M>,
    elements: Elements<'a, '_>,
    fold: Option<Fold>,
    copy: Option<Var>,
    known: &Known,
) -> Result<Option<Blocks>> {
    let job = elements.job;
    let number = |place| known.get(&step_id(job, place)).copied();
    let Some(found) = elements.awaits().map(number).collect() else { return Ok(None) };
    let Some(place) = batch.place(Work::Read(elements, fold))? else { return Ok(None) };
    let rest = job.rest.as_deref().map(|rest| batch.machine().read_state(rest)).transpose()?;
    let addend = elements.addend().map(|addend| &*addend.slots);
    let slots = elements.steps().map(Step::slots).chain(addend).flatten().map(|(_, slot)| Slot::Read(slot));
    let (length, x, sources) = (job.length, job.x, elements.sources());
    let data = Data { length, x, rest, sources, slots, found, parameter: None, compensation: None, copy, key: [0; 2] };
    batch.add(&place, data, fold).map(Some)
}

/// Adds what makes the awaited numbers of the parts that are the answers. The result says which result each is; nothing, if it cannot be had.
fn follow<'a, M: Machine<'a>>(
    batch: &mut Batch<'a, M>,
    round: &Round<'a, '_>,
    parts: &[Option<Range<usize>>],
) -> Result<Vec<Option<usize>>> {
    let of_leaf = |asked: usize| {
        let scale = round.asked[asked].multiplier();
        parts[asked].clone().map(|results| Parts { results, scale })
    };
    let groups = round.groups.iter().map(|group| group.iter().map(|&asked| of_leaf(asked)).collect()).collect();
    let folds = round.groups.iter().map(|group| round.asked[group[0]].question.fold).collect::<Vec<_>>();
    // The host joins the parts of each leaf, and then the leaves.
    let by_leaf = totals(batch, &folds, groups)?;
    let by_group = totals(batch, &folds, by_leaf.into_iter().map(|leaves| Some(vec![leaves?])).collect())?;
    let parts_of = |total: Option<Origin>| match total {
        None => Some(Parts::NONE),
        Some(Origin::Leaf(asked)) => of_leaf(asked),
        Some(Origin::Group(group)) => by_group[group].clone(),
    };

    let mut blocks = Vec::with_capacity(round.awaited.len());
    for awaited in &round.awaited {
        let [first, second] = awaited.totals.map(parts_of);
        let (Some(first), Some(second), Some(Join { fold, recording, scalars })) = (first, second, Join::follow(awaited.step())) else {
            blocks.push(None);
            continue;
        };
        let place = batch.place_of(recording, scalars)?;
        blocks.push(place.map(|place| batch.join(&place, [first, second], fold)));
    }
    let firsts = batch.enqueue();
    Ok(blocks.into_iter().map(|blocks| blocks.map(|blocks| blocks.results(&firsts).start)).collect())
}

/// Adds what joins the results of each member of each group to one number. The result is where those of each group are; nothing, if they cannot
/// be had.
fn totals<'a, M: Machine<'a>>(batch: &mut Batch<'a, M>, folds: &[Fold], groups: Vec<Option<Vec<Parts>>>) -> Result<Vec<Option<Parts>>> {
    let mut blocks = Vec::with_capacity(groups.len());
    for (&fold, members) in folds.iter().zip(groups) {
        let Join { recording, scalars, .. } = Join::total(fold);
        let place = batch.place_of(recording, scalars)?;
        blocks.push(members.zip(place).map(|(members, place)| {
            let join = |parts| batch.join(&place, [parts], fold);
            members.into_iter().map(join).collect::<Vec<_>>()
        }));
    }
    let firsts = batch.enqueue();
    // Those of a group are neighbours, as they have been added one after another.
    let range = |blocks: Vec<Blocks>| Some(blocks.first()?.results(&firsts).start..blocks.last()?.results(&firsts).end);
    Ok(blocks.into_iter().map(|blocks| Some(Parts { results: range(blocks?)?, scale: 1.0 })).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn inputs_take_little_memory() {
        let leaves = |lengths: &[usize]| at_once(lengths.iter().copied());
        assert_eq!([leaves(&[5]), leaves(&[5, 7]), leaves(&[INPUTS - 1, 1, 1]), leaves(&[INPUTS + 1, 1])], [1, 2, 2, 1]);
    }
}
