//! Writing a checkpoint.

use std::collections::{BTreeMap, HashMap};
use std::io::{self, Write};
use std::ops::Range;
use std::path::Path;

use candle_core::{Tensor, TensorId};

use super::layout::{EntryInfo, Layout};
use super::pieces::{PieceWriter, join};
use super::record::{Checked, Record};
use super::replace::{failed, replace};
use crate::engine::write_tensor;
use crate::error::{Error, Result};
use crate::loss_scaler::LossScaler;
use crate::model::{Model, by_first_path};
use crate::rule::StateTensor;
use crate::tree::{Leaf, StateTree};

/// What is to be saved: a state, and the model and notes with it.
///
/// Model and state in one file belong together: no crash can leave a new model beside an old state. Notes hold what else a training
/// program needs to go on, such as the step or the place in the data.
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
/// Checkpoint::new(&state).model(&model).note("step", 1).save(&path)?;
///
/// // In another process:
/// let model = vec![Var::zeros(3, DType::BF16, &Device::Cpu)?];
/// let mut state = setup(MixedPrecision::new(DType::F32, AdamW::new(0.1)), &model)?;
/// let file = CheckpointFile::open(&path)?;
/// file.restore_with_model(&mut state, &model)?;
/// let step: u64 = file.note("step").unwrap_or("0").parse()?;
/// # assert_eq!(step, 1);
/// # assert!(model[0].to_dtype(DType::F32)?.to_vec1::<f32>()?[0] < 1.0);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// # Reading it in Python
///
/// ```python
/// from safetensors import safe_open
/// with safe_open("run.safetensors", framework="np") as file:   # or "pt"; numpy has no bf16
///     print({name: file.get_tensor(name) for name in file.keys() if name.endswith("/master")})
/// ```
#[derive(Debug)]
pub struct Checkpoint<'s> {
    state: &'s StateTree,
    model: Option<Result<BTreeMap<String, Tensor>>>,
    notes: BTreeMap<String, String>,
    scaler: Option<LossScaler>,
}

impl<'s> Checkpoint<'s> {
    /// A checkpoint of this state.
    pub fn new(state: &'s StateTree) -> Self {
        Checkpoint { state, model: None, notes: BTreeMap::new(), scaler: None }
    }

    /// Saves the variables of `model`, the state's, as well: all of them, those without a leaf and those of integer dtype too. Each is saved
    /// under the path that its leaf has; one without a leaf that has several paths, under the first in sorted order.
    pub fn model<M: Model + ?Sized>(mut self, model: &M) -> Self {
        self.model = Some(variables(self.state, model));
        self
    }

    /// Saves the loss scaler, with its scale and counts.
    pub fn scaler(mut self, scaler: &LossScaler) -> Self {
        self.scaler = Some(scaler.clone());
        self
    }

    /// Saves a text under a name.
    pub fn note(mut self, name: impl Into<String>, text: impl ToString) -> Self {
        self.notes.insert(name.into(), text.to_string());
        self
    }

    /// Writes the file.
    ///
    /// It is written to a temporary file in the same folder, flushed to the disk and then renamed: whatever happens meanwhile, `path` has
    /// either what it had before or the new checkpoint, whole. Nothing of the size of the state is copied in memory. A symbolic link stays one, and
    /// a file that is replaced hands its permissions on; not its owner and access lists, and hard links keep the old file.
    ///
    /// # Errors
    /// If the model is not the state's or has averages in place of its parameters, a number of the scaler is out of range, two tensors would
    /// have the same name in the file, or the file system fails. What was at `path` is still there then, unless all that failed is the flush of the folder: the
    /// message says that the new file is in its place.
    pub fn save(self, path: impl AsRef<Path>) -> Result<()> {
        let path = path.as_ref();
        let Checkpoint { state, model, notes, scaler } = self;
        state.expect_parameters()?;
        state.expect_whole("`Checkpoint::save`")?;
        // JSON has no numbers for what is not finite: it could not be read again.
        scaler.as_ref().map_or(Ok(()), LossScaler::check)?;
        let model = model.transpose()?;
        let paths = model.as_ref().map(|model| model.keys().cloned().collect());
        let record = Record::new(state, notes, scaler, paths);
        write(path, entries(state, model.iter().flatten()), Some(&record)).map_err(|error| Error::checkpoint(path, error))
    }
}

