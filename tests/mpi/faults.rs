//! What becomes of a job of which a rank fails.

use std::path::Path;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use candle_core::{DType, Device};
use optimisers::mpi::{World, run};
use optimisers::{
    AdamW, Checkpoint, CheckpointFile, Communicator, Error, Gradients, Lend, MixedPrecision, Model, Setup,
    Visitor, update,
};

use crate::job::{Job, Test, folder, pids, send};
use crate::laws::{Case, rank};
use support::common::{Grads, model, random};
use support::random_programs as letters;
use support::reports::{gradients, parameters};

const HOW: &str = "OPTIMISERS_MPI_HOW";
const WHERE: &str = "OPTIMISERS_MPI_WHERE";
const WHO: &str = "OPTIMISERS_MPI_WHO";

/// How long a job may take whose rank fails.
const LIMIT: Duration = Duration::from_secs(10);

pub const CASES: &[Case] = &[
    ("failing", || rank(failing)),
    ("leaving", || rank(leaving)),
    ("saving", || rank(saving)),
    ("nested", nested),
    ("own_start", own_start),
    ("one_thread", one_thread),
];

pub fn tests() -> Vec<Test> {
    let mut tests: Vec<Test> = Vec::new();
    for how in ["error", "panic", "exit", "kill"] {
        for place in ["before_update", "in_update", "before_save", "in_save"] {
            for who in [0, 2] {
                let test = move || {
                    let job = Job::new("failing", 3)
                        .with(HOW, how)
                        .with(WHERE, place)
                        .with(WHO, &who.to_string());
                    let finished = job.start().finish(LIMIT)?;
                    let said_so = match how {
                        "error" => finished.said.contains(&format!("rank {who}: this rank fails")),
                        "panic" => {
                            finished.said.contains("this rank panics")
                                && finished.said.contains(&format!("rank {who}"))
                        }
                        _ => true,
                    };
                    if finished.status.success() {
                        Err(format!("a good end\n{}", finished.said))
                    } else if !said_so {
                        Err(format!("no word of it\n{}", finished.said))
                    } else if !finished.folder.path().join("old").exists() {
                        Err("the first file is not there".to_string())
                    } else {
                        whole(&finished.folder.path().join("old"), &[1])
                    }
                };
                tests.push((
                    format!("a_rank_that_fails_ends_the_job::{how}::{place}::rank_{who}"),
                    Box::new(test),
                ));
            }
        }
    }
    tests.push((
        "a_rank_that_comes_to_its_end_too_early".to_string(),
        Box::new(|| {
            let finished = Job::new("leaving", 3).start().finish(LIMIT)?;
            let is_told = finished
                .said
                .contains("rank 1 called the end of the program, and rank 0 update");
            if is_told && !finished.status.success() {
                Ok(())
            } else {
                Err(finished.said)
            }
        }),
    ));
    for (name, case) in [
        ("mpi_is_initialised_once", "nested"),
        ("a_program_that_starts_mpi_itself", "own_start"),
        ("a_program_that_starts_mpi_for_one_thread", "one_thread"),
    ] {
        tests.push((name.to_string(), Box::new(move || Job::new(case, 2).passes())));
    }
    let kills = std::env::var("KILLS")
        .ok()
        .map_or(12, |kills| kills.parse().expect("a number"));
    for at in 0..kills {
        tests.push((
            format!("a_rank_that_is_killed_while_it_saves::{at}"),
            Box::new(move || killed(at)),
        ));
    }
    tests
}

/// Whether the file is that of one of these numbers of steps.
fn whole(path: &Path, steps: &[u64]) -> Result<(), String> {
    let step = step_of(path)?;
    if steps.contains(&step) {
        Ok(())
    } else {
        Err(format!("step {step} of {steps:?}"))
    }
}

