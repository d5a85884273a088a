//! [`CheckpointSaver`]: a series of files, which a thread writes while the training goes on.
//!
//! Without other ranks a save has these steps:
//! 1. Wait for the thread of the previous save, and return the thread's error if there is one.
//! 2. Refuse the step if there is a whole file of a later step (`check_later_files`).
//! 3. Copy everything (`Snapshot`) into the memory of the previous copy. After that the training may change
//!    state and model.
//! 4. In a thread: remove unfinished files, write the copy, and only then remove old files, so that there is
//!    a whole file at any time.

use std::collections::BTreeSet;
use std::ffi::{OsStr, OsString};
use std::io::ErrorKind::NotFound;
use std::path::{Path, PathBuf};
use std::thread::{self, JoinHandle};
use std::time::Duration;
use std::{fs, io};

use super::file::CheckpointFile;
use super::layout::{CopiedTensor, FileLayout};
use super::replace::{abandoned_files, folder_of, io_failure, prefix_for, remove_abandoned};
use super::save::{Checkpoint, file_warnings};
use super::write::{FileContent, NonFiniteEntry, write};
use crate::error::warning::Warning;
use crate::error::{Error, ErrorKind, Result};
use crate::ranks::{Call, StateWorld};

/// Saves checkpoints while the training goes on, each in a file of its own.
///
/// [`save`](CheckpointSaver::save) copies what the next step would overwrite, and returns. A thread writes
/// the copy as [`Checkpoint::save`] does: if the process is killed, a file is there whole or not at all. One
/// file is written at a time. If the write fails, the next `save` or [`wait`](CheckpointSaver::wait) returns
/// the error.
///
/// All files are in one folder. For `run.safetensors` they are `run-000000100.safetensors` and so on, with
/// the number of the step. [`newest`](CheckpointSaver::newest) opens the last file that is whole.
///
/// ```
/// use candle_core::{DType, Device, Var};
/// use optimisers::{Adam, Checkpoint, CheckpointSaver, setup, update};
///
/// # let folder = tempfile::tempdir()?;
/// # let path = folder.path().join("run.safetensors");
/// let model = vec![Var::ones(3, DType::F32, &Device::Cpu)?];
/// let mut state = setup(Adam::new(0.1), &model)?;
/// let mut saver = CheckpointSaver::new(&path).keep_last(2);
/// let resumed = saver.newest()?.found;
/// if let Some((step, file)) = &resumed {
///     file.restore_with_model(&mut state, &model)?;
///     println!("goes on after step {step}");
/// }
/// for step in resumed.map_or(0, |(step, _)| step) + 1..=40 {
///     update(&mut state, &model, &model[0].sqr()?.sum_all()?.backward()?)?;
///     if step % 10 == 0 {
///         saver.save(step, Checkpoint::new(&state).model(&model))?;
///     }
/// }
/// saver.wait()?;
/// assert_eq!(saver.files()?, [30, 40].map(|step| (step, folder.path().join(format!("run-{step:09}.safetensors")))));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// # What it costs
/// The copy takes as much memory as the file is long, from the first save on until the saver is dropped.
/// `save` makes the copy in about the time in which an optimiser reads and writes the same number of bytes.
/// The first copy takes longer, because the process gets new memory for it. The thread then competes with the
/// training for memory and processors until the file is written.
///
/// # Copying during the next pass
/// A forward and backward pass reads parameters and does not touch the state, so another thread can make the
/// copy during the pass. The borrow checker then allows the next update only after the copy. The overlap pays
/// if processors or memory are idle; `cargo bench --bench checkpoint -- --steps` measures both ways.
///
/// ```
/// # use candle_core::{DType, Device, Var};
/// # use optimisers::{Adam, Checkpoint, CheckpointSaver, setup, update};
/// # let folder = tempfile::tempdir()?;
/// # let model = vec![Var::ones(3, DType::F32, &Device::Cpu)?];
/// # let mut state = setup(Adam::new(0.1), &model)?;
/// # let mut saver = CheckpointSaver::new(folder.path().join("run.safetensors"));
/// # let step = 10;
/// let grads = std::thread::scope(|threads| {
///     let copied = threads.spawn(|| saver.save(step, Checkpoint::new(&state).model(&model)));
///     let grads = model[0].sqr()?.sum_all()?.backward()?;
///     copied.join().expect("the copy")?;
///     Ok::<_, optimisers::Error>(grads)
/// })?;
/// update(&mut state, &model, &grads)?;
/// # saver.wait()?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// # Over ranks
/// All ranks [of a divided state](crate::Setup::over) call `save` with the same arguments. `save` then writes
/// the file before it returns, each rank its parts, because ranks that write have to agree, and cannot agree
/// on training steps at the same time. Rank 0 removes old files.
#[must_use = "nothing is written until `save` is called"]
#[derive(Debug)]
pub struct CheckpointSaver {
    series: Series,
    /// The number of files that stay; all if `None`.
    file_limit: Option<usize>,
    /// The steps of files that were opened and are not whole. These files are neither counted nor removed.
    broken_steps: BTreeSet<u64>,
    unfinished_save: Option<UnfinishedSave>,
    /// Memory for the next copy.
    room: Vec<u8>,
}

