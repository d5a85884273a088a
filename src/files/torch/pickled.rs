//! The content of a file of `torch.save`: a pickle, whose tensors name records of the archive.
//!
//! A tensor in a pickle is a call that makes it, and the id of a record `data/<key>`:
//!
//! ```text
//! _rebuild_tensor_v2(id = ("storage", FloatStorage, key, ..), offset, shape, strides, ..)
//! ```

use std::collections::{BTreeMap, HashMap};

use candle_core::pickle::Object;
use serde_json::{Map, Value};

use super::archive::Archive;
use super::content::{Content, NamedGroups, StateEntry, StoredTensor, StridedRun, texts};
use super::flat::{GROUPS, PARAMETERS};
use super::objects::{damaged, object, stateless};
use crate::error::{Error, ErrorKind, Result};
use crate::numbers::DType;

type Pairs = [(Object, Object)];

/// The end of the name of an archive's pickle. What precedes it is the folder of all records.
const PICKLE: &str = "data.pkl";

/// The key of the names of parameters: in an optimiser's groups, or in the dict of the whole file.
const NAMES: &str = "param_names";

/// The state of the optimiser at the place `at`, or of the only optimiser of the file.
pub(super) fn content(archive: &Archive, at: Option<&str>) -> Result<Content> {
    let pickle = archive.find(PICKLE).ok_or_else(|| damaged("it has no record \"data.pkl\""))?;
    let folder = pickle.strip_suffix(PICKLE).unwrap_or_default();
    let order = format!("{folder}byteorder");
    if archive.find(&order).is_some() && archive.bytes(&order).map_err(damaged)? != b"little" {
        return Err(damaged("its numbers are big-endian"));
    }
    let root = object(&archive.bytes(pickle).map_err(damaged)?)?;
    let mut states = Vec::new();
    find("", &root, &mut states);
    if let Some(at) = at {
        let places: Vec<String> = states.iter().map(|(place, _)| place.clone()).collect();
        states.retain(|(place, _)| place == at);
        if states.is_empty() {
            return Err(Error::unknown("optimiser state at", at, &places));
        }
    }
    let state = match &states[..] {
        [(_, state)] => Reader { archive, folder }.state(state)?,
        [] => return Err(stateless("no dict in it has \"state\" and \"param_groups\"")),
        _ => {
            let places: Vec<String> = states.into_iter().map(|(place, _)| place).collect();
            return Err(Error::new(ErrorKind::File, "the file has optimiser states at")
                .with_got(places.join(", "))
                .with_expected("one")
                .with_remedy("name one of these places with `TorchState::open_at`"));
        }
    };
    let beside = dict(&root).and_then(|root| get(root, NAMES)).and_then(|names| texts(&value(names)));
    Ok(Content { names: state.names.or(beside), ..state })
}

/// Adds the states of optimisers in an object, with their places: keys and indices, joined by dots.
fn find<'o>(place: &str, object: &'o Object, found: &mut Vec<(String, &'o Pairs)>) {
    let inside = |name: String| if place.is_empty() { name } else { format!("{place}.{name}") };
    match object {
        Object::Dict(pairs)
            if get(pairs, "state").and_then(dict).is_some() && get(pairs, GROUPS).is_some() =>
        {
            found.push((place.to_string(), pairs));
        }
        Object::Dict(pairs) => {
            for (key, value) in pairs {
                if let Object::Unicode(key) = key {
                    find(&inside(key.clone()), value, found);
                }
            }
        }
        Object::List(parts) | Object::Tuple(parts) => {
            parts.iter().enumerate().for_each(|(i, part)| find(&inside(i.to_string()), part, found));
        }
        _ => {}
    }
}

fn dict(object: &Object) -> Option<&Pairs> {
    if let Object::Dict(pairs) = object { Some(pairs) } else { None }
}

fn list(object: &Object) -> Option<&[Object]> {
    if let Object::List(parts) | Object::Tuple(parts) = object { Some(parts) } else { None }
}

fn get<'o>(pairs: &'o Pairs, key: &str) -> Option<&'o Object> {
    pairs.iter().find_map(|(own, value)| matches!(own, Object::Unicode(own) if own == key).then_some(value))
}

fn integer(object: &Object) -> Option<i64> {
    match object {
        Object::Int(value) => Some((*value).into()),
        Object::Long(value) => Some(*value),
        _ => None,
    }
}

