//! [`Checkpoint`]: collects state, model and bytes, and writes them to a file or to bytes.

use std::collections::{BTreeMap, HashMap};
use std::path::Path;

use super::agreement::agree_on_record;
use super::layout::{Remarks, SavedTensor, entries, entry_name};
use super::record::Record;
use super::write::{FileContent, NonFiniteEntry, write};
use crate::error::warning::Warning;
use crate::error::{Error, ErrorKind, Result};
use crate::model::lent::Lent;
use crate::model::{Identity, Model, Variable, duplicate_path_error, identity, in_path_order};
use crate::numbers::counts;
use crate::ranks::Call;
use crate::rule::field::{FieldValue, Number};
use crate::step::loss_scaler::LossScaler;
use crate::tensors::Tensor;
use crate::training::plateau::ReduceOnPlateau;
use crate::tree::{Leaf, StateTree};

/// A checkpoint to be saved: a state, with the model and bytes of the program.
///
/// Model and state in one file stay together: no crash can leave a new model and an old state. Bytes hold
/// anything else that a program needs to go on, such as the place in the data.
///
/// ```
/// use candle_core::{DType, Device, Var};
/// use optimisers::{AdamW, Checkpoint, CheckpointFile, MixedPrecision, setup, update};
///
/// # let folder = tempfile::tempdir()?;
/// # let path = folder.path().join("run.safetensors");
/// let model = vec![Var::ones(3, DType::BF16, &Device::Cpu)?];
/// let mut state = setup(MixedPrecision::new(DType::F32, AdamW::new(0.1)), &model)?;
/// update(&mut state, &model, &model[0].sqr()?.sum_all()?.backward()?)?;
/// Checkpoint::new(&state).model(&model).bytes("batch", "17").save(&path)?;
///
/// // In another process:
/// let model = vec![Var::zeros(3, DType::BF16, &Device::Cpu)?];
/// let mut state = setup(MixedPrecision::new(DType::F32, AdamW::new(0.1)), &model)?;
/// let file = CheckpointFile::open(&path)?;
/// file.restore_with_model(&mut state, &model)?;
/// assert_eq!(file.bytes("batch")?, Some(b"17".to_vec()));
/// # assert!(model[0].to_dtype(DType::F32)?.to_vec1::<f32>()?[0] < 1.0);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// # Reading the file in Python
///
/// ```python
/// from safetensors import safe_open
/// with safe_open("run.safetensors", framework="np") as file:   # or "pt"; numpy has no bf16
///     print({name: file.get_tensor(name) for name in file.keys() if name.endswith("/master")})
/// ```
#[must_use = "nothing is written until `save` is called"]
#[derive(Debug)]
pub struct Checkpoint<'s> {
    state: &'s StateTree,
    model: Option<Result<BTreeMap<String, Lent<'s>>>>,
    scaler: Option<LossScaler>,
    plateau: Option<ReduceOnPlateau>,
    /// The user's bytes by name.
    bytes: BTreeMap<String, Vec<u8>>,
}

impl<'s> Checkpoint<'s> {
    /// A checkpoint of this state.
    pub fn new(state: &'s StateTree) -> Self {
        Checkpoint {
            state,
            model: None,
            scaler: None,
            plateau: None,
            bytes: BTreeMap::new(),
        }
    }

    /// Saves the variables of the state's model as well.
    ///
    /// All variables are saved, also variables without a leaf or of integer dtype. A variable is saved under
    /// the path of its leaf, or, without a leaf, under the first of its paths in sorted order.
    pub fn model<M: Model + ?Sized>(mut self, model: &'s M) -> Self {
        self.model = Some(variables_by_path(self.state, model));
        self
    }

    /// Saves the loss scaler, with its scale and counts.
    pub fn scaler(mut self, scaler: &LossScaler) -> Self {
        self.scaler = Some(scaler.clone());
        self
    }