/// A file that is being written.
#[derive(Debug)]
struct UnfinishedSave {
    path: PathBuf,
    /// Returns the warnings about the file, and the memory of the copy.
    thread: JoinHandle<(Result<Vec<Warning>>, Vec<u8>)>,
}

/// The newest whole checkpoint of a series, and the files that were passed over.
#[derive(Debug)]
#[non_exhaustive]
pub struct NewestCheckpoint {
    /// The step of the file and the file, if there is one.
    pub found: Option<(u64, CheckpointFile)>,
    /// Why newer files were [passed over](Warning::PassedOver), the newest first.
    pub passed_over: Vec<Warning>,
}

impl CheckpointSaver {
    /// A saver of a series of files, which are named by this path and the step.
    ///
    /// The saver keeps all files, unless [`keep_last`](CheckpointSaver::keep_last) is called.
    pub fn new(path: impl Into<PathBuf>) -> Self {
        let series = Series { path: path.into() };
        CheckpointSaver {
            series,
            file_limit: None,
            broken_steps: BTreeSet::new(),
            unfinished_save: None,
            room: Vec::new(),
        }
    }

    /// Keeps only the last `files` files.
    ///
    /// An older file is removed when the new file is whole and in place, so for a moment there is one more
    /// file. Files that [`newest`](CheckpointSaver::newest) or `save` has found not to be whole are neither
    /// counted nor removed.
    pub fn keep_last(mut self, files: usize) -> Self {
        self.file_limit = Some(files);
        self
    }

    /// Copies a checkpoint, and lets a thread write it to the file of this step.
    ///
    /// Waits first until the previous save is done, and returns the warnings of that save, as
    /// [`wait`](CheckpointSaver::wait) does. A file of this step is replaced.
    ///
    /// # Errors
    /// If the previous save failed: its error is returned once, and nothing is copied. As
    /// [`Checkpoint::save`] for all that is checked before the file is written. If there is a whole file of a
    /// later step, because that file would be taken for the newest. If the folder cannot be read, or
    /// `keep_last` was called with 0.
    pub fn save(&mut self, step: u64, checkpoint: Checkpoint<'_>) -> Result<Vec<Warning>> {
        let (path, state) = (self.series.path(step), checkpoint.state());
        let earlier_warnings = self.wait().and_then(|warnings| {
            // Only rank 0 checks, because other ranks may see changes of a shared folder later.
            if state.world.rank() == 0 {
                self.check_later_files(step)?
            };
            Ok(warnings)
        });
        if state.world.is_divided() {
            // Without this agreement the other ranks would wait in `Checkpoint::save` for a rank that
            // refuses.
            let mut warnings = state.world.settle(Call::Save, earlier_warnings)?;
            warnings.extend(checkpoint.save(&path)?);
            let removed = if state.world.rank() == 0 {
                self.removal(step).run()
            } else {
                Ok(())
            };
            state.world.settle(Call::Saved, removed)?;
            self.broken_steps.remove(&step);
            return Ok(warnings);
        }
        let warnings = earlier_warnings?;
        let snapshot = Snapshot::new(checkpoint, &path, std::mem::take(&mut self.room))?;
        let removal = self.removal(step);
        let target = path.clone();
        let work = move || {
            // Unfinished files of all steps are removed here, because `NewFile` removes only the files of its
            // own step.
            removal.series.remove_unfinished();
            let (warnings, room) = snapshot.write(&target);
            (
                warnings.and_then(|warnings| removal.run().map(|()| warnings)),
                room,
            )
        };
        let thread = thread::Builder::new()
            .name("checkpoint".to_string())
            .spawn(work)
            .map_err(|error| io_failure("start a thread")(error).in_file("checkpoint", &path))?;
        self.unfinished_save = Some(UnfinishedSave { path, thread });
        self.broken_steps.remove(&step);
        Ok(warnings)
    }

