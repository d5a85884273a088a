//! The files of `torch.save`: a pickle that names records of numbers, read by candle.

use std::collections::{BTreeMap, HashMap};

use candle_core::DType;
use candle_core::pickle::{Object, Stack};
use serde_json::{Map, Value};

use super::archive::Archive;
use super::content::{Content, NamedGroups, StateEntry, StoredTensor, StridedRun, TorchResult, texts};
use super::flat::{GROUPS, PARAMETERS};
use crate::error::TorchError;

type Pairs = [(Object, Object)];

/// The end of the name of an archive's pickle. Records of numbers stand beside it.
const PICKLE: &str = "data.pkl";

/// The key of the names in an optimiser's groups, and of a list of all beside the optimiser.
const NAMES: &str = "param_names";

pub(super) fn damaged(reason: impl ToString) -> TorchError {
    TorchError::Format { reason: reason.to_string() }
}

/// The state of the optimiser at a place in the file, or of the only one.
pub(super) fn content(archive: &Archive, at: Option<&str>) -> TorchResult<Content> {
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
        let places = states.iter().map(|(place, _)| place.clone()).collect();
        states.retain(|(place, _)| place == at);
        if states.is_empty() {
            return Err(TorchError::Places { places });
        }
    }
    let state = match &states[..] {
        [(_, state)] => Reader { archive, folder }.state(state)?,
        [] => return Err(TorchError::NoState { reason: "no dict in it has \"state\" and \"param_groups\"" }),
        _ => return Err(TorchError::Places { places: states.into_iter().map(|(place, _)| place).collect() }),
    };
    let beside = dict(&root).and_then(|root| get(root, NAMES)).and_then(|names| texts(&value(names)));
    Ok(Content { names: state.names.or(beside), ..state })
}

/// The object that a pickle describes.
fn object(pickle: &[u8]) -> TorchResult<Object> {
    /// How much larger than its text an object may grow by parts that refer to others, each of which candle copies.
    const GROWTH: usize = 16;
    /// The letters of a reason.
    const LONGEST: usize = 200;
    let (mut stack, mut rest, mut copied, mut depths) = (Stack::empty(), pickle, 0, Depths::default());
    loop {
        let instruction = rest;
        match *instruction {
            // candle shifts the bytes of a longer one out of its 64 bits.
            [0x8a, bytes, ..] if bytes > 8 => return Err(damaged("it has an integer of more than 64 bits")),
            // candle makes room for a text before it reads it.
            [b'X', a, b, c, d, ref after @ ..] if u32::from_le_bytes([a, b, c, d]) as usize > after.len() => {
                return Err(damaged("it ends within a text"));
            }
            _ => {}
        }
        // candle's errors may quote whole objects.
        let unread = |error: candle_core::Error| damaged(error.to_string().chars().take(LONGEST).collect::<String>());
        if stack.read(&mut rest).map_err(unread)? {
            return stack.finalize().map_err(unread);
        }
        depths.follow(instruction, stack.stack().len())?;
        if matches!(instruction, [b'h' | b'j' | b'q' | b'r', ..]) {
            copied += stack.stack().last().map_or(0, size);
            if copied > GROWTH * pickle.len() {
                return Err(damaged("its objects refer to each other too often"));
            }
        }
    }
}

/// How deep the objects are that candle has read so far. What reads, copies or drops an object goes down to
/// its end.
#[derive(Default)]
struct Depths {
    /// Of the objects on the stack.
    stack: Vec<usize>,
    /// Of those that are kept, by their numbers.
    kept: HashMap<u32, usize>,
}

impl Depths {
    /// Far more than a state of torch's has, which is 7 deep.
    const DEEPEST: usize = 64;