/// A hyper-parameter as JSON. If JSON has no such value, a text that describes it.
fn value(object: &Object) -> Value {
    match object {
        Object::None => Value::Null,
        Object::Bool(flag) => Value::Bool(*flag),
        Object::Int(number) => (*number).into(),
        Object::Long(number) => (*number).into(),
        Object::Float(number) => {
            serde_json::Number::from_f64(*number).map_or_else(|| number.to_string().into(), Value::Number)
        }
        Object::Unicode(text) => text.as_str().into(),
        Object::List(parts) | Object::Tuple(parts) => parts.iter().map(value).collect(),
        other => kind(other).into(),
    }
}

/// The kind of an object, for errors.
fn kind(object: &Object) -> String {
    match object {
        Object::Dict(_) => "a dict".to_string(),
        Object::List(_) | Object::Tuple(_) => "a list".to_string(),
        Object::Unicode(_) => "a text".to_string(),
        Object::None => "None".to_string(),
        Object::Reduce { callable, .. } | Object::Build { callable, .. } => match &**callable {
            Object::Class { class_name, .. } => format!("what {class_name} makes"),
            _ => "an object".to_string(),
        },
        _ => "an object".to_string(),
    }
}

/// Reads a [`Content`] from the objects of an archive.
struct Reader<'a> {
    archive: &'a Archive,
    /// The prefix of the names of the archive's records.
    folder: &'a str,
}

impl Reader<'_> {
    fn state(&self, pairs: &Pairs) -> Result<Content> {
        let no_groups = || damaged("its param_groups are no list of dicts");
        let (mut groups, mut names, mut own_names) = (Vec::new(), Vec::new(), true);
        for group in get(pairs, GROUPS).and_then(list).ok_or_else(no_groups)? {
            let group = dict(group).ok_or_else(no_groups)?;
            let keys = get(group, PARAMETERS)
                .and_then(list)
                .and_then(|keys| keys.iter().map(ParameterKey::of).collect::<Option<Vec<_>>>());
            let keys = keys.ok_or_else(|| damaged("a group has no list of its params, by number or name"))?;
            let said = get(group, NAMES).and_then(|names| texts(&value(names)));
            let said = said.or_else(|| keys.iter().map(ParameterKey::name).collect());
            // Without the names of one group, those of later groups would move to other parameters.
            own_names &= said.is_some();
            names.extend(said.into_iter().flatten());
            let settings = group.iter().filter_map(|(key, object)| match key {
                Object::Unicode(key) if key != PARAMETERS && key != NAMES => {
                    Some(self.setting(object).map(|value| (key.clone(), value)))
                }
                _ => None,
            });
            groups.push((settings.collect::<Result<Map<_, _>>>()?, keys));
        }
        let mut state = HashMap::new();
        for (key, entries) in get(pairs, "state").and_then(dict).unwrap_or_default() {
            let (Some(key), Some(entries)) = (ParameterKey::of(key), dict(entries)) else {
                return Err(damaged("its state is no dict of dicts, by the number or name of a parameter"));
            };
            state.insert(key, self.entries(entries)?);
        }
        Ok(Content { names: own_names.then_some(names), ..NamedGroups { groups }.with_state(state)? })
    }

    /// A hyper-parameter as JSON. If a CUDA graph captures the optimiser, torch has a tensor of one number.
    fn setting(&self, object: &Object) -> Result<Value> {
        match self.tensor(object) {
            Some(StoredTensor { strided: Some(strided), place, dtype, shape }) if strided.span == [1] => {
                let stored = StoredTensor { strided: None, place, dtype, shape };
                self.archive.verify(&stored.place).map_err(damaged)?;
                let number = self.archive.tensor(&stored, &strided).map_err(damaged)?;
                Ok(number
                    .to_dtype(DType::F64.into())
                    .and_then(|number| number.reshape(())?.to_scalar::<f64>())
                    .map_err(damaged)?
                    .into())
            }
            _ => Ok(value(object)),
        }
    }

    fn entries(&self, pairs: &Pairs) -> Result<BTreeMap<String, StateEntry>> {
        let mut entries = BTreeMap::new();
        for (key, object) in pairs {
            let Object::Unicode(key) = key else {
                return Err(damaged("an entry of a parameter's state has no name"));
            };
            let entry = match object {
                // SGD has this as its velocity before the first step.
                Object::None => continue,
                Object::Float(number) => StateEntry::Number(*number),
                object => match (integer(object), self.tensor(object)) {
                    (Some(number), _) => StateEntry::Number(number as f64),
                    (None, Some(tensor)) => StateEntry::Tensor(tensor),
                    (None, None) => StateEntry::Other(kind(object)),
                },
            };
            entries.insert(key.clone(), entry);
        }
        Ok(entries)
    }

    /// The tensor that an object describes, if it describes one in a known way.
    fn tensor(&self, object: &Object) -> Option<StoredTensor> {
        let Object::Reduce { callable, args } = object else { return None };
        let Object::Class { class_name, .. } = &**callable else { return None };
        let (first, args) = list(args)?.split_first()?;
        match class_name.as_str() {
            "_rebuild_parameter" => return self.tensor(first),
            "_rebuild_tensor_v2" => {}
            _ => return None,
        }
        let (Object::PersistentLoad(id), [offset, shape, strides, ..]) = (first, args) else { return None };
        let [_, class, Object::Unicode(key), ..] = list(id)? else { return None };
        let Object::Class { class_name, .. } = class else { return None };
        let lengths = |object| {
            list(object)?
                .iter()
                .map(|length| usize::try_from(integer(length)?).ok())
                .collect::<Option<Vec<_>>>()
        };
        let (offset, shape, strides) =
            (usize::try_from(integer(offset)?).ok()?, lengths(shape)?, lengths(strides)?);
        let strided = StridedRun { span: [span(&shape, &strides)?], offset, strides };
        Some(StoredTensor {
            place: format!("{}data/{key}", self.folder),
            strided: Some(strided),
            dtype: dtype(class_name)?,
            shape,
        })
    }
}