fn fail() -> Result<(), Error> {
    match std::env::var(HOW).expect("how").as_str() {
        "error" => Err(candle_core::Error::Msg("this rank fails".to_string()).into()),
        "panic" => panic!("this rank panics"),
        "exit" => std::process::exit(3),
        _ => {
            send("KILL", std::process::id());
            std::thread::sleep(LIMIT);
            Ok(())
        }
    }
}

/// Gradients in whose midst a rank fails.
struct Failing(Grads);

impl Gradients for Failing {
    fn gradient(&self, path: &str, x: &dyn Lend) -> Option<&dyn Lend> {
        if path == "2" {
            // An error cannot be returned from here.
            fail().expect("no gradient");
        }
        self.0.gradient(path, x)
    }

    fn paths(&self) -> impl Iterator<Item = &str> {
        self.0.keys().map(String::as_str)
    }

    fn by_path(&self) -> bool {
        true
    }
}

/// A model at which a rank fails when it is looked at.
struct FailingModel;

impl Model for FailingModel {
    fn visit<'m>(&'m self, _: &mut Visitor<'m, '_>) {
        // As above.
        fail().expect("no model");
    }
}

/// One of three ranks fails in its second step or save, or before it.
fn failing(world: World) -> Result<(), Error> {
    let model = model(&parameters(DType::BF16));
    let mut state = Setup::over(&world).build(MixedPrecision::new(DType::F32, AdamW::new(0.1)), &model)?;
    let is_failing = std::env::var(WHO).expect("who") == world.rank().to_string();
    let place = std::env::var(WHERE).expect("where");
    update(&mut state, &model, &gradients(0, 0, DType::BF16))?;
    Checkpoint::new(&state)
        .bytes("step", "1")
        .save(folder().join("old"))?;
    if is_failing && place == "before_update" {
        fail()?;
    }
    let (mut grads, how) = (gradients(1, 0, DType::BF16), std::env::var(HOW).expect("how"));
    // The error of a call is one on all ranks; what ends the job is that the program does not catch it.
    let wrong = Error::from(candle_core::Error::Msg("this rank fails".to_string()));
    match how.as_str() {
        _ if !is_failing || place != "in_update" => update(&mut state, &model, &grads)?,
        "error" => {
            grads.insert("0".to_string(), random(1, &[2], DType::BF16, &Device::Cpu));
            return update(&mut state, &model, &grads).map_err(|_| wrong).map(drop);
        }
        _ => update(&mut state, &model, &Failing(grads))?,
    };
    if is_failing && place == "before_save" {
        fail()?;
    }
    let checkpoint = Checkpoint::new(&state).bytes("step", "1");
    match how.as_str() {
        "error" if is_failing => checkpoint.save(folder().join("missing/old")).map_err(|_| wrong)?,
        _ if is_failing => checkpoint.model(&FailingModel).save(folder().join("old"))?,
        _ => checkpoint.save(folder().join("old"))?,
    };
    Ok(())
}

/// A rank whose program is at its end while the others train on.
fn leaving(world: World) -> Result<(), Error> {
    let model = model(&parameters(DType::BF16));
    let mut state = Setup::over(&world).build(AdamW::new(0.1), &model)?;
    for call in 0..if world.rank() == 1 { 2 } else { 4 } {
        update(&mut state, &model, &gradients(call, 0, DType::BF16))?;
    }
    Ok(())
}

/// Saves to one path until it is killed.
fn saving(world: World) -> Result<(), Error> {
    let model = model(&[
        random(1, &[300_000], DType::BF16, &Device::Cpu),
        random(2, &[5], DType::BF16, &Device::Cpu),
    ]);
    let mut state = Setup::over(&world).build(MixedPrecision::new(DType::F32, AdamW::new(0.1)), &model)?;
    let grads = support::common::grads([Some(random(3, &[300_000], DType::BF16, &Device::Cpu)), None]);
    for step in 1u64.. {
        update(&mut state, &model, &grads)?;
        Checkpoint::new(&state)
            .model(&model)
            .bytes("step", step.to_string())
            .save(folder().join("file"))?;
    }
    Ok(())
}

