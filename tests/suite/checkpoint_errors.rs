//! Files that do not fit are refused with the facts and the remedy, and change not one bit of state and model.

use std::collections::BTreeMap;

use candle_core::{DType, Tensor, Var};
use optimisers::{
    AccumGrad, Adam, AdamW, Checkpoint, CheckpointFile, ClipGrad, ClipNorm, Descent, Ema, LossScaler, MixedPrecision, Momentum, NonFinite,
    Optimiser, OptimiserChain, Result, Rule, StateTree, setup, update,
};
use serde_json::{Value, json};

use crate::common::{Vars, forget_ascent, random, says, snapshot, values, var};
use crate::crafted_checkpoints::{Pieces, assembled, file_of, open, with_checksum};
use crate::models::CPU;

fn model(seed: u64, dtype: DType) -> Vars {
    let leaf = |(path, shape): (&str, &[usize])| (path.to_string(), var(&random(seed, shape, dtype, CPU)));
    [("body.bias", &[2][..]), ("body.weight", &[2, 3]), ("head", &[])].into_iter().map(leaf).collect()
}

fn rule() -> impl Rule + Clone {
    OptimiserChain::new((AccumGrad::new(2), ClipNorm::new(3.0), AdamW::new(0.01)))
}

/// A model and its state after an odd number of calls.
fn started(optimiser: impl Optimiser, seed: u64, dtype: DType) -> (Vars, StateTree) {
    let model = model(seed, dtype);
    let mut state = setup(optimiser, &model).unwrap();
    for call in 0..3 {
        let gradients = model.iter().map(|(path, x)| (path.clone(), random(seed + call, x.dims(), dtype, CPU))).collect::<BTreeMap<_, _>>();
        update(&mut state, &model, &gradients).unwrap();
    }
    (model, state)
}

/// The file of a model in F32 with its state.
fn file() -> Vec<u8> {
    let (model, state) = started(rule(), 1, DType::F32);
    file_of(Checkpoint::new(&state).model(&model).note("step", 3))
}

/// The file fails to restore, alone and with the model, and leaves everything as it was.
fn refused_by(file: &CheckpointFile, model: &Vars, state: &mut StateTree, words: &[&str]) {
    let before = snapshot(model, state);
    says(&file.restore_with_model(state, model).expect_err("an error"), words);
    assert!(snapshot(model, state) == before, "{words:?}: something changed");
    if let Err(error) = file.restore(state) {
        says(&error, &["crafted"]);
        assert!(snapshot(model, state) == before, "{words:?}: something changed");
    }
}

/// The file is refused by the state that it was made of, with other values.
fn refused(file: Result<CheckpointFile>, words: &[&str]) {
    let words = [&["crafted"], words].concat();
    match file {
        Err(error) => says(&error, &words),
        Ok(file) => {
            let (model, mut state) = started(rule(), 20, DType::F32);
            refused_by(&file, &model, &mut state, &words);
        }
    }
}

/// The file after an edit, with the checksum that it should have.
fn edited(edit: impl FnOnce(&mut Pieces)) -> Result<CheckpointFile> {
    let mut pieces = Pieces::of(&file());
    edit(&mut pieces);
    open(&pieces.bytes())
}

fn leaf<'p>(pieces: &'p mut Pieces, path: &str) -> &'p mut Value {
    &mut pieces.description["leaves"][path]
}

/// What the edits below start from is not refused.
#[test]
fn the_pieces_are_a_checkpoint() {
    let (model, mut state) = started(rule(), 20, DType::F32);
    edited(|_| {}).unwrap().restore_with_model(&mut state, &model).unwrap();
}

