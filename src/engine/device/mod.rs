//! The fused engine of devices: a chain is printed as CUDA C, compiled at run time, and launched over all leaves at once.

mod batch;
mod machine;
mod print;
mod recording;

use candle_core::{Device, Tensor};

use self::batch::{Batch, Data, Place, Slot};
#[cfg(any(feature = "cuda", feature = "emulate"))]
pub(super) use self::machine::Launch;
pub(super) use self::machine::Machine;
#[cfg(feature = "cuda")]
pub(super) use self::machine::{FUNCTION, THREADS};
use self::recording::Work;
use super::cpu::Fold;
use super::tensor::{self, buffers};
use super::{Job, Question, Step, Store, Ticket, warn_once};
use crate::error::Result;

/// Writes the parameters and state of all jobs, and then moves their counters.
pub(super) fn commit(mut tickets: Vec<Ticket<'_>>) -> Result<()> {
    while let Some(first) = tickets.first() {
        let device = first.job.x.device().clone();
        let (mut here, elsewhere): (Vec<_>, Vec<_>) = tickets.into_iter().partition(|ticket| ticket.job.x.device().same_device(&device));
        tickets = elsewhere;
        let done = commit_on(&device, &mut here)?;
        for (mut ticket, done) in here.into_iter().zip(done) {
            match done {
                true => ticket.job.replace()?,
                false => tensor::commit(&mut ticket.job)?,
            }
            ticket.job.count();
        }
    }
    Ok(())
}

/// The answers to questions about leaves: one transfer for all that are about leaves of one device.
pub(super) fn fold(questions: &[Question<'_, '_>]) -> Result<Vec<f64>> {
    let mut totals = vec![0.0; questions.len()];
    let mut open: Vec<usize> = (0..questions.len()).collect();
    while let Some(&first) = open.first() {
        let device = questions[first].job.x.device();
        let (here, elsewhere): (Vec<_>, Vec<_>) = open.into_iter().partition(|&open| questions[open].job.x.device().same_device(device));
        open = elsewhere;
        let asked: Vec<_> = here.iter().map(|&here| questions[here]).collect();
        for (answered, total) in here.into_iter().zip(fold_on(device, &asked)?) {
            totals[answered] = match total {
                Some(total) => total,
                None => tensor::fold(questions[answered])?,
            };
        }
    }
    Ok(totals)
}

/// Commits on one device. The result is which of the jobs could be done.
fn commit_on(device: &Device, tickets: &mut [Ticket<'_>]) -> Result<Vec<bool>> {
    match device {
        #[cfg(feature = "emulate")]
        Device::Cpu => commit_with(super::emulation::Emulated::new(), tickets),
        #[cfg(feature = "cuda")]
        Device::Cuda(device) => commit_with(super::cuda::Cuda::new(device), tickets),
        device => {
            warn_once(&format!("no fused engine for {:?}", device.location()));
            Ok(vec![false; tickets.len()])
        }
    }
}

/// Folds on one device; nothing for what could not be done.
fn fold_on(device: &Device, questions: &[Question<'_, '_>]) -> Result<Vec<Option<f64>>> {
    match device {
        #[cfg(feature = "emulate")]
        Device::Cpu => fold_with(super::emulation::Emulated::new(), questions),
        #[cfg(feature = "cuda")]
        Device::Cuda(device) => fold_with(super::cuda::Cuda::new(device), questions),
        device => {
            warn_once(&format!("no fused engine for {:?}", device.location()));
            Ok(vec![None; questions.len()])
        }
    }
}

/// What to do for a part of a job.
enum Part {
    Nothing,
    Launch(Place),
    /// The machine cannot do it.
    Impossible,
}

fn commit_with<'a, M: Machine<'a>>(machine: M, tickets: &'a mut [Ticket<'_>]) -> Result<Vec<bool>> {
    let mut batch = Batch::new(machine);
    // A prefix reads the parameter, so its launch has to come before that which writes it.
    let mut prefixes = Vec::with_capacity(tickets.len());
    for ticket in &*tickets {
        prefixes.push(ticket.job.prefixes.iter().map(|prefix| part(&mut batch, prefix)).collect::<Result<Vec<_>>>()?);
    }
    let mains = tickets.iter().map(|ticket| part(&mut batch, &ticket.job)).collect::<Result<Vec<_>>>()?;
    let mut done = Vec::with_capacity(tickets.len());
    for ((ticket, prefixes), main) in tickets.iter_mut().zip(prefixes).zip(mains) {
        let possible = !prefixes.iter().chain([&main]).any(|part| matches!(part, Part::Impossible));
        done.push(possible);
        if !possible {
            continue;
        }
        let Job { rest, prefixes: jobs, length, x, source, steps, store, .. } = &mut *ticket.job;
        let rest = rest.as_deref_mut().map(|rest| batch.machine().write_state(rest)).transpose()?;
        for (prefix, part) in jobs.iter_mut().zip(prefixes) {
            let Job { length, x, source, steps, store, .. } = prefix;
            add(&mut batch, part, data(*length, x, source, steps, store, rest))?;
        }
        add(&mut batch, main, data(*length, x, source, steps, store, rest))?;
    }
    batch.run(false)?;
    Ok(done)
}