    /// Saves a [`ReduceOnPlateau`](crate::ReduceOnPlateau), with its best metric and counts.
    pub fn plateau(mut self, plateau: &ReduceOnPlateau) -> Self {
        self.plateau = Some(plateau.clone());
        self
    }

    /// Saves bytes under a name, such as a text or the state of a random generator.
    ///
    /// The bytes are an entry of the file, `optimisers.bytes/<name>` in U8, and can be as long as memory
    /// allows. [`CheckpointFile::bytes`](crate::CheckpointFile::bytes) returns them.
    pub fn bytes(mut self, name: impl Into<String>, bytes: impl Into<Vec<u8>>) -> Self {
        self.bytes.insert(name.into(), bytes.into());
        self
    }

    /// Writes the file. Over [ranks](crate::Setup::over) all ranks call this, with the same arguments.
    ///
    /// The checkpoint is written to a temporary file in the same folder, flushed to the disk and then
    /// renamed: whatever happens, `path` has either the old file or the whole new file. Nothing of the size
    /// of the state is copied in memory. If `path` is a symbolic link, its target is replaced. The new file
    /// gets the permissions of the old file, but not its owner and access lists; hard links keep the old
    /// file.
    ///
    /// # Over ranks
    /// Each rank writes its parts of state and parameters to one file, in a folder that all ranks see. The
    /// file has the bytes that a single process would write, so any number of ranks can restore from it.
    /// Variables without a leaf, running statistics and parameters that no gradient has reached have the
    /// values of rank 0. If one rank fails, or differs in bytes, loss scaler, plateau, path or model, all
    /// ranks get an error.
    ///
    /// # Warnings
    /// Numbers of state or model that are infinite or NaN are saved. `save` then logs a
    /// [warning](Warning::NotFinite), and returns the warning on all ranks. Keep an older file then, because
    /// [`restore`](crate::CheckpointFile::restore) refuses such numbers unless the program
    /// [accepts](crate::CheckpointFile::accepting_non_finite) them. The check needs no extra pass.
    ///
    /// If a window of [`AccumGrad`](crate::AccumGrad) is open, its sum is in the file, and `save` returns a
    /// [warning](Warning::WindowsOpen) without logging it.
    ///
    /// ```
    /// use candle_core::{Device, Var};
    /// use optimisers::{Adam, Checkpoint, Warning, setup};
    ///
    /// # let folder = tempfile::tempdir()?;
    /// # let path = folder.path().join("run.safetensors");
    /// let x = Var::new(&[1f32, f32::INFINITY], &Device::Cpu)?;
    /// let state = setup(Adam::new(0.1), &x)?;
    /// let warnings = Checkpoint::new(&state).model(&x).save(&path)?;
    /// assert!(matches!(&warnings[..], [Warning::NotFinite { index: 1, .. }]));
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// If the model is not the state's or has averages instead of its parameters, the parameters have
    /// [no names](crate::CandleOptimizer), a number of the scaler or of the plateau is out of range, two
    /// tensors would have the same name in the file, or the file system fails. After an error the old file is
    /// still at `path`, unless only the flush of the folder failed. That error reports that the new file is
    /// in place.
    pub fn save(self, path: impl AsRef<Path>) -> Result<Vec<Warning>> {
        let (path, state) = (path.as_ref(), self.state);
        self.with_content(path, |content, numbers| {
            let tensors = write(&state.world, Call::File, path, content)?;
            Ok(file_warnings(
                path,
                state.calls,
                tensors.into_iter().chain(numbers).collect(),
            ))
        })
    }

