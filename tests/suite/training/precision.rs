//! Dtypes by path, and modules that run in a dtype of their own.

use candle_core::{D, DType, Device, Module, Tensor, Var};
use candle_nn::{
    Init, LayerNorm, Linear, VarBuilder, VarMap, conv2d, embedding, layer_norm_no_bias, linear, ops::softmax,
};
use optimisers::{
    Adam, Checkpoint, CheckpointFile, ErrorKind, InDtype, MixedPrecision, Model, PrecisionPolicy, setup,
    trainables,
};

use crate::model::models::CPU;
use support::common::{bits, devices, is_kind, random, values, var};

pub(crate) fn policy(choices: &[(&str, DType)]) -> PrecisionPolicy {
    PrecisionPolicy::new(choices.iter().copied()).expect("a policy")
}

/// The dtypes of a map's variables, by path.
pub(crate) fn dtypes(variables: &VarMap) -> Vec<(String, DType)> {
    trainables(variables)
        .expect("variables")
        .into_iter()
        .map(|(path, x)| (path, x.dtype()))
        .collect()
}

fn named(rows: &[(&str, DType)]) -> Vec<(String, DType)> {
    rows.iter()
        .map(|(path, dtype)| (path.to_string(), *dtype))
        .collect()
}

/// What parameters cannot be.
pub(crate) const REFUSED: [DType; 7] = [
    DType::U8,
    DType::U32,
    DType::I16,
    DType::I64,
    DType::F8E4M3,
    DType::F4,
    DType::F8E8M0,
];

#[test]
fn the_first_pattern_that_matches_decides() {
    use DType::{BF16, F16, F32, F64};
    let policy = policy(&[
        ("*.norm.*", F32),
        ("head.*", F64),
        ("?.b*", F16),
        ("*.weight", BF16),
        ("head.norm.weight", F64),
    ]);
    let rows = [
        ("0.norm.weight", F32),
        ("head.norm.weight", F32),
        ("head.weight", F64),
        ("head.bias", F64),
        ("0.bias", F16),
        ("0.fc.weight", BF16),
        ("norm.weight", BF16),
        (".norm.", F32),
    ];
    for (path, dtype) in rows {
        assert_eq!(policy.dtype(path).expect(path), dtype, "{path}");
    }
    for path in ["norm", "10.bias", "Head.bias", "0.fc.weights", ""] {
        let error = policy.dtype(path).expect_err(path);
        is_kind(
            &error,
            ErrorKind::Argument,
            &["no pattern matches this parameter"],
        );
        assert_eq!(
            (
                error.path(),
                error.got().map(|patterns| patterns.split(", ").count())
            ),
            (Some(path), Some(5)),
            "{error}"
        );
    }
}