#[test]
fn tensors_that_are_missing_or_too_many() {
    let remove = |name: &'static str| {
        edited(move |pieces| {
            // The scalar's tensors are the last in the file.
            let info = pieces.tensors.as_object_mut().unwrap().remove(name).unwrap();
            assert_eq!(info["data_offsets"][1], pieces.data.len());
            pieces.data.truncate(pieces.data.len() - 4);
        })
    };
    refused(remove("head/2.v"), &["Entry", "the file lacks the tensor \"head/2.v\""]);
    refused(edited(|pieces| pieces.push("head/2.w", "F32", &[], &[0; 4])), &["Entry", "\"head/2.w\"", "its description does not name"]);
    refused(edited(|pieces| pieces.push("more", "I64", &[0], &[])), &["Entry", "\"more\"", "its description does not name"]);
    let renamed = |pieces: &mut Pieces| {
        let info = pieces.tensors.as_object_mut().unwrap().remove("head").unwrap();
        pieces.tensors["heads"] = info;
    };
    refused(edited(renamed), &["Entry", "the file lacks the tensor \"head\""]);
    let unnamed = |pieces: &mut Pieces| _ = leaf(pieces, "head")["tensors"].as_array_mut().unwrap().pop();
    refused(edited(unnamed), &["OtherNames", "\"head\"", "tensors", "2.v", "another version of the rule"]);
    // A master is left out only on purpose.
    let master = |pieces: &mut Pieces| {
        let inner = pieces.description["optimisers"][0].take();
        let storage = json!({"kind": "master", "offloaded": false});
        let settings = json!([["dtype", {"text": "F32"}]]);
        pieces.description["optimisers"][0] = json!({"kind": "MixedPrecision", "storage": storage, "settings": settings, "inner": inner});
        leaf(pieces, "head")["tensors"].as_array_mut().unwrap().insert(0, json!("master"));
        pieces.push("head/master", "F32", &[], &[0; 4]);
    };
    let (model, mut state) = started(MixedPrecision::new(DType::F32, rule()), 20, DType::F32);
    refused_by(&edited(master).unwrap(), &model, &mut state, &["OtherNames", "\"head\"", "master"]);
    edited(master).unwrap().converting().restore_with_model(&mut state, &model).unwrap();
    assert_eq!(values(&model["head"]), [0.0]);
}

#[test]
fn tensors_of_another_shape_or_dtype() {
    for (entry, shape) in [("body.weight/2.m", json!([3, 2])), ("body.weight", json!([6])), ("head/0.acc", json!([1]))] {
        let words = ["Shape", &format!("{entry:?} has shape"), "in the file, expected", "pass the model that it was saved with"];
        refused(edited(|pieces| pieces.tensors[entry]["shape"] = shape), &words);
    }
    for (entry, dtype) in [("body.weight/2.m", "I32"), ("body.weight", "U32")] {
        let with = |pieces: &mut Pieces| pieces.tensors[entry]["dtype"] = json!(dtype);
        let words = ["Dtype", &format!("{entry:?} is {dtype} in the file, expected F32"), "CheckpointFile::converting"];
        refused(edited(with), &words);
        // Numbers that are no floating-point numbers are not converted either.
        refused(edited(with).map(CheckpointFile::converting), &words[..2]);
    }
    // Dtypes that candle does not have, or that take less than a byte.
    for (dtype, shape) in [("BOOL", json!([8])), ("F4", json!([16])), ("F8_E5M2", json!([8])), ("C64", json!([])), ("U16", json!([2, 2]))] {
        let with = |pieces: &mut Pieces| {
            pieces.tensors["body.bias"] =
                json!({ "dtype": dtype, "shape": shape, "data_offsets": pieces.tensors["body.bias"]["data_offsets"] })
        };
        refused(edited(with), &["\"body.bias\" has shape"]);
    }
    refused(edited(|pieces| leaf(pieces, "body.weight")["shape"] = json!([3, 2])), &["Shape", "\"body.weight\"", "[3, 2]", "[2, 3]"]);
    refused(edited(|pieces| leaf(pieces, "head")["dtype"] = json!("bf16")), &["Dtype", "\"head\"", "bf16", "CheckpointFile::converting"]);
    refused(edited(|pieces| leaf(pieces, "head")["dtype"] = json!("f31")), &["Dtype", "\"head\"", "f31"]);
}

