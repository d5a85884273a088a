//! Writing a checkpoint.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::fs::File;
use std::io::{self, BufWriter, Seek, SeekFrom, Write};
use std::path::Path;

use candle_core::{DType, Tensor, TensorId};
use safetensors::tensor::{Metadata, TensorInfo};

use super::file::checksum_place;
use super::record::{KEY, Record};
use super::replace::{failed, replace};
use crate::engine::write_tensor;
use crate::error::{CheckpointError, Error, Result};
use crate::loss_scaler::LossScaler;
use crate::model::{Model, by_first_path};
use crate::rule::StateTensor;
use crate::tensor_file::LARGEST_HEADER;
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

/// A tensor in the file.
struct SavedTensor<'s> {
    name: String,
    dtype: DType,
    shape: Vec<usize>,
    values: Values<'s>,
}

impl<'s> SavedTensor<'s> {
    fn parameter((path, parameter): (&String, &'s Tensor)) -> Self {
        let (dtype, shape) = (parameter.dtype(), parameter.dims().to_vec());
        SavedTensor { name: path.clone(), dtype, shape, values: Values::Parameter(parameter) }
    }
}

enum Values<'s> {
    State(StateTensor<'s>),
    Parameter(&'s Tensor),
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
    let tensors = tensors.map(|(leaf, name, tensor)| SavedTensor {
        name: entry_name(leaf.path(), &name),
        dtype: tensor.dtype(),
        shape: tensor.shape().dims().to_vec(),
        values: Values::State(tensor),
    });
    sorted(tensors.chain(model.map(SavedTensor::parameter)))
}

fn sorted<'s>(entries: impl Iterator<Item = SavedTensor<'s>>) -> Vec<SavedTensor<'s>> {
    let mut entries: Vec<SavedTensor<'_>> = entries.collect();
    // The widest first, so that all are aligned; as the safetensors library orders them.
    entries.sort_by(|a, b| b.dtype.size_in_bytes().cmp(&a.dtype.size_in_bytes()).then_with(|| a.name.cmp(&b.name)));
    entries
}

fn write(path: &Path, entries: Vec<SavedTensor<'_>>, record: Option<&Record>) -> std::result::Result<(), CheckpointError> {
    let header = header(&entries, record)?;
    let missing = || CheckpointError::Record { reason: "it has no place for the checksum".to_string() };
    let place = record.map(|_| checksum_place(&header).ok_or_else(missing)).transpose()?;
    replace(path, |file| fill(file, &header, place.map(|place| place.start), &entries))
}

/// Writes everything, then the checksum into its place, if it has one.
fn fill(file: &File, header: &[u8], checksum: Option<usize>, entries: &[SavedTensor<'_>]) -> std::result::Result<(), CheckpointError> {
    let mut out = Summed { out: BufWriter::new(file), sum: crc32fast::Hasher::new() };
    out.write_all(&(header.len() as u64).to_le_bytes()).and_then(|()| out.write_all(header)).map_err(failed("write the header"))?;
    for entry in entries {
        let written = match entry.values {
            Values::State(tensor) => tensor.write_to(&mut out),
            Values::Parameter(parameter) => write_tensor(parameter, &mut out),
        };
        written.map_err(failed("write the tensors"))?;
    }
    let Summed { mut out, sum } = out;
    if let Some(checksum) = checksum {
        let digits = format!("{:08x}", sum.finalize());
        let place = SeekFrom::Start((size_of::<u64>() + checksum) as u64);
        out.seek(place).and_then(|_| out.write_all(digits.as_bytes())).map_err(failed("write the checksum"))?;
    }
    out.flush().map_err(failed("write the tensors"))
}

fn header(entries: &[SavedTensor<'_>], record: Option<&Record>) -> std::result::Result<Vec<u8>, CheckpointError> {
    let damaged = |error: serde_json::Error| CheckpointError::Record { reason: error.to_string() };
    let mut names = HashSet::from(["__metadata__"]);
    let mut tensors = Vec::with_capacity(entries.len());
    let mut end = 0;
    for SavedTensor { name, dtype, shape, .. } in entries {
        if !names.insert(name) {
            return Err(CheckpointError::DuplicateEntry { entry: name.clone() });
        }
        if !is_plain(*dtype) {
            return Err(CheckpointError::UnsupportedDtype { entry: name.clone(), dtype: *dtype });
        }
        let start = end;
        end += shape.iter().product::<usize>() * dtype.size_in_bytes();
        tensors.push((name.clone(), TensorInfo { dtype: (*dtype).into(), shape: shape.clone(), data_offsets: (start, end) }));
    }
    let description = record.map(|record| Ok(HashMap::from([(KEY.to_string(), serde_json::to_string(record).map_err(damaged)?)])));
    let metadata = Metadata::new(description.transpose()?, tensors).map_err(|source| CheckpointError::Format { source })?;
    let mut header = serde_json::to_vec(&metadata).map_err(damaged)?;
    header.resize(header.len().next_multiple_of(size_of::<u64>()), b' ');
    if header.len() > LARGEST_HEADER {
        return Err(CheckpointError::HeaderTooLarge { bytes: header.len(), largest: LARGEST_HEADER });
    }
    Ok(header)
}

/// Whether files hold this dtype.
fn is_plain(dtype: DType) -> bool {
    use DType::{BF16, F16, F32, F64, I16, I32, I64, U8, U32};
    matches!(dtype, U8 | U32 | I16 | I32 | I64 | F16 | BF16 | F32 | F64)
}

/// Passes on what is written and sums it up.
struct Summed<W> {
    out: W,
    sum: crc32fast::Hasher,
}

impl<W: Write> Write for Summed<W> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        // In pieces that are still in the cache when they are read for the second time.
        let written = self.out.write(&bytes[..bytes.len().min(1 << 18)])?;
        self.sum.update(&bytes[..written]);
        Ok(written)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.out.flush()
    }
}
