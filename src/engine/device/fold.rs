//! Answers to questions, round by round in one go: a later round reads the factors that the device makes of the answers of earlier ones.
//!
//! The parts of each fold are joined in the order of the host and with its roundings, so that a factor has the bits of the one that the host
//! makes of the same answers. Powers of other exponents than 1 and 2 are as exact as the device's `pow`.

use std::collections::HashMap;
use std::ops::Range;

use candle_core::Device;

use super::batch::{Batch, Blocks, Data, Norm, Slot};
use super::machine::Machine;
use super::recording::{Work, record_join};
use crate::engine::cpu::Fold;
use crate::engine::{Asked, GradientNorm, Job, Question, Round, Step, tensor, warn_once};
use crate::error::Result;

/// What a device found in the rounds that it was asked.
#[derive(Debug, Default, PartialEq)]
pub(in crate::engine) struct Found {
    /// The folds that were asked for, by round; nothing for what could not be done.
    pub(in crate::engine) folds: Vec<Vec<Option<f64>>>,
    /// The factors that were awaited, by round.
    pub(in crate::engine) factors: Vec<Vec<Option<f64>>>,
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
            Ok(Found { folds, factors: rounds.iter().map(|round| vec![None; round.awaited.len()]).collect() })
        }
    }
}

/// The numbers of the results that are factors, by [`address`].
type Factors = HashMap<(usize, usize), usize>;

/// Which norm it is.
fn address(job: &Job<'_>, place: usize) -> (usize, usize) {
    (std::ptr::from_ref(job).addr(), place)
}

pub(super) fn fold_with<'a, M: Machine<'a>>(machine: M, rounds: &[Round<'a, '_>]) -> Result<Found> {
    let mut batch = Batch::new(machine);
    let mut known = Factors::new();
    let mut found = Vec::with_capacity(rounds.len());
    for round in rounds {
        let add = |asked: &Asked<'a, '_>| add(&mut batch, asked.question, &known);
        let blocks = round.asked.iter().map(add).collect::<Result<Vec<_>>>()?;
        let firsts = batch.enqueue();
        let parts: Vec<_> = blocks.iter().map(|blocks| blocks.as_ref().map(|blocks| blocks.results(&firsts))).collect();
        let factors = factors(&mut batch, round, &parts)?;
        for (awaited, factor) in round.awaited.iter().zip(&factors) {
            known.extend(factor.map(|factor| (address(awaited.job, awaited.place), factor)));
        }
        found.push((parts, factors));
    }
    let results = batch.run()?;
    let mut numbers = Found::default();
    for (round, (parts, factors)) in rounds.iter().zip(found) {
        let total = |parts: Range<usize>, fold: Fold| results[parts].iter().fold(0.0, |total, &part| fold.join(total, part));
        let totals = parts.into_iter().zip(&round.asked).map(|(parts, asked)| parts.map(|parts| total(parts, asked.question.fold)));
        numbers.folds.push(totals.collect());
        numbers.factors.push(factors.into_iter().map(|factor| factor.map(|factor| results[factor])).collect());
    }
    Ok(numbers)
}

/// Adds the fold that answers a question; nothing, if it cannot be done.
fn add<'a, M: Machine<'a>>(batch: &mut Batch<'a, M>, question: Question<'a, '_>, known: &Factors) -> Result<Option<Blocks>> {
    let factor = |place| known.get(&address(question.job, place)).copied();
    let Some(factors) = question.awaits().map(factor).collect() else { return Ok(None) };
    let Some(place) = batch.place(Work::Answer(question))? else { return Ok(None) };
    let Question { job, fold, .. } = question;
    let rest = job.rest.as_deref().map(|rest| batch.machine().read_state(rest)).transpose()?;
    let slots = question.steps().flat_map(Step::slots).map(|(_, slot)| Slot::Read(slot));
    let (length, x, sources) = (job.length, job.x, question.sources());
    let data = Data { length, x, rest, sources, slots, factors, parameter: None, compensation: None, key: [0; 2] };
    batch.add(&place, data, Some(fold)).map(Some)
}

/// Adds what makes the awaited factors of the parts that are the answers. The result is the number of each factor; nothing, if it cannot be
/// had.
fn factors<'a, M: Machine<'a>>(
    batch: &mut Batch<'a, M>,
    round: &Round<'a, '_>,
    parts: &[Option<Range<usize>>],
) -> Result<Vec<Option<usize>>> {
    let norm = |asked: usize| {
        let scale = round.asked[asked].multiplier();
        parts[asked].clone().map(|results| Norm { results, scale })
    };
    let groups = round.groups.iter().map(|group| group.iter().map(|&asked| norm(asked)).collect()).collect();
    let folds = round.groups.iter().map(|group| round.asked[group[0]].question.fold).collect::<Vec<_>>();
    // The host joins the parts of each leaf, and then the leaves.
    let by_leaf = totals(batch, &folds, groups)?;
    let by_group = totals(batch, &folds, by_leaf.into_iter().map(|leaves| Some(vec![leaves?])).collect())?;

    let mut blocks = Vec::with_capacity(round.awaited.len());
    for awaited in &round.awaited {
        let gradient = match awaited.gradient {
            GradientNorm::Leaf(asked) => norm(asked),
            GradientNorm::Group(group) => by_group[group].clone(),
        };
        let parameter = awaited.parameter.map_or(Some(Norm::NONE), norm);
        let (Some(reduction), Some(gradient), Some(parameter)) = (awaited.reduction(), gradient, parameter) else {
            blocks.push(None);
            continue;
        };
        let fold = Fold::for_norm(reduction.p);
        let (recording, scalars) = record_join(fold, Some(&*reduction.factor));
        let place = batch.place_of(recording, scalars)?;
        blocks.push(place.map(|place| batch.join(&place, parameter, gradient, fold)));
    }
    let firsts = batch.enqueue();
    Ok(blocks.into_iter().map(|blocks| blocks.map(|blocks| blocks.results(&firsts).start)).collect())
}

/// Adds what joins the results of each norm of each group to one number. The result is where those of each group are; nothing, if they cannot be
/// had.
fn totals<'a, M: Machine<'a>>(batch: &mut Batch<'a, M>, folds: &[Fold], groups: Vec<Option<Vec<Norm>>>) -> Result<Vec<Option<Norm>>> {
    let mut blocks = Vec::with_capacity(groups.len());
    for (&fold, norms) in folds.iter().zip(groups) {
        let (recording, scalars) = record_join(fold, None);
        let place = batch.place_of(recording, scalars)?;
        blocks.push(norms.zip(place).map(|(norms, place)| {
            let join = |norm| batch.join(&place, Norm::NONE, norm, fold);
            norms.into_iter().map(join).collect::<Vec<_>>()
        }));
    }
    let firsts = batch.enqueue();
    // Those of a group are neighbours, as they have been added one after another.
    let range = |blocks: Vec<Blocks>| Some(blocks.first()?.results(&firsts).start..blocks.last()?.results(&firsts).end);
    Ok(blocks.into_iter().map(|blocks| Some(Norm { results: range(blocks?)?, scale: 1.0 })).collect())
}