    /// Waits until the file that is being written is in place, and older files are removed.
    ///
    /// Returns the [warnings](Warning::NotFinite) about the file, or an empty list if no file is being
    /// written. A saver that is dropped also waits, but can only [log](Warning::NotSaved) an error.
    ///
    /// # Errors
    /// As [`Checkpoint::save`]; if an old file cannot be removed.
    pub fn wait(&mut self) -> Result<Vec<Warning>> {
        let Some(UnfinishedSave { path, thread }) = self.unfinished_save.take() else {
            return Ok(Vec::new());
        };
        let panicked = |_| Error::other("the thread that wrote it has panicked").in_file("checkpoint", &path);
        let (warnings, room) = thread.join().map_err(panicked)?;
        self.room = room;
        warnings
    }

    /// Whether a file is being written, for which a [`save`](CheckpointSaver::save) would wait.
    pub fn is_saving(&self) -> bool {
        self.unfinished_save
            .as_ref()
            .is_some_and(|save| !save.thread.is_finished())
    }

    /// The path of a step's file, whether it is there or not.
    pub fn path(&self, step: u64) -> PathBuf {
        self.series.path(step)
    }

    /// The step and path of each file of the series, in the order of steps, whether it is whole or not.
    ///
    /// # Errors
    /// If the path names no file, or its folder cannot be read.
    pub fn files(&self) -> Result<Vec<(u64, PathBuf)>> {
        Ok(self
            .series
            .steps()?
            .into_iter()
            .map(|step| (step, self.series.path(step)))
            .collect())
    }

    /// Opens the newest file of the series that is whole, and lists the newer files that are not whole.
    ///
    /// A file is passed over if [`CheckpointFile::open`] refuses the file, because it is damaged, cannot be
    /// read, or is of another format. Unfinished files of a killed process are listed as well; a later save
    /// removes such a file when it is older than a minute. Each entry of the list is also logged. Whether the
    /// file fits a state, and whether its numbers are finite, is checked when it is restored.
    ///
    /// Waits first until the previous save is done.
    ///
    /// # Errors
    /// If the previous save failed, or the folder cannot be read.
    pub fn newest(&mut self) -> Result<NewestCheckpoint> {
        self.wait()?;
        let mut newest = NewestCheckpoint {
            found: None,
            passed_over: Vec::new(),
        };
        for (step, path) in self.files()?.into_iter().rev() {
            match CheckpointFile::open(&path) {
                Ok(file) => {
                    newest.found = Some((step, file));
                    break;
                }
                Err(error) => {
                    self.broken_steps.insert(step);
                    newest.passed_over.push(Warning::PassedOver {
                        file: path,
                        reason: error.to_string(),
                    });
                }
            }
        }
        let oldest = newest.found.as_ref().map_or(0, |(step, _)| *step);
        for (_, file) in self
            .series
            .unfinished()
            .into_iter()
            .rev()
            .filter(|(step, _)| *step >= oldest)
        {
            let error = Error::new(
                ErrorKind::File,
                "it is unfinished: the process that wrote it has ended",
            );
            let reason = error.in_file("checkpoint", &file).to_string();
            newest.passed_over.push(Warning::PassedOver { file, reason });
        }
        newest.passed_over.iter().for_each(Warning::log);
        Ok(newest)
    }

