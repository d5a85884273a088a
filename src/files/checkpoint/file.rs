//! [`CheckpointFile`]: opens a checkpoint, checks format and checksum, and has the options of a restore.

use std::ops::Range;
use std::path::{Path, PathBuf};

use safetensors::SafeTensorError;

use super::record::{
    BEFORE_CHECKSUM, FORMAT, NO_CHECKSUM, Origin, Record, bytes_name, damage_error, json_error,
};
use crate::error::{Error, ErrorKind, Result};
use crate::files::tensor_file::{Entry, TensorFile, Texts, open_error, read_error};
use crate::model::patterns::Patterns;
use crate::step::loss_scaler::LossScaler;
use crate::tensors::{Tensor, dtype_from_file};
use crate::training::plateau::ReduceOnPlateau;
use crate::tree::StateTree;

/// An open checkpoint whose format, version and checksum are right.
///
/// Whether the file fits a state is checked when it is restored.
///
/// Tensors stay in the open file until they are taken over, so only the state needs memory. If a new save
/// replaces the file, the opened file is still read; on Windows no save can replace the file before this
/// value is dropped. A file that is changed in place is refused, as far as its length and its time of
/// modification show the change.
#[must_use = "reading a checkpoint changes nothing: call one of its `restore` methods"]
#[derive(Debug)]
pub struct CheckpointFile {
    pub(super) path: PathBuf,
    pub(super) tensors: TensorFile,
    pub(super) record: Record,
    pub(super) convert: bool,
    pub(super) accept_non_finite: bool,
    pub(super) keep_settings: bool,
    pub(super) except: Patterns,
}

impl CheckpointFile {
    /// Opens a file and compares its checksum.
    ///
    /// Over [ranks](crate::Setup::over) each rank opens the file. A rank that gets an error has to end with
    /// that error, as `?` does, because the other ranks wait in [`restore`](CheckpointFile::restore) until
    /// this rank has ended.
    ///
    /// # Errors
    /// If the file cannot be read, is no checkpoint, has another version of the format, or was damaged or
    /// truncated.
    pub fn open(path: impl AsRef<Path>) -> Result<Self> {
        Self::open_file(path.as_ref(), true)
    }

    /// Opens a file that another program has edited; the checksum is not compared.
    ///
    /// # Errors
    /// As [`CheckpointFile::open`].
    pub fn open_edited(path: impl AsRef<Path>) -> Result<Self> {
        Self::open_file(path.as_ref(), false)
    }

    fn open_file(path: &Path, verify: bool) -> Result<Self> {
        Self::parse(path, TensorFile::open(path), verify).map_err(|error| error.in_file("checkpoint", path))
    }

    /// Reads a checkpoint from bytes, and keeps the bytes. Errors have `name` instead of a path.
    ///
    /// # Errors
    /// As [`CheckpointFile::open`].
    pub fn from_bytes(name: impl Into<PathBuf>, bytes: Vec<u8>) -> Result<Self> {
        Self::read_bytes(&name.into(), bytes, true)
    }

    /// Reads a checkpoint from bytes that another program has edited; the checksum is not compared.
    ///
    /// # Errors
    /// As [`CheckpointFile::open`].
    pub fn from_edited_bytes(name: impl Into<PathBuf>, bytes: Vec<u8>) -> Result<Self> {
        Self::read_bytes(&name.into(), bytes, false)
    }

    fn read_bytes(name: &Path, bytes: Vec<u8>, verify: bool) -> Result<Self> {
        Self::parse(name, TensorFile::from_bytes(bytes), verify)
            .map_err(|error| error.in_file("checkpoint", name))
    }

    fn parse(path: &Path, file: Result<(TensorFile, Texts), SafeTensorError>, verify: bool) -> Result<Self> {
        let (tensors, texts) = file.map_err(open_error)?;
        let description = texts.optimisers.ok_or_else(|| {
            let problem = "a safetensors file without optimiser state (its metadata has no \"optimisers\")";
            Error::new(ErrorKind::File, problem).with_remedy("for plain weights use `Weights`")
        })?;
        // The version is read first, because another version may have other fields than `Record`.
        let Origin { format, version } = serde_json::from_str(&description).map_err(json_error)?;
        if format != FORMAT {
            let remedy = format!("read the file with optimisers {version}, which wrote the file");
            return Err(Error::new(ErrorKind::File, "it has format version")
                .with_got(format)
                .with_expected(FORMAT)
                .with_remedy(remedy));
        }
        let record: Record = serde_json::from_str(&description).map_err(json_error)?;
        if verify {
            let sum = checksum(&tensors)
                .map_err(read_error)?
                .unwrap_or_else(|| "missing".to_string());
            if sum != record.checksum {
                return Err(
                    Error::new(ErrorKind::File, "the file was damaged or edited: its checksum is")
                        .with_got(sum)
                        .with_expected(record.checksum)
                        .with_remedy(
                            "if the edit was intended, read the file with `CheckpointFile::open_edited`",
                        ),
                );
            }
        }
        let path = path.to_path_buf();
        Ok(CheckpointFile {
            path,
            tensors,
            record,
            convert: false,
            accept_non_finite: false,
            keep_settings: false,
            except: Patterns::new(Vec::new()),
        })
    }