/// Kills a rank of a job that saves all the time. The file is a whole one.
fn killed(at: u64) -> Result<(), String> {
    let running = Job::new("saving", 2).start();
    let (file, started) = (running.folder.path().join("file"), Instant::now());
    while !file.exists() {
        if started.elapsed() > LIMIT {
            return Err(format!(
                "nothing was saved\n{}",
                running.finish(Duration::ZERO).err().unwrap_or_default()
            ));
        }
        std::thread::sleep(Duration::from_millis(1));
    }
    // Places that are spread over several saves, however long one takes.
    std::thread::sleep(Duration::from_micros(at * 7919 % 60_000));
    let ranks = pids(running.folder.path());
    let before = step_of(&file)?;
    send("KILL", ranks[at as usize % ranks.len()]);
    let killed = Instant::now();
    let finished = running.finish(started.elapsed() + LIMIT)?;
    if killed.elapsed() > LIMIT || finished.status.success() {
        return Err(format!("{} after {:?}", finished.status, killed.elapsed()));
    }
    let after = step_of(&file)?;
    if after >= before {
        Ok(())
    } else {
        Err(format!("step {after} after {before}"))
    }
}

/// The step that a whole file says.
fn step_of(file: &Path) -> Result<u64, String> {
    let checkpoint = CheckpointFile::open(file).map_err(|error| error.to_string())?;
    let step = checkpoint.bytes("step").map_err(|error| error.to_string())?;
    let step = step.and_then(|step| String::from_utf8(step).ok()?.parse().ok());
    step.ok_or_else(|| "no step".to_string())
}

/// A second start of MPI is an error, a second world is none.
fn nested() -> ExitCode {
    rank(|world| {
        let error = run(|_| Ok::<(), Error>(()))
            .expect_err("a second start")
            .to_string();
        assert!(error.contains("World::new"), "{error}");
        let second = World::new()?;
        assert_eq!((second.rank(), second.size()), (world.rank(), world.size()));
        let model = model(&parameters(DType::BF16));
        let mut states = [&world, &second].map(|world| {
            Setup::over(world)
                .build(AdamW::new(0.1), &model)
                .expect("a state")
        });
        states
            .iter_mut()
            .try_for_each(|state| update(state, &model, &gradients(0, 0, DType::BF16)).map(drop))
    })
}

/// A program that has initialised MPI has a world, until it ends MPI.
fn own_start() -> ExitCode {
    let (universe, _) = mpi::initialize_with_threading(mpi::Threading::Serialized).expect("the first start");
    let world = World::new().expect("a world");
    letters::call(&world, 3, 1).expect("a call");
    drop(universe);
    let mut nothing: Vec<Vec<&mut [u8]>> = (0..world.size()).map(|_| Vec::new()).collect();
    let error = world
        .gather(&[&[1]], &mut nothing)
        .expect_err("after the end")
        .to_string();
    assert!(
        error.contains("MPI has ended") && error.contains("Universe"),
        "{error}"
    );
    let error = World::new().expect_err("after the end").to_string();
    assert!(error.contains("MPI has ended"), "{error}");
    ExitCode::SUCCESS
}

/// What MPI was started for, if it says so, has to be calls from any thread.
fn one_thread() -> ExitCode {
    let (_universe, provided) =
        mpi::initialize_with_threading(mpi::Threading::Single).expect("the first start");
    let is_refused = World::new().is_err_and(|error| {
        error
            .to_string()
            .contains("for calls from one thread only; write `let (_universe, _) = mpi::initialize")
    });
    assert_eq!(is_refused, provided < mpi::Threading::Serialized);
    assert_eq!(provided, mpi::Threading::Single, "else this has tested nothing");
    ExitCode::SUCCESS
}
