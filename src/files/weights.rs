//! Weights from safetensors files.

use std::collections::{BTreeMap, HashSet};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::tensor_file::{Entry, TensorFile, open_error, read_error};
use crate::engine::{rounded, set_lent};
use crate::error::{Error, ErrorKind, Result, first_names, one_of};
use crate::model::lent::{Lend, check_parameter};
use crate::model::{Model, Variable, in_path_order};
use crate::numbers::{DType, Requirements};
use crate::tensors::Tensor;
use crate::tree::{MasterValues, WeightFiles, check_equal};

/// The tensors of safetensors files, by name, for variables of the same or another dtype.
///
/// F16, BF16, F32 and F64 are converted into each other, and rounded once if needed. Tensors of other dtypes
/// need variables of their dtype.
///
/// A file may come from another library or from `VarMap::save`, or be a checkpoint of this crate. Of a
/// checkpoint only the parameters are read. [`CheckpointFile::converting`](crate::CheckpointFile::converting)
/// also reads masters, which are more precise copies of parameters.
///
/// The files stay open, and a tensor is read when it is needed. A clone shares the files. If the content of
/// an open file is modified, the next read is an error, as far as length and time of modification show the
/// change.
///
/// ```
/// use candle_core::{DType::{BF16, F32}, Device, Tensor, Var};
/// use optimisers::Weights;
/// use std::collections::{BTreeMap, HashMap};
///
/// # let folder = tempfile::tempdir()?;
/// # let path = folder.path().join("model.safetensors");
/// let saved = HashMap::from([("fc.weight".to_string(), Tensor::new(&[1f32, 0.1], &Device::Cpu)?)]);
/// candle_core::safetensors::save(&saved, &path)?;
///
/// let model = BTreeMap::from([("fc.weight", Var::zeros(2, BF16, &Device::Cpu)?)]);
/// Weights::open([&path])?.load_into(&model)?;
/// assert_eq!(model["fc.weight"].to_dtype(F32)?.to_vec1::<f32>()?, [1.0, 0.100097656]);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[must_use = "reading weights changes nothing: call one of its `load` methods"]
#[derive(Clone)]
pub struct Weights {
    files: Arc<[WeightFile]>,
    /// The index of each tensor's file, by the tensor's name.
    file_indices: Arc<BTreeMap<String, usize>>,
    accept_non_finite: bool,
}

/// The word for these files in errors.
const WEIGHTS: &str = "weights";

/// Variables with their new values.
type Assignments<'m> = Vec<(Variable<'m>, Tensor)>;

/// An open file of weights.
struct WeightFile {
    path: PathBuf,
    tensors: TensorFile,
}

impl std::fmt::Debug for Weights {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Weights")
            .field("files", &self.paths())
            .field("tensors", &self.file_indices.len())
            .finish()
    }
}

impl Weights {
    /// Opens files that together have the tensors of one model.
    ///
    /// # Errors
    /// If a file cannot be read or is not a whole safetensors file. If two files have a tensor of one name.
    pub fn open(files: impl IntoIterator<Item = impl AsRef<Path>>) -> Result<Self> {
        let files: Arc<[WeightFile]> = files
            .into_iter()
            .map(|path| WeightFile::open(path.as_ref()))
            .collect::<Result<_>>()?;
        let mut file_indices = BTreeMap::new();
        for (i, file) in files.iter().enumerate() {
            for name in file.tensors.names() {
                if let Some(other) = file_indices.insert(name.clone(), i) {
                    let problem = format!(
                        "it has the tensor {name:?}, which {} has too",
                        files[other].path.display()
                    );
                    let error =
                        Error::new(ErrorKind::File, problem).with_remedy("pass the parts of one model only");
                    return Err(error.in_file(WEIGHTS, &file.path));
                }
            }
        }
        Ok(Weights {
            files,
            file_indices: Arc::new(file_indices),
            accept_non_finite: false,
        })
    }

    /// Accepts infinities and NaN, which are refused by default.
    ///
    /// Numbers that are too large for the dtype of their parameter then become infinite.
    pub fn accepting_non_finite(mut self) -> Self {
        self.accept_non_finite = true;
        self
    }

