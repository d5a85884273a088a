//! Files that do not fit are refused with the facts and the remedy, and change not one bit of state and
//! model.

use std::collections::BTreeMap;
use std::path::Path;

use candle_core::{DType, Tensor, Var};
use optimisers::ErrorKind::{Argument, Changed, File, Model, NotFinite, OtherRule};
use optimisers::{
    AccumGrad, Adam, AdamW, Checkpoint, CheckpointFile, ClipGrad, ClipNorm, Descent, Ema, ErrorKind,
    IntoOptimiser, LossScaler, MixedPrecision, Momentum, Nesterov, NonFinite, Optimiser, OptimiserChain,
    Result, Rule, StateTree, setup, update,
};
use serde_json::{Value, json};

use crate::model::models::CPU;
use support::common::{Vars, forget_ascent, is_kind, number_bits, random, snapshot, values, var};
use support::crafted_checkpoints::{Pieces, assembled, file_of, open};

const TENSOR: ErrorKind = ErrorKind::Tensor;

fn model(seed: u64, dtype: DType) -> Vars {
    let leaf = |(path, shape): (&str, &[usize])| (path.to_string(), var(&random(seed, shape, dtype, CPU)));
    [("body.bias", &[2][..]), ("body.weight", &[2, 3]), ("head", &[])]
        .into_iter()
        .map(leaf)
        .collect()
}

fn rule() -> impl Rule + Clone {
    OptimiserChain::new((AccumGrad::new(2), ClipNorm::new(3.0), AdamW::new(0.01)))
}

/// A model and its state after an odd number of calls.
fn started(optimiser: impl IntoOptimiser, seed: u64, dtype: DType) -> (Vars, StateTree) {
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
    file_of(Checkpoint::new(&state).model(&model))
}

/// The file fails to restore, alone and with the model, and leaves everything as it was.
fn refused_by(file: &CheckpointFile, model: &Vars, state: &mut StateTree, kind: ErrorKind, words: &[&str]) {
    let before = snapshot(model, state);
    is_kind(
        &file.restore_with_model(state, model).expect_err("an error"),
        kind,
        words,
    );
    assert!(snapshot(model, state) == before, "{words:?}: something changed");
    if let Err(error) = file.restore(state) {
        assert_eq!(error.file(), Some(Path::new("crafted")), "{error}");
        assert!(snapshot(model, state) == before, "{words:?}: something changed");
    }
}

/// The file is refused by the state that it was made of, with other values, and the error says all words.
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

