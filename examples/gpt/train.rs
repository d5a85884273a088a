//! The training loop: steps, validation, checkpoints, and what is shown of them.

use std::error::Error;
use std::fs::File;
use std::io::Write;
use std::path::Path;
use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressStyle};
use optimisers::{CheckpointSaver, LeafFigures};

use crate::Args;
use crate::checkpoint;
use crate::text::Text;
use crate::trainer::Trainer;

/// In which steps figures are written.
const FIGURES_EVERY: usize = 10;

/// How a call of [`train`] ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum End {
    /// All steps are done.
    Finished,
    /// `--stop-at` was reached.
    Stopped,
    /// The user wants no more.
    Interrupted,
}

/// Trains until all steps are done, `--stop-at` is reached, or `interrupted` holds on any rank, and saves.
pub(crate) fn train(
    trainer: &mut Trainer,
    saver: &mut CheckpointSaver,
    args: &Args,
    text: &Text,
    interrupted: impl Fn() -> bool,
) -> Result<End, Box<dyn Error>> {
    let Args {
        settings,
        checkpoint_every,
        stop_at,
        figures,
        ..
    } = args;
    let last = stop_at.unwrap_or(settings.steps).min(settings.steps);
    let speaks = trainer.world.is_first();
    let bar = if speaks {
        progress_bar(settings.steps, trainer.history.steps())
    } else {
        ProgressBar::hidden()
    };
    let say = |line: String| {
        if speaks {
            bar.suspend(|| println!("{line}"))
        }
    };
    let mut file = figures
        .as_deref()
        .filter(|_| speaks)
        .map(|path| figures_file(path, args.resume))
        .transpose()?;
    let mut speed = Speed::default();
    let mut saved = trainer.history.steps();
    say(format!(
        "{:>8}  {:>13}  {:>15}  {:>12}",
        "step", "training loss", "validation loss", "characters/s"
    ));
    while trainer.history.steps() < last && !trainer.is_any(interrupted())? {
        let start = Instant::now();
        let wants_figures = figures.is_some() && trainer.history.steps().is_multiple_of(FIGURES_EVERY);
        let found = trainer.step(settings, text, wants_figures)?;
        speed.add(settings.batch * settings.context, start.elapsed());
        let step = trainer.history.steps();
        if let Some(file) = &mut file {
            for leaf in &found {
                let LeafFigures {
                    path,
                    gradient,
                    parameter,
                    update,
                    ..
                } = leaf;
                writeln!(
                    file,
                    "{step},{path},{gradient:e},{parameter:e},{update:e},{:e}",
                    leaf.ratio()
                )?;
            }
        }
        bar.set_position(step as u64);
        bar.set_message(format!(
            "loss {:.3}  {:.0} characters/s",
            trainer.history.train_loss(),
            speed.per_second()
        ));

        if step.is_multiple_of(settings.evaluate_every) || step == settings.steps {
            let loss = trainer.validation_loss(settings, text)?;
            trainer.history.validation.push((step, loss));
            let train_loss = trainer.history.train_loss();
            say(format!(
                "{step:>8}  {train_loss:>13.4}  {loss:>15.4}  {:>12.0}",
                speed.per_second()
            ));
        }
        if step.is_multiple_of(*checkpoint_every) {
            checkpoint::save(saver, trainer, settings, text)?;
            saved = step;
        }
    }
    bar.finish_and_clear();
    let step = trainer.history.steps();
    if saved < step {
        checkpoint::save(saver, trainer, settings, text)?;
    }
    saver.wait()?;
    Ok(match step {
        _ if step >= settings.steps => End::Finished,
        _ if step >= last => End::Stopped,
        _ => End::Interrupted,
    })
}

/// A file to which figures are appended.
fn figures_file(path: &Path, resumed: bool) -> std::io::Result<File> {
    let mut file = File::options()
        .create(true)
        .write(true)
        .append(resumed)
        .truncate(!resumed)
        .open(path)?;
    if file.metadata()?.len() == 0 {
        writeln!(file, "step,path,gradient,parameter,update,ratio")?;
    }
    Ok(file)
}

/// Characters and the time they took, the steps alone.
#[derive(Default)]
struct Speed {
    characters: usize,
    time: Duration,
}

impl Speed {
    fn add(&mut self, characters: usize, time: Duration) {
        self.characters += characters;
        self.time += time;
    }

    fn per_second(&self) -> f64 {
        self.characters as f64 / self.time.as_secs_f64()
    }
}

/// A bar on stderr; it stays hidden where stderr is not a terminal.
fn progress_bar(steps: usize, done: usize) -> ProgressBar {
    let bar = ProgressBar::new(steps as u64).with_position(done as u64);
    if let Ok(style) = ProgressStyle::with_template("{bar:40.cyan/blue} step {pos}/{len}  {msg}  {eta} left")
    {
        bar.set_style(style);
    }
    bar.reset_eta();
    bar
}