#[test]
fn numbers_that_are_not_finite() {
    for (entry, index, number) in [("body.weight/2.v", 4, f32::NAN), ("body.bias", 1, f32::NEG_INFINITY), ("head/0.acc", 0, f32::INFINITY)]
    {
        let with = |pieces: &mut Pieces| pieces.tensor(entry)[4 * index..4 * index + 4].copy_from_slice(&number.to_le_bytes());
        let words = ["NonFinite", &format!("{entry:?} has {number} at element {index}"), "CheckpointFile::accepting_non_finite"];
        refused(edited(with), &words);

        let (model, mut state) = started(rule(), 20, DType::F32);
        edited(with).unwrap().accepting_non_finite().restore_with_model(&mut state, &model).unwrap();
        let (path, tensor) = entry.split_once('/').unwrap_or((entry, ""));
        let restored = if tensor.is_empty() { model[path].copy() } else { Ok(state.leaf(path).unwrap().tensor(tensor).unwrap().unwrap()) };
        let (got, finite) = (values(&restored.unwrap()), |value: &f64| value.is_finite());
        assert_eq!((got[index].to_bits(), got.iter().filter(|x| finite(x)).count()), (f64::from(number).to_bits(), got.len() - 1));
    }
}

/// What is not finite in a master is not finite in its parameter either, and both are taken over.
#[test]
fn masters_that_are_not_finite() {
    let rule = || MixedPrecision::new(DType::F32, rule());
    let (model, mut state) = started(rule(), 1, DType::BF16);
    let gradients = |number: f32| BTreeMap::from([("body.bias", Tensor::new(&[number, 1.0], CPU).unwrap())]);
    for number in [f32::NAN, f32::INFINITY] {
        state.all().adjust_field("non_finite", NonFinite::Pass).unwrap();
        update(&mut state, &model, &gradients(number)).unwrap();
        update(&mut state, &model, &gradients(1.0)).unwrap();
        let file = file_of(Checkpoint::new(&state).model(&model));
        let (other, mut resumed) = started(rule(), 20, DType::BF16);
        refused_by(&open(&file).unwrap(), &other, &mut resumed, &["crafted", "NonFinite", "\"body.bias/"]);
        open(&file).unwrap().accepting_non_finite().restore_with_model(&mut resumed, &other).unwrap();
        assert!(snapshot(&other, &resumed) == snapshot(&model, &state));
        assert!(values(&other["body.bias"])[0].is_nan());
    }
}

/// A scaler that could not be read again is not written.
#[test]
fn a_loss_scaler_out_of_range() {
    let (_, state) = started(rule(), 1, DType::F32);
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("run");
    for scale in [f64::NAN, f64::INFINITY, 0.0, -1.0] {
        let error = Checkpoint::new(&state).scaler(&LossScaler::fixed(scale)).save(&path).unwrap_err();
        says(&error, &["LossScaler", "scale is", "expected"]);
        assert!(!path.exists());
    }
    let saved = file_of(Checkpoint::new(&state).scaler(&LossScaler::dynamic()));
    assert_eq!(open(&saved).unwrap().scaler().unwrap(), Some(LossScaler::dynamic()));
    let mut pieces = Pieces::of(&saved);
    pieces.description["scaler"]["scale"] = json!(-2.0);
    says(&open(&pieces.bytes()).unwrap().scaler().unwrap_err(), &["crafted", "LossScaler", "scale is -2"]);
    pieces.description["scaler"]["scale"] = json!(null);
    says(&open(&pieces.bytes()).unwrap_err(), &["crafted", "Record"]);
    assert_eq!(open(&file()).unwrap().scaler().unwrap(), None);
}

#[test]
fn parameters_that_are_missing_or_too_many() {
    let without = |pieces: &mut Pieces| _ = pieces.description["leaves"].as_object_mut().unwrap().remove("head").unwrap();
    refused(edited(without), &["MissingParameter", "no parameter \"head\" in the file; it has: body.bias, body.weight"]);
    let with = |pieces: &mut Pieces| pieces.description["leaves"]["tail"] = pieces.description["leaves"]["head"].clone();
    refused(edited(with), &["ExtraParameter", "\"tail\" that the state lacks", "pass the model that it was saved with"]);

    let words = ["MissingParameter", "no parameter \"head\" in the file; it has: body.bias, body.weight"];
    refused(edited(|pieces| pieces.description["model"] = json!(["body.bias", "body.weight"])), &words);
    let more = json!(["body.bias", "body.weight", "head", "tail"]);
    refused(edited(|pieces| pieces.description["model"] = more), &["ExtraParameter", "\"tail\" that the model lacks"]);
}

