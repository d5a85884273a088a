//! Answers to questions, round by round in one go: a later round reads the numbers that the device makes of the answers of earlier ones.
//!
//! The parts of each fold are joined in the order of the host and with its roundings, so that a number has the bits of the one that the host
//! makes of the same answers. Powers of other exponents than 1 and 2 are as exact as the device's `pow`.

use std::collections::HashMap;
use std::ops::Range;

use candle_core::Device;

use super::batch::{Batch, Blocks, Data, Parts, Slot};
use super::machine::Machine;
use super::recording::{Join, Work};
use crate::engine::cpu::Fold;
use crate::engine::{Asked, Job, Question, Round, Step, Total, tensor, warn_once};
use crate::error::Result;

/// What a device found in the rounds that it was asked.
#[derive(Debug, Default, PartialEq)]
pub(in crate::engine) struct Found {
    /// The folds that were asked for, by round; nothing for what could not be done.
    pub(in crate::engine) folds: Vec<Vec<Option<f64>>>,
    /// The numbers that were awaited, by round.
    pub(in crate::engine) numbers: Vec<Vec<Option<f64>>>,
}

/// The folds that are asked for: one transfer for all that are about leaves of one device.
pub(in crate::engine) fn fold(questions: &[Question<'_, '_>]) -> Result<Vec<f64>> {
    let mut totals = vec![0.0; questions.len()];
    let mut open: Vec<usize> = (0..questions.len()).collect();
    while let Some(&first) = open.first() {
        let device = questions[first].job.x.device();
        let (here, elsewhere): (Vec<_>, Vec<_>) = open.into_iter().partition(|&open| questions[open].job.x.device().same_device(device));
        open = elsewhere;
        let round = Round::new(here.iter().map(|&here| questions[here]));
        let found = found_on(device, &[round])?.folds.concat();
        for (answered, total) in here.into_iter().zip(found) {
            totals[answered] = match total {
                Some(total) => total,
                None => tensor::fold(questions[answered])?,
            };
        }
    }
    Ok(totals)
}

/// What one device finds about its leaves, in one transfer.
pub(in crate::engine) fn found_on(device: &Device, rounds: &[Round<'_, '_>]) -> Result<Found> {
    match device {
        #[cfg(feature = "emulate")]
        Device::Cpu => fold_with(crate::engine::emulation::Emulated::new(), rounds),
        #[cfg(feature = "cuda")]
        Device::Cuda(device) => fold_with(crate::engine::cuda::Cuda::new(device), rounds),
        device => {
            warn_once(&format!("no fused engine for {:?}", device.location()));
            let folds = rounds.iter().map(|round| vec![None; round.asked.len()]).collect();
            Ok(Found { folds, numbers: rounds.iter().map(|round| vec![None; round.awaited.len()]).collect() })
        }
    }
}

/// The results, by number, on which steps depend, by their [`address`].
type Known = HashMap<(usize, usize), usize>;

/// Which step it is.
fn address(job: &Job<'_>, place: usize) -> (usize, usize) {
    (std::ptr::from_ref(job).addr(), place)
}

pub(super) fn fold_with<'a, M: Machine<'a>>(machine: M, rounds: &[Round<'a, '_>]) -> Result<Found> {
    let mut batch = Batch::new(machine);
    let mut known = Known::new();
    let mut found = Vec::with_capacity(rounds.len());
    for round in rounds {
        let add = |asked: &Asked<'a, '_>| add(&mut batch, asked.question, &known);
        let blocks = round.asked.iter().map(add).collect::<Result<Vec<_>>>()?;
        let firsts = batch.enqueue();
        let parts: Vec<_> = blocks.iter().map(|blocks| blocks.as_ref().map(|blocks| blocks.results(&firsts))).collect();
        let numbers = follow(&mut batch, round, &parts)?;
        for (awaited, number) in round.awaited.iter().zip(&numbers) {
            known.extend(number.map(|number| (address(awaited.job, awaited.place), number)));
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

/// Adds the fold that answers a question; nothing, if it cannot be done.
fn add<'a, M: Machine<'a>>(batch: &mut Batch<'a, M>, question: Question<'a, '_>, known: &Known) -> Result<Option<Blocks>> {
    let number = |place| known.get(&address(question.job, place)).copied();
    let Some(found) = question.awaits().map(number).collect() else { return Ok(None) };
    let Some(place) = batch.place(Work::Answer(question))? else { return Ok(None) };
    let Question { job, fold, .. } = question;
    let rest = job.rest.as_deref().map(|rest| batch.machine().read_state(rest)).transpose()?;
    let addend = question.addend().map(|addend| &*addend.slots);
    let slots = question.steps().map(Step::slots).chain(addend).flatten().map(|(_, slot)| Slot::Read(slot));
    let (length, x, sources) = (job.length, job.x, question.sources());
    let data = Data { length, x, rest, sources, slots, found, parameter: None, compensation: None, key: [0; 2] };
    batch.add(&place, data, Some(fold)).map(Some)
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
    let parts_of = |total: Option<Total>| match total {
        None => Some(Parts::NONE),
        Some(Total::Leaf(asked)) => of_leaf(asked),
        Some(Total::Group(group)) => by_group[group].clone(),
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
