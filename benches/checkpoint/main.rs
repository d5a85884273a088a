//! How fast a state is saved: against the same number of bytes written from memory in one go and flushed as
//! well, interleaved in one run. And what a save beside the training does to its steps.
//!
//! Two lines, medians over rounds in seconds; the peaks are those of resident memory while saving or loading,
//! the state counted in, as multiples of the state's size (Linux only, else nan):
//! `bench save seconds=<x> plain_seconds=<x> ratio=<x> peak=<x>`
//! `bench load seconds=<x> plain_seconds=<x> ratio=<x> peak=<x>`.
//!
//! With `--steps` it is these lines in place of those, for steps of a forward and backward pass and an update
//! (with `--batch 0` an update alone), each way in turn with steps while nothing is written:
//! `bench steps way=<waits|first|beside> seconds=<x> plain_seconds=<x> ratio=<x> pause=<x> lost=<x> steps=<n>`.
//! A step while a checkpoint is written takes `seconds`, from the call of `save` to the end of the step in
//! which the file is in its place, so the copy counts; else `plain_seconds`. The call itself takes `pause`,
//! and the whole save costs the training `lost` seconds. The ways: `Checkpoint::save` between two steps,
//! `CheckpointSaver::save` between two steps, and the same beside the forward and backward pass.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::time::Instant;

use candle_core::{DType, Device, Tensor, Var};
use clap::Parser;
use optimisers::{Adam, Checkpoint, CheckpointFile, CheckpointSaver, Result, StateTree, setup, update};

/// Measures saving and loading against plain files.
#[derive(Parser)]
struct Options {
    /// The size of the state in millions of bytes.
    #[arg(long, default_value_t = 1000)]
    megabytes: usize,
    /// Measures steps beside a save.
    #[arg(long)]
    steps: bool,
    /// Rows of the input of a step; with 0 the update alone is measured.
    #[arg(long, default_value_t = 64)]
    batch: usize,
    /// Rounds; the median is reported.
    #[arg(long, default_value_t = 7, value_parser = clap::value_parser!(u32).range(1..))]
    rounds: u32,
    /// Where to write; else the folder for temporary files.
    #[arg(long)]
    folder: Option<PathBuf>,
    /// Passed by cargo.
    #[arg(long, hide = true)]
    bench: bool,
}

/// Elements of a leaf; its two moments take 32 MB.
const LEAF: usize = 4_000_000;

/// A state whose memory is all in use.
fn state(megabytes: usize) -> Result<StateTree> {
    let leaves = (megabytes * 1_000_000).div_ceil(8 * LEAF);
    let model: Vec<Var> = (0..leaves)
        .map(|_| Var::zeros(LEAF, DType::F32, &Device::Cpu))
        .collect::<candle_core::Result<_>>()?;
    let mut state = setup(Adam::new(1e-3), &model)?;
    let gradient = Tensor::randn(0f32, 1.0, LEAF, &Device::Cpu)?;
    update(
        &mut state,
        &model,
        &(0..leaves)
            .map(|i| (i.to_string(), gradient.clone()))
            .collect::<BTreeMap<_, _>>(),
    )?;
    Ok(state)
}

/// What a save does for the file system, without making anything of a state.
fn write_plain(path: &Path, bytes: &[u8]) -> std::io::Result<()> {
    let temporary = path.with_extension("plain");
    let mut file = File::create(&temporary)?;
    file.write_all(bytes)?;
    file.sync_all()?;
    fs::rename(&temporary, path)?;
    File::open(path.parent().unwrap_or(path))?.sync_all()
}

/// Bytes of resident memory, now or at the peak since [`forget_peak`].
fn resident(field: &str) -> f64 {
    let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status
        .lines()
        .find_map(|line| line.strip_prefix(field)?.strip_prefix(':'));
    let kilobytes = line.and_then(|line| line.split_whitespace().next()?.parse::<f64>().ok());
    kilobytes.map_or(f64::NAN, |kilobytes| 1024.0 * kilobytes)
}

fn forget_peak() {
    let _ = fs::write("/proc/self/clear_refs", "5");
}

