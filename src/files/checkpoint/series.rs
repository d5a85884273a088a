//! The files of a series of checkpoints: one for each step at which a program saved.

use std::ffi::{OsStr, OsString};
use std::fs;
use std::io::ErrorKind::NotFound;
use std::path::{Path, PathBuf};
use std::time::Duration;

use super::replace::{abandoned, failed, folder, prefix, remove_abandoned};
use crate::error::{Error, ErrorKind, Result};

/// The digits of a step in a file's name, so that names are in the order of steps.
const DIGITS: usize = 9;

/// Files in one folder, named by `path` and a step: `run-000000100.safetensors`.
#[derive(Clone, Debug)]
pub(super) struct Series {
    pub(super) path: PathBuf,
}

impl Series {
    /// The path of a step's file.
    pub(super) fn path(&self, step: u64) -> PathBuf {
        self.path.with_file_name(self.name(step))
    }

    fn name(&self, step: u64) -> OsString {
        let mut name = self.path.file_stem().unwrap_or_default().to_os_string();
        name.push(format!("-{step:0DIGITS$}"));
        if let Some(extension) = self.path.extension() {
            name.push(".");
            name.push(extension);
        }
        name
    }

    /// The step in the name of a file, if it is one of the series.
    fn step(&self, name: &OsStr) -> Option<u64> {
        let stem = self.path.file_stem()?.as_encoded_bytes();
        let digits = name
            .as_encoded_bytes()
            .strip_prefix(stem)?
            .strip_prefix(b"-")?
            .split(|byte| !byte.is_ascii_digit())
            .next()?;
        let step = std::str::from_utf8(digits).ok()?.parse().ok()?;
        // Compared as a whole, so that no other file with digits after the stem is taken for one of these.
        (self.name(step) == name).then_some(step)
    }

    /// The steps of all files, in order.
    ///
    /// # Errors
    /// If the path names no file, or its folder cannot be read.
    pub(super) fn steps(&self) -> Result<Vec<u64>> {
        let in_file = |error: Error| error.in_file("checkpoint", &self.path);
        if self.path.file_name().is_none() {
            let unnamed = Error::new(ErrorKind::Argument, "the path of a series names no file");
            return Err(in_file(unnamed.with_remedy("give a path such as `folder/run.safetensors`")));
        }
        let read = || {
            fs::read_dir(folder(&self.path))?
                .map(|entry| Ok(self.step(&entry?.file_name())))
                .collect::<std::io::Result<Vec<_>>>()
        };
        let steps = read().map_err(|error| in_file(failed("read the folder")(error)))?;
        let mut steps: Vec<u64> = steps.into_iter().flatten().collect();
        steps.sort_unstable();
        Ok(steps)
    }

    /// The unfinished files of killed processes, each with its step.
    pub(super) fn unfinished(&self) -> Vec<(u64, PathBuf)> {
        let found =
            abandoned(&folder(&self.path), |prefix| self.step_of_temporary(prefix).is_some(), Duration::ZERO);
        let mut found: Vec<_> = found
            .into_iter()
            .filter_map(|(prefix, path)| Some((self.step_of_temporary(&prefix)?, path)))
            .collect();
        found.sort();
        found
    }

    /// Removes unfinished files of all steps.
    pub(super) fn remove_unfinished(&self) {
        remove_abandoned(&folder(&self.path), |prefix| self.step_of_temporary(prefix).is_some());
    }

    /// The step in the prefix of a temporary file; `None` if the prefix is cut before the end of the step.
    fn step_of_temporary(&self, of_file: &str) -> Option<u64> {
        let step = self.step(OsStr::new(of_file.strip_prefix('.')?.strip_suffix('.')?))?;
        (prefix(&self.path(step)) == of_file).then_some(step)
    }

    /// Removes the files of steps before `step` for which `is_counted` holds, except the last `others` of
    /// them.
    pub(super) fn remove_before(
        &self,
        step: u64,
        others: usize,
        is_counted: impl Fn(u64) -> bool,
    ) -> Result<()> {
        let mut before: Vec<u64> =
            self.steps()?.into_iter().filter(|other| *other < step && is_counted(*other)).collect();
        before.truncate(before.len().saturating_sub(others));
        for old in before {
            remove(&self.path(old))?;
        }
        Ok(())
    }
}

fn remove(path: &Path) -> Result<()> {
    match fs::remove_file(path) {
        Err(error) if error.kind() != NotFound => {
            let failed = failed("remove an old checkpoint")(error).in_file("checkpoint", path);
            Err(failed.with_remedy("the new one is whole and in its place"))
        }
        _ => Ok(()),
    }
}