impl StateTree {
    /// Saves the [masters](StateTree::masters) to a safetensors file under the parameters' names, which `VarMap::load`, torch and other tools
    /// read. It is written as a [checkpoint](crate::Checkpoint::save) is: the file has what it had before, or all that is new.
    ///
    /// # Errors
    /// As [`StateTree::masters`]; if the file system fails.
    pub fn save_masters<M: Model + ?Sized>(&self, model: &M, path: impl AsRef<Path>) -> Result<()> {
        let (path, masters) = (path.as_ref(), self.masters(model)?);
        write(path, sorted(masters.iter().map(SavedTensor::parameter)), None).map_err(|error| Error::checkpoint(path, error))
    }
}

/// A tensor in the file, or the part of it that is written here.
struct SavedTensor<'s> {
    entry: EntryInfo,
    /// The elements that are written, in row-major order.
    part: Range<usize>,
    values: Values<'s>,
}

enum Values<'s> {
    /// The part, whatever it is a part of.
    State(StateTensor<'s>),
    /// All elements.
    Parameter(&'s Tensor),
}

impl<'s> SavedTensor<'s> {
    fn parameter((path, parameter): (&String, &'s Tensor)) -> Self {
        let entry = EntryInfo { name: path.clone(), dtype: parameter.dtype(), shape: parameter.dims().to_vec() };
        SavedTensor { entry, part: 0..parameter.elem_count(), values: Values::Parameter(parameter) }
    }

    fn state(leaf: &Leaf, name: &str, tensor: StateTensor<'s>) -> Self {
        let entry = EntryInfo { name: entry_name(leaf.path(), name), dtype: tensor.dtype(), shape: tensor.shape().dims().to_vec() };
        SavedTensor { entry, part: 0..tensor.shape().elem_count(), values: Values::State(tensor) }
    }

    fn write_to(&self, out: &mut dyn Write) -> io::Result<()> {
        match self.values {
            Values::State(tensor) => tensor.write_to(out),
            Values::Parameter(parameter) => {
                let part = parameter.detach().flatten_all().and_then(|flat| flat.narrow(0, self.part.start, self.part.len()));
                write_tensor(&part.map_err(io::Error::other)?, out)
            }
        }
    }
}

/// The model's variables. Those that have a leaf are under its path, whatever has been renamed since it was made.
pub(super) fn variables<M: Model + ?Sized>(state: &StateTree, model: &M) -> Result<BTreeMap<String, Tensor>> {
    let parameters = state.parameters(model)?;
    let paths: HashMap<TensorId, &str> = parameters.iter().map(Tensor::id).zip(state.leaves().map(Leaf::path)).collect();
    let mut variables = BTreeMap::new();
    for (path, variable) in by_first_path(model, Tensor::is_variable)? {
        let path = paths.get(&variable.id()).map_or(path, |path| path.to_string());
        if variables.insert(path.clone(), variable).is_some() {
            return Err(Error::DuplicatePath { path });
        }
    }
    Ok(variables)
}

/// The name of a state tensor in the file.
pub(super) fn entry_name(path: &str, tensor: &str) -> String {
    format!("{path}/{tensor}")
}

fn entries<'s>(state: &'s StateTree, model: impl Iterator<Item = (&'s String, &'s Tensor)>) -> Vec<SavedTensor<'s>> {
    let tensors = state.leaves().flat_map(|leaf| leaf.state.tensors().into_iter().map(move |(name, tensor)| (leaf, name, tensor)));
    let tensors = tensors.map(|(leaf, name, tensor)| SavedTensor::state(leaf, &name, tensor));
    sorted(tensors.chain(model.map(SavedTensor::parameter)))
}

fn sorted<'s>(tensors: impl Iterator<Item = SavedTensor<'s>>) -> Vec<SavedTensor<'s>> {
    let mut tensors: Vec<SavedTensor<'_>> = tensors.collect();
    tensors.sort_by(|a, b| a.entry.in_file_order(&b.entry));
    tensors
}

fn write(path: &Path, tensors: Vec<SavedTensor<'_>>, record: Option<&Record>) -> Checked<()> {
    let layout = Layout::new(tensors.iter().map(|tensor| &tensor.entry), record)?;
    replace(path, |file| {
        let mut out = PieceWriter::new(file);
        out.write(0..layout.head.len() as u64, |out| out.write_all(&layout.head)).map_err(failed("write the header"))?;
        for (i, tensor) in tensors.iter().enumerate() {
            out.write(layout.place(i, &tensor.part), |out| tensor.write_to(out)).map_err(failed("write the tensors"))?;
        }
        let pieces = out.finish().map_err(failed("write the tensors"))?;
        join(file, &layout, pieces)
    })
}