/// Samples of one of two ways.
#[derive(Default)]
struct Samples {
    seconds: Vec<f64>,
    /// More resident memory than before, in bytes.
    memory: Vec<f64>,
}

impl Samples {
    fn take<T, E>(&mut self, work: impl FnOnce() -> std::result::Result<T, E>) -> std::result::Result<T, E> {
        forget_peak();
        let before = resident("VmRSS");
        let start = Instant::now();
        let result = work();
        self.seconds.push(start.elapsed().as_secs_f64());
        self.memory.push(resident("VmHWM") - before);
        result
    }
}

fn median(samples: &[f64]) -> f64 {
    let mut samples = samples.to_vec();
    samples.sort_by(f64::total_cmp);
    samples[samples.len() / 2]
}

fn report(name: &str, ours: &Samples, plain: &Samples, state: usize) {
    let (seconds, plain_seconds) = (median(&ours.seconds), median(&plain.seconds));
    let peak = ours.memory.iter().copied().fold(f64::NAN, f64::max) / state as f64 + 1.0;
    println!(
        "bench {name} seconds={seconds:.3} plain_seconds={plain_seconds:.3} ratio={:.2} peak={peak:.3}",
        seconds / plain_seconds
    );
}

/// A network of square matrices, and what a step of it needs.
struct Training {
    model: Vec<Var>,
    state: StateTree,
    input: Tensor,
    /// The gradients of steps that are an update alone.
    fixed: Option<BTreeMap<String, Tensor>>,
}

/// The rows and columns of a matrix, whose two moments take 32 MB.
const WIDTH: usize = 2000;

type Gradients = std::result::Result<BTreeMap<String, Tensor>, candle_core::Error>;

impl Training {
    fn new(options: &Options) -> Result<Self> {
        let layers = (options.megabytes * 1_000_000).div_ceil(8 * WIDTH * WIDTH);
        let deviation = 1.0 / (WIDTH as f64).sqrt();
        let matrix = |_| Var::randn_f64(0.0, deviation, (WIDTH, WIDTH), DType::F32, &Device::Cpu);
        let model: Vec<Var> = (0..layers).map(matrix).collect::<candle_core::Result<_>>()?;
        let state = setup(Adam::new(1e-5), &model)?;
        let input = Tensor::randn(0f32, 1.0, (options.batch.max(1), WIDTH), &Device::Cpu)?;
        let mut training = Training {
            model,
            state,
            input,
            fixed: None,
        };
        if options.batch == 0 {
            training.fixed = Some(training.gradients()?);
        }
        Ok(training)
    }

    fn gradients(&self) -> Gradients {
        if let Some(fixed) = &self.fixed {
            return Ok(fixed.clone());
        }
        let output = self
            .model
            .iter()
            .try_fold(self.input.clone(), |x, matrix| x.matmul(matrix)?.tanh())?;
        let mut found = output.sqr()?.mean_all()?.backward()?;
        let of = |(i, x): (usize, &Var)| Some((i.to_string(), found.remove(x)?));
        Ok(self.model.iter().enumerate().filter_map(of).collect())
    }

    fn update(&mut self, gradients: Gradients) -> Result<()> {
        update(&mut self.state, &self.model, &gradients?).map(drop)
    }

    fn checkpoint(&self) -> Checkpoint<'_> {
        Checkpoint::new(&self.state).model(&self.model)
    }
}

/// The ways to save during a training.
const WAYS: [&str; 3] = ["waits", "first", "beside"];