/// What an edit changes, by the names on the way there; its value then, if any; and what is said of the file,
/// in parts.
type Edit = (&'static str, &'static str, ErrorKind, &'static str);

const EDITS: [Edit; 38] = [
    (
        "leaves head tensors",
        r#"["0.acc", "2.m"]"#,
        OtherRule,
        "\"head\" | tensors | 2.v | another version",
    ),
    (
        "tensors body.weight/2.m shape",
        "[3, 2]",
        TENSOR,
        "\"body.weight/2.m\" has shape | , expected",
    ),
    (
        "tensors body.weight shape",
        "[6]",
        TENSOR,
        "\"body.weight\" has shape | pass the model that was saved",
    ),
    (
        "tensors head/0.acc shape",
        "[1]",
        TENSOR,
        "parameter \"head\": the file's \"head/0.acc\" has shape",
    ),
    (
        "leaves body.weight shape",
        "[3, 2]",
        TENSOR,
        "\"body.weight\" | [3, 2] | [2, 3]",
    ),
    (
        "leaves head dtype",
        "\"bf16\"",
        TENSOR,
        "\"head\" | is BF16, expected F32 | CheckpointFile::converting",
    ),
    (
        "leaves head dtype",
        "\"f31\"",
        TENSOR,
        "\"head\" | is F31, expected F32",
    ),
    (
        "tensors body.weight/2.m dtype",
        "\"I32\"",
        TENSOR,
        "\"body.weight/2.m\" is I32, expected F32",
    ),
    (
        "tensors body.weight dtype",
        "\"U32\"",
        TENSOR,
        "the file's \"body.weight\" is U32, expected F32",
    ),
    (
        "model",
        r#"["body.bias","body.weight"]"#,
        Model,
        "\"head\": the file lacks this parameter; the file has: body.bias",
    ),
    (
        "model",
        r#"["body.bias","body.weight","head","tail"]"#,
        Model,
        "\"tail\": the file has this parameter, but the model does not",
    ),
    (
        "eta",
        "-0.5",
        Argument,
        "AdamW: eta is -0.5, expected a finite number of 0 or more",
    ),
    (
        "eta",
        "\"nan\"",
        Argument,
        "parameter \"body.bias\": | AdamW: eta is NaN",
    ),
    ("eta", "\"inf\"", Argument, "AdamW: eta is inf"),
    (
        "beta",
        "[0.9, 1]",
        Argument,
        "AdamW: beta is (0.9, 1), expected two numbers in [0, 1)",
    ),
    ("n", "0", Argument, "AccumGrad: n is 0, expected 1 or more"),
    (
        "omega",
        "0",
        Argument,
        "ClipNorm: omega is 0, expected a number above 0",
    ),
    (
        "eta",
        "\"0.1\"",
        File,
        "parameter \"body.bias\": | eta is \"0.1\", expected a real number",
    ),
    ("eta", "true", File, "eta is true, expected a real number"),
    ("eta", "null", File, "eta is null, expected a real number"),
    ("beta", "0.9", File, "beta is 0.9, expected a pair of reals"),
    ("n", "2.5", File, "n is 2.5, expected a count"),
    ("n", "-1", File, "n is -1.0, expected a count"),
    (
        "non_finite",
        "\"Ignore\"",
        File,
        "non_finite is \"Ignore\", expected one of Error, Pass, Skip",
    ),
    (
        "leaves head optimiser",
        "7",
        File,
        "parameter \"head\" | refers to an optimiser that is not there",
    ),
    (
        "leaves head counters 0 0",
        "\"ticks\"",
        OtherRule,
        "\"head\" | counters | ticks",
    ),
    // A count that the next call would overflow.
    (
        "leaves head counters 0 1",
        MOST,
        File,
        "damaged: the count \"0.calls\" is 18446744073709551615",
    ),
    (
        "leaves head steps",
        MOST,
        File,
        "\"head\" | damaged: the count \"steps\" is 18446744073709551615",
    ),
    ("leaves head steps", "-1", File, DAMAGED),
    ("format", "\"1\"", File, DAMAGED),
    (
        "checksum",
        "",
        File,
        "the description of the state is damaged: missing field `checksum`",
    ),
    ("leaves", "", File, "missing field `leaves`"),
    ("optimisers", "", File, "missing field `optimisers`"),
    // Dtypes that candle does not have, or that take less than a byte.
    (
        "tensors body.bias",
        r#"{"dtype": "BOOL", "shape": [8], "data_offsets": [0, 8]}"#,
        TENSOR,
        BIAS,
    ),
    (
        "tensors body.bias",
        r#"{"dtype": "F4", "shape": [16], "data_offsets": [0, 8]}"#,
        TENSOR,
        BIAS,
    ),
    (
        "tensors body.bias",
        r#"{"dtype": "F8_E5M2", "shape": [8], "data_offsets": [0, 8]}"#,
        TENSOR,
        BIAS,
    ),
    (
        "tensors body.bias",
        r#"{"dtype": "C64", "shape": [], "data_offsets": [0, 8]}"#,
        TENSOR,
        BIAS,
    ),
    (
        "tensors body.bias",
        r#"{"dtype": "U16", "shape": [2, 2], "data_offsets": [0, 8]}"#,
        TENSOR,
        BIAS,
    ),
];

const MOST: &str = "18446744073709551615";
const BIAS: &str = "\"body.bias\" has shape";

fn edit(pieces: &mut Pieces, place: &str, value: &str) {
    if value.is_empty() {
        _ = pieces.description.as_object_mut().unwrap().remove(place).unwrap();
        return;
    }
    let value: Value = serde_json::from_str(value).unwrap();
    if let Some(field) = pieces
        .fields()
        .into_iter()
        .flatten()
        .find(|field| field[0] == place)
    {
        field[1] = value;
        return;
    }
    let pointer = format!("/{}", place.replace('/', "~1").replace(' ', "/"));
    *match pointer.strip_prefix("/tensors") {
        Some(pointer) => pieces.tensors.pointer_mut(pointer),
        None => pieces.description.pointer_mut(&pointer),
    }
    .unwrap() = value;
}

#[test]
fn each_edit_is_refused_with_what_it_edited() {
    // What they start from is not refused.
    let (model, mut state) = started(rule(), 20, DType::F32);
    edited(|_| {})
        .unwrap()
        .restore_with_model(&mut state, &model)
        .unwrap();
    for (place, value, kind, words) in EDITS {
        let with = || edited(|pieces| edit(pieces, place, value));
        refused(with(), kind, &words.split(" | ").collect::<Vec<_>>());
        // Numbers that are no floating-point numbers are not converted either.
        if value.contains("32") {
            refused(with().map(CheckpointFile::converting), kind, &[words]);
        }
    }
}

/// In the list of tensors, and not in the description.
#[test]
fn tensors_that_are_missing_or_too_many() {
    fn moved(pieces: &mut Pieces, name: &str) -> Value {
        pieces.tensors.as_object_mut().unwrap().remove(name).unwrap()
    }
    let missing = |pieces: &mut Pieces| {
        // The scalar's tensors are the last in the file.
        assert_eq!(moved(pieces, "head/2.v")["data_offsets"][1], pieces.data.len());
        pieces.data.truncate(pieces.data.len() - 4);
    };
    refused(edited(missing), File, &["the file lacks the tensor \"head/2.v\""]);
    let renamed = |pieces: &mut Pieces| pieces.tensors["heads"] = moved(pieces, "head");
    refused(edited(renamed), File, &["the file lacks the tensor \"head\""]);
    let more = |pieces: &mut Pieces| pieces.push("head/2.w", "F32", &[], &[0; 4]);
    refused(
        edited(more),
        File,
        &["\"head/2.w\"", "its description does not name"],
    );
    let renamed = |pieces: &mut Pieces| pieces.fields()[0][0][0] = json!("m");
    refused(
        edited(renamed),
        OtherRule,
        &["parameter \"body.bias\"", "fields", "another version of the rule"],
    );
}

/// A master is left out only on purpose.
#[test]
fn a_master_that_the_file_lacks() {
    let master = |pieces: &mut Pieces| {
        let inner = pieces.description["optimisers"][0].take();
        let storage = json!({"kind": "master", "offloaded": false});
        let settings = json!([["dtype", {"text": "F32"}]]);
        pieces.description["optimisers"][0] =
            json!({"kind": "MixedPrecision", "storage": storage, "settings": settings, "inner": inner});
        pieces.description["leaves"]["head"]["tensors"]
            .as_array_mut()
            .unwrap()
            .insert(0, json!("master"));
        pieces.push("head/master", "F32", &[], &[0; 4]);
    };
    let (model, mut state) = started(MixedPrecision::new(DType::F32, rule()), 20, DType::F32);
    refused_by(
        &edited(master).unwrap(),
        &model,
        &mut state,
        OtherRule,
        &["\"head\"", "master"],
    );
    edited(master)
        .unwrap()
        .converting()
        .restore_with_model(&mut state, &model)
        .unwrap();
    assert_eq!(values(&model["head"]), [0.0]);
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
        refused(edited(with), NotFinite, &words);

        let (model, mut state) = started(rule(), 20, DType::F32);
        edited(with)
            .unwrap()
            .accepting_non_finite()
            .restore_with_model(&mut state, &model)
            .unwrap();
        let got = snapshot(&model, &state)
            .into_iter()
            .find(|(name, _)| name == entry)
            .unwrap()
            .1;
        let finite = got
            .iter()
            .filter(|bits| f64::from_bits(**bits).is_finite())
            .count();
        assert_eq!((got[index], finite), (number_bits(number.into()), got.len() - 1));
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
        refused_by(
            &open(&file).unwrap(),
            &other,
            &mut resumed,
            NotFinite,
            &["crafted", "\"body.bias/"],
        );
        open(&file)
            .unwrap()
            .accepting_non_finite()
            .restore_with_model(&mut resumed, &other)
            .unwrap();
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
        let error = Checkpoint::new(&state)
            .scaler(&LossScaler::fixed(scale))
            .save(&path)
            .unwrap_err();
        is_kind(&error, Argument, &["LossScaler", "scale is", "expected"]);
        assert!(!path.exists());
    }
    let saved = file_of(Checkpoint::new(&state).scaler(&LossScaler::dynamic()));
    assert_eq!(
        open(&saved).unwrap().scaler().unwrap(),
        Some(LossScaler::dynamic())
    );
    assert_eq!(open(&file()).unwrap().scaler().unwrap(), None);
    let scaler = |scale: Value| {
        let mut pieces = Pieces::of(&saved);
        pieces.description["scaler"]["scale"] = scale;
        open(&pieces.bytes()).and_then(|file| file.scaler()).unwrap_err()
    };
    is_kind(
        &scaler(json!(-2.0)),
        Argument,
        &["crafted", "LossScaler", "scale is -2"],
    );
    is_kind(&scaler(json!(null)), File, &["crafted", DAMAGED]);
}