    /// Refuses a step if there is a whole file of a later step, which [`Self::newest`] would open instead.
    fn check_later_files(&mut self, step: u64) -> Result<()> {
        if self.file_limit == Some(0) {
            return Err(Error::new(ErrorKind::Argument, "`keep_last` was called with")
                .with_got(0)
                .with_expected("at least 1"));
        }
        for later_step in self
            .series
            .steps()?
            .into_iter()
            .rev()
            .take_while(|other| *other > step)
        {
            let path = self.series.path(later_step);
            if !self.broken_steps.contains(&later_step) && CheckpointFile::open(&path).is_ok() {
                return Err(Error::new(
                    ErrorKind::Argument,
                    "there is a file of a later step, and the step to save is",
                )
                .with_got(step)
                .with_expected(format_args!("at least {later_step}"))
                .with_remedy("go on from the newest file, remove the later files, or save under another path")
                .in_file("checkpoint", &path));
            }
            // The step is remembered, so that the next save does not read the whole damaged file again.
            self.broken_steps.insert(later_step);
        }
        Ok(())
    }

    fn removal(&self, step: u64) -> Removal {
        let mut broken_steps = self.broken_steps.clone();
        broken_steps.remove(&step);
        Removal {
            series: self.series.clone(),
            file_limit: self.file_limit,
            broken_steps,
            step,
        }
    }
}

impl Drop for CheckpointSaver {
    fn drop(&mut self) {
        let file = self
            .unfinished_save
            .as_ref()
            .map(|save| save.path.clone())
            .unwrap_or_default();
        if let Err(error) = self.wait() {
            Warning::NotSaved {
                file,
                reason: error.to_string(),
            }
            .log();
        }
    }
}

/// The removal of old files, once the file of `step` is in place.
struct Removal {
    series: Series,
    file_limit: Option<usize>,
    broken_steps: BTreeSet<u64>,
    step: u64,
}

impl Removal {
    fn run(&self) -> Result<()> {
        let Some(file_limit) = self.file_limit else {
            return Ok(());
        };
        let is_counted = |step| !self.broken_steps.contains(&step);
        // One less, because the new file is one of the files that stay.
        self.series
            .remove_before(self.step, file_limit.saturating_sub(1), is_counted)
    }
}

/// The content of a file, without borrows.
#[derive(Debug)]
struct Snapshot {
    layout: FileLayout,
    tensors: Vec<CopiedTensor>,
    /// The bytes of all tensors.
    room: Vec<u8>,
    /// The numbers of leaves that are not finite. These are in the description and not among the tensors.
    numbers: Vec<NonFiniteEntry>,
    /// The calls in open windows.
    calls: u64,
}

impl Snapshot {
    /// Copies a checkpoint for `path` into `room`, the memory of the previous copy.
    ///
    /// That memory is used again, because memory that is new to the process takes several times as long to fill.
    fn new(checkpoint: Checkpoint<'_>, path: &Path, mut room: Vec<u8>) -> Result<Self> {
        let calls = checkpoint.state().calls;
        checkpoint.with_content(path, |content, numbers| {
            let FileContent { tensors, layout } = content?;
            room.clear();
            // The memory is reserved first, so that a lack of memory is an error of the save and does not end
            // the process.
            let copies = room
                .try_reserve_exact(layout.length as usize - layout.head.len())
                .map_err(io::Error::from)
                .and_then(|()| {
                    tensors
                        .into_iter()
                        .map(|tensor| tensor.copy_to(&mut room))
                        .collect()
                });
            let tensors =
                copies.map_err(|error| io_failure("copy the tensors")(error).in_file("checkpoint", path))?;
            Ok(Snapshot {
                layout,
                tensors,
                room,
                numbers,
                calls,
            })
        })
    }

    /// Writes the file as [`Checkpoint::save`] does. Also returns the memory for the next copy.
    fn write(self, path: &Path) -> (Result<Vec<Warning>>, Vec<u8>) {
        let Snapshot {
            layout,
            tensors,
            room,
            numbers,
            calls,
        } = self;
        let tensors = tensors.into_iter().map(|tensor| tensor.in_room(&room)).collect();
        let warnings = write(
            &StateWorld::ALONE,
            Call::File,
            path,
            Ok(FileContent { tensors, layout }),
        )
        .map(|non_finite_tensors| {
            file_warnings(
                path,
                calls,
                non_finite_tensors.into_iter().chain(numbers).collect(),
            )
        });
        (warnings, room)
    }
}

