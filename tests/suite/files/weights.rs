//! Weights from files of any dtype.

use std::collections::{BTreeMap, HashMap};
use std::path::PathBuf;

use candle_core::{DType, Tensor, Var};
use candle_nn::{VarBuilder, VarMap, layer_norm_no_bias, linear};
use optimisers::{
    Adam, Error, ErrorKind, Lookahead, MixedPrecision, OptimiserChain, Weights, setup, setup_with,
};
use tempfile::TempDir;

use crate::model::models::{CPU, of, var_map};
use crate::training::precision::policy;
use support::common::{
    Vars, assert_same, bits, bits16, devices, is_kind, nearest16, numbers, random, snapshot, values, var,
};
use support::crafted_checkpoints::assembled;

const FLOATS: [DType; 4] = [DType::F16, DType::BF16, DType::F32, DType::F64];

/// A file in a folder that lasts as long as the test.
fn saved(folder: &TempDir, name: &str, tensors: impl IntoIterator<Item = (&'static str, Tensor)>) -> PathBuf {
    let path = folder.path().join(name);
    let tensors: HashMap<&str, Tensor> = tensors.into_iter().collect();
    candle_core::safetensors::save(&tensors, &path).expect("a file");
    path
}

fn folder() -> TempDir {
    tempfile::tempdir().expect("a folder")
}

const IN_F16: &str = "a number that F16 can hold";

/// Asserts which tensor of a file was refused, and why: what it is and where, and what was expected.
fn is_refused(
    error: &Error,
    path: &str,
    problem: ErrorKind,
    element: Option<usize>,
    got: Option<&str>,
    expected: &str,
) {
    assert_eq!((error.kind(), error.path()), (problem, Some(path)), "{error}");
    assert_eq!(
        (error.element(), error.got(), error.expected()),
        (element, got, Some(expected)),
        "{error}"
    );
    assert!(
        error.file().is_some() && error.to_string().starts_with("weights "),
        "{error}"
    );
}

/// Values that two roundings in a row get wrong: just off the middle between two 16-bit numbers, by less than
/// an f32 can say.
fn tricky() -> Vec<f64> {
    let middles = [
        1.0 + 2f64.powi(-8),
        1.0 + 3.0 * 2f64.powi(-8),
        1.0 + 2f64.powi(-11),
        1.0 + 3.0 * 2f64.powi(-11),
    ];
    let off = [-(2f64.powi(-40)), 0.0, 2f64.powi(-40)];
    middles
        .into_iter()
        .flat_map(|middle| off.map(|off| middle + off))
        .flat_map(|x| [x, -x])
        .chain(numbers(3, 200))
        .collect()
}

#[test]
fn values_are_converted_and_rounded_once() {
    for device in devices() {
        for from in FLOATS {
            let folder = folder();
            let stored = of(&tricky(), from);
            let weights = Weights::open([saved(&folder, "model.safetensors", [("x", stored.clone())])])
                .expect("weights");
            for to in FLOATS {
                let model: Vars = [(
                    "x".to_string(),
                    Var::zeros(stored.shape(), to, &device).expect("a variable"),
                )]
                .into();
                assert_eq!(weights.load_into(&model).expect("loaded"), Vec::<String>::new());
                match to {
                    DType::F16 | DType::BF16 => {
                        let expected: Vec<u16> =
                            values(&stored).into_iter().map(|x| nearest16(to, x)).collect();
                        assert_eq!(
                            bits16(&model["x"].to_device(CPU).expect("on the host")),
                            expected,
                            "{from:?} to {to:?}"
                        );
                    }
                    _ => assert_eq!(
                        bits(&model["x"]),
                        bits(&stored.to_dtype(to).expect("converted")),
                        "{from:?} to {to:?}"
                    ),
                }
            }
        }
    }
}

/// T40: F32 into BF16, all or nothing.
#[test]
fn t40_nothing_changes_when_something_does_not_fit() {
    let folder = folder();
    let good = || ("a", of(&[1.5, 2.5], DType::F32));
    let integers = Tensor::new(&[1u32, 2], CPU).expect("integers");
    type Row = (
        &'static str,
        Option<Tensor>,
        ErrorKind,
        Option<usize>,
        Option<&'static str>,
        &'static str,
    );
    let rows: [Row; 5] = [
        ("missing", None, ErrorKind::Tensor, None, None, "one of: a"),
        (
            "shape",
            Some(of(&[1.0, 2.0, 3.0], DType::F32)),
            ErrorKind::Tensor,
            None,
            Some("[3]"),
            "[2]",
        ),
        (
            "dtype",
            Some(integers),
            ErrorKind::Tensor,
            None,
            Some("U32"),
            "F16",
        ),
        (
            "large",
            Some(of(&[1.0, -1e6], DType::F32)),
            ErrorKind::Tensor,
            Some(1),
            Some("-1000000"),
            IN_F16,
        ),
        (
            "larger",
            Some(of(&[65520.0, 1.0], DType::F64)),
            ErrorKind::Tensor,
            Some(0),
            Some("65520"),
            IN_F16,
        ),
    ];
    for (name, second, problem, element, got, expected) in rows {
        let tensors = [Some(good()), second.map(|second| ("b", second))]
            .into_iter()
            .flatten();
        let model: Vars = [
            ("a".to_string(), var(&of(&[7.0, 8.0], DType::BF16))),
            ("b".to_string(), var(&of(&[9.0, 9.5], DType::F16))),
        ]
        .into();
        let path = saved(&folder, name, tensors);
        let error = Weights::open([&path])
            .expect("weights")
            .load_into(&model)
            .expect_err(name);
        assert!(
            error
                .to_string()
                .starts_with(&format!("weights {}: ", path.display()))
                && error.to_string().contains("\"b\""),
            "{error}"
        );
        is_refused(&error, "b", problem, element, got, expected);
        assert_eq!(
            (values(&model["a"]), values(&model["b"])),
            (vec![7.0, 8.0], vec![9.0, 9.5]),
            "{name}"
        );
    }
}

#[test]
fn what_no_variable_has_is_reported() {
    let folder = folder();
    let path = saved(
        &folder,
        "m",
        [
            ("a", of(&[1.0, 65519.0], DType::F32)),
            ("z", of(&[1.0], DType::F32)),
            ("b", of(&[2.0], DType::BF16)),
        ],
    );
    let weights = Weights::open([path]).expect("weights");
    assert_eq!(weights.names().collect::<Vec<_>>(), ["a", "b", "z"]);
    let model = BTreeMap::from([("a", var(&of(&[0.0, 0.0], DType::F16)))]);
    assert_eq!(weights.load_into(&model).expect("loaded"), ["b", "z"]);
    assert_eq!(values(&model["a"]), [1.0, 65504.0]);
    assert!(format!("{weights:?}").contains("tensors: 3"));
}

#[test]
fn numbers_that_are_not_finite_are_taken_over_on_request_only() {
    let folder = folder();
    for (i, (from, to)) in FLOATS
        .into_iter()
        .flat_map(|from| FLOATS.map(|to| (from, to)))
        .enumerate()
    {
        for (j, bad) in [f64::INFINITY, f64::NEG_INFINITY, f64::NAN]
            .into_iter()
            .enumerate()
        {
            let path = saved(&folder, &format!("{i} {j}"), [("a", of(&[1.0, bad, 2.0], from))]);
            let model = BTreeMap::from([("a", var(&of(&[5.0, 5.0, 5.0], to)))]);
            let weights = Weights::open([path]).expect("weights");
            let refused = weights.load_into(&model).expect_err("refused");
            is_refused(
                &refused,
                "a",
                ErrorKind::NotFinite,
                Some(1),
                Some(&bad.to_string()),
                "a finite number",
            );
            assert_eq!(values(&model["a"]), [5.0; 3]);
            weights
                .accepting_non_finite()
                .load_into(&model)
                .expect("taken over");
            assert_eq!(bits(&model["a"]), bits(&of(&[1.0, bad, 2.0], DType::F64)));
        }
    }
    let large = saved(&folder, "large", [("a", of(&[70000.0], DType::F32))]);
    let model = BTreeMap::from([("a", var(&of(&[5.0], DType::F16)))]);
    Weights::open([large])
        .map(Weights::accepting_non_finite)
        .and_then(|weights| weights.load_into(&model))
        .expect("taken over");
    assert_eq!(values(&model["a"]), [f64::INFINITY]);
}

/// Tied weights are in a file once, under either path, or twice.
#[test]
fn tied_weights_are_found_under_any_of_their_paths() {
    let folder = folder();
    for (i, names) in [vec!["in"], vec!["out"], vec!["in", "out"]]
        .into_iter()
        .enumerate()
    {
        let path = saved(
            &folder,
            &i.to_string(),
            names.into_iter().map(|name| (name, of(&[3.0], DType::F64))),
        );
        let shared = var(&of(&[0.0], DType::BF16));
        let model = BTreeMap::from([("in", shared.clone()), ("out", shared.clone())]);
        assert_eq!(
            Weights::open([path])
                .and_then(|weights| weights.load_into(&model))
                .expect("loaded"),
            Vec::<String>::new()
        );
        assert_eq!(values(&shared), [3.0]);
    }
}

/// Only one of two different values could be that of a tied variable.
#[test]
fn t61_different_values_for_one_tied_variable_are_refused() {
    let folder = folder();
    let path = saved(
        &folder,
        "untied",
        [("in", of(&[3.0], DType::F32)), ("out", of(&[4.0], DType::F32))],
    );
    let shared = var(&of(&[0.0], DType::BF16));
    let model = BTreeMap::from([("in", shared.clone()), ("out", shared.clone())]);
    let weights = Weights::open([path]).expect("a file");
    let rule = || MixedPrecision::new(DType::F32, Adam::new(0.1));
    let mut state = setup(rule(), &model).expect("a state");
    let by_path =
        [("in", 3.0), ("out", 4.0)].map(|(path, value)| (path.to_string(), of(&[value], DType::F32)));
    let values_by_path = BTreeMap::from(by_path);
    let refused = [
        weights.load_into(&model),
        state.set_masters(&model, &weights),
        state.set_masters(&model, &values_by_path),
    ];
    for refused in refused {
        is_kind(
            &refused.expect_err("two values"),
            ErrorKind::Model,
            &["\"in\" and \"out\" are one variable", "untie the two"],
        );
    }
    assert_eq!(values(&shared), [0.0]);

    // One number in two dtypes is one value, and so are both zeros; the same bytes of two shapes are not.
    let mut set = |of_in: Tensor, of_out: Tensor| {
        let both = BTreeMap::from([("in".to_string(), of_in), ("out".to_string(), of_out)]);
        state.set_masters(&model, &both).map(|_| values(&shared))
    };
    for value in [3.0, 0.1] {
        let equal = set(
            of(&[value], DType::BF16),
            of(&[value], DType::BF16).to_dtype(DType::F64).expect("f64"),
        );
        assert_eq!(equal.expect("one value"), values(&of(&[value], DType::BF16)));
    }
    set(of(&[0.0], DType::F32), of(&[-0.0], DType::F32)).expect("one value");
    let of_two_shapes = [
        of(&[3.0], DType::F32),
        of(&[3.0], DType::F32).reshape((1, 1)).expect("a matrix"),
    ];
    let square = random(1, &[2, 2], DType::F32, CPU);
    let transposed = square.t().expect("a view");
    let shared_square = var(&square);
    let squares = BTreeMap::from([("in", shared_square.clone()), ("out", shared_square)]);
    let mut of_square = setup(rule(), &squares).expect("a state");
    let strided = BTreeMap::from([("in".to_string(), square), ("out".to_string(), transposed)]);
    let error = of_square.set_masters(&squares, &strided).expect_err("two values");
    is_kind(&error, ErrorKind::Model, &["their values differ"]);
    for (one, other) in [
        (of(&[0.1], DType::BF16), of(&[0.1], DType::F32)),
        (of(&[0.1], DType::F32), of(&[0.1], DType::BF16)),
        (of_two_shapes[0].clone(), of_two_shapes[1].clone()),
    ] {
        let error = set(one, other).expect_err("two values");
        is_kind(&error, ErrorKind::Model, &["their values differ"]);
    }
}

#[test]
fn integers_and_empty_tensors_are_taken_over_as_they_are() {
    let folder = folder();
    let count = || Tensor::new(&[5i64], CPU).expect("a count");
    let path = saved(
        &folder,
        "m",
        [
            ("bn.num_batches_tracked", count()),
            ("empty", Tensor::zeros((0, 3), DType::F32, CPU).expect("empty")),
        ],
    );
    let zero = Var::zeros(1, DType::I64, CPU).expect("a count");
    let model = var_map([
        ("bn.num_batches_tracked".to_string(), zero.clone()),
        (
            "empty".to_string(),
            Var::zeros((0, 3), DType::BF16, CPU).expect("empty"),
        ),
    ]);
    Weights::open([path])
        .and_then(|weights| weights.load_into(&model))
        .expect("loaded");
    assert_eq!(values(&zero), [5.0]);
}

/// Masters have what a file has, and parameters that rounded; infinities come in on request.
#[test]
fn masters_are_loaded_from_files_of_several_parts() {
    let folder = folder();
    let (wide, large) = (of(&tricky(), DType::F64), of(&[1.0, -1e9, 2.0], DType::F32));
    let first = saved(
        &folder,
        "first.safetensors",
        [("a", wide.clone()), ("left", of(&[7.0], DType::F32))],
    );
    let second = saved(
        &folder,
        "second.safetensors",
        [("mask", large.clone()), ("more", of(&[1.0], DType::F32))],
    );
    let fresh = || -> Vars {
        let variable = |dtype, length| Var::zeros(length, dtype, CPU).expect("a variable");
        let lengths = [
            ("a", DType::F16, wide.elem_count()),
            ("left", DType::BF16, 1),
            ("mask", DType::F16, 3),
        ];
        lengths
            .map(|(path, dtype, length)| (path.to_string(), variable(dtype, length)))
            .into()
    };
    let weights = Weights::open([&first, &second]).expect("weights");
    let rule = MixedPrecision::new(
        DType::F64,
        OptimiserChain::new((Adam::new(0.1), Lookahead::new(2))),
    );
    let (model, lenient) = (fresh(), weights.clone().accepting_non_finite());
    let mut state = setup_with(&model, |path, _| (path != "left").then(|| rule.clone())).expect("a state");
    state.rename("a", "renamed").expect("a new name");

    let before = snapshot(&model, &state);
    let error = state.set_masters(&model, &weights).expect_err("refused");
    is_refused(
        &error,
        "mask",
        ErrorKind::Tensor,
        Some(1),
        Some("-1000000000"),
        IN_F16,
    );
    let masters: BTreeMap<String, Tensor> = [
        ("a", &wide),
        ("left", &large.narrow(0, 0, 1).expect("one")),
        ("mask", &large),
    ]
    .map(|(path, values)| (path.to_string(), values.clone()))
    .into();
    let error = state.set_masters(&model, &masters).expect_err("refused");
    is_kind(
        &error,
        ErrorKind::Tensor,
        &["\"mask\"", "Weights::accepting_non_finite"],
    );
    assert_eq!(
        (error.path(), error.element(), error.expected()),
        (Some("mask"), Some(1), Some(IN_F16)),
        "{error}"
    );
    assert_same(&[snapshot(&model, &state)], &[before], "after the refusals");

    assert_eq!(state.set_masters(&model, &lenient).expect("masters"), ["more"]);
    let masters = state.masters(&model).expect("masters");
    assert_eq!(
        (bits(&masters["renamed"]), values(&masters["mask"])),
        (bits(&wide), values(&large))
    );
    assert_eq!(
        bits16(&model["a"]),
        values(&wide)
            .into_iter()
            .map(|x| nearest16(DType::F16, x))
            .collect::<Vec<_>>()
    );
    assert_eq!(
        (values(&model["mask"]), values(&model["left"])),
        (vec![1.0, f64::NEG_INFINITY, 2.0], vec![7.0])
    );
    let slow = state
        .leaf("renamed")
        .and_then(|leaf| leaf.tensor("1.slow").ok())
        .expect("a copy");
    assert_eq!(bits(&slow), bits(&wide));
    state
        .check_masters(&model)
        .expect("parameters that are their masters rounded");
    let first = Weights::open([&first]).expect("weights");
    let missing = state.set_masters(&model, &first).expect_err("refused");
    is_refused(&missing, "mask", ErrorKind::Tensor, None, None, "one of: a, left");
}

#[test]
fn files_are_refused_by_name() {
    let folder = folder();
    let (a, b) = (
        saved(&folder, "a", [("x", of(&[1.0], DType::F32))]),
        saved(&folder, "b", [("y", of(&[2.0], DType::F32))]),
    );
    let again = saved(&folder, "again", [("y", of(&[2.0], DType::F32))]);
    let model = BTreeMap::from([
        ("x", var(&of(&[0.0], DType::F16))),
        ("y", var(&of(&[0.0], DType::F16))),
    ]);
    Weights::open([&a, &b])
        .and_then(|weights| weights.load_into(&model))
        .expect("loaded from two files");
    assert_eq!((values(&model["x"]), values(&model["y"])), (vec![1.0], vec![2.0]));

    let two = Weights::open([&a, &b, &again]).expect_err("twice");
    let words = format!(
        "weights {}: it has the tensor \"y\", which {} has too",
        again.display(),
        b.display()
    );
    is_kind(&two, ErrorKind::File, &[&words]);
    assert_eq!(two.file(), Some(&*again));
    let none = folder.path().join("none");
    let no_file = Weights::open([&none]).expect_err("no file");
    assert_eq!((no_file.kind(), no_file.file()), (ErrorKind::Io, Some(&*none)));
    let bytes = std::fs::read(&a).expect("bytes");
    for length in [0, 7, 20, bytes.len() - 1] {
        std::fs::write(&none, &bytes[..length]).expect("a file");
        is_kind(
            &Weights::open([&none]).expect_err("truncated"),
            ErrorKind::File,
            &["not a whole safetensors file"],
        );
    }
}

/// Headers that lie: an error, and no panic.
#[test]
fn files_are_not_trusted() {
    let folder = folder();
    let path = folder.path().join("crafted");
    let zeros = [0; 8];
    for header in [
        r#"{"a":{"dtype":"F32","shape":[0,18446744073709551615,2],"data_offsets":[0,0]}}"#,
        r#"{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}"#,
        r#"{"a":{"dtype":"F32","shape":[3],"data_offsets":[0,8]}}"#,
        r#"{"a":{"dtype":"F32","shape":[2],"data_offsets":[8,16]}}"#,
        "[]",
    ] {
        let data = if header.contains("18446744073709551615") {
            &zeros[..0]
        } else {
            &zeros
        };
        std::fs::write(&path, assembled(header, data)).expect("a file");
        is_kind(
            &Weights::open([&path]).expect_err(header),
            ErrorKind::File,
            &["not a whole safetensors file"],
        );
    }
    let other = r#"{"a":{"dtype":"F8_E5M2","shape":[8],"data_offsets":[0,8]}}"#;
    std::fs::write(&path, assembled(other, &zeros)).expect("a file");
    let model = BTreeMap::from([("a", var(&of(&[0.0; 8], DType::F16)))]);
    let error = Weights::open([&path])
        .and_then(|weights| weights.load_into(&model))
        .expect_err("no number of candle's");
    is_refused(&error, "a", ErrorKind::Tensor, None, Some("F8_E5M2"), "F16");
}

fn file_of_a_model(folder: &TempDir) -> (PathBuf, VarMap) {
    let (path, variables) = (folder.path().join("model.safetensors"), VarMap::new());
    let builder = VarBuilder::from_varmap(&variables, DType::F32, CPU);
    linear(4, 3, builder.pp("fc"))
        .and_then(|_| layer_norm_no_bias(3, 1e-5, builder.pp("norm")))
        .expect("a model");
    for variable in variables.all_vars() {
        variable
            .set(&random(9, variable.dims(), DType::F32, CPU))
            .expect("values");
    }
    variables.save(&path).expect("saved");
    (path, variables)
}

#[test]
fn a_model_of_a_policy_takes_a_file_of_another_dtype() {
    let folder = folder();
    let (path, original) = file_of_a_model(&folder);
    let weights = Weights::open([path]).expect("weights");
    for device in devices() {
        let variables = VarMap::new();
        let policy = policy(&[("norm.*", DType::F32), ("*", DType::BF16)]);
        let builder = policy.builder(&variables, &device);
        let fc = linear(4, 3, builder.pp("fc")).expect("a layer");
        let norm = layer_norm_no_bias(3, 1e-5, builder.pp("norm")).expect("a norm");
        assert_eq!(weights.load_into(&variables).expect("loaded"), [""; 0]);
        assert_eq!(
            (fc.weight().dtype(), norm.weight().dtype()),
            (DType::BF16, DType::F32)
        );
        policy.check(&variables).expect("as the policy says");
        let original = original.data().lock().expect("the variables");
        for (path, x) in variables.data().lock().expect("the variables").iter() {
            assert_eq!(
                bits(x),
                bits(&original[path].to_dtype(x.dtype()).expect("rounded")),
                "{path}"
            );
            assert!(x.device().same_device(&device) && x.is_variable());
        }
    }
}