    /// Allows a state or model of other dtypes than the file's.
    ///
    /// Tensors are converted, and rounded once if needed. The precise copy of each parameter in the file (its
    /// master, or the parameter itself) becomes the precise copy in the state or model. So a run can go on in
    /// another precision: from bf16 with f32 masters to all f32, or back, or with masters in f64. Only F16,
    /// BF16, F32 and F64 are converted into each other.
    ///
    /// Conversion is for bare rules and [`MixedPrecision`](crate::MixedPrecision), with or without
    /// [`Offload`](crate::Offload). For other stores, such as [`Kahan`](crate::Kahan), restore without
    /// conversion, then [replace](crate::Selection::replace) the rule.
    pub fn converting(mut self) -> Self {
        self.convert = true;
        self
    }

    /// Accepts infinities and NaN, which are refused by default.
    pub fn accepting_non_finite(mut self) -> Self {
        self.accept_non_finite = true;
        self
    }

    /// Keeps the program's hyper-parameters, schedules and count of steps, and which parameters are frozen.
    ///
    /// By default a restore takes all these settings from the file, except schedules of fields for which the
    /// program gives a schedule. The state [warns](crate::Warning::SettingsDiffer) of settings that the
    /// program has chosen differently. With this method the file gives only the memory of rules, such as
    /// moments with their counts. Schedules then begin at the program's count of steps, which is 0 in a new
    /// state. In both cases [`Restored::differences`](crate::Restored) lists the hyper-parameters that
    /// differ.
    ///
    /// ```
    /// use candle_core::{DType, Device, Var};
    /// use optimisers::{Adam, Checkpoint, CheckpointFile, setup};
    ///
    /// let x = Var::ones(3, DType::F32, &Device::Cpu)?;
    /// let (bytes, _) = Checkpoint::new(&setup(Adam::new(0.1), &x)?).to_bytes()?;
    /// let mut state = setup(Adam::new(0.02), &x)?;
    /// let restored = CheckpointFile::from_bytes("run", bytes)?.keeping_settings().restore(&mut state)?;
    /// assert_eq!(state.leaf("").and_then(|leaf| leaf.learning_rate()), Some(0.02));
    /// assert_eq!(restored.differences[0].field, "eta");
    /// assert_eq!(restored.differences[0].file, Some(0.1.into()));
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn keeping_settings(mut self) -> Self {
        self.keep_settings = true;
        self
    }