/// States for other models, from files that nobody edited.
#[test]
fn another_model() {
    let file = open(&file()).unwrap();
    let with = |change: &dyn Fn(&mut Vars), words: &[&str]| {
        let mut model = model(20, DType::F32);
        change(&mut model);
        let mut state = setup(rule(), &model).unwrap();
        refused_by(&file, &model, &mut state, words);
    };
    let x = || var(&random(3, &[2], DType::F32, CPU));
    with(&|model| _ = model.remove("head"), &["ExtraParameter", "\"head\" that the state lacks"]);
    with(&|model| _ = model.insert("tail".to_string(), x()), &["MissingParameter", "no parameter \"tail\" in the file"]);
    with(&|model| _ = model.insert("head".to_string(), x()), &["Shape", "\"head\" has shape [] in the file, expected [2]"]);
    let integer = |model: &mut Vars| _ = model.insert("tokens".to_string(), Var::zeros(2, DType::U32, CPU).unwrap());
    with(&integer, &["MissingParameter", "no parameter \"tokens\" in the file; it has: body.bias, body.weight, head"]);

    // A model that is not the state's.
    let (mine, mut state) = started(rule(), 20, DType::F32);
    let (theirs, _) = started(rule(), 30, DType::F32);
    let before = (snapshot(&mine, &state), snapshot(&theirs, &state));
    says(&file.restore_with_model(&mut state, &theirs).unwrap_err(), &["UnknownParameter", "\"body.bias\"", "another model"]);
    assert!((snapshot(&mine, &state), snapshot(&theirs, &state)) == before);
}

#[test]
fn a_file_without_the_model() {
    let (model, state) = started(rule(), 1, DType::F32);
    let file = open(&file_of(Checkpoint::new(&state))).unwrap();
    let (other, mut resumed) = started(rule(), 20, DType::F32);
    refused_by(&file, &other, &mut resumed, &["crafted", "NoModel", "save it with `Checkpoint::model`"]);
    file.restore(&mut resumed).unwrap();
    assert!(snapshot(&other, &resumed)[model.len()..] == snapshot(&model, &state)[model.len()..], "the state alone");
}

