//! Trains a small transformer, character by character, on this crate's own sources or on a text of yours, and
//! lets it write some.
//!
//! Its matrices are bf16 (or f16, or f32), its norms f32: a model of mixed dtypes under one optimiser,
//! `MixedPrecision` around `ClipGlobalNorm` and a rule, with a learning rate that follows a schedule. The run
//! is saved every so often, and one that was interrupted goes on as if it had not been, to the last bit.
//!
//! Run with `cargo run --release --example gpt`; start reading at `trainer.rs`.

#[path = "../support/chart.rs"]
mod chart;
mod checkpoint;
mod compare;
#[path = "../support/device.rs"]
mod device;
mod history;
mod model;
#[path = "../support/picture.rs"]
mod picture;
mod plot;
#[path = "../support/random.rs"]
mod random;
#[path = "../support/ranks.rs"]
mod ranks;
mod rules;
mod sample;
mod settings;
mod sources;
mod text;
mod train;
mod trainer;
#[path = "../support/variable.rs"]
mod variable;

use std::error::Error;
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use candle_core::Device;
use clap::Parser;

use checkpoint::Saved;
use device::DeviceName;
use optimisers::CheckpointSaver;
use random::Random;
use ranks::{Ranks, World};
use sample::Sample;
use settings::Settings;
use text::Text;
use train::End;
use trainer::Trainer;

/// What a shell expects of a program that Ctrl-C ended.
const INTERRUPTED: u8 = 130;

/// Trains a small transformer, character by character, on this crate's sources or another text, and lets it
/// write some.
///
/// With --micro-batches 8 and --ranks 2, 4 or 8 several threads train it together, with the losses of one but
/// for the rounding of sums.
/// So do the processes of `mpirun -n 2 gpt --micro-batches 8 --ranks mpi`, on one machine or on several that
/// share their files.
///
/// Ctrl-C saves the run and stops; a second Ctrl-C stops at once. With --resume and the same options it goes
/// on, and ends with the same numbers as if it had not been interrupted.
///
/// candle gets one thread beside those of its matrix products; CANDLE_NUM_THREADS in the environment can give
/// it more, which pays with wide networks on idle processors.
#[derive(Parser)]
struct Args {
    #[command(flatten)]
    settings: Settings,

    /// Who shares the micro-batches and the optimiser's state: so many threads, or `mpi`, the processes that
    /// `mpirun` has started. Their number must divide that of the micro-batches. How many
    /// they are changes the last bits of the sum of more than two micro-batches
    #[arg(long, default_value = "1")]
    ranks: Ranks,

    /// Where to train. A run can be resumed on another device, which rounds sums in another way
    #[arg(long, value_enum, default_value_t = DeviceName::Cpu)]
    device: DeviceName,

    /// A text in UTF-8 to train on, its last tenth for validation; this crate's sources if not given
    #[arg(long)]
    text: Option<PathBuf>,

    /// The name of the files that keep the run, each with the step in it: gpt-000000100.safetensors
    #[arg(long, default_value = "gpt.safetensors")]
    checkpoint: PathBuf,

    /// Saves the run every so many steps, and at the end, while the training goes on
    #[arg(long, default_value_t = 100, value_parser = settings::steps())]
    checkpoint_every: usize,

    /// Keeps so many of the last checkpoints
    #[arg(long, default_value_t = 2, value_parser = settings::steps())]
    keep_last: usize,

    /// Goes on with the run of the newest checkpoint that is whole
    #[arg(long)]
    resume: bool,

    /// Starts anew even if there are checkpoints, and removes them
    #[arg(long, conflicts_with = "resume")]
    overwrite: bool,

    /// Stops after this step as Ctrl-C would
    #[arg(long)]
    stop_at: Option<usize>,

    /// Trains with each rule (or that of --rule) and so many seeds, and prints what came of it as a table;
    /// nothing is saved
    #[arg(long, conflicts_with_all = ["resume", "overwrite", "stop_at", "seed", "figures"], value_parser = clap::value_parser!(u64).range(1..))]
    compare: Option<u64>,

    /// Writes the norms of each parameter, its gradient and its update to this file, as comma-separated
    /// values, in every tenth step. A run that is resumed appends, and steps after its last checkpoint stand
    /// twice
    #[arg(long)]
    figures: Option<PathBuf>,

    /// Characters to write at the end
    #[arg(long, default_value_t = 500)]
    sample: usize,

    /// What the sample starts with; the text's first character if not given
    #[arg(long)]
    prompt: Option<String>,

    /// How freely the sample is drawn; 0 takes the likeliest character each time
    #[arg(long, default_value_t = 0.8, value_parser = settings::not_negative, allow_negative_numbers = true)]
    temperature: f64,

    /// Where to write the picture of the losses
    #[arg(long, default_value = "gpt-loss.png", value_parser = picture::png_path)]
    out: PathBuf,
}

fn main() -> ExitCode {
    give_candle_one_thread();
    let args: Args = ranks::options();
    ranks::on_each(
        args.ranks,
        |rank, ranks| Start::new(&args, rank, ranks),
        |start, world| rank(&args, start, world),
    )
}

/// candle's own threads wait for each other in a loop after each operation. With networks as small as these
/// they gain nothing, and where other programs keep the processor busy they take ten times as long.
#[allow(unsafe_code)]
fn give_candle_one_thread() {
    const THREADS: &str = "CANDLE_NUM_THREADS";
    if std::env::var_os(THREADS).is_none() {
        // SAFETY: no other thread is there yet that could read the environment.
        unsafe { std::env::set_var(THREADS, "1") };
    }
}

