//! The content of a safetensors file: a tensor `<parameter>/<entry>` for each entry of the state, and the
//! groups as JSON.

use std::collections::{BTreeMap, HashMap};

use serde_json::{Map, Value};

use super::content::{Content, NamedGroups, StateEntry, StoredTensor, texts};
use super::objects::{damaged, stateless};
use crate::error::Result;
use crate::files::tensor_file::{TensorFile, Texts};
use crate::tensors::from_file;

/// The key of the groups in the metadata.
pub(super) const GROUPS: &str = "param_groups";

/// The key of the parameters in a group.
pub(super) const PARAMETERS: &str = "params";

pub(super) fn content(file: &TensorFile, texts_of_file: Texts) -> Result<Content> {
    let reason = "its metadata has no \"param_groups\", which the snippet in the documentation writes";
    let groups = texts_of_file.param_groups.ok_or_else(|| stateless(reason))?;
    let unread = |reason: &dyn std::fmt::Display| damaged(format!("its param_groups are damaged: {reason}"));
    let groups: Vec<Map<String, Value>> = serde_json::from_str(&groups).map_err(|error| unread(&error))?;
    let named = |mut group: Map<String, Value>| {
        let names = group.remove(PARAMETERS).as_ref().and_then(texts);
        names
            .map(|names| (group, names))
            .ok_or_else(|| unread(&"a group has no list of the names of its params"))
    };
    let groups = groups.into_iter().map(named).collect::<Result<Vec<_>>>()?;
    let names = groups.iter().flat_map(|(_, names)| names.iter().cloned()).collect();
    let mut state: HashMap<String, BTreeMap<String, StateEntry>> = HashMap::new();
    for place in file.names() {
        // From the right, because names of parameters may have slashes.
        let (Some((name, key)), Some(entry)) = (place.rsplit_once('/'), file.entry(&place)) else {
            return Err(damaged(format!("its tensor {place:?} is not named <parameter>/<entry>")));
        };
        let (name, key) = (name.to_string(), key.to_string());
        let found = match from_file(entry.dtype) {
            Ok(dtype) => {
                StateEntry::Tensor(StoredTensor { strided: None, dtype, shape: entry.shape.to_vec(), place })
            }
            Err(_) => StateEntry::Other(format!("a tensor of {:?}", entry.dtype)),
        };
        state.entry(name).or_default().insert(key, found);
    }
    Ok(Content { names: Some(names), ..NamedGroups { groups }.with_state(state)? })
}
