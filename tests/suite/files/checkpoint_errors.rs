//! Files that do not fit are refused with the facts and the remedy, and change not one bit of state and
//! model.

use std::collections::BTreeMap;
use std::path::Path;

use candle_core::{DType, Tensor, Var};
use optimisers::ErrorKind::{Argument, Changed, File, OtherRule};
use optimisers::{
    AccumGrad, Adam, AdamW, Checkpoint, CheckpointFile, ClipGrad, ClipNorm, Descent, Ema, ErrorKind,
    LossScaler, MixedPrecision, Momentum, NonFinite, Optimiser, OptimiserChain, Result, Rule, StateTree,
    TensorProblem, setup, update,
};
use serde_json::{Value, json};

use crate::model::models::CPU;
use support::common::{Vars, forget_ascent, is_kind, random, snapshot, values, var};
use support::crafted_checkpoints::{Pieces, assembled, file_of, open, with_checksum};

const SHAPE: ErrorKind = ErrorKind::Tensor(TensorProblem::Shape);
const DTYPE: ErrorKind = ErrorKind::Tensor(TensorProblem::Dtype);
const NOT_FINITE: ErrorKind = ErrorKind::Tensor(TensorProblem::NotFinite);

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
        let gradients = model
            .iter()
            .map(|(path, x)| (path.clone(), random(seed + call, x.dims(), dtype, CPU)))
            .collect::<BTreeMap<_, _>>();
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
fn refused_by(file: &CheckpointFile, model: &Vars, state: &mut StateTree, kind: ErrorKind, words: &[&str]) {
    let before = snapshot(model, state);
    is_kind(&file.restore_with_model(state, model).expect_err("an error"), kind, words);
    assert!(snapshot(model, state) == before, "{words:?}: something changed");
    if let Err(error) = file.restore(state) {
        assert_eq!(error.file(), Some(Path::new("crafted")), "{error}");
        assert!(snapshot(model, state) == before, "{words:?}: something changed");
    }
}

/// The file is refused by the state that it was made of, with other values.
fn refused(file: Result<CheckpointFile>, kind: ErrorKind, words: &[&str]) {
    let words = [&["crafted"], words].concat();
    match file {
        Err(error) => is_kind(&error, kind, &words),
        Ok(file) => {
            let (model, mut state) = started(rule(), 20, DType::F32);
            refused_by(&file, &model, &mut state, kind, &words);
        }
    }
}

/// The file after an edit, with the checksum that it should have.
fn edited(edit: impl FnOnce(&mut Pieces)) -> Result<CheckpointFile> {
    let mut pieces = Pieces::of(&file());
    edit(&mut pieces);
    open(&pieces.bytes())
}

const DAMAGED: &str = "the description of the state is damaged: ";

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
    refused(remove("head/2.v"), File, &["the file lacks the tensor \"head/2.v\""]);
    refused(
        edited(|pieces| pieces.push("head/2.w", "F32", &[], &[0; 4])),
        File,
        &["\"head/2.w\"", "its description does not name"],
    );
    refused(
        edited(|pieces| pieces.push("more", "I64", &[0], &[])),
        File,
        &["\"more\"", "its description does not name"],
    );
    let renamed = |pieces: &mut Pieces| {
        let info = pieces.tensors.as_object_mut().unwrap().remove("head").unwrap();
        pieces.tensors["heads"] = info;
    };
    refused(edited(renamed), File, &["the file lacks the tensor \"head\""]);
    let unnamed = |pieces: &mut Pieces| _ = leaf(pieces, "head")["tensors"].as_array_mut().unwrap().pop();
    refused(edited(unnamed), OtherRule, &["\"head\"", "tensors", "2.v", "another version of the rule"]);
    // A master is left out only on purpose.
    let master = |pieces: &mut Pieces| {
        let inner = pieces.description["optimisers"][0].take();
        let storage = json!({"kind": "master", "offloaded": false});
        let settings = json!([["dtype", {"text": "F32"}]]);
        pieces.description["optimisers"][0] =
            json!({"kind": "MixedPrecision", "storage": storage, "settings": settings, "inner": inner});
        leaf(pieces, "head")["tensors"].as_array_mut().unwrap().insert(0, json!("master"));
        pieces.push("head/master", "F32", &[], &[0; 4]);
    };
    let (model, mut state) = started(MixedPrecision::new(DType::F32, rule()), 20, DType::F32);
    refused_by(&edited(master).unwrap(), &model, &mut state, OtherRule, &["\"head\"", "master"]);
    edited(master).unwrap().converting().restore_with_model(&mut state, &model).unwrap();
    assert_eq!(values(&model["head"]), [0.0]);
}