/// Saves in one of the ways and steps until the file is in its place. Returns the seconds of a step, those of
/// the call that saves, and how many steps there were.
fn save_and_step(
    way: &str,
    training: &mut Training,
    saver: &mut CheckpointSaver,
    number: u64,
    path: &Path,
) -> Result<(f64, f64, usize)> {
    let start = Instant::now();
    let (gradients, pause) = match way {
        "waits" => {
            training.checkpoint().save(path)?;
            (training.gradients(), start.elapsed())
        }
        "first" => {
            saver.save(number, training.checkpoint())?;
            let pause = start.elapsed();
            (training.gradients(), pause)
        }
        _ => {
            let training = &*training;
            std::thread::scope(|threads| {
                let copied =
                    threads.spawn(|| saver.save(number, training.checkpoint()).map(|_| start.elapsed()));
                let gradients = training.gradients();
                Ok::<_, optimisers::Error>((gradients, copied.join().expect("no panic")?))
            })?
        }
    };
    training.update(gradients)?;
    let mut steps = 1;
    while way != "waits" && saver.is_saving() {
        let gradients = training.gradients();
        training.update(gradients)?;
        steps += 1;
    }
    Ok((
        start.elapsed().as_secs_f64() / steps as f64,
        pause.as_secs_f64(),
        steps,
    ))
}

fn steps(options: &Options, folder: &Path) -> std::result::Result<(), Box<dyn std::error::Error>> {
    /// Steps while nothing is written, in each round.
    const PLAIN: usize = 3;
    let mut training = Training::new(options)?;
    let mut saver = CheckpointSaver::new(folder.join("run")).keep_last(1);
    let mut samples = WAYS.map(|_| [const { Vec::new() }; 4]);
    // The first copy is into memory that is new to the process.
    save_and_step("first", &mut training, &mut saver, 0, &folder.join("plain"))?;
    for round in 0..options.rounds {
        for (way, samples) in WAYS.iter().zip(&mut samples) {
            let start = Instant::now();
            for _ in 0..PLAIN {
                let gradients = training.gradients();
                training.update(gradients)?;
            }
            let plain = start.elapsed().as_secs_f64() / PLAIN as f64;
            let (seconds, pause, steps) = save_and_step(
                way,
                &mut training,
                &mut saver,
                1 + u64::from(round),
                &folder.join("plain"),
            )?;
            saver.wait()?;
            [seconds, plain, pause, steps as f64]
                .into_iter()
                .zip(samples)
                .for_each(|(sample, samples)| samples.push(sample));
        }
    }
    println!(
        "state_bytes={} layers={} batch={} rounds={}",
        training.state.bytes(),
        training.model.len(),
        options.batch,
        options.rounds
    );
    for (way, samples) in WAYS.iter().zip(&samples) {
        let [seconds, plain, pause, steps] = samples.each_ref().map(|samples| median(samples));
        let ratio = seconds / plain;
        let lost = (seconds - plain) * steps;
        println!(
            "bench steps way={way} seconds={seconds:.3} plain_seconds={plain:.3} ratio={ratio:.2} \
             pause={pause:.3} lost={lost:.3} steps={steps}"
        );
    }
    Ok(())
}

fn main() -> std::result::Result<(), Box<dyn std::error::Error>> {
    let options = Options::parse();
    let folder = match &options.folder {
        Some(folder) => tempfile::tempdir_in(folder)?,
        None => tempfile::tempdir()?,
    };
    if options.steps {
        return steps(&options, folder.path());
    }
    let (path, plain_path) = (folder.path().join("run"), folder.path().join("plain"));
    let mut state = state(options.megabytes)?;
    Checkpoint::new(&state).save(&path)?;
    let bytes = fs::read(&path)?;
    println!(
        "state_bytes={} file_bytes={} rounds={}",
        state.bytes(),
        bytes.len(),
        options.rounds
    );

    let (mut save, mut plain) = (Samples::default(), Samples::default());
    for round in 0..options.rounds {
        // By turns who goes first: the disk may still be busy with what came before.
        if round % 2 == 0 {
            save.take(|| Checkpoint::new(&state).save(&path))?;
        }
        plain.take(|| write_plain(&plain_path, &bytes))?;
        if round % 2 == 1 {
            save.take(|| Checkpoint::new(&state).save(&path))?;
        }
    }
    drop(bytes);
    report("save", &save, &plain, state.bytes());

    let (mut load, mut plain) = (Samples::default(), Samples::default());
    for _ in 0..options.rounds {
        load.take(|| CheckpointFile::open(&path).and_then(|file| file.restore(&mut state)))?;
        drop(plain.take(|| fs::read(&path))?);
    }
    report("load", &load, &plain, state.bytes());
    Ok(())
}