/// The rule that saved, the rule that loads, and words of the error.
type Row<'w> = (Box<dyn Optimiser>, Box<dyn Optimiser>, &'w [&'w str]);

#[test]
fn another_rule() {
    let save = |optimiser: &dyn Optimiser| {
        let (model, state) = started(dyn_clone::clone_box(optimiser), 1, DType::BF16);
        file_of(Checkpoint::new(&state).model(&model))
    };
    let chain = |first: bool| -> Box<dyn Optimiser> {
        let (clip, momentum) = (ClipGrad::new(1.0), Momentum::new(0.1));
        if first { Box::new(OptimiserChain::new((clip, momentum))) } else { Box::new(OptimiserChain::new((momentum, clip))) }
    };
    let mixed = |dtype| -> Box<dyn Optimiser> { Box::new(MixedPrecision::new(dtype, Momentum::new(0.1))) };
    let replace = "restore, and then replace the rule";
    let rows: [Row<'_>; 8] = [
        (Box::new(Adam::new(0.1)), Box::new(AdamW::new(0.1)), &["has AdamW, the file's has Adam", replace]),
        (Box::new(Momentum::new(0.1)), Box::new(optimisers::Nesterov::new(0.1)), &["has Nesterov, the file's has Momentum", replace]),
        (
            chain(true),
            chain(false),
            &["the file's has OptimiserChain(ClipGrad, Momentum) (here: Momentum, file: ClipGrad, at member 0)", replace],
        ),
        (Box::new(Momentum::new(0.1)), chain(true), &["the file's has Momentum", replace]),
        (mixed(DType::F32), Box::new(Momentum::new(0.1)), &["has Momentum, the file's has MixedPrecision(F32, Momentum)", "converting"]),
        (mixed(DType::F32), mixed(DType::F64), &["has MixedPrecision(F64, Momentum)", "converting"]),
        (Box::new(Momentum::new(0.1)), mixed(DType::F32), &["the file's has Momentum", "converting"]),
        (
            Box::new(OptimiserChain::new((Some(Descent::new(0.1)), Adam::new(0.1)))),
            Box::new(OptimiserChain::new((None::<Descent>, Descent::new(0.1)))),
            &["OptimiserChain(None, Descent), the file's has OptimiserChain(Descent, Adam)", replace],
        ),
    ];
    for (saved, set_up, words) in rows {
        let file = open(&save(&*saved)).unwrap();
        let (model, mut state) = started(set_up, 20, DType::BF16);
        let words = [&["crafted", "OtherRule", "parameter \"body.bias\""], words].concat();
        refused_by(&file, &model, &mut state, &words);
    }
}

#[test]
fn hyper_parameters_and_counters() {
    fn field<'p>(pieces: &'p mut Pieces, name: &str) -> &'p mut Value {
        &mut pieces.fields().into_iter().flatten().find(|field| field[0] == name).unwrap()[1]
    }
    let rows = [
        ("eta", json!(-0.5), "AdamW: eta is -0.5, expected a finite number of 0 or more"),
        ("eta", json!("nan"), "AdamW: eta is NaN"),
        ("eta", json!("inf"), "AdamW: eta is inf"),
        ("beta", json!([0.9, 1]), "AdamW: beta is (0.9, 1), expected two numbers in [0, 1)"),
        ("n", json!(0), "AccumGrad: n is 0, expected 1 or more"),
        ("omega", json!(0), "ClipNorm: omega is 0, expected a number above 0"),
        ("eta", json!("0.1"), "eta is not a real number"),
        ("eta", json!(true), "eta is not a real number"),
        ("beta", json!(0.9), "beta is not a pair of reals"),
        ("n", json!(2.5), "n is not a count"),
        ("n", json!(-1), "n is not a count"),
        ("non_finite", json!("Ignore"), "non_finite is not one of Error, Pass, Skip"),
    ];
    for (name, value, words) in rows {
        refused(edited(|pieces| *field(pieces, name) = value), &["Field", "parameter \"body.bias\": ", words]);
    }
    refused(edited(|pieces| *field(pieces, "eta") = json!(null)), &["Record"]);
    let rename = |pieces: &mut Pieces| pieces.fields()[0][0][0] = json!("m");
    refused(edited(rename), &["OtherNames", "parameter \"body.bias\"", "fields", "another version of the rule"]);
    refused(edited(|pieces| leaf(pieces, "head")["optimiser"] = json!(7)), &["Record", "\"head\"", "optimiser"]);
    refused(edited(|pieces| leaf(pieces, "head")["counters"][0][0] = json!("ticks")), &["OtherNames", "\"head\"", "counters", "ticks"]);
    // A count that the next call would overflow.
    refused(
        edited(|pieces| leaf(pieces, "head")["counters"][0][1] = json!(u64::MAX)),
        &["Record", "\"head\"", "18446744073709551615 0.calls"],
    );
    refused(edited(|pieces| leaf(pieces, "head")["steps"] = json!(u64::MAX)), &["Record", "\"head\"", "steps", "18446744073709551615"]);
    refused(edited(|pieces| leaf(pieces, "head")["steps"] = json!(-1)), &["Record"]);
}