    /// The names of the tensors, sorted.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.file_indices.keys().map(String::as_str)
    }

    /// Sets every variable of a model to the tensor whose name is the variable's path.
    ///
    /// Everything is read, checked and converted before the first variable is written. Returns the names that
    /// no variable has.
    ///
    /// Load before [`setup`](crate::setup). If a rule has masters (more precise copies of parameters),
    /// `setup` makes the masters from the rounded parameters. Loading later changes no master, so the next
    /// update would refuse a parameter that does not fit its master. To give masters the unrounded values of
    /// the files, call [`StateTree::set_masters`](crate::StateTree::set_masters).
    ///
    /// # Errors
    /// If a tensor is missing, or has another shape than its variable, a dtype that is not converted, or a
    /// number that is not finite, before or after rounding. If the model has one variable under two names,
    /// and the files have different values there. Nothing changes then. If a device fails, or memory is not
    /// lent again, the error says how many variables were written before.
    pub fn load_into<M: Model + ?Sized>(&self, model: &M) -> Result<Vec<String>> {
        let (values, unused) = self.values(model, |name, x| {
            check_parameter("variable", x, true).map_err(|error| error.at(name))?;
            Ok(rounded(&self.read(name, x.shape(), x.dtype())?, x.dtype())?)
        })?;
        let count = values.len();
        for (i, (variable, value)) in values.into_iter().enumerate() {
            set_lent(&*variable.x, &value)
                .map_err(|error| error.at(variable.path()).after_values(i, count))?;
        }
        Ok(unused)
    }

    /// The tensor that `read` returns for each variable of a model, and the names that no variable has.
    fn values<'m, M: Model + ?Sized>(
        &self,
        model: &'m M,
        read: impl Fn(&str, &dyn Lend) -> Result<Tensor>,
    ) -> Result<(Assignments<'m>, Vec<String>)> {
        let mut unused: HashSet<&str> = self.names().collect();
        let mut values = Vec::new();
        for variable in in_path_order(model, Tensor::is_variable)? {
            // A file may have tied weights under only one of their paths.
            let mut names = variable
                .paths
                .iter()
                .map(String::as_str)
                .filter(|path| self.file_indices.contains_key(*path));
            let name = names.next().unwrap_or(variable.path());
            let value = read(name, &*variable.x)?;
            for other_name in names {
                check_equal([name, other_name], [&value, &read(other_name, &*variable.x)?])?;
            }
            variable.paths.iter().for_each(|path| {
                unused.remove(path.as_str());
            });
            values.push((variable, value));
        }
        Ok((
            values,
            self.names()
                .filter(|name| unused.contains(name))
                .map(str::to_string)
                .collect(),
        ))
    }

    /// The tensor for a parameter of this shape and dtype, checked, in the dtype of the file.
    fn read(&self, path: &str, shape: &[usize], dtype: DType) -> Result<Tensor> {
        let (file, entry) = self.entry(path)?;
        let on_non_finite = "call `Weights::accepting_non_finite` first";
        let on_non_finite = (!self.accept_non_finite).then_some(on_non_finite);
        let required = Requirements::of_weights("the file's tensor", shape, dtype, on_non_finite);
        let tensor = entry
            .check_values(&required, 0..entry.elements())
            .and_then(|()| entry.tensor().map_err(read_error));
        tensor.map_err(|error| error.at(path).in_file(WEIGHTS, &file.path))
    }

    /// The tensor with this name, and its file.
    fn entry(&self, name: &str) -> Result<(&WeightFile, Entry<'_>)> {
        let file = self.file_indices.get(name).map(|&index| &self.files[index]);
        file.and_then(|file| Some((file, file.tensors.entry(name)?)))
            .ok_or_else(|| {
                let paths: Vec<String> = self
                    .paths()
                    .iter()
                    .map(|path| path.display().to_string())
                    .collect();
                let (problem, names) = ("there is no tensor for it", first_names(self.names()));
                let error = match &*self.files {
                    [] => Error::missing(format!("{problem}, because there are no files")),
                    [only] => Error::missing(problem).in_file(WEIGHTS, &only.path),
                    _ => Error::missing(format!("{problem} in {}", paths.join(", "))),
                };
                let with_names = if names.is_empty() {
                    error
                } else {
                    error.with_expected(one_of(&names))
                };
                with_names.at(name).with_remedy(
                    "pass a file of this model, or a model with the parameters that the file has",
                )
            })
    }

    fn paths(&self) -> Vec<PathBuf> {
        self.files.iter().map(|file| file.path.clone()).collect()
    }
}

impl WeightFiles for Weights {
    fn masters(&self, model: &dyn Model) -> Result<(BTreeMap<String, Tensor>, Vec<String>)> {
        let (values, unused) = self.values(model, |name, x| self.read(name, x.shape(), x.dtype()))?;
        Ok((
            values
                .into_iter()
                .map(|(variable, values)| (variable.path().to_string(), values))
                .collect(),
            unused,
        ))
    }
}

impl<'v> From<&'v Weights> for MasterValues<'v> {
    fn from(weights: &'v Weights) -> Self {
        MasterValues::from_files(weights)
    }
}

impl WeightFile {
    fn open(path: &Path) -> Result<Self> {
        let (tensors, _) =
            TensorFile::open(path).map_err(|source| open_error(source).in_file(WEIGHTS, path))?;
        Ok(WeightFile {
            path: path.to_path_buf(),
            tensors,
        })
    }
}