/// The least number of digits of a step in a file's name. Zeros in front keep names in the order of steps.
const DIGITS: usize = 9;

/// Files in one folder, named by `path` and a step: `run-000000100.safetensors`.
#[derive(Clone, Debug)]
struct Series {
    path: PathBuf,
}

impl Series {
    /// The path of a step's file.
    fn path(&self, step: u64) -> PathBuf {
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

    /// The step in the name of a file, if the file is one of the series.
    fn step(&self, name: &OsStr) -> Option<u64> {
        let stem = self.path.file_stem()?.as_encoded_bytes();
        let digits = name
            .as_encoded_bytes()
            .strip_prefix(stem)?
            .strip_prefix(b"-")?
            .split(|byte| !byte.is_ascii_digit())
            .next()?;
        let step = std::str::from_utf8(digits).ok()?.parse().ok()?;
        // The whole name is compared, so that no other file with digits after the stem belongs to the series.
        (self.name(step) == name).then_some(step)
    }

    /// The steps of all files, in order.
    ///
    /// # Errors
    /// If the path names no file, or its folder cannot be read.
    fn steps(&self) -> Result<Vec<u64>> {
        let in_file = |error: Error| error.in_file("checkpoint", &self.path);
        if self.path.file_name().is_none() {
            let unnamed = Error::new(ErrorKind::Argument, "the path of a series names no file");
            return Err(in_file(
                unnamed.with_remedy("give a path such as `folder/run.safetensors`"),
            ));
        }
        let read_steps = || {
            fs::read_dir(folder_of(&self.path))?
                .map(|entry| Ok(self.step(&entry?.file_name())))
                .collect::<io::Result<Vec<_>>>()
        };
        let steps_of_files = read_steps().map_err(|error| in_file(io_failure("read the folder")(error)))?;
        let mut steps: Vec<u64> = steps_of_files.into_iter().flatten().collect();
        steps.sort_unstable();
        Ok(steps)
    }

    /// The unfinished files of killed processes, each with its step.
    fn unfinished(&self) -> Vec<(u64, PathBuf)> {
        let is_ours = |prefix: &str| self.step_of_temporary(prefix).is_some();
        let mut files: Vec<_> = abandoned_files(&folder_of(&self.path), is_ours, Duration::ZERO)
            .into_iter()
            .filter_map(|(prefix, path)| Some((self.step_of_temporary(&prefix)?, path)))
            .collect();
        files.sort();
        files
    }

    /// Removes unfinished files of all steps.
    fn remove_unfinished(&self) {
        remove_abandoned(&folder_of(&self.path), |prefix| {
            self.step_of_temporary(prefix).is_some()
        });
    }

    /// The step in the prefix of a temporary file; `None` if the prefix is cut before the end of the step.
    fn step_of_temporary(&self, file_prefix: &str) -> Option<u64> {
        let step = self.step(OsStr::new(file_prefix.strip_prefix('.')?.strip_suffix('.')?))?;
        (prefix_for(&self.path(step)) == file_prefix).then_some(step)
    }

    /// Removes the counted files of steps before `step`, except the last `kept_count` files.
    fn remove_before(&self, step: u64, kept_count: usize, is_counted: impl Fn(u64) -> bool) -> Result<()> {
        let mut old_steps: Vec<u64> = self
            .steps()?
            .into_iter()
            .filter(|other| *other < step && is_counted(*other))
            .collect();
        old_steps.truncate(old_steps.len().saturating_sub(kept_count));
        for old_step in old_steps {
            remove_old(&self.path(old_step))?;
        }
        Ok(())
    }
}

/// Removes an old file. A missing file is no error.
fn remove_old(path: &Path) -> Result<()> {
    match fs::remove_file(path) {
        Err(error) if error.kind() != NotFound => {
            let error = io_failure("remove an old checkpoint")(error).in_file("checkpoint", path);
            Err(error.with_remedy("the new one is whole and in its place"))
        }
        _ => Ok(()),
    }
}