#[test]
fn tensors_of_another_shape_or_dtype() {
    for (entry, shape) in
        [("body.weight/2.m", json!([3, 2])), ("body.weight", json!([6])), ("head/0.acc", json!([1]))]
    {
        let path = entry.split('/').next().unwrap();
        let words = [
            &format!("parameter {path:?}: the file's {entry:?} has shape"),
            ", expected",
            "pass the model that it was saved with",
        ];
        refused(edited(|pieces| pieces.tensors[entry]["shape"] = shape), SHAPE, &words);
    }
    for (entry, dtype) in [("body.weight/2.m", "I32"), ("body.weight", "U32")] {
        let with = |pieces: &mut Pieces| pieces.tensors[entry]["dtype"] = json!(dtype);
        let words = [&format!("the file's {entry:?} is {dtype}, expected F32"), "CheckpointFile::converting"];
        refused(edited(with), DTYPE, &words);
        // Numbers that are no floating-point numbers are not converted either.
        refused(edited(with).map(CheckpointFile::converting), DTYPE, &words[..1]);
    }
    // Dtypes that candle does not have, or that take less than a byte.
    for (dtype, shape) in [
        ("BOOL", json!([8])),
        ("F4", json!([16])),
        ("F8_E5M2", json!([8])),
        ("C64", json!([])),
        ("U16", json!([2, 2])),
    ] {
        let with = |pieces: &mut Pieces| pieces.tensors["body.bias"] = json!({ "dtype": dtype, "shape": shape, "data_offsets": pieces.tensors["body.bias"]["data_offsets"] });
        refused(edited(with), SHAPE, &["\"body.bias\" has shape"]);
    }
    refused(
        edited(|pieces| leaf(pieces, "body.weight")["shape"] = json!([3, 2])),
        SHAPE,
        &["\"body.weight\"", "[3, 2]", "[2, 3]"],
    );
    refused(
        edited(|pieces| leaf(pieces, "head")["dtype"] = json!("bf16")),
        DTYPE,
        &["\"head\"", "is BF16, expected F32", "CheckpointFile::converting"],
    );
    refused(
        edited(|pieces| leaf(pieces, "head")["dtype"] = json!("f31")),
        DTYPE,
        &["\"head\"", "is F31, expected F32"],
    );
}