    /// The bytes of the file that [`save`](Checkpoint::save) would write, and the same warnings.
    ///
    /// This is for programs that keep checkpoints in a database, or send checkpoints.
    /// [`CheckpointFile::from_bytes`](crate::CheckpointFile::from_bytes) reads the bytes. The bytes take as
    /// much memory as state and model.
    ///
    /// # Errors
    /// As [`save`](Checkpoint::save). Also if the state is divided among ranks.
    ///
    /// ```
    /// use candle_core::{Device, Var};
    /// use optimisers::{Adam, Checkpoint, CheckpointFile, setup};
    ///
    /// let x = Var::new(&[1f32, 2.0], &Device::Cpu)?;
    /// let state = setup(Adam::new(0.1), &x)?;
    /// let (bytes, warnings) = Checkpoint::new(&state).model(&x).to_bytes()?;
    /// assert!(warnings.is_empty());
    ///
    /// let mut resumed = setup(Adam::new(0.1), &x)?;
    /// CheckpointFile::from_bytes("step 0", bytes)?.restore_with_model(&mut resumed, &x)?;
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn to_bytes(self) -> Result<(Vec<u8>, Vec<Warning>)> {
        self.state.check_whole("`to_bytes`")?;
        let (path, calls) = (Path::new("in memory"), self.state.calls);
        self.with_content(path, |content, numbers| {
            let (bytes, tensors) = content?
                .to_bytes()
                .map_err(|error| error.in_file("checkpoint", path))?;
            Ok((
                bytes,
                file_warnings(path, calls, tensors.into_iter().chain(numbers).collect()),
            ))
        })
    }

    /// The state that is saved.
    pub(super) fn state(&self) -> &'s StateTree {
        self.state
    }

    /// Runs `run` on the content of the file for `path`, and on the leaves' numbers that are not finite.
    ///
    /// If the content cannot be made, `run` gets that error and can pass it on to the other ranks.
    ///
    /// # Errors
    /// The errors of `run`. If one rank refuses, or the ranks differ, all ranks get an error, and `run` is
    /// not called.
    pub(super) fn with_content<T>(
        self,
        path: &Path,
        run: impl FnOnce(Result<FileContent<'_>>, Vec<NonFiniteEntry>) -> Result<T>,
    ) -> Result<T> {
        let check_result = self.check();
        let Checkpoint {
            state,
            model,
            scaler,
            plateau,
            bytes,
        } = self;
        // After an error this rank goes on, because the other ranks wait for it in `agree_on_record`.
        let (model, record) = match check_result.and_then(|()| model.transpose()) {
            Ok(model) => {
                let paths = model.as_ref().map(|model| model.keys().cloned().collect());
                let bytes = bytes.keys().cloned().collect();
                (
                    model,
                    Ok(Record {
                        scaler,
                        plateau,
                        bytes,
                        model: paths,
                        ..Record::new(state)
                    }),
                )
            }
            Err(error) => (None, Err(error)),
        };
        let (record, shapes) = agree_on_record(state, record, &bytes)?;
        let content = entries(state, shapes, model.as_ref(), &bytes)
            .and_then(|tensors| FileContent::new(path, tensors, Remarks::Checkpoint(&record)));
        let numbers = record
            .non_finite()
            .map(|(path, name, value)| (entry_name(path, name), 0, Number(value)));
        run(content, numbers.collect())
    }

    /// Refuses a state, or numbers, that no restore would take.
    fn check(&self) -> Result<()> {
        self.state.check_names()?;
        self.state.check_parameters()?;
        self.state.leaves().try_for_each(check_ranges)?;
        // JSON has no infinity or NaN, so such numbers could not be read again.
        self.scaler.as_ref().map_or(Ok(()), LossScaler::check)?;
        self.plateau.as_ref().map_or(Ok(()), ReduceOnPlateau::check)
    }
}