fn part<'a, M: Machine<'a>>(batch: &mut Batch<'a, M>, job: &Job<'_>) -> Result<Part> {
    let writes = |step: &Step<'_>| !step.slots().is_empty();
    if matches!(job.store, Store::Nothing) && !job.steps.iter().any(writes) {
        return Ok(Part::Nothing);
    }
    Ok(batch.place(Work::Commit(job))?.map_or(Part::Impossible, Part::Launch))
}

fn add<'a, M: Machine<'a>>(batch: &mut Batch<'a, M>, part: Part, data: Data<'a, impl Iterator<Item = Slot<'a>>>) -> Result<()> {
    if let Part::Launch(place) = part {
        batch.add(&place, data, None)?;
    }
    Ok(())
}

/// The data of a job's parts.
fn data<'a>(
    length: usize,
    x: &'a Tensor,
    sources: &'a [Tensor],
    steps: &'a mut [Step<'_>],
    store: &'a mut Store<'_>,
    rest: Option<u64>,
) -> Data<'a, impl Iterator<Item = Slot<'a>>> {
    let (mut parameter, mut compensation, mut key) = (None, None, [0; 2]);
    match store {
        Store::Nothing | Store::Plain => {}
        Store::Master { parameter: low } => parameter = Some(*low),
        Store::Random { key: bits } => key = *bits,
        Store::Kahan { compensation: lost } => compensation = Some(&mut **lost),
    }
    Data { length, x, rest, sources, slots: buffers(steps).map(Slot::Write), parameter, compensation, key }
}