#[test]
fn numbers_that_are_not_finite() {
    for (entry, index, number) in [
        ("body.weight/2.v", 4, f32::NAN),
        ("body.bias", 1, f32::NEG_INFINITY),
        ("head/0.acc", 0, f32::INFINITY),
    ] {
        let with = |pieces: &mut Pieces| {
            pieces.tensor(entry)[4 * index..4 * index + 4].copy_from_slice(&number.to_le_bytes())
        };
        let words = [
            &format!("the file's {entry:?} is {number} at element {index}"),
            "CheckpointFile::accepting_non_finite",
        ];
        refused(edited(with), NOT_FINITE, &words);

        let (model, mut state) = started(rule(), 20, DType::F32);
        edited(with).unwrap().accepting_non_finite().restore_with_model(&mut state, &model).unwrap();
        let (path, tensor) = entry.split_once('/').unwrap_or((entry, ""));
        let restored = if tensor.is_empty() {
            model[path].copy()
        } else {
            Ok(state.leaf(path).unwrap().tensor(tensor).unwrap().unwrap())
        };
        let (got, finite) = (values(&restored.unwrap()), |value: &f64| value.is_finite());
        assert_eq!(
            (got[index].to_bits(), got.iter().filter(|x| finite(x)).count()),
            (f64::from(number).to_bits(), got.len() - 1)
        );
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
        refused_by(&open(&file).unwrap(), &other, &mut resumed, NOT_FINITE, &["crafted", "\"body.bias/"]);
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
        is_kind(&error, Argument, &["LossScaler", "scale is", "expected"]);
        assert!(!path.exists());
    }
    let saved = file_of(Checkpoint::new(&state).scaler(&LossScaler::dynamic()));
    assert_eq!(open(&saved).unwrap().scaler().unwrap(), Some(LossScaler::dynamic()));
    let mut pieces = Pieces::of(&saved);
    pieces.description["scaler"]["scale"] = json!(-2.0);
    is_kind(
        &open(&pieces.bytes()).unwrap().scaler().unwrap_err(),
        Argument,
        &["crafted", "LossScaler", "scale is -2"],
    );
    pieces.description["scaler"]["scale"] = json!(null);
    is_kind(&open(&pieces.bytes()).unwrap_err(), File, &["crafted", DAMAGED]);
    assert_eq!(open(&file()).unwrap().scaler().unwrap(), None);
}

#[test]
fn parameters_that_are_missing_or_too_many() {
    let without = |pieces: &mut Pieces| {
        _ = pieces.description["leaves"].as_object_mut().unwrap().remove("head").unwrap()
    };
    refused(
        edited(without),
        ErrorKind::Model,
        &["parameter \"head\": the file lacks it; it has: body.bias, body.weight"],
    );
    let with = |pieces: &mut Pieces| {
        pieces.description["leaves"]["tail"] = pieces.description["leaves"]["head"].clone()
    };
    refused(
        edited(with),
        ErrorKind::Model,
        &[
            "parameter \"tail\": the file has it, and the state lacks it",
            "pass the model that it was saved with",
        ],
    );

    let words = ["parameter \"head\": the file lacks it; it has: body.bias, body.weight"];
    refused(
        edited(|pieces| pieces.description["model"] = json!(["body.bias", "body.weight"])),
        ErrorKind::Model,
        &words,
    );
    let more = json!(["body.bias", "body.weight", "head", "tail"]);
    refused(
        edited(|pieces| pieces.description["model"] = more),
        ErrorKind::Model,
        &["parameter \"tail\": the file has it, and the model lacks it"],
    );
}

/// States for other models, from files that nobody edited.
#[test]
fn another_model() {
    let file = open(&file()).unwrap();
    let with = |change: &dyn Fn(&mut Vars), kind: ErrorKind, words: &[&str]| {
        let mut model = model(20, DType::F32);
        change(&mut model);
        let mut state = setup(rule(), &model).unwrap();
        refused_by(&file, &model, &mut state, kind, words);
    };
    let x = || var(&random(3, &[2], DType::F32, CPU));
    with(
        &|model| _ = model.remove("head"),
        ErrorKind::Model,
        &["parameter \"head\": the file has it, and the state lacks it"],
    );
    with(
        &|model| _ = model.insert("tail".to_string(), x()),
        ErrorKind::Model,
        &["parameter \"tail\": the file lacks it; it has: body.bias, body.weight, head"],
    );
    with(
        &|model| _ = model.insert("head".to_string(), x()),
        SHAPE,
        &["the file's \"head\" has shape [], expected [2]"],
    );
    let integer =
        |model: &mut Vars| _ = model.insert("tokens".to_string(), Var::zeros(2, DType::U32, CPU).unwrap());
    with(
        &integer,
        ErrorKind::Model,
        &["parameter \"tokens\": the file lacks it; it has: body.bias, body.weight, head"],
    );

    // A model that is not the state's.
    let (mine, mut state) = started(rule(), 20, DType::F32);
    let (theirs, _) = started(rule(), 30, DType::F32);
    let before = (snapshot(&mine, &state), snapshot(&theirs, &state));
    let error = file.restore_with_model(&mut state, &theirs).unwrap_err();
    is_kind(&error, ErrorKind::Model, &["parameter \"body.bias\": it is not in this state", "another model"]);
    assert!((snapshot(&mine, &state), snapshot(&theirs, &state)) == before);
}