/// What all ranks of a process start with.
struct Start {
    text: Text,
    prompt: Vec<u32>,
    device: Device,
    saved: Option<Saved>,
    interrupted: Arc<AtomicBool>,
}

impl Start {
    /// Refuses what can be refused before the training.
    fn new(args: &Args, rank: usize, ranks: usize) -> Result<Self, Box<dyn Error>> {
        let Args {
            settings,
            checkpoint,
            out,
            ..
        } = args;
        settings.check(ranks)?;
        let text = Text::read(args.text.as_deref())?;
        text.check_context(settings.context)?;
        let prompt = args.prompt.as_deref().filter(|prompt| !prompt.is_empty());
        let prompt = prompt.map_or(Ok(text.start()), |prompt| text.encode(prompt))?;
        let mut saver = CheckpointSaver::new(checkpoint);
        let files = if args.compare.is_none() && !args.resume {
            saver.files()?
        } else {
            Vec::new()
        };
        if let Some((_, file)) = files.last().filter(|_| !args.overwrite) {
            return Err(format!(
                "{} exists: go on with its run by --resume, or remove it by --overwrite",
                file.display()
            )
            .into());
        }
        let device = args.device.open()?;
        let saved = args
            .resume
            .then(|| Saved::open(&mut saver, settings, ranks, &text))
            .transpose()?;
        if rank == 0 {
            picture::check_writable(out)?;
            files
                .iter()
                .try_for_each(|(_, file)| std::fs::remove_file(file))?;
        }
        Ok(Start {
            text,
            prompt,
            device,
            saved,
            interrupted: on_ctrl_c()?,
        })
    }
}

/// A rank's run. Rank 0 speaks for all.
fn rank(args: &Args, start: &Start, world: World) -> Result<ExitCode, Box<dyn Error>> {
    let Args {
        settings,
        checkpoint,
        out,
        ..
    } = args;
    let Start {
        text,
        prompt,
        device,
        saved,
        interrupted,
    } = start;
    if let Some(seeds) = args.compare {
        compare::compare(settings, seeds, text, device, &world)?;
        return Ok(ExitCode::SUCCESS);
    }
    let interrupted = || interrupted.load(Ordering::Relaxed);
    let mut trainer = Trainer::new(settings, text, device, world)?;
    if let Some(saved) = saved {
        saved.resume(&mut trainer, settings)?;
    }
    let mut saver = CheckpointSaver::new(checkpoint).keep_last(args.keep_last);
    if saved.is_none() {
        checkpoint::save(&mut saver, &trainer, settings, text)?;
    }

    if trainer.world.is_first() {
        header(&trainer, text, settings);
    }
    let end = train::train(&mut trainer, &mut saver, args, text, interrupted)?;
    let validation_loss = trainer.validation_loss(settings, text)?;
    let code = if end == End::Interrupted {
        ExitCode::from(INTERRUPTED)
    } else {
        ExitCode::SUCCESS
    };
    if !trainer.world.is_first() {
        return Ok(code);
    }
    if end == End::Finished && args.sample > 0 {
        println!("\nsample, temperature {}:\n", args.temperature);
        let random = Random::new(!settings.seed);
        let sample = Sample {
            length: args.sample,
            temperature: args.temperature,
            prompt,
            context: settings.context,
            random,
        };
        sample.print(&trainer.gpt, text, interrupted)?;
    }
    plot::losses(&trainer.history, trainer.state.elements(), args)?;
    println!("\nlosses: {}", out.display());
    println!(
        "checkpoint: {}",
        saver.path(trainer.history.steps() as u64).display()
    );
    if end != End::Finished {
        println!(
            "stopped after {} of {} steps; the same command with --resume goes on",
            trainer.history.steps(),
            settings.steps
        );
    }
    result(&trainer, validation_loss)?;
    Ok(code)
}

/// What becomes true when the user wants to stop, by Ctrl-C, SIGTERM or SIGHUP. A second time ends the
/// program at once.
fn on_ctrl_c() -> Result<Arc<AtomicBool>, ctrlc::Error> {
    let interrupted = Arc::new(AtomicBool::new(false));
    let seen = interrupted.clone();
    ctrlc::set_handler(move || {
        if seen.swap(true, Ordering::Relaxed) {
            std::process::exit(INTERRUPTED.into());
        }
    })?;
    Ok(interrupted)
}

/// What is about to happen.
fn header(trainer: &Trainer, text: &Text, settings: &Settings) {
    let (train, validation) = text.lengths();
    let (parameters, bytes) = (trainer.state.elements(), trainer.state.bytes());
    println!(
        "{train} characters to train on and {validation} to validate with, {} different ones",
        text.characters()
    );
    let (steps, seed, ranks) = (settings.steps, settings.seed, trainer.world.size());
    println!(
        "{parameters} parameters, {bytes} bytes of optimiser state on rank 0 of {ranks}, {steps} steps, \
         seed {seed}\n"
    );
}

/// The result, one line for programs.
fn result(trainer: &Trainer, validation_loss: f32) -> Result<(), Box<dyn Error>> {
    let (step, train_loss) = (trainer.history.steps(), trainer.history.train_loss());
    let crc = trainer.parameters_crc()?;
    println!(
        "result step={step} train_loss={train_loss} validation_loss={validation_loss} \
         parameters_crc={crc:08x}"
    );
    Ok(())
}
