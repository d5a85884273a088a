//! The content of a file: a tensor `<parameter>/<key>` for each entry of the state, and the groups as JSON.

use std::collections::{BTreeMap, HashMap};
use std::fmt::Display;

use serde_json::{Map, Value};

use crate::error::{Error, ErrorKind, Result};
use crate::files::tensor_file::{Source, TensorFile, Texts, open_error, read_error};

/// The key of the groups in the metadata.
pub(super) const GROUPS: &str = "param_groups";

/// The key of the parameters in a group.
pub(super) const PARAMETERS: &str = "params";

/// How files of `torch.save` begin: an archive, or with torch before 1.6 a pickle.
const PICKLED: [&[u8]; 2] = [b"PK\x03\x04", b"\x80\x02"];

/// The state of an optimiser. Its tensors stay in the file.
#[derive(Debug)]
pub(super) struct Content {
    pub(super) file: TensorFile,
    /// The hyper-parameters of each group, by torch's names.
    pub(super) groups: Vec<Map<String, Value>>,
    /// The parameters, in the order of the groups.
    pub(super) parameters: Vec<TorchParameter>,
    /// The names of the parameters.
    pub(super) names: Vec<String>,
}

/// torch's state of one parameter.
#[derive(Debug)]
pub(super) struct TorchParameter {
    /// The index in [`Content::groups`].
    pub(super) group: usize,
    /// The name in the file of each entry, by torch's key of the entry.
    pub(super) entries: BTreeMap<String, String>,
}

/// The error that a file does not have the state of an optimiser.
fn damage_error(reason: String) -> Error {
    Error::new(ErrorKind::File, "not a file with the whole state of an optimiser")
        .caused_by(reason)
        .with_remedy(
            "write the file with the function `save_state` in the documentation of `optimisers::torch`",
        )
}

/// Opens a safetensors file.
fn open(source: Source) -> Result<(TensorFile, Texts)> {
    let mut buffer = Vec::new();
    let head = source
        .read(0, source.length().min(4) as usize, &mut buffer)
        .map_err(read_error)?;
    let is_pickled = PICKLED.iter().any(|magic| head.starts_with(magic));
    let pickle_error = || {
        let remedy =
            "convert the file with the function `convert` in the documentation of `optimisers::torch`";
        Error::new(
            ErrorKind::File,
            "a file of `torch.save`, and not a safetensors file",
        )
        .with_remedy(remedy)
    };
    // `is_pickled` counts only after an error, because the length of a header may have the bytes of a pickle.
    TensorFile::from_source(source).map_err(|error| {
        if is_pickled {
            pickle_error()
        } else {
            open_error(error)
        }
    })
}

impl Content {
    /// Reads groups and names. Tensors stay in the source.
    pub(super) fn from_source(source: Source) -> Result<Self> {
        let (file, texts) = open(source)?;
        let missing = || damage_error("its metadata has no \"param_groups\"".to_string());
        let text = texts.param_groups.ok_or_else(missing)?;
        let groups_error =
            |reason: &dyn Display| damage_error(format!("its param_groups are damaged: {reason}"));
        let groups: Vec<Map<String, Value>> =
            serde_json::from_str(&text).map_err(|error| groups_error(&error))?;
        let mut remaining_entries = entries(&file)?;
        let mut content = Content {
            file,
            groups: Vec::new(),
            parameters: Vec::new(),
            names: Vec::new(),
        };
        for (group, mut settings) in groups.into_iter().enumerate() {
            let names: Option<Vec<String>> = settings
                .remove(PARAMETERS)
                .and_then(|names| serde_json::from_value(names).ok());
            for name in
                names.ok_or_else(|| groups_error(&"a group has no list of the names of its params"))?
            {
                // torch has no state for a parameter before the first step.
                let entries = remaining_entries.remove(&name).unwrap_or_default();
                content.parameters.push(TorchParameter { group, entries });
                content.names.push(name);
            }
            content.groups.push(settings);
        }
        match remaining_entries.keys().min() {
            Some(name) => Err(damage_error(format!(
                "it has the state of a parameter {name:?} that no group has"
            ))),
            None => Ok(content),
        }
    }
}

/// The entries of each parameter, as [`TorchParameter::entries`].
fn entries(file: &TensorFile) -> Result<HashMap<String, BTreeMap<String, String>>> {
    let mut entries: HashMap<String, BTreeMap<String, String>> = HashMap::new();
    for tensor in file.names() {
        // The name is split at the last slash, because names of parameters may have slashes.
        let Some((parameter, key)) = tensor.rsplit_once('/') else {
            return Err(damage_error(format!(
                "its tensor {tensor:?} is not named <parameter>/<key>"
            )));
        };
        entries
            .entry(parameter.to_string())
            .or_default()
            .insert(key.to_string(), tensor);
    }
    Ok(entries)
}