#[test]
fn a_file_without_the_model() {
    let (model, state) = started(rule(), 1, DType::F32);
    let file = open(&file_of(Checkpoint::new(&state))).unwrap();
    let (other, mut resumed) = started(rule(), 20, DType::F32);
    refused_by(
        &file,
        &other,
        &mut resumed,
        File,
        &["crafted", "the file has no model", "save it with `Checkpoint::model`"],
    );
    file.restore(&mut resumed).unwrap();
    assert!(
        snapshot(&other, &resumed)[model.len()..] == snapshot(&model, &state)[model.len()..],
        "the state alone"
    );
}

/// The rule that saved, the rule that loads, what the error says that the file has and the state, and what
/// else.
type Row<'w> = (Box<dyn Optimiser>, Box<dyn Optimiser>, [&'w str; 2], &'w [&'w str]);

#[test]
fn another_rule() {
    let save = |optimiser: &dyn Optimiser| {
        let (model, state) = started(dyn_clone::clone_box(optimiser), 1, DType::BF16);
        file_of(Checkpoint::new(&state).model(&model))
    };
    let chain = |first: bool| -> Box<dyn Optimiser> {
        let (clip, momentum) = (ClipGrad::new(1.0), Momentum::new(0.1));
        if first {
            Box::new(OptimiserChain::new((clip, momentum)))
        } else {
            Box::new(OptimiserChain::new((momentum, clip)))
        }
    };
    let mixed = |dtype| -> Box<dyn Optimiser> { Box::new(MixedPrecision::new(dtype, Momentum::new(0.1))) };
    let replace = "restore, and then replace the rule";
    let rows: [Row<'_>; 8] = [
        (Box::new(Adam::new(0.1)), Box::new(AdamW::new(0.1)), ["Adam", "AdamW"], &[replace]),
        (
            Box::new(Momentum::new(0.1)),
            Box::new(optimisers::Nesterov::new(0.1)),
            ["Momentum", "Nesterov"],
            &[replace],
        ),
        (
            chain(true),
            chain(false),
            ["OptimiserChain(ClipGrad, Momentum)", "OptimiserChain(Momentum, ClipGrad)"],
            &["(here: Momentum, file: ClipGrad, at member 0)", replace],
        ),
        (
            Box::new(Momentum::new(0.1)),
            chain(true),
            ["Momentum", "OptimiserChain(ClipGrad, Momentum)"],
            &[replace],
        ),
        (
            mixed(DType::F32),
            Box::new(Momentum::new(0.1)),
            ["MixedPrecision(F32, Momentum)", "Momentum"],
            &["converting"],
        ),
        (
            mixed(DType::F32),
            mixed(DType::F64),
            ["MixedPrecision(F32, Momentum)", "MixedPrecision(F64, Momentum)"],
            &["converting"],
        ),
        (
            Box::new(Momentum::new(0.1)),
            mixed(DType::F32),
            ["Momentum", "MixedPrecision(F32, Momentum)"],
            &["converting"],
        ),
        (
            Box::new(OptimiserChain::new((Some(Descent::new(0.1)), Adam::new(0.1)))),
            Box::new(OptimiserChain::new((None::<Descent>, Descent::new(0.1)))),
            ["OptimiserChain(Descent, Adam)", "OptimiserChain(None, Descent)"],
            &[replace],
        ),
    ];
    for (saved, set_up, [got, expected], words) in rows {
        let file = open(&save(&*saved)).unwrap();
        let (model, mut state) = started(set_up, 20, DType::BF16);
        let rules = format!(": {got}, expected {expected};");
        let words =
            [&["crafted", "parameter \"body.bias\": the file is of another rule", &rules], words].concat();
        refused_by(&file, &model, &mut state, OtherRule, &words);
    }
}