/// The number of elements from the first one of a tensor to the last. `None` if a count overflows, or if
/// elements of the tensor share a place.
fn span(shape: &[usize], strides: &[usize]) -> Option<usize> {
    if shape.len() != strides.len() {
        return None;
    }
    // Counted as well, because with strides of 0 a short run would have any number of elements.
    let elements = shape.iter().try_fold(1usize, |elements, length| elements.checked_mul(*length))?;
    if elements == 0 {
        return Some(0);
    }
    let last = shape
        .iter()
        .zip(strides)
        .try_fold(0usize, |last, (length, stride)| last.checked_add((length - 1).checked_mul(*stride)?));
    last.and_then(|last| last.checked_add(1)).filter(|span| *span >= elements)
}

fn dtype(storage: &str) -> Option<DType> {
    Some(match storage {
        "FloatStorage" => DType::F32,
        "DoubleStorage" => DType::F64,
        "HalfStorage" => DType::F16,
        "BFloat16Storage" => DType::BF16,
        "LongStorage" => DType::I64,
        _ => return None,
    })
}

/// The key of a parameter in an optimiser's state and groups.
#[derive(Debug, PartialEq, Eq, Hash)]
enum ParameterKey {
    Number(i64),
    Name(String),
}

impl ParameterKey {
    fn of(object: &Object) -> Option<Self> {
        match object {
            Object::Unicode(name) => Some(ParameterKey::Name(name.clone())),
            object => integer(object).map(ParameterKey::Number),
        }
    }

    fn name(&self) -> Option<String> {
        if let ParameterKey::Name(name) = self { Some(name.clone()) } else { None }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn spans_are_not_smaller_than_their_tensors() {
        assert_eq!(span(&[], &[]), Some(1));
        assert_eq!(span(&[2, 3], &[3, 1]), Some(6));
        assert_eq!(span(&[2, 2, 2, 2], &[8, 1, 4, 2]), Some(16));
        assert_eq!(span(&[2, 3], &[6, 2]), Some(11));
        assert_eq!(span(&[0, 3], &[3, 1]), Some(0));
        for (shape, strides) in [
            (&[2, 3][..], &[0, 1][..]),
            (&[2], &[1, 1]),
            (&[usize::MAX, 2], &[1, 1]),
            (&[2, 2], &[usize::MAX, 1]),
        ] {
            assert_eq!(span(shape, strides), None, "{shape:?}");
        }
    }
}