/// States for other models, from files that nobody edited.
#[test]
fn another_model() {
    let file = open(&file()).unwrap();
    fn x() -> Var {
        var(&random(3, &[2], DType::F32, CPU))
    }
    type Case = (fn(&mut Vars), ErrorKind, &'static [&'static str]);
    const LACKS: &str = "parameter \"tail\": the file lacks this parameter; the file has: body.bias, \
                         body.weight, head";
    const HAS: &str = "parameter \"head\": the file has this parameter, but the state does not";
    let cases: [Case; 4] = [
        (
            |x| _ = x.remove("head"),
            Model,
            &[HAS, "pass the model that was saved"],
        ),
        (|vars| _ = vars.insert("tail".into(), x()), Model, &[LACKS]),
        (
            |vars| _ = vars.insert("tail".into(), Var::zeros(2, DType::U32, CPU).unwrap()),
            Model,
            &[LACKS],
        ),
        (
            |vars| _ = vars.insert("head".into(), x()),
            TENSOR,
            &["\"head\" has shape [], expected [2]"],
        ),
    ];
    for (change, kind, words) in cases {
        let mut model = model(20, DType::F32);
        change(&mut model);
        let mut state = setup(rule(), &model).unwrap();
        refused_by(&file, &model, &mut state, kind, words);
    }
    // A model that is not the state's.
    let (mine, mut state) = started(rule(), 20, DType::F32);
    let (theirs, _) = started(rule(), 30, DType::F32);
    let before = (snapshot(&mine, &state), snapshot(&theirs, &state));
    let error = file.restore_with_model(&mut state, &theirs).unwrap_err();
    is_kind(
        &error,
        Model,
        &[
            "parameter \"body.bias\": it is not in this state",
            "another model",
        ],
    );
    assert!((snapshot(&mine, &state), snapshot(&theirs, &state)) == before);
}