#[test]
fn hyper_parameters_and_counters() {
    fn field<'p>(pieces: &'p mut Pieces, name: &str) -> &'p mut Value {
        &mut pieces.fields().into_iter().flatten().find(|field| field[0] == name).unwrap()[1]
    }
    let rows = [
        ("eta", json!(-0.5), Argument, "AdamW: eta is -0.5, expected a finite number of 0 or more"),
        ("eta", json!("nan"), Argument, "AdamW: eta is NaN"),
        ("eta", json!("inf"), Argument, "AdamW: eta is inf"),
        ("beta", json!([0.9, 1]), Argument, "AdamW: beta is (0.9, 1), expected two numbers in [0, 1)"),
        ("n", json!(0), Argument, "AccumGrad: n is 0, expected 1 or more"),
        ("omega", json!(0), Argument, "ClipNorm: omega is 0, expected a number above 0"),
        ("eta", json!("0.1"), File, "eta is \"0.1\", expected a real number"),
        ("eta", json!(true), File, "eta is true, expected a real number"),
        ("beta", json!(0.9), File, "beta is 0.9, expected a pair of reals"),
        ("n", json!(2.5), File, "n is 2.5, expected a count"),
        ("n", json!(-1), File, "n is -1, expected a count"),
        ("non_finite", json!("Ignore"), File, "non_finite is \"Ignore\", expected one of Error, Pass, Skip"),
    ];
    for (name, value, kind, words) in rows {
        refused(edited(|pieces| *field(pieces, name) = value), kind, &["parameter \"body.bias\": ", words]);
    }
    refused(edited(|pieces| *field(pieces, "eta") = json!(null)), File, &[DAMAGED]);
    let rename = |pieces: &mut Pieces| pieces.fields()[0][0][0] = json!("m");
    refused(edited(rename), OtherRule, &["parameter \"body.bias\"", "fields", "another version of the rule"]);
    let words = ["parameter \"head\"", DAMAGED, "refers to an optimiser that is not there"];
    refused(edited(|pieces| leaf(pieces, "head")["optimiser"] = json!(7)), File, &words);
    refused(
        edited(|pieces| leaf(pieces, "head")["counters"][0][0] = json!("ticks")),
        OtherRule,
        &["\"head\"", "counters", "ticks"],
    );
    // A count that the next call would overflow.
    refused(
        edited(|pieces| leaf(pieces, "head")["counters"][0][1] = json!(u64::MAX)),
        File,
        &["parameter \"head\"", DAMAGED, "the count \"0.calls\" is 18446744073709551615"],
    );
    let words = ["parameter \"head\"", DAMAGED, "the count \"steps\" is 18446744073709551615"];
    refused(edited(|pieces| leaf(pieces, "head")["steps"] = json!(u64::MAX)), File, &words);
    refused(edited(|pieces| leaf(pieces, "head")["steps"] = json!(-1)), File, &[DAMAGED]);
}

