//! The fused engine of devices: a chain is printed as CUDA C, compiled at run time, and launched over all leaves at once.

mod batch;
mod machine;
mod print;
mod recording;
mod rounds;

use candle_core::{Device, Tensor};
use smallvec::SmallVec;

use self::batch::{Batch, Data, Place, Slot};
#[cfg(any(feature = "cuda", feature = "emulate"))]
pub(super) use self::machine::Launch;
pub(super) use self::machine::Machine;
#[cfg(feature = "cuda")]
pub(super) use self::machine::{FUNCTION, THREADS};
use self::recording::Work;
pub(super) use self::rounds::{Found, fold, found_on};
use super::tensor::{self, buffers};
use super::{Job, Step, Store, Ticket, by_device, warn_once};
use crate::error::Result;

/// Writes the parameters and state of all jobs, and then moves their counters.
pub(super) fn commit(tickets: Vec<Ticket<'_>>) -> Result<()> {
    for (device, mut here) in by_device(tickets, |ticket| ticket.job.x.device()) {
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
        let Job { rest, prefixes: jobs, length, x, source, steps, store, .. } = &mut ticket.job;
        let rest = rest.as_deref_mut().map(|rest| batch.machine().write_state(rest)).transpose()?;
        for (prefix, part) in jobs.iter_mut().zip(prefixes) {
            let Job { length, x, source, steps, store, .. } = prefix;
            add(&mut batch, part, data(*length, x, source, steps, store, rest))?;
        }
        add(&mut batch, main, data(*length, x, source, steps, store, rest))?;
    }
    batch.run()?;
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
    Data {
        length,
        x,
        rest,
        sources,
        slots: buffers(steps).map(Slot::Write),
        found: SmallVec::new(),
        parameter,
        compensation,
        copy: None,
        key,
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use candle_core::{DType, Var};
    use smallvec::smallvec;

    use super::machine::Launch;
    use super::rounds::find_with;
    use super::*;
    use crate::engine::cpu::Fold;
    use crate::engine::{
        Awaited, Buffer, Elements, FromNorms, Norms, Of, OnNonFinite, Origin, Question, Reduction, Round, Scale, Scope, erased,
    };
    use crate::value::Value;

    /// A device that knows what it was asked to run, and computes nothing.
    #[derive(Default)]
    struct Recorder {
        /// Which sources it compiles.
        compiler: Option<fn(&str) -> bool>,
        addresses: u64,
        results: usize,
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

        fn function(&mut self, source: &str) -> Result<Option<()>> {
            Ok(self.compiler.is_some_and(|compiles| compiles(source)).then_some(()))
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

        fn write_new(&mut self, _: Var) -> Result<u64> {
            self.address()
        }

        fn launch(&mut self, launches: Vec<Launch<()>>, results: usize) -> Result<()> {
            self.results = results;
            if let Some(launched) = &self.launched {
                launched.lock().expect("a lock").extend(launches);
            }
            Ok(())
        }

        fn found(self) -> Result<Vec<f64>> {
            Ok(vec![1.0; self.results])
        }
    }

    fn descent<'a>(x: &'a Tensor, eta: f64) -> Job<'a> {
        let step = Step::Map { kernel: erased(Scale(eta)), slots: &mut [] };
        Job { steps: smallvec![step], store: Store::Plain, ..Job::new("x", x, smallvec![x.copy().expect("a copy")]) }
    }

    #[test]
    fn a_row_says_where_things_are_and_the_scalars() -> Result<()> {
        let x = Var::zeros(40_000, DType::F32, &Device::Cpu)?;
        let launched = Arc::default();
        let machine = Recorder { compiler: Some(|_| true), launched: Some(Arc::clone(&launched)), ..Recorder::default() };
        let mut tickets = [0.5, 0.25].map(|eta| Ticket::new(descent(&x, eta)));
        assert_eq!(commit_with(machine, &mut tickets)?, [true, true]);
        let launched = launched.lock().expect("a lock");
        let [Launch { leaves: 2, rows, firsts, blocks: 6, results: None, .. }] = &launched[..] else { panic!("one launch") };
        let scalar = |eta: f32| u64::from(eta.to_bits());
        assert_eq!(rows[..], [40_000, 1, 16, 32, scalar(0.5), 40_000, 1, 48, 64, scalar(0.25)]);
        assert_eq!(firsts[..], [0, 3]);
        Ok(())
    }

    #[derive(Clone, Copy)]
    struct Half;

    impl FromNorms for Half {
        fn factor<V: Value>(self, norms: Norms<V>) -> V {
            norms.gradient * 0.5
        }
    }

    /// What is found of a norm, and of the norm of what that scales.
    fn two_rounds(machine: Recorder) -> Result<Found> {
        let x = Var::zeros(40_000, DType::F32, &Device::Cpu)?;
        let norm = || {
            let (scope, non_finite, factor) = (Scope::Group(0), OnNonFinite::Refuse, Box::new(Half));
            Step::Reduce(Reduction { p: 2.0, scope, finite_only: false, of_parameter: false, non_finite, factor })
        };
        let job = Job { steps: smallvec![norm(), norm()], ..descent(&x, 0.5) };
        let question = |place| Question { elements: Elements { job: &job, of: Of::Gradient(place) }, fold: Fold::Squares };
        let awaited = Awaited { job: &job, place: 0, totals: [Some(Origin::Group(0)), None] };
        let first = Round { groups: vec![vec![0]], awaited: vec![awaited], ..Round::new([question(0)].into_iter()) };
        find_with(machine, &[first, Round::new([question(1)].into_iter())])
    }

    #[test]
    fn a_row_refers_to_what_earlier_launches_find() -> Result<()> {
        let launched = Arc::default();
        let machine = Recorder { compiler: Some(|_| true), launched: Some(Arc::clone(&launched)), ..Recorder::default() };
        // Every result is 1, and there are three parts.
        assert_eq!(two_rounds(machine)?, Found { folds: vec![vec![Some(3.0)]; 2], numbers: vec![vec![Some(1.0)], vec![]] });
        let launched = launched.lock().expect("a lock");
        let one = 1f64.to_bits();
        let rows: Vec<_> = launched.iter().map(|launch| (&launch.rows[..], &launch.references[..], launch.results)).collect();
        // Three parts of a leaf, its total, that of the group, the factor, and three parts again.
        assert_eq!(
            rows[1..4],
            [
                (&[0, 3, one][..], &[0][..], Some(3)),
                (&[3, 1, one][..], &[0][..], Some(4)),
                (&[4, 1, one, 0.5f64.to_bits()][..], &[0][..], Some(5)),
            ]
        );
        let (row, [factor], Some(6)) = rows[4] else { panic!("{rows:?}") };
        assert_eq!((rows.len(), row[*factor]), (5, 5));
        Ok(())
    }

    #[test]
    fn what_depends_on_a_factor_without_a_kernel_is_not_found() -> Result<()> {
        let machine = Recorder { compiler: Some(|source| source.contains("leaf_of")), ..Recorder::default() };
        assert_eq!(two_rounds(machine)?, Found { folds: vec![vec![Some(3.0)], vec![None]], numbers: vec![vec![None], vec![]] });
        Ok(())
    }

    #[test]
    fn jobs_without_a_kernel_are_left_to_tensor_operations() -> Result<()> {
        let x = Var::zeros(5, DType::F32, &Device::Cpu)?;
        let mut tickets = [Ticket::new(descent(&x, 0.5))];
        assert_eq!(commit_with(Recorder::default(), &mut tickets)?, [false]);
        let job = descent(&x, 0.5);
        let question = Question { elements: Elements { job: &job, of: Of::Gradient(1) }, fold: Fold::Squares };
        let round = Round::new([question].into_iter());
        assert_eq!(find_with(Recorder::default(), &[round])?.folds, [[None]]);

        // A dtype that no kernel reads.
        let words = Var::zeros(5, DType::U32, &Device::Cpu)?;
        let mut tickets = [Ticket::new(descent(&words, 0.5))];
        assert_eq!(commit_with(Recorder { compiler: Some(|_| true), ..Recorder::default() }, &mut tickets)?, [false]);
        Ok(())
    }
}