    /// Follows an instruction that has left so many objects on the stack.
    fn follow(&mut self, instruction: &[u8], length: usize) -> TorchResult<()> {
        let number = match *instruction {
            [b'h' | b'q', number, ..] => number.into(),
            [b'j' | b'r', a, b, c, d, ..] => u32::from_le_bytes([a, b, c, d]),
            _ => 0,
        };
        // What was where the last object is now, or above it, is in that object.
        let place = length.saturating_sub(1).min(self.stack.len());
        let parts = &self.stack[place..];
        let last = match (instruction.first(), parts) {
            (Some(b'h' | b'j'), _) => self.kept.get(&number).copied(),
            (Some(0x80 | b'q' | b'r'), _) => parts.first().copied(),
            // Behind its mark.
            (Some(b't'), [_, parts @ ..]) => parts.iter().map(|part| part + 1).max(),
            (Some(b'a' | b'e' | b's' | b'u'), [whole, parts @ ..]) => parts.iter().map(|part| part + 1).chain([*whole]).max(),
            _ => parts.iter().map(|part| part + 1).max(),
        };
        let last = last.unwrap_or(0);
        if last > Self::DEEPEST {
            return Err(damaged(format!("its objects are nested more than {} deep", Self::DEEPEST)));
        }
        if let Some(b'q' | b'r') = instruction.first() {
            self.kept.insert(number, last);
        }
        self.stack.truncate(place);
        self.stack.resize(length, last);
        Ok(())
    }
}

/// How much there is of an object: of how many objects it consists, and of how many bytes of text.
fn size(object: &Object) -> usize {
    1 + match object {
        Object::Tuple(parts) | Object::List(parts) => parts.iter().map(size).sum(),
        Object::Dict(pairs) => pairs.iter().map(|(key, value)| size(key) + size(value)).sum(),
        Object::Reduce { callable, args } | Object::Build { callable, args } => size(callable) + size(args),
        Object::PersistentLoad(id) => size(id),
        Object::Unicode(text) => text.len(),
        Object::Class { module_name, class_name } => module_name.len() + class_name.len(),
        _ => 0,
    }
}