fn fold_with<'a, M: Machine<'a>>(machine: M, questions: &[Question<'a, '_>]) -> Result<Vec<Option<f64>>> {
    let mut batch = Batch::new(machine);
    let mut found = Vec::with_capacity(questions.len());
    for &question in questions {
        let Some(place) = batch.place(Work::Answer(question))? else {
            found.push(None);
            continue;
        };
        let Question { job, fold, .. } = question;
        let rest = job.rest.as_deref().map(|rest| batch.machine().read_state(rest)).transpose()?;
        let slots = question.steps().flat_map(Step::slots).map(|(_, slot)| Slot::Read(slot));
        let sources = question.sources();
        let data = Data { length: job.length, x: job.x, rest, sources, slots, parameter: None, compensation: None, key: [0; 2] };
        found.push(Some(batch.add(&place, data, Some(fold))?));
    }
    let results = batch.run(true)?;
    let total = |blocks: batch::Blocks, fold: Fold| {
        let own = results[blocks.group].iter().skip(blocks.first as usize).take(blocks.count as usize);
        own.fold(0.0, |total, &chunk| fold.join(total, chunk))
    };
    Ok(found.into_iter().zip(questions).map(|(blocks, question)| blocks.map(|blocks| total(blocks, question.fold))).collect())
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use candle_core::{DType, Var};
    use smallvec::smallvec;

    use super::machine::Launch;
    use super::*;
    use crate::engine::{Buffer, Of, Scale};

    /// A device that knows what it was asked to run, and computes nothing.
    #[derive(Default)]
    struct Recorder {
        has_compiler: bool,
        addresses: u64,
        launched: Option<Arc<std::sync::Mutex<Vec<Launch<()>>>>>,
    }

    impl Recorder {
        fn address(&mut self) -> Result<u64> {
            self.addresses += 1;
            Ok(16 * self.addresses)
        }
    }

    impl<'a> Machine<'a> for Recorder {
        type Function = ();

        fn function(&mut self, _: &str) -> Result<Option<()>> {
            Ok(self.has_compiler.then_some(()))
        }

        fn read(&mut self, _: Tensor) -> Result<u64> {
            self.address()
        }

        fn write(&mut self, _: &'a Tensor) -> Result<u64> {
            self.address()
        }

        fn read_state(&mut self, _: &'a Buffer) -> Result<u64> {
            self.address()
        }

        fn write_state(&mut self, _: &'a mut Buffer) -> Result<u64> {
            self.address()
        }

        fn run(self, launches: Vec<Launch<()>>, results: usize) -> Result<Vec<f64>> {
            if let Some(launched) = self.launched {
                launched.lock().expect("a lock").extend(launches);
            }
            Ok(vec![1.0; results])
        }
    }

    fn descent<'a>(x: &'a Tensor, eta: f64) -> Job<'a> {
        let step = Step::Map { kernel: Box::new(Scale(eta)), slots: &mut [] };
        Job { steps: smallvec![step], store: Store::Plain, ..Job::new("x", x, smallvec![x.copy().expect("a copy")]) }
    }

    #[test]
    fn a_row_says_where_things_are_and_the_scalars() -> Result<()> {
        let x = Var::zeros(40_000, DType::F32, &Device::Cpu)?;
        let launched = Arc::default();
        let machine = Recorder { has_compiler: true, launched: Some(Arc::clone(&launched)), ..Recorder::default() };
        let mut tickets = [0.5, 0.25].map(|eta| Ticket::new(Box::new(descent(&x, eta))));
        assert_eq!(commit_with(machine, &mut tickets)?, [true, true]);
        let launched = launched.lock().expect("a lock");
        let [Launch { leaves: 2, rows, firsts, blocks: 6, results: None, .. }] = &launched[..] else { panic!("one launch") };
        let scalar = |eta: f32| u64::from(eta.to_bits());
        assert_eq!(rows[..], [40_000, 1, 16, 32, scalar(0.5), 40_000, 1, 48, 64, scalar(0.25)]);
        assert_eq!(firsts[..], [0, 3]);
        Ok(())
    }

    #[test]
    fn jobs_without_a_kernel_are_left_to_tensor_operations() -> Result<()> {
        let x = Var::zeros(5, DType::F32, &Device::Cpu)?;
        let mut tickets = [Ticket::new(Box::new(descent(&x, 0.5)))];
        assert_eq!(commit_with(Recorder::default(), &mut tickets)?, [false]);
        let job = descent(&x, 0.5);
        let question = Question { job: &job, of: Of::Gradient(1), fold: Fold::Squares };
        assert_eq!(fold_with(Recorder::default(), &[question])?, [None]);

        // A dtype that no kernel reads.
        let words = Var::zeros(5, DType::U32, &Device::Cpu)?;
        let mut tickets = [Ticket::new(Box::new(descent(&words, 0.5)))];
        assert_eq!(commit_with(Recorder { has_compiler: true, ..Recorder::default() }, &mut tickets)?, [false]);
        Ok(())
    }
}