#[test]
fn files_of_another_kind() {
    refused(open(b""), File, &["not a whole safetensors file"]);
    refused(open(b"{\"weights\": [1, 2, 3]}"), File, &["not a whole safetensors file"]);
    refused(open(&[0; 4096]), File, &["not a whole safetensors file"]);
    refused(open(&[0xff; 4096]), File, &["not a whole safetensors file"]);
    let plain = |metadata: &str| {
        assembled(
            &format!(r#"{{{metadata}"w":{{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}}}"#),
            &[0; 4],
        )
    };
    for metadata in ["", r#""__metadata__":{},"#, r#""__metadata__":{"format":"pt"},"#] {
        refused(open(&plain(metadata)), File, &["without optimiser state", "`Weights`"]);
    }
    let twice = plain(r#""w":{"dtype":"F32","shape":[0],"data_offsets":[0,0]},"#);
    refused(open(&twice), File, &["two entries with the name \"w\""]);
    refused(
        open(&plain(r#""__metadata__":{"optimisers":"yes"},"#)),
        File,
        &["the description of the state is damaged"],
    );
    refused(open(&plain(r#""__metadata__":{"optimisers":"{}"},"#)), File, &[DAMAGED, "missing field"]);
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
        is_kind(&result.unwrap_err(), Changed, &["other weights", "with_averages"]);
    }
    assert!(snapshot(&model, &state) == before);
    state.with_averages(&model, || Ok::<_, optimisers::Error>(())).unwrap();
    file.restore_with_model(&mut state, &model).unwrap();
    assert_eq!(file_of(Checkpoint::new(&state).model(&model)), saved);
}

#[test]
fn another_version_of_the_format() {
    for version in [0, 2, u64::MAX] {
        let other = |pieces: &mut Pieces| {
            pieces.description = json!({ "format": version, "crate": "9.9.9", "anything": { "else": [] } })
        };
        let words = [&format!("format version {version}, expected 1"), "written by optimisers 9.9.9"];
        refused(edited(other), File, &words);
    }
    refused(edited(|pieces| pieces.description["format"] = json!("1")), File, &[DAMAGED]);
    for part in ["checksum", "leaves", "optimisers", "notes"] {
        let without =
            |pieces: &mut Pieces| _ = pieces.description.as_object_mut().unwrap().remove(part).unwrap();
        refused(edited(without), File, &[DAMAGED, &format!("missing field `{part}`")]);
    }
}

#[test]
fn a_damaged_or_edited_file() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("crafted");
    let original = file();
    let length = original.len();
    let words = ["checksum", "the file was damaged or edited", "`CheckpointFile::open_edited`"];
    for place in [length - 1, length - 50] {
        let mut bytes = original.clone();
        bytes[place] ^= 1;
        refused(open(&bytes), File, &words);
        std::fs::write(&path, &bytes).unwrap();
        refused(CheckpointFile::open(&path), File, &words);
        let (model, mut state) = started(rule(), 20, DType::F32);
        is_kind(&state.load(&path).unwrap_err(), File, &words);
        CheckpointFile::open_edited(&path).unwrap().restore_with_model(&mut state, &model).unwrap();
    }
    // Written anew by a program that leaves spaces in the description, so that the checksum is not found.
    let text = String::from_utf8_lossy(&original).replace(r#"\"checksum\":\""#, r#"\"checksum\": \""#);
    let mut bytes = original.clone();
    let header = 8 + u64::from_le_bytes(original[..8].try_into().unwrap()) as usize;
    let spaced = text[text.find('{').unwrap()..=text.rfind('}').unwrap()].trim_end().to_string();
    bytes.splice(..header, assembled(&spaced, &[]));
    refused(open(&bytes), File, &words);
    std::fs::write(&path, &bytes).unwrap();
    assert_eq!(CheckpointFile::open_edited(&path).unwrap().note("step"), Some("3"));
    // An edit does not pass the other checks.
    std::fs::write(&path, &original[..length - 1]).unwrap();
    refused(CheckpointFile::open_edited(&path), File, &["not a whole safetensors file"]);
}

#[test]
fn a_file_cut_off_anywhere() {
    let original = file();
    for length in 0..original.len() {
        let error = open(&original[..length]).expect_err("an error");
        is_kind(&error, File, &["crafted", "not a whole safetensors file"]);
    }
    let longer = [&original[..], &[0]].concat();
    refused(open(&longer), File, &["not a whole safetensors file"]);
    assert!(open(&with_checksum(original)).is_ok());
}