/// The states of optimisers in an object, with their places: the keys and numbers on the way, with dots.
fn find<'o>(place: &str, object: &'o Object, found: &mut Vec<(String, &'o Pairs)>) {
    let inside = |name: String| if place.is_empty() { name } else { format!("{place}.{name}") };
    match object {
        Object::Dict(pairs) if get(pairs, "state").and_then(dict).is_some() && get(pairs, GROUPS).is_some() => {
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

/// A hyper-parameter. One that JSON has no value for is its description.
fn value(object: &Object) -> Value {
    match object {
        Object::None => Value::Null,
        Object::Bool(flag) => Value::Bool(*flag),
        Object::Int(number) => (*number).into(),
        Object::Long(number) => (*number).into(),
        Object::Float(number) => serde_json::Number::from_f64(*number).map_or_else(|| number.to_string().into(), Value::Number),
        Object::Unicode(text) => text.as_str().into(),
        Object::List(parts) | Object::Tuple(parts) => parts.iter().map(value).collect(),
        other => kind(other).into(),
    }
}

/// What an object is, in words.
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

/// Makes of the objects of an archive what a [`Content`] has.
struct Reader<'a> {
    archive: &'a Archive,
    /// What the names of the archive's records begin with.
    folder: &'a str,
}

impl Reader<'_> {
    fn state(&self, pairs: &Pairs) -> TorchResult<Content> {
        let no_groups = || damaged("its param_groups are no list of dicts");
        let (mut groups, mut names, mut own_names) = (Vec::new(), Vec::new(), true);
        for group in get(pairs, GROUPS).and_then(list).ok_or_else(no_groups)? {
            let group = dict(group).ok_or_else(no_groups)?;
            let keys = get(group, PARAMETERS).and_then(list).and_then(|keys| keys.iter().map(ParameterKey::of).collect::<Option<Vec<_>>>());
            let keys = keys.ok_or_else(|| damaged("a group has no list of its params, by number or name"))?;
            let said = get(group, NAMES).and_then(|names| texts(&value(names)));
            let said = said.or_else(|| keys.iter().map(ParameterKey::name).collect());
            own_names &= said.is_some();
            names.extend(said.into_iter().flatten());
            let settings = group.iter().filter_map(|(key, object)| match key {
                Object::Unicode(key) if key != PARAMETERS && key != NAMES => Some(self.setting(object).map(|value| (key.clone(), value))),
                _ => None,
            });
            groups.push((settings.collect::<TorchResult<Map<_, _>>>()?, keys));
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

    /// A hyper-parameter; a tensor of one number stands for it where a graph captures the optimiser.
    fn setting(&self, object: &Object) -> TorchResult<Value> {
        match self.tensor(object) {
            Some(StoredTensor { strided: Some(strided), place, dtype, shape }) if strided.span == [1] => {
                let stored = StoredTensor { strided: None, place, dtype, shape };
                self.archive.verify(&stored.place).map_err(damaged)?;
                let number = self.archive.tensor(&stored, &strided).map_err(damaged)?;
                Ok(number.to_dtype(DType::F64).and_then(|number| number.reshape(())?.to_scalar::<f64>()).map_err(damaged)?.into())
            }
            _ => Ok(value(object)),
        }
    }

    fn entries(&self, pairs: &Pairs) -> TorchResult<BTreeMap<String, StateEntry>> {
        let mut entries = BTreeMap::new();
        for (key, object) in pairs {
            let Object::Unicode(key) = key else { return Err(damaged("an entry of a parameter's state has no name")) };
            let entry = match object {
                // SGD has such a velocity before the first step.
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

    /// The tensor that an object describes.
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
        let lengths = |object| list(object)?.iter().map(|length| usize::try_from(integer(length)?).ok()).collect::<Option<Vec<_>>>();
        let (offset, shape, strides) = (usize::try_from(integer(offset)?).ok()?, lengths(shape)?, lengths(strides)?);
        let strided = StridedRun { span: [span(&shape, &strides)?], offset, strides };
        Some(StoredTensor { place: format!("{}data/{key}", self.folder), strided: Some(strided), dtype: dtype(class_name)?, shape })
    }
}

/// How many elements there are from the first to the last of a tensor.
fn span(shape: &[usize], strides: &[usize]) -> Option<usize> {
    if shape.len() != strides.len() {
        return None;
    }
    // The number of elements has to be one, too: strides of 0 take no room.
    let elements = shape.iter().try_fold(1usize, |elements, length| elements.checked_mul(*length))?;
    if elements == 0 {
        return Some(0);
    }
    let last = shape.iter().zip(strides).try_fold(0usize, |last, (length, stride)| last.checked_add((length - 1).checked_mul(*stride)?));
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

/// By what an optimiser's state knows its parameters.
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

    fn refused(pickle: &[u8]) -> String {
        object(pickle).expect_err("an error").to_string()
    }

    /// An integer of 9 bytes, and a tuple that has the one before twice, 40 times: 2⁴⁰ objects; a long text
    /// that is kept once and taken often.
    #[test]
    fn pickles_that_candle_would_not_survive() {
        assert!(refused(&[0x8a, 9, 1, 1, 1, 1, 1, 1, 1, 1, 1, b'.']).contains("more than 64 bits"));
        let mut pickle = b")q\0".to_vec();
        for i in 0..40 {
            pickle.extend([b'h', i, b'h', i, 0x86, b'q', i + 1]);
        }
        assert!(refused(&[&pickle[..], b"."].concat()).contains("too often"));
        let text = [&b"(X\xe8\x03\0\0"[..], &[b'a'; 1000], b"q\0", &b"h\0".repeat(1000), b"t."].concat();
        assert!(refused(&text).contains("too often"));
        assert!(refused(b"\x95").contains("op-code 149"));
        let quoted = [&b"("[..], &[b'N'; 1000], b"ta."].concat();
        assert!(refused(&[&b"}"[..], &quoted].concat()).len() < 400, "a part of another kind");
    }

    /// A text that says to be longer than the file is refused before there is room for it; so are other
    /// lengths, which candle does not read.
    #[test]
    fn lengths_are_at_most_what_is_left() {
        for length in [4u32, 5, 1 << 20, u32::MAX - 15, u32::MAX] {
            let pickle = [&b"\x80\x02X"[..], &length.to_le_bytes(), b"abc."].concat();
            let said = refused(&pickle);
            assert_eq!(said.contains("it ends within a text"), length > 4, "{length}: {said}");
        }
        assert_eq!(object(b"X\x03\0\0\0abc.").expect("a text"), Object::Unicode("abc".to_string()));
        // Texts, bytes and integers of other lengths, and frames.
        for code in [0x8b, 0x8c, 0x8d, 0x8e, 0x95, 0x96, b'B', b'C', b'T', b'U', b'V', b'S', b'P', b'L', b'I', b'F'] {
            let said = refused(&[&[code, 0xff, 0xff, 0xff, 0x7f][..], b"abc."].concat());
            assert!(said.contains(&format!("op-code {code}")), "{said}");
        }
        let cuts: [&[u8]; 13] =
            [b"X", b"X\x01\0\0", b"\x8a", b"\x8a\x08abc", b"K", b"M\x01", b"J\0\0\0", b"G\0", b"h", b"j\0", b"Nq", b"c", b"ca\nb"];
        for cut in cuts {
            refused(cut);
        }
    }

    /// Every instruction that puts objects into another, so often that its depth is 64, and once more.
    #[test]
    fn depth_is_at_most_64() {
        let times = |times: usize, part: &[u8]| part.repeat(times);
        // Each begins at depth 0 and adds as much in every round.
        let rounds: [(&str, &[u8], &[u8], &[u8]); 12] = [
            ("tuple of one", b")", b"\x85", b""),
            ("tuple of two", b")", b"N\x86", b""),
            ("tuple of three", b")", b"NN\x87", b""),
            ("called", b")", b")R", b""),
            ("made", b")", b")\x81", b""),
            ("built", b")", b"Nb", b""),
            ("elsewhere", b")", b"Q", b""),
            ("kept and taken", b")", b"q\0h\0\x86", b""),
            ("kept and taken by long numbers", b")", b"r\0\x01\0\0j\0\x01\0\0\x86", b""),
            ("marked tuple", b"(", b"(", b"t"),
            ("list", b"]", b"]", b"a"),
            ("dict", b"}", b"N}", b"s"),
        ];
        for (what, start, inwards, outwards) in rounds {
            let nested = |depth: usize| match outwards {
                // The innermost mark is a tuple of its own.
                b"t" => [times(depth + 1, b"("), times(depth + 1, b"t"), b".".to_vec()].concat(),
                _ => [start, &times(depth, inwards), &times(depth, outwards), b"."].concat(),
            };
            let grows = matches!(what, "kept and taken" | "kept and taken by long numbers");
            if !grows {
                drop(object(&nested(64)).unwrap_or_else(|error| panic!("{what}: {error}")));
            }
            let depths = if grows { &[65, 100][..] } else { &[65, 100, 60_000] };
            for &depth in depths {
                let said = refused(&nested(depth));
                assert!(said.contains("more than 64 deep") || grows && said.contains("too often"), "{what}, {depth}: {said}");
            }
        }
        let several = |depth: usize| [&times(depth, b"](")[..], b"N", &times(depth, b"e"), b"."].concat();
        object(&several(64)).expect("a list");
        assert!(refused(&several(65)).contains("more than 64 deep"));
        let pairs = |depth: usize| [&times(depth, b"}(N")[..], b"N", &times(depth, b"u"), b"."].concat();
        object(&pairs(64)).expect("a dict");
        assert!(refused(&pairs(65)).contains("more than 64 deep"));
        // Many beside each other are not deep.
        let wide = [b"]".to_vec(), times(5000, b"]a"), times(5000, b"N\x85a"), b"(".to_vec(), times(5000, b"}"), b"e.".to_vec()].concat();
        object(&wide).expect("a list");
    }

    #[test]
    fn spans_are_not_smaller_than_their_tensors() {
        assert_eq!(span(&[], &[]), Some(1));
        assert_eq!(span(&[2, 3], &[3, 1]), Some(6));
        assert_eq!(span(&[2, 2, 2, 2], &[8, 1, 4, 2]), Some(16));
        assert_eq!(span(&[2, 3], &[6, 2]), Some(11));
        assert_eq!(span(&[0, 3], &[3, 1]), Some(0));
        for (shape, strides) in [(&[2, 3][..], &[0, 1][..]), (&[2], &[1, 1]), (&[usize::MAX, 2], &[1, 1]), (&[2, 2], &[usize::MAX, 1])] {
            assert_eq!(span(shape, strides), None, "{shape:?}");
        }
    }
}