#[test]
fn a_file_without_the_model() {
    let (model, state) = started(rule(), 1, DType::F32);
    let file = open(&file_of(Checkpoint::new(&state))).unwrap();
    let (other, mut resumed) = started(rule(), 20, DType::F32);
    let words = [
        "crafted",
        "the file has no model",
        "save the checkpoint with `Checkpoint::model`",
    ];
    refused_by(&file, &other, &mut resumed, File, &words);
    file.restore(&mut resumed).unwrap();
    // The state alone.
    assert!(snapshot(&other, &resumed)[model.len()..] == snapshot(&model, &state)[model.len()..]);
}

#[test]
fn another_rule() {
    const CLIPPED: &str = "OptimiserChain(ClipGrad, Momentum)";
    const SINGLE: &str = "MixedPrecision(F32, Momentum)";
    let replace = "restore, and then replace the rule";
    // The rule that saved, the rule that loads, what the error says that the file has and the state, and what
    // else.
    let (momentum, with_clip) = (
        || Optimiser::new(Momentum::new(0.1)),
        OptimiserChain::new((ClipGrad::new(1.0), Momentum::new(0.1))),
    );
    let turned = OptimiserChain::new((Momentum::new(0.1), ClipGrad::new(1.0)));
    let [single, double] =
        [DType::F32, DType::F64].map(|dtype| MixedPrecision::new(dtype, Momentum::new(0.1)));
    let two = OptimiserChain::new((Some(Descent::new(0.1)), Adam::new(0.1)));
    let one = OptimiserChain::new((None::<Descent>, Descent::new(0.1)));
    let (order, converting) = ("(here: Momentum, file: ClipGrad, at member 0)", "converting");
    let rows = [
        (
            Optimiser::new(Adam::new(0.1)),
            Optimiser::new(AdamW::new(0.1)),
            ["Adam", "AdamW"],
            replace,
        ),
        (
            momentum(),
            Optimiser::new(Nesterov::new(0.1)),
            ["Momentum", "Nesterov"],
            replace,
        ),
        (
            Optimiser::new(with_clip.clone()),
            Optimiser::new(turned),
            [CLIPPED, "OptimiserChain(Momentum, ClipGrad)"],
            order,
        ),
        (
            momentum(),
            Optimiser::new(with_clip),
            ["Momentum", CLIPPED],
            replace,
        ),
        (
            Optimiser::new(single.clone()),
            momentum(),
            [SINGLE, "Momentum"],
            converting,
        ),
        (
            Optimiser::new(single.clone()),
            Optimiser::new(double),
            [SINGLE, "MixedPrecision(F64, Momentum)"],
            converting,
        ),
        (
            momentum(),
            Optimiser::new(single),
            ["Momentum", SINGLE],
            converting,
        ),
        (
            Optimiser::new(two),
            Optimiser::new(one),
            ["OptimiserChain(Descent, Adam)", "OptimiserChain(None, Descent)"],
            replace,
        ),
    ];
    for (saved, set_up, [got, expected], words) in rows {
        let (model, state) = started(saved, 1, DType::BF16);
        let file = open(&file_of(Checkpoint::new(&state).model(&model))).unwrap();
        let (model, mut state) = started(set_up, 20, DType::BF16);
        let other = "parameter \"body.bias\": the file is of another rule";
        refused_by(
            &file,
            &model,
            &mut state,
            OtherRule,
            &["crafted", other, &format!(": {got}, expected {expected};"), words],
        );
    }
}