#[test]
fn only_dtypes_that_can_be_trained_are_possible() {
    for dtype in REFUSED {
        let errors = [
            PrecisionPolicy::new([("a", DType::F32), ("*", dtype)]).expect_err("refused"),
            InDtype::new(dtype, ()).expect_err("refused"),
        ];
        for (error, place) in errors.into_iter().zip([r#"the pattern "*""#, "InDtype"]) {
            assert_eq!(
                (error.kind(), error.got()),
                (ErrorKind::Argument, Some(&*format!("{dtype:?}"))),
                "{error}"
            );
            assert!(
                error
                    .to_string()
                    .starts_with(&format!("the dtype of {place} is {dtype:?}, expected F16")),
                "{error}"
            );
        }
    }
}

/// candle-nn's own layers from a policy's builder, with prefixes, on every device.
#[test]
fn a_builder_gives_each_variable_its_dtype() {
    use DType::{BF16, F16, F32, F64};
    let policy = policy(&[("*norm.*", F32), ("*.bias", F64), ("conv.*", BF16), ("*", F16)]);
    for device in devices() {
        let variables = VarMap::new();
        let builder = policy.builder(&variables, &device);
        assert_eq!(builder.dtype(), F16);
        let block = builder.pp("block").pp(0);
        let made = [
            linear(64, 32, block.pp("fc")).expect("a layer").weight().clone(),
            layer_norm_no_bias(32, 1e-5, block.pp("norm"))
                .expect("a norm")
                .weight()
                .clone(),
            conv2d(2, 4, 3, Default::default(), builder.pp("conv"))
                .expect("a layer")
                .weight()
                .clone(),
            embedding(50, 16, builder.root().pp("tokens"))
                .expect("an embedding")
                .embeddings()
                .clone(),
        ];
        policy.check(&variables).expect("as the policy says");
        let expected = [
            ("block.0.fc.bias", F64),
            ("block.0.fc.weight", F16),
            ("block.0.norm.weight", F32),
            ("conv.bias", F64),
            ("conv.weight", BF16),
            ("tokens.weight", F16),
        ];
        assert_eq!(dtypes(&variables), named(&expected));
        let known = trainables(&variables).expect("variables");
        for layer in made {
            assert!(known.values().any(|x| x.id() == layer.id()) && layer.device().same_device(&device));
        }
    }
}

/// What is drawn at random is spread as in F32, and constants are exact.
#[test]
fn initial_values_are_those_of_f32_rounded() {
    for (device, dtype) in devices()
        .into_iter()
        .flat_map(|device| [DType::F16, DType::BF16, DType::F32, DType::F64].map(|d| (device.clone(), d)))
    {
        let variables = VarMap::new();
        let builder = policy(&[("*", dtype)]).builder(&variables, &device);
        let get = |name: &str, init| {
            let tensor = builder.get_with_hints((40, 50), name, init).expect("a variable");
            assert_eq!(
                (tensor.dtype(), tensor.dims(), tensor.is_variable()),
                (dtype, &[40, 50][..], true)
            );
            values(&tensor)
        };
        assert_eq!(get("zeros", Init::Const(0.0)), [0.0; 2000]);
        assert_eq!(get("ones", Init::Const(1.0)), [1.0; 2000]);
        let third = Tensor::new(1f32 / 3.0, CPU)
            .and_then(|x| x.to_dtype(dtype))
            .expect("a number");
        let thirds = get("thirds", Init::Const(1.0 / 3.0));
        assert!(
            thirds.iter().all(|x| (x - values(&third)[0]).abs() < 1e-7),
            "{thirds:?}"
        );
        let uniform = get("uniform", Init::Uniform { lo: -0.25, up: 0.5 });
        assert!(
            uniform.iter().all(|x| (-0.25..=0.5).contains(x))
                && uniform.iter().any(|x| *x < -0.2)
                && uniform.iter().any(|x| *x > 0.45)
        );
        let normal = get(
            "normal",
            Init::Randn {
                mean: 1.0,
                stdev: 0.5,
            },
        );
        let mean = normal.iter().sum::<f64>() / 2000.0;
        let deviation = (normal.iter().map(|x| (x - mean).powi(2)).sum::<f64>() / 2000.0).sqrt();
        assert!(
            (mean - 1.0).abs() < 0.08 && (deviation - 0.5).abs() < 0.06,
            "{mean} {deviation}"
        );
        assert_ne!(uniform[..1000], uniform[1000..]);
    }
}

/// The text of a constructor's error; candle's `Result` keeps no more of ours.
fn refusal<T>(result: candle_core::Result<T>) -> String {
    result.err().expect("an error").to_string()
}

#[test]
fn a_builder_refuses_what_the_policy_does_not_say() {
    let variables = VarMap::new();
    let builder = policy(&[("fc.weight", DType::BF16)]).builder(&variables, CPU);
    let uncovered = r#"parameter "fc.bias": no pattern matches this parameter; the patterns are: fc.weight; add a pattern for it, or a last pattern "*""#;
    assert!(refusal(linear(4, 2, builder.pp("fc"))).starts_with(uncovered));
    let weight = builder.get((2, 4), "fc.weight").expect("the variable");
    assert_eq!(
        builder.pp("fc").get((2, 4), "weight").expect("the same").id(),
        weight.id()
    );
    let shape = refusal(builder.get((4, 2), "fc.weight"));
    assert!(
        shape.contains(
            r#"parameter "fc.weight": the variable that is there already has shape [2, 4], expected [4, 2]"#
        ),
        "{shape}"
    );
    let dtype = refusal(
        policy(&[("*", DType::F32)])
            .builder(&variables, CPU)
            .get((2, 4), "fc.weight"),
    );
    assert!(
        dtype.contains(r#"parameter "fc.weight": the variable that is there already is BF16, expected F32"#),
        "{dtype}"
    );
    assert!(
        refusal(
            PrecisionPolicy::new([("", DType::F32); 0])
                .expect("no patterns")
                .builder(&variables, CPU)
                .get(1, "x")
        )
        .contains("\"x\"")
    );
    assert_eq!(dtypes(&variables), named(&[("fc.weight", DType::BF16)]));
}

#[test]
fn the_policy_decides_for_floats_and_nothing_else() {
    let variables = VarMap::new();
    let builder = policy(&[("*", DType::BF16)]).builder(&variables, CPU);
    for (name, asked, got) in [
        ("a", DType::F32, DType::BF16),
        ("b", DType::F64, DType::BF16),
        ("c", DType::BF16, DType::BF16),
        ("positions", DType::U32, DType::U32),
        ("batches", DType::I64, DType::I64),
    ] {
        assert_eq!(
            builder
                .get_with_hints_dtype(3, name, Init::Const(0.0), asked)
                .expect(name)
                .dtype(),
            got
        );
    }
    assert_eq!(
        builder
            .to_dtype(DType::F32)
            .get(2, "d")
            .expect("a variable")
            .dtype(),
        DType::BF16
    );
    assert!(builder.contains_tensor("a") && !builder.contains_tensor("e"));
    assert_eq!(builder.get_unchecked("a").expect("a variable").dims(), [3]);
    assert!(refusal(builder.get_unchecked("e")).contains('e'));
    policy(&[("*", DType::BF16)])
        .check(&variables)
        .expect("integers are not the policy's concern");
}

#[test]
fn a_model_is_checked_against_its_policy() {
    let variables = VarMap::new();
    linear(
        4,
        2,
        VarBuilder::from_varmap(&variables, DType::BF16, CPU).pp("fc"),
    )
    .expect("a layer");
    let check = |choices: &[(&str, DType)]| policy(choices).check(&variables);
    check(&[("*", DType::BF16)]).expect("right");
    check(&[("*.bias", DType::BF16), ("fc.*", DType::BF16)]).expect("right");
    let unmatched = check(&[("*.norm.*", DType::F32), ("*", DType::BF16)]).expect_err("useless");
    is_kind(
        &unmatched,
        ErrorKind::Argument,
        &["the pattern \"*.norm.*\" matches no parameter"],
    );
    assert_eq!(
        unmatched.expected(),
        Some("one that matches one of: fc.bias, fc.weight")
    );
    let shadowed = check(&[("*", DType::BF16), ("*.bias", DType::F32)]).expect_err("useless");
    let words = "the pattern \"*.bias\" decides nothing: \"*\" comes first and matches \"fc.bias\" as well";
    is_kind(&shadowed, ErrorKind::Argument, &[words]);
    let uncovered = check(&[("*.bias", DType::BF16)]).expect_err("no pattern");
    is_kind(
        &uncovered,
        ErrorKind::Argument,
        &["no pattern matches this parameter"],
    );
    assert_eq!(uncovered.path(), Some("fc.weight"), "{uncovered}");
    let other = check(&[("*.bias", DType::F32), ("*", DType::BF16)]).expect_err("another dtype");
    assert_eq!(
        (other.kind(), other.path()),
        (ErrorKind::Tensor, Some("fc.bias")),
        "{other}"
    );
    assert_eq!(
        (other.expected(), other.got()),
        (Some("F32"), Some("BF16")),
        "{other}"
    );
    let empty = policy(&[("*", DType::F32)])
        .check(&VarMap::new())
        .expect_err("nothing to check");
    is_kind(&empty, ErrorKind::Model, &["no trainable"]);
}

/// The variables are in the `VarMap`, so states and checkpoints know them.
#[test]
fn setup_and_checkpoints_see_the_variables() {
    let policy = policy(&[("*.bias", DType::F32), ("*", DType::F16)]);
    let build = || {
        let variables = VarMap::new();
        linear(3, 2, policy.builder(&variables, CPU).pp("fc")).expect("a layer");
        let state = setup(MixedPrecision::new(DType::F32, Adam::new(0.1)), &variables).expect("a state");
        (variables, state)
    };
    let (variables, state) = build();
    let names: Vec<_> = state
        .leaves()
        .map(|leaf| {
            (
                leaf.path(),
                DType::from(leaf.dtype()),
                leaf.tensor_names().contains(&"master".to_string()),
            )
        })
        .collect();
    assert_eq!(
        names,
        [("fc.bias", DType::F32, false), ("fc.weight", DType::F16, true)]
    );
    assert_eq!(state.bytes(), 4 * (2 * 2 + 3 * 6));

    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("state.safetensors");
    Checkpoint::new(&state)
        .model(&variables)
        .save(&path)
        .expect("saved");
    let (other, mut resumed) = build();
    CheckpointFile::open(&path)
        .and_then(|file| file.restore_with_model(&mut resumed, &other))
        .expect("restored");
    let values = |variables: &VarMap| {
        trainables(variables)
            .expect("variables")
            .values()
            .map(bits)
            .collect::<Vec<_>>()
    };
    assert_eq!(values(&variables), values(&other));
}

/// Forward and backward, an adaptor has the bits of conversions by hand: in the output, the input's gradient,
/// and the parameters' gradients.
#[test]
fn an_adaptor_has_the_bits_of_conversions_by_hand() {
    for device in devices() {
        for (inside, outside) in [
            (DType::F32, DType::F16),
            (DType::F32, DType::BF16),
            (DType::BF16, DType::F32),
            (DType::F16, DType::F32),
        ] {
            let weight = var(&random(1, &[6, 4], inside, &device));
            let bias = var(&random(2, &[6], inside, &device));
            let norm = var(&random(3, &[4], inside, &device));
            let input = var(&random(4, &[5, 4], outside, &device));
            let modules: [(Box<dyn Module>, &[&Var]); 3] = [
                (
                    Box::new(Linear::new(
                        weight.as_tensor().clone(),
                        Some(bias.as_tensor().clone()),
                    )),
                    &[&weight, &bias],
                ),
                (
                    Box::new(LayerNorm::new_no_bias(norm.as_tensor().clone(), 1e-5)),
                    &[&norm],
                ),
                (Box::new(|x: &Tensor| softmax(x, D::Minus1)), &[]),
            ];
            for (module, parameters) in modules {
                let module = &module;
                let by_hand = |x: &Tensor| module.forward(&x.to_dtype(inside)?)?.to_dtype(outside);
                let adaptor = InDtype::new(inside, |x: &Tensor| module.forward(x)).expect("an adaptor");
                let run = |module: &dyn Module| {
                    let output = module.forward(input.as_tensor()).expect("an output");
                    let gradients = output
                        .to_dtype(DType::F32)
                        .and_then(|y| y.sqr()?.sum_all()?.backward())
                        .expect("gradients");
                    let of = |x: &Var| {
                        gradients
                            .get(x)
                            .map(|gradient| (gradient.dtype(), bits(gradient)))
                            .expect("a gradient")
                    };
                    (
                        output.dtype(),
                        bits(&output),
                        of(&input),
                        parameters.iter().map(|x| of(x)).collect::<Vec<_>>(),
                    )
                };
                let got = run(&adaptor);
                assert_eq!(got, run(&by_hand), "{inside:?} in {outside:?}");
                assert_eq!((got.0, got.2.0), (outside, outside));
                assert!(got.3.iter().all(|(dtype, _)| *dtype == inside));
            }
        }
    }
}

#[test]
fn tokens_go_in_as_they_are() {
    let variables = VarMap::new();
    let tokens = embedding(
        5,
        3,
        policy(&[("*", DType::BF16)])
            .builder(&variables, CPU)
            .pp("tokens"),
    )
    .expect("an embedding");
    let tokens = InDtype::new(DType::BF16, tokens).expect("an adaptor");
    let output = tokens
        .forward(&Tensor::new(&[1u32, 4], CPU).expect("tokens"))
        .expect("an output");
    assert_eq!(
        (output.dtype(), output.dims(), tokens.dtype()),
        (DType::BF16, &[2, 3][..], DType::BF16)
    );
    assert_eq!(tokens.module().hidden_size(), 3);
}

#[test]
fn an_adaptor_shows_its_modules_parameters() {
    let weight = || {
        var(&random(1, &[2, 2], DType::F32, &Device::Cpu))
            .as_tensor()
            .clone()
    };
    let model = vec![InDtype::new(DType::F32, Linear::new(weight(), None)).expect("an adaptor")];
    let mut paths = Vec::new();
    model.visit(&mut optimisers::Visitor::new(&mut |path, _| {
        paths.push(path.to_string())
    }));
    assert_eq!(paths, ["0.weight"]);
}