/// Refuses a counter or a number that no restore would take.
fn check_ranges(leaf: &Leaf) -> Result<()> {
    let count_fault =
        |(name, count): (String, u64)| Some((name, FieldValue::Count(count), counts::too_large(count)?));
    let number_fault = |(name, number): (String, f64)| {
        let expected = leaf.state.number_fault(&name, number)?;
        Some((name, FieldValue::Real(number), expected))
    };
    let counts = leaf.counters().into_iter().filter_map(count_fault);
    let mut faults = counts.chain(leaf.numbers().into_iter().filter_map(number_fault));
    let Some((name, got, expected)) = faults.next() else {
        return Ok(());
    };
    let problem = format!("{name:?} in the state of {} is", leaf.optimiser().rule().name());
    Err(Error::new(ErrorKind::Contract, problem)
        .with_got(got)
        .with_expected(expected)
        .with_remedy("let the rule set no such value, or give a number a wider range in `State::with_number`")
        .at(leaf.path()))
}

impl StateTree {
    /// Saves the [masters](StateTree::masters) to a safetensors file under the parameters' names.
    ///
    /// `VarMap::load`, torch and other tools read the file. An old file is replaced as a whole, as by
    /// [`Checkpoint::save`](crate::Checkpoint::save). For numbers that are infinite or NaN a
    /// [warning](Warning::NotFinite) is returned. Over [ranks](crate::Setup::over) all ranks call this
    /// together. Running statistics are made of the parts of all ranks: call [`broadcast`](crate::broadcast)
    /// first.
    ///
    /// # Errors
    /// As [`StateTree::masters`]; if the parameters have [no names](crate::CandleOptimizer); if the file
    /// system fails.
    pub fn save_masters<M: Model + ?Sized>(&self, model: &M, path: impl AsRef<Path>) -> Result<Vec<Warning>> {
        let path = path.as_ref();
        let content = self.check_names().and_then(|()| {
            let tensors = self
                .leaves()
                .zip(self.master_parts(model)?)
                .map(|(leaf, master)| SavedTensor::part_of(leaf, leaf.path().to_string(), master))
                .collect();
            FileContent::new(path, tensors, Remarks::Nothing)
        });
        let non_finite = write(&self.world, Call::SaveMasters, path, content)?;
        Ok(file_warnings(path, self.calls, non_finite))
    }
}

/// The warnings about a file that was written: one about numbers that are not finite, which is also logged,
/// and one about open windows with `calls` calls.
pub(crate) fn file_warnings(path: &Path, calls: u64, mut non_finite: Vec<NonFiniteEntry>) -> Vec<Warning> {
    non_finite.sort_by(|(name, index, _), (other, other_index, _)| (name, index).cmp(&(other, other_index)));
    // Each rank that has a part of a tensor may have found a number in the tensor.
    non_finite.dedup_by(|(name, ..), (previous, ..)| name == previous);
    let warning = non_finite.first().map(|(entry, index, Number(value))| {
        let (entry, index, value) = (entry.clone(), *index, value.to_string());
        Warning::NotFinite {
            file: path.to_path_buf(),
            tensors: non_finite.len(),
            entry,
            index,
            value,
        }
    });
    warning.iter().for_each(Warning::log);
    warning
        .into_iter()
        .chain((calls > 0).then_some(Warning::WindowsOpen { calls }))
        .collect()
}

/// The model's variables by path. A variable with a leaf has the path of the leaf, even after a rename.
pub(super) fn variables_by_path<'m, M: Model + ?Sized>(
    state: &StateTree,
    model: &'m M,
) -> Result<BTreeMap<String, Lent<'m>>> {
    let parameters = state.parameters(model)?;
    let paths: HashMap<Identity, &str> = parameters
        .iter()
        .map(identity)
        .zip(state.leaves().map(Leaf::path))
        .collect();
    let mut variables = BTreeMap::new();
    for (model_path, variable) in in_path_order(model, Tensor::is_variable)?
        .into_iter()
        .map(Variable::into_path_and_handle)
    {
        let path = paths
            .get(&identity(&variable))
            .map_or(model_path, |path| path.to_string());
        if variables.insert(path.clone(), variable).is_some() {
            return Err(duplicate_path_error(&path));
        }
    }
    Ok(variables)
}