    /// Leaves out the parameters whose path matches one of these patterns, in the file and in the state.
    ///
    /// This is for a model that differs from the saved model by a head of another shape, a missing part, or
    /// new parts. Parameters that are left out stay as they are, in state and model, and may have any shape
    /// and rule. Everything else has to fit. [`Restored`](crate::Restored) lists what was taken over and what
    /// was left out. In a pattern `*` stands for any text, dots included, and `?` for one character; the
    /// whole path must match. A parameter with several paths is left out if one of its paths matches.
    ///
    /// ```
    /// use std::collections::BTreeMap;
    ///
    /// use candle_core::{DType, Device, Var};
    /// use optimisers::{Adam, Checkpoint, CheckpointFile, setup};
    ///
    /// let model = |head: &'static str, classes: usize| -> candle_core::Result<BTreeMap<&str, Var>> {
    ///     let variable = |size: usize| Var::ones(size, DType::F32, &Device::Cpu);
    ///     Ok(BTreeMap::from([("encoder", variable(3)?), (head, variable(classes)?)]))
    /// };
    /// let saved = model("head.a", 10)?;
    /// let (bytes, _) = Checkpoint::new(&setup(Adam::new(0.1), &saved)?).model(&saved).to_bytes()?;
    /// let new = model("head.b", 2)?;
    /// let mut state = setup(Adam::new(0.1), &new)?;
    /// let file = CheckpointFile::from_bytes("run", bytes)?.except(["head.*"]);
    /// let restored = file.restore_with_model(&mut state, &new)?;
    /// assert_eq!((restored.taken, restored.left), (vec!["encoder".into()], vec!["head.b".into()]));
    /// assert_eq!(restored.passed_over, ["head.a"]);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn except<P: Into<String>>(mut self, patterns: impl IntoIterator<Item = P>) -> Self {
        let earlier_texts = self.except.texts().iter().cloned();
        self.except = Patterns::new(
            earlier_texts
                .chain(patterns.into_iter().map(Into::into))
                .collect(),
        );
        self
    }

    /// Whether a pattern matches one of the parameter's paths. Only the state has all paths of a tied weight.
    pub(super) fn is_excepted(&self, state: &StateTree, path: &str) -> bool {
        match state.leaf(path) {
            Some(leaf) => self
                .except
                .first_match(&leaf.paths().collect::<Vec<_>>())
                .is_some(),
            None => self.except.first_match(&[path]).is_some(),
        }
    }

    /// The bytes that were saved under this name.
    ///
    /// # Errors
    /// If the file can no longer be read, was changed after it was opened, or lacks bytes that it names.
    ///
    /// ```
    /// use candle_core::{DType, Device, Var};
    /// use optimisers::{Adam, Checkpoint, CheckpointFile, setup};
    ///
    /// # let folder = tempfile::tempdir()?;
    /// # let path = folder.path().join("run.safetensors");
    /// let x = Var::ones(3, DType::F32, &Device::Cpu)?;
    /// let state = setup(Adam::new(0.1), &x)?;
    /// Checkpoint::new(&state).bytes("generator", [1, 2, 3]).save(&path)?;
    /// let file = CheckpointFile::open(&path)?;
    /// assert_eq!((file.bytes("generator")?, file.bytes("loader")?), (Some(vec![1, 2, 3]), None));
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn bytes(&self, name: &str) -> Result<Option<Vec<u8>>> {
        if !self.record.bytes.contains(name) {
            return Ok(None);
        }
        let name = bytes_name(name);
        self.entry(&name)
            .filter(|entry| entry.dtype == safetensors::Dtype::U8)
            .ok_or_else(|| damage_error(format_args!("it names the bytes {name:?}, which the file lacks")))
            .and_then(|entry| entry.bytes().map_err(read_error))
            .map(Some)
            .map_err(|error| error.in_file("checkpoint", &self.path))
    }

    /// The [count of applied steps](crate::StateTree::steps) of the state that was saved.
    pub fn steps(&self) -> u64 {
        self.record.steps
    }

    /// The loss scaler that was saved along.
    ///
    /// # Errors
    /// If one of its numbers is out of range.
    pub fn scaler(&self) -> Result<Option<LossScaler>> {
        self.checked_copy(self.record.scaler.as_ref(), LossScaler::check)
    }

    /// The [`ReduceOnPlateau`](crate::ReduceOnPlateau) that was saved along.
    ///
    /// # Errors
    /// If one of its numbers is out of range.
    pub fn plateau(&self) -> Result<Option<ReduceOnPlateau>> {
        self.checked_copy(self.record.plateau.as_ref(), ReduceOnPlateau::check)
    }

    fn checked_copy<T: Clone>(
        &self,
        saved: Option<&T>,
        check: impl Fn(&T) -> Result<()>,
    ) -> Result<Option<T>> {
        saved
            .map_or(Ok(()), check)
            .map_err(|error| error.in_file("checkpoint", &self.path))?;
        Ok(saved.cloned())
    }

    /// The names of all tensors in the file.
    pub fn tensor_names(&self) -> Vec<String> {
        self.tensors.names()
    }

    /// A copy of the tensor of this name on the CPU, such as `encoder.0.weight/master`.
    ///
    /// # Errors
    /// If the dtype is none of U8, U32, I16, I32, I64, F16, BF16, F32 and F64. If the file can no longer be read,
    /// or was changed after it was opened.
    pub fn tensor(&self, name: &str) -> Result<Option<Tensor>> {
        let Some(entry) = self.entry(name) else {
            return Ok(None);
        };
        dtype_from_file(entry.dtype)?;
        entry
            .tensor()
            .map(Some)
            .map_err(|source| read_error(source).in_file("checkpoint", &self.path))
    }

    pub(super) fn entry(&self, name: &str) -> Option<Entry<'_>> {
        self.tensors.entry(name)
    }
}

/// The place of the checksum in the bytes before a file's tensors.
pub(super) fn checksum_place(head: &[u8]) -> Option<Range<usize>> {
    let before = head
        .windows(BEFORE_CHECKSUM.len())
        .position(|window| window == BEFORE_CHECKSUM)?;
    let start = before + BEFORE_CHECKSUM.len();
    let place = start..start + NO_CHECKSUM.len();
    (place.end <= head.len()).then_some(place)
}

/// The checksum of the file's bytes, if the file has a place for one.
fn checksum(file: &TensorFile) -> std::io::Result<Option<String>> {
    let mut sum = crc32fast::Hasher::new();
    let mut buffer = Vec::new();
    let head = file.head(&mut buffer)?;
    let Some(place) = checksum_place(head) else {
        return Ok(None);
    };
    sum.update(&head[..place.start]);
    sum.update(NO_CHECKSUM.as_bytes());
    sum.update(&head[place.end..]);
    // Freed now, because a header can have 100 MB, and the rest of the sum does not need the header.
    drop(buffer);
    file.stream(|bytes| sum.update(bytes))?;
    Ok(Some(format!("{:08x}", sum.finalize())))
}