#[test]
fn files_of_another_kind() {
    refused(open(b""), &["Format", "not a whole safetensors file"]);
    refused(open(b"{\"weights\": [1, 2, 3]}"), &["Format", "not a whole safetensors file"]);
    refused(open(&[0; 4096]), &["Format", "not a whole safetensors file"]);
    refused(open(&[0xff; 4096]), &["Format", "not a whole safetensors file"]);
    let plain = |metadata: &str| assembled(&format!(r#"{{{metadata}"w":{{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}}}"#), &[0; 4]);
    for metadata in ["", r#""__metadata__":{},"#, r#""__metadata__":{"format":"pt"},"#] {
        refused(open(&plain(metadata)), &["NotACheckpoint", "without optimiser state", "`Weights`"]);
    }
    let twice = plain(r#""w":{"dtype":"F32","shape":[0],"data_offsets":[0,0]},"#);
    refused(open(&twice), &["Format", "two entries with the name \"w\""]);
    refused(open(&plain(r#""__metadata__":{"optimisers":"yes"},"#)), &["Record", "the description of the state is damaged"]);
    refused(open(&plain(r#""__metadata__":{"optimisers":"{}"},"#)), &["Record", "missing field"]);
}

/// Parameters that were set aside would come back over those of the file.
#[test]
fn other_weights_in_the_model() {
    let rule = || OptimiserChain::new((Momentum::new(0.1), Ema::new(0.5)));
    let (model, mut state) = started(rule(), 1, DType::F32);
    let saved = file_of(Checkpoint::new(&state).model(&model));
    let file = open(&saved).unwrap();
    update(&mut state, &model, &BTreeMap::from([("head", Tensor::new(1f32, CPU).unwrap())])).unwrap();
    forget_ascent(&mut state, &model, &BTreeMap::from([("head", Tensor::new(1f32, CPU).unwrap())]));
    let before = snapshot(&model, &state);
    for result in [file.restore(&mut state), file.restore_with_model(&mut state, &model)] {
        says(&result.unwrap_err(), &["AveragesInModel", "with_averages"]);
    }
    assert!(snapshot(&model, &state) == before);
    state.with_averages(&model, || Ok::<_, optimisers::Error>(())).unwrap();
    file.restore_with_model(&mut state, &model).unwrap();
    assert_eq!(file_of(Checkpoint::new(&state).model(&model)), saved);
}

#[test]
fn another_version_of_the_format() {
    for version in [0, 2, u64::MAX] {
        let other = |pieces: &mut Pieces| pieces.description = json!({ "format": version, "crate": "9.9.9", "anything": { "else": [] } });
        let words = ["Version", &format!("format version {version}, this crate reads 1"), "written by optimisers 9.9.9"];
        refused(edited(other), &words);
    }
    refused(edited(|pieces| pieces.description["format"] = json!("1")), &["Record"]);
    for part in ["checksum", "leaves", "optimisers", "notes"] {
        let without = |pieces: &mut Pieces| _ = pieces.description.as_object_mut().unwrap().remove(part).unwrap();
        refused(edited(without), &["Record", &format!("missing field `{part}`")]);
    }
}

#[test]
fn a_damaged_or_edited_file() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("crafted");
    let original = file();
    let length = original.len();
    let words = ["Checksum", "the file was damaged or edited", "`CheckpointFile::open_edited`"];
    for place in [length - 1, length - 50] {
        let mut bytes = original.clone();
        bytes[place] ^= 1;
        refused(open(&bytes), &words);
        std::fs::write(&path, &bytes).unwrap();
        refused(CheckpointFile::open(&path), &words);
        let (model, mut state) = started(rule(), 20, DType::F32);
        says(&state.load(&path).unwrap_err(), &words);
        CheckpointFile::open_edited(&path).unwrap().restore_with_model(&mut state, &model).unwrap();
    }
    // Written anew by a program that leaves spaces in the description, so that the checksum is not found.
    let text = String::from_utf8_lossy(&original).replace(r#"\"checksum\":\""#, r#"\"checksum\": \""#);
    let mut bytes = original.clone();
    let header = 8 + u64::from_le_bytes(original[..8].try_into().unwrap()) as usize;
    let spaced = text[text.find('{').unwrap()..=text.rfind('}').unwrap()].trim_end().to_string();
    bytes.splice(..header, assembled(&spaced, &[]));
    refused(open(&bytes), &words);
    std::fs::write(&path, &bytes).unwrap();
    assert_eq!(CheckpointFile::open_edited(&path).unwrap().note("step"), Some("3"));
    // An edit does not pass the other checks.
    std::fs::write(&path, &original[..length - 1]).unwrap();
    refused(CheckpointFile::open_edited(&path), &["Format", "not a whole safetensors file"]);
}

#[test]
fn a_file_cut_off_anywhere() {
    let original = file();
    for length in 0..original.len() {
        let error = open(&original[..length]).expect_err("an error");
        says(&error, &["crafted", "Format", "not a whole safetensors file"]);
    }
    let longer = [&original[..], &[0]].concat();
    refused(open(&longer), &["Format", "not a whole safetensors file"]);
    assert!(open(&with_checksum(original)).is_ok());
}
