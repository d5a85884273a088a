//! Saving a run and going on with it: files with the parameters, the optimiser's state, and facts of the run.

use std::error::Error;
use std::path::Path;

use optimisers::{Checkpoint, CheckpointFile, CheckpointSaver, LossScaler};
use serde::Serialize;
use serde_json::{Map, Value};

use crate::history::History;
use crate::settings::Settings;
use crate::text::Text;
use crate::trainer::Trainer;

/// The names of the bytes.
const RUN: &str = "run";
const HISTORY: &str = "history";
/// What may change: the numbers do not depend on it.
const RANKS: &str = "ranks";

/// What a run computes, to compare it with another's. The names are those of the options.
#[derive(Serialize)]
struct Run<'a> {
    #[serde(flatten)]
    settings: &'a Settings,
    ranks: usize,
    text: String,
}

/// Saves the run as it is now; all ranks call it. The file is written while the training goes on. It is there
/// as a whole or not at all, so an interruption leaves the one before.
pub(crate) fn save(
    saver: &mut CheckpointSaver,
    trainer: &Trainer,
    settings: &Settings,
    text: &Text,
) -> Result<(), Box<dyn Error>> {
    let run = Run {
        settings,
        ranks: trainer.world.size(),
        text: text.fingerprint(),
    };
    let checkpoint = Checkpoint::new(&trainer.state)
        .model(&trainer.gpt)
        .scaler(&trainer.scaler)
        .bytes(RUN, serde_json::to_vec(&run)?)
        .bytes(HISTORY, serde_json::to_vec(&trainer.history)?);
    saver.save(trainer.history.steps() as u64, checkpoint)?;
    Ok(())
}

/// A run in a file that can go on here.
pub(crate) struct Saved {
    file: CheckpointFile,
    /// How many there were when it was saved.
    ranks: usize,
    history: History,
    scaler: LossScaler,
}

impl Saved {
    /// The run of the newest file that is whole, which must have been started with the same settings and
    /// text. Files that are passed over are named on stderr.
    pub(crate) fn open(
        saver: &mut CheckpointSaver,
        settings: &Settings,
        ranks: usize,
        text: &Text,
    ) -> Result<Self, Box<dyn Error>> {
        let newest = saver.newest()?;
        let none = || {
            format!(
                "no whole checkpoint such as {}: start a new run without --resume",
                saver.path(0).display()
            )
        };
        let found = newest.found.ok_or_else(none)?;
        let (path, file) = (saver.path(found.0), found.1);
        let path = &*path;
        let lacks = |name| {
            format!(
                "{} is no checkpoint of this example: it has no {name}",
                path.display()
            )
        };
        let saved =
            |name| -> Result<Vec<u8>, Box<dyn Error>> { Ok(file.bytes(name)?.ok_or_else(|| lacks(name))?) };
        let before: Map<String, Value> = serde_json::from_slice(&saved(RUN)?)?;
        check_same(
            path,
            &before,
            &Run {
                settings,
                ranks,
                text: text.fingerprint(),
            },
        )?;
        let history = serde_json::from_slice(&saved(HISTORY)?)?;
        let scaler = file.scaler()?.ok_or_else(|| lacks("loss scaler"))?;
        let ranks = before
            .get(RANKS)
            .and_then(Value::as_u64)
            .map_or(ranks, |ranks| ranks as usize)
            .max(1);
        Ok(Saved {
            file,
            ranks,
            history,
            scaler,
        })
    }

    /// Takes over the run; all ranks call it.
    pub(crate) fn resume(&self, trainer: &mut Trainer, settings: &Settings) -> Result<(), Box<dyn Error>> {
        // On another number of ranks each of them has more or fewer micro-batches from now on.
        trainer.share_micro_batches(settings, self.ranks)?;
        self.file.restore_with_model(&mut trainer.state, &trainer.gpt)?;
        trainer.share_micro_batches(settings, trainer.world.size())?;
        (trainer.history, trainer.scaler) = (self.history.clone(), self.scaler.clone());
        Ok(())
    }
}

/// Fails where the run of the file and this one would not compute the same.
fn check_same(path: &Path, before: &Map<String, Value>, now: &Run) -> Result<(), Box<dyn Error>> {
    let Value::Object(now) = serde_json::to_value(now)? else {
        return Err("a run is described by its options".into());
    };
    let shown = |value: Option<&Value>| {
        value.map_or("nothing".to_string(), |value| value.to_string().replace('"', ""))
    };
    let different: Vec<String> = now
        .iter()
        .filter(|(name, value)| *name != RANKS && before.get(*name) != Some(value))
        .map(|(name, value)| {
            format!(
                "--{name} {} (now {})",
                shown(before.get(name)),
                shown(Some(value))
            )
        })
        .collect();
    if different.is_empty() {
        return Ok(());
    }
    let (path, different) = (path.display(), different.join(", "));
    Err(format!(
        "{path} is of a run with {different}: repeat its options to resume it, or start a new run with \
         another --checkpoint"
    )
    .into())
}