#[test]
fn files_of_another_kind() {
    let plain = |metadata: &str| {
        let header = format!(r#"{{{metadata}"w":{{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}}}"#);
        assembled(&header, &[0; 4])
    };
    let (whole, without) = ("not a whole safetensors file", "without optimiser state");
    let cases = [
        (b"".to_vec(), whole),
        (b"{\"weights\": [1, 2, 3]}".to_vec(), whole),
        (vec![0; 4096], whole),
        (vec![0xff; 4096], whole),
        (plain(""), without),
        (plain(r#""__metadata__":{},"#), without),
        (
            plain(r#""__metadata__":{"format":"pt"},"#),
            "for plain weights use `Weights`",
        ),
        (
            plain(r#""w":{"dtype":"F32","shape":[0],"data_offsets":[0,0]},"#),
            "entries with the name \"w\"",
        ),
        (
            plain(r#""__metadata__":{"optimisers":"yes"},"#),
            "the description of the state is damaged",
        ),
        (
            plain(r#""__metadata__":{"optimisers":"{}"},"#),
            "is damaged: missing field",
        ),
    ];
    for (bytes, words) in cases {
        refused(open(&bytes), File, &[words]);
    }
}

/// Parameters that were set aside would come back over those of the file.
#[test]
fn other_weights_in_the_model() {
    let rule = || OptimiserChain::new((Momentum::new(0.1), Ema::new(0.5)));
    let (model, mut state) = started(rule(), 1, DType::F32);
    let saved = file_of(Checkpoint::new(&state).model(&model));
    let file = open(&saved).unwrap();
    update(
        &mut state,
        &model,
        &BTreeMap::from([("head", Tensor::new(1f32, CPU).unwrap())]),
    )
    .unwrap();
    forget_ascent(
        &mut state,
        &model,
        &BTreeMap::from([("head", Tensor::new(1f32, CPU).unwrap())]),
    );
    let before = snapshot(&model, &state);
    for result in [
        file.restore(&mut state),
        file.restore_with_model(&mut state, &model),
    ] {
        is_kind(&result.unwrap_err(), Changed, &["other weights", "with_averages"]);
    }
    assert!(snapshot(&model, &state) == before);
    state
        .with_averages(&model, || Ok::<_, optimisers::Error>(()))
        .unwrap();
    file.restore_with_model(&mut state, &model).unwrap();
    assert_eq!(file_of(Checkpoint::new(&state).model(&model)), saved);
}

#[test]
fn another_version_of_the_format() {
    for version in [0, 2, u64::MAX] {
        let other = |pieces: &mut Pieces| {
            pieces.description = json!({ "format": version, "crate": "9.9.9", "anything": { "else": [] } })
        };
        let words = [
            &format!("format version {version}, expected 1"),
            "read the file with optimisers 9.9.9",
        ];
        refused(edited(other), File, &words);
    }
}

#[test]
fn a_damaged_or_edited_file() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("crafted");
    let original = file();
    let length = original.len();
    let words = [
        "checksum",
        "the file was damaged or edited",
        "`CheckpointFile::open_edited`",
    ];
    for place in [length - 1, length - 50] {
        let mut bytes = original.clone();
        bytes[place] ^= 1;
        refused(open(&bytes), File, &words);
        std::fs::write(&path, &bytes).unwrap();
        refused(CheckpointFile::open(&path), File, &words);
        let (model, mut state) = started(rule(), 20, DType::F32);
        CheckpointFile::open_edited(&path)
            .unwrap()
            .restore_with_model(&mut state, &model)
            .unwrap();
    }
    // Written anew by a program that leaves spaces in the description, so that the checksum is not found.
    let text = String::from_utf8_lossy(&original).replace(r#"\"checksum\":\""#, r#"\"checksum\": \""#);
    let mut bytes = original.clone();
    let header = 8 + u64::from_le_bytes(original[..8].try_into().unwrap()) as usize;
    let spaced = text[text.find('{').unwrap()..=text.rfind('}').unwrap()]
        .trim_end()
        .to_string();
    bytes.splice(..header, assembled(&spaced, &[]));
    refused(open(&bytes), File, &words);
    std::fs::write(&path, &bytes).unwrap();
    assert!(CheckpointFile::open_edited(&path).is_ok());
    // An edit does not pass the other checks.
    std::fs::write(&path, &original[..length - 1]).unwrap();
    refused(
        CheckpointFile::open_edited(&path),
        File,
        &["not a whole safetensors file"],
    );
}
