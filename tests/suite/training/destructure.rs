//! Parameters by path and as one flat vector.

use std::collections::BTreeMap;

use candle_core::{DType, Tensor, Var};
use candle_nn::{Embedding, Linear, VarMap};
use half::{bf16, f16};
use optimisers::{
    Adam, Descent, Error, ErrorKind, Lookahead, MixedPrecision, Model, Optimiser, OptimiserChain,
    ScheduleFree, SplitMaster, Structure, destructure, model, setup, trainables, update,
};
use proptest::prelude::*;

use crate::model::models::{CPU, integers, of, plain, squares, trained, var_map};
use support::common::{Vars, assert_same, bits, bits16, devices, is_kind, random, snapshot, values, var};

const DTYPES: [DType; 4] = [DType::F16, DType::BF16, DType::F32, DType::F64];

struct LanguageModel {
    head: Linear,
    embedding: Embedding,
    positions: Tensor,
    steps: Var,
}
model!(LanguageModel {
    head,
    embedding,
    positions,
    steps
});

/// A model with a tied weight, a constant and an integer variable.
fn language_model() -> LanguageModel {
    let weight = trained(&[5, 3]);
    let head = Linear::new(weight.clone(), Some(trained(&[5])));
    LanguageModel {
        head,
        embedding: Embedding::new(weight, 3),
        positions: plain(&[4]),
        steps: integers(),
    }
}

fn named<const N: usize>(tensors: [(&str, Tensor); N]) -> Vars {
    tensors
        .map(|(path, tensor)| (path.to_string(), var(&tensor)))
        .into()
}

fn scalar(value: f64, dtype: DType) -> Tensor {
    Tensor::new(value, CPU)
        .and_then(|x| x.to_dtype(dtype))
        .expect("a scalar")
}

/// Every bit, NaNs told apart.
fn exact(tensor: &Tensor) -> Vec<u64> {
    let flat = tensor.flatten_all().expect("a flat tensor");
    match tensor.dtype() {
        DType::F32 => flat
            .to_vec1::<f32>()
            .expect("f32")
            .into_iter()
            .map(|x| x.to_bits().into())
            .collect(),
        DType::F64 => flat
            .to_vec1::<f64>()
            .expect("f64")
            .into_iter()
            .map(f64::to_bits)
            .collect(),
        _ => bits16(tensor).into_iter().map(u64::from).collect(),
    }
}

#[test]
fn trainables_are_the_variables_in_path_order() {
    let model = language_model();
    let parameters = trainables(&model).unwrap();
    assert_eq!(
        parameters.keys().collect::<Vec<_>>(),
        ["embedding.weight", "head.bias"]
    );
    let weight = model.embedding.embeddings();
    assert_eq!(parameters["embedding.weight"].id(), weight.id());

    let mut state = setup(Descent::new(0.5), &parameters).unwrap();
    let variables = [weight, model.head.bias().unwrap()].map(|x| Var::from_tensor(x).unwrap());
    update(&mut state, &parameters, &squares(&variables)).unwrap();
    assert!(
        values(weight)
            .into_iter()
            .chain(values(&parameters["head.bias"]))
            .all(|x| x == 0.0),
        "no copies, and themselves a model"
    );

    assert!(trainables(&VarMap::new()).unwrap().is_empty());
    assert_eq!(
        trainables(&trained(&[2]))
            .unwrap()
            .into_keys()
            .collect::<Vec<_>>(),
        [""]
    );
    let twice = [("a.b".to_string(), var(&plain(&[2])))];
    let clash = (
        var_map(twice.clone()),
        BTreeMap::from([("0.a", BTreeMap::from([("b", var(&plain(&[2])))]))]),
    );
    assert_eq!(
        trainables(&clash).unwrap().into_keys().collect::<Vec<_>>(),
        ["0.a.b", "1.0.a.b"]
    );
    struct Clash(Vars, Vars);
    impl Model for Clash {
        fn visit<'m>(&'m self, visitor: &mut optimisers::Visitor<'m, '_>) {
            visitor.child("x", &self.0);
            visitor.child("x", &self.1);
        }
    }
    let clash = Clash(named([("a", plain(&[1]))]), named([("a", plain(&[1]))]));
    for error in [trainables(&clash).unwrap_err(), destructure(&clash).unwrap_err()] {
        is_kind(&error, ErrorKind::Model, &["two variables"]);
        assert_eq!(error.path(), Some("x.a"));
    }
}

#[test]
fn the_vector_has_the_widest_dtype() {
    let cases: [(&[DType], DType); 7] = [
        (&[DType::F16], DType::F16),
        (&[DType::BF16, DType::BF16], DType::BF16),
        (&[DType::F16, DType::BF16], DType::F32),
        (&[DType::BF16, DType::F32, DType::F16], DType::F32),
        (&[DType::F16, DType::F32], DType::F32),
        (&[DType::F16, DType::F64], DType::F64),
        (&DTYPES, DType::F64),
    ];
    for (dtypes, expected) in cases {
        let model: Vec<Var> = (0..)
            .zip(dtypes)
            .map(|(seed, dtype)| var(&random(seed, &[2, 3], *dtype, CPU)))
            .collect();
        let (flat, structure) = destructure(&model).unwrap();
        assert_eq!(
            (flat.dtype(), structure.dtype()),
            (expected, expected.into()),
            "{dtypes:?}"
        );
        assert_eq!(
            (flat.dims(), structure.elements()),
            (&[6 * dtypes.len()][..], 6 * dtypes.len())
        );
        assert_eq!(
            values(&flat),
            model.iter().flat_map(|x| values(x)).collect::<Vec<_>>(),
            "{dtypes:?}"
        );
    }
    let eight = named([("half", Tensor::zeros(2, DType::F8E4M3, CPU).unwrap())]);
    let error = destructure(&eight).unwrap_err();
    is_kind(&error, ErrorKind::Tensor, &["F16, BF16, F32 or F64"]);
    assert_eq!((error.path(), error.got()), (Some("half"), Some("F8E4M3")));
    for nothing in [VarMap::new(), var_map([("count".to_string(), integers())])] {
        is_kind(
            &destructure(&nothing).unwrap_err(),
            ErrorKind::Model,
            &["no trainable"],
        );
    }
}

/// Copies: what happens to the model, the vector or the tensors later does not show in the others.
#[test]
fn nothing_is_shared() {
    let zero = |x: &Var| x.set(&x.zeros_like().unwrap()).unwrap();
    for model in [
        named([("a", plain(&[4]))]),
        named([("a", plain(&[4])), ("b", plain(&[2, 2]))]),
    ] {
        let (flat, structure) = destructure(&model).unwrap();
        let expected = values(&flat);
        model.values().for_each(zero);
        assert_eq!(values(&flat), expected);
        let flat = var(&flat);
        let tensors = structure.rebuild(&flat).unwrap();
        assert!(
            tensors
                .values()
                .all(|tensor| !tensor.is_variable() && tensor.is_contiguous())
        );
        zero(&flat);
        assert_eq!(tensors.values().flat_map(values).collect::<Vec<_>>(), expected);
    }
    // A vector that is the model's only variable.
    let x = var(&plain(&[4]));
    let (_, structure) = destructure(&x).unwrap();
    let before = values(&x);
    structure.assign(&x, &x).unwrap();
    assert_eq!(values(&x), before);
}

#[test]
fn a_tied_variable_is_there_once() {
    let model = language_model();
    let (flat, structure) = destructure(&model).unwrap();
    assert_eq!(flat.dims(), [15 + 5]);
    let gradients = flat.sqr().unwrap().sum_all().unwrap().backward().unwrap();
    let weight = model.head.weight();
    assert_eq!(
        bits(gradients.get(weight).unwrap()),
        bits(&(weight * 2.0).unwrap())
    );
    let tensors = structure.rebuild(&flat).unwrap();
    assert_eq!(
        tensors.keys().collect::<Vec<_>>(),
        ["embedding.weight", "head.bias"]
    );
    structure.assign(&(flat * 3.0).unwrap(), &model).unwrap();
    assert_eq!(bits(weight), bits(&(&tensors["embedding.weight"] * 3.0).unwrap()));
    assert_eq!(
        bits(model.head.bias().unwrap()),
        bits(&(&tensors["head.bias"] * 3.0).unwrap())
    );
}

/// Σ w·flat has the gradient w, cut into the variables' shapes and rounded to their dtypes.
#[test]
fn gradients_reach_the_variables() {
    let model = named([
        ("a", random(1, &[2, 3], DType::BF16, CPU)),
        ("b", plain(&[0, 2])),
        ("c", random(2, &[4], DType::F16, CPU)),
        ("d", scalar(3.0, DType::F32)),
    ]);
    let weights = random(9, &[11], DType::F32, CPU);
    let (flat, structure) = destructure(&model).unwrap();
    let gradients = flat.mul(&weights).unwrap().sum_all().unwrap().backward().unwrap();
    let expected = structure.rebuild(&weights).unwrap();
    for (path, x) in &model {
        let gradient = gradients.get(x).unwrap();
        assert_eq!(
            (gradient.dtype(), gradient.shape(), bits(gradient)),
            (x.dtype(), x.shape(), bits(&expected[path])),
            "{path}"
        );
    }
}

/// Gradients of a function of the rebuilt tensors come back at their places in the vector; unused parts have
/// zeros.
#[test]
fn gradients_reach_the_vector() {
    let shapes: [&[usize]; 6] = [&[2, 2], &[0], &[3], &[], &[1, 5], &[2, 0]];
    let dtypes = [
        DType::F32,
        DType::F32,
        DType::F16,
        DType::F64,
        DType::BF16,
        DType::F16,
    ];
    let model: Vec<Var> = (0..)
        .zip(shapes.iter().zip(dtypes))
        .map(|(i, (shape, dtype))| var(&random(i, shape, dtype, CPU)))
        .collect();
    let (start, structure) = destructure(&model).unwrap();
    let used = ["0", "1", "3", "4"];
    for flat in [var(&start), var(&(start.detach() + 0.1).unwrap())] {
        let tensors = structure.rebuild(&flat).unwrap();
        let square = |path: &str| tensors[path].to_dtype(DType::F64)?.sqr()?.sum_all();
        let total = used
            .into_iter()
            .map(|path| square(path).unwrap())
            .reduce(|a, b| (a + b).unwrap())
            .unwrap();
        let gradient = total.backward().unwrap().get(&flat).unwrap().clone();
        let expected = |(path, tensor): (&String, &Tensor)| {
            let factor = if used.contains(&path.as_str()) { 2.0 } else { 0.0 };
            values(tensor)
                .into_iter()
                .map(move |x| factor * x)
                .collect::<Vec<_>>()
        };
        assert_eq!(
            values(&gradient),
            tensors.iter().flat_map(expected).collect::<Vec<_>>()
        );
        assert_eq!((gradient.dtype(), gradient.dims()), (DType::F64, flat.dims()));
    }
    // From the variables through the vector and back to the variables.
    let (flat, structure) = destructure(&model).unwrap();
    let again = structure.rebuild(&flat).unwrap()["2"]
        .sum_all()
        .unwrap()
        .backward()
        .unwrap();
    assert_eq!(values(again.get(&model[2]).unwrap()), [1.0; 3]);
}

#[test]
fn odd_sizes_and_layouts() {
    let scalars = named([("a", scalar(1.5, DType::F32)), ("b", scalar(-2.0, DType::F32))]);
    let (flat, structure) = destructure(&scalars).unwrap();
    assert_eq!(values(&flat), [1.5, -2.0]);
    assert_eq!(structure.rebuild(&flat).unwrap()["b"].dims(), [0; 0]);

    for empty in [
        named([("a", plain(&[0, 3]))]),
        named([("a", plain(&[0])), ("b", plain(&[2, 0]))]),
    ] {
        let (flat, structure) = destructure(&empty).unwrap();
        assert_eq!((flat.dims(), structure.elements()), (&[0][..], 0));
        let tensors = structure.rebuild(&flat).unwrap();
        assert!(
            tensors
                .iter()
                .all(|(path, tensor)| tensor.shape() == empty[path].shape())
        );
        structure.assign(&flat, &empty).unwrap();
    }

    let model = named([("a", plain(&[2, 2])), ("b", plain(&[3]))]);
    let (_, structure) = destructure(&model).unwrap();
    let matrix = plain(&[7, 2]);
    let one = scalar(4.0, DType::F32);
    for flat in [
        matrix.narrow(1, 1, 1).unwrap().squeeze(1).unwrap(),
        one.broadcast_as(7).unwrap(),
    ] {
        assert!(!flat.is_contiguous());
        structure.assign(&flat, &model).unwrap();
        assert_eq!(
            model.values().flat_map(|x| values(x)).collect::<Vec<_>>(),
            values(&flat)
        );
    }
}

#[test]
fn special_values_go_round() {
    let halves: [f16; 7] = [
        f16::NAN,
        f16::INFINITY,
        f16::NEG_ZERO,
        f16::MIN_POSITIVE_SUBNORMAL,
        f16::MAX,
        f16::EPSILON,
        -f16::NAN,
    ];
    let brains: [bf16; 7] = [
        bf16::NAN,
        bf16::NEG_INFINITY,
        bf16::NEG_ZERO,
        bf16::MIN_POSITIVE_SUBNORMAL,
        bf16::MAX,
        bf16::MIN,
        -bf16::NAN,
    ];
    let singles = [
        f32::NAN,
        f32::INFINITY,
        -0.0,
        f32::from_bits(1),
        f32::MAX,
        f32::EPSILON,
        f32::from_bits(0x7fc0_1234),
    ];
    let of_16 = || {
        [
            ("f", Tensor::new(&halves, CPU).unwrap()),
            ("b", Tensor::new(&brains, CPU).unwrap()),
        ]
    };
    let [f, b] = of_16();
    let s = ("s", Tensor::new(&singles, CPU).unwrap());
    for model in [
        named(of_16()),
        named([f.clone(), b.clone(), s.clone()]),
        named([f, b, s, ("d", of(&[f64::NAN, -0.0], DType::F64))]),
    ] {
        let before: Vec<_> = model.values().map(|x| exact(x)).collect();
        let (flat, structure) = destructure(&model).unwrap();
        assert_eq!(
            structure
                .rebuild(&flat)
                .unwrap()
                .values()
                .map(exact)
                .collect::<Vec<_>>(),
            before
        );
        model
            .values()
            .for_each(|x| x.set(&x.ones_like().unwrap()).unwrap());
        structure.assign(&flat, &model).unwrap();
        assert_eq!(model.values().map(|x| exact(x)).collect::<Vec<_>>(), before);
    }
}

/// The error of both ways back; the model keeps every bit.
fn refused(structure: &Structure, flat: &Tensor, model: &Vars) -> Error {
    let before: Vec<_> = model.values().map(|x| bits(x)).collect();
    let error = structure.assign(flat, model).expect_err("an error");
    assert_eq!(model.values().map(|x| bits(x)).collect::<Vec<_>>(), before);
    error
}

#[test]
fn vectors_that_do_not_fit() {
    let model = named([("a", plain(&[2, 2])), ("b", random(3, &[3], DType::BF16, CPU))]);
    let (flat, structure) = destructure(&model).unwrap();
    let shapes: [&[usize]; 5] = [&[6], &[8], &[0], &[7, 1], &[]];
    for shape in shapes {
        let wrong = Tensor::zeros(shape, DType::F32, CPU).unwrap();
        for error in [
            refused(&structure, &wrong, &model),
            structure.rebuild(&wrong).unwrap_err(),
        ] {
            assert_eq!(error.kind(), ErrorKind::Tensor, "{error}");
            assert_eq!(
                (error.got(), error.expected()),
                (Some(&*format!("{shape:?}")), Some("[7]"))
            );
            assert!(
                error
                    .to_string()
                    .starts_with(&format!("the flat vector has shape {shape:?}, expected [7]; ")),
                "{error}"
            );
        }
    }
    for dtype in [DType::F64, DType::BF16, DType::U32] {
        let wrong = flat.to_dtype(dtype).unwrap();
        for error in [
            refused(&structure, &wrong, &model),
            structure.rebuild(&wrong).unwrap_err(),
        ] {
            is_kind(&error, ErrorKind::Tensor, &["the flat vector"]);
            assert_eq!(
                (error.got(), error.expected()),
                (Some(&*format!("{dtype:?}")), Some("F32"))
            );
        }
    }
}

#[test]
fn models_that_are_not_the_structures() {
    let model = || named([("a", plain(&[2, 2])), ("b", plain(&[4]))]);
    let (flat, structure) = destructure(&model()).unwrap();
    let flat = (flat + 1.0).unwrap();
    let cases: [(&str, &[&str], &[&str], Vars); 4] = [
        ("b", &["b"], &[], named([("a", plain(&[2, 2]))])),
        (
            "c",
            &[],
            &["c"],
            named([("a", plain(&[2, 2])), ("b", plain(&[4])), ("c", plain(&[1]))]),
        ),
        (
            "a",
            &["a"],
            &[],
            named([("b", plain(&[4])), ("c", plain(&[2, 2]))]),
        ),
        ("", &[], &[""], named([("", plain(&[4])), ("a", plain(&[2, 2]))])),
    ];
    for (path, expected, got, other) in cases {
        let error = refused(&structure, &flat, &other).to_string();
        let text = format!("parameter {path:?}: its paths in the model are {got:?}, expected {expected:?}; ");
        assert!(error.starts_with(&text), "{error}");
    }
    let cases = [
        (
            "a",
            ErrorKind::Tensor,
            "[4]",
            "[2, 2]",
            named([("a", plain(&[4])), ("b", plain(&[2, 2]))]),
        ),
        (
            "b",
            ErrorKind::Tensor,
            "F16",
            "F32",
            named([("a", plain(&[2, 2])), ("b", random(1, &[4], DType::F16, CPU))]),
        ),
    ];
    for (path, problem, got, expected, other) in cases {
        let error = refused(&structure, &flat, &other);
        assert_eq!((error.kind(), error.path()), (problem, Some(path)), "{error}");
        assert_eq!(
            (error.got(), error.expected()),
            (Some(got), Some(expected)),
            "{error}"
        );
    }
    let tied = language_model();
    let (flat_of_tied, structure_of_tied) = destructure(&tied).unwrap();
    let untied = LanguageModel {
        embedding: Embedding::new(trained(&[5, 3]), 3),
        ..language_model()
    };
    let error = structure_of_tied
        .assign(&flat_of_tied, &untied)
        .unwrap_err()
        .to_string();
    let text =
        r#"its paths in the model are ["embedding.weight"], expected ["embedding.weight", "head.weight"]; "#;
    assert!(error.contains(text), "{error}");

    // Another model that is built alike is welcome.
    let other = model();
    structure.assign(&flat, &other).unwrap();
    assert_eq!(
        other.values().flat_map(|x| values(x)).collect::<Vec<_>>(),
        values(&flat)
    );
}

/// Runs only where a second device is.
#[test]
fn parameters_on_several_devices() {
    let [cpu, other] = &devices()[..] else { return };
    let model = vec![var(&plain(&[2])), var(&plain(&[3]).to_device(other).unwrap())];
    let (flat, structure) = destructure(&model).unwrap();
    assert!(flat.device().same_device(cpu));
    let gradients = flat.sqr().unwrap().sum_all().unwrap().backward().unwrap();
    let tensors = structure.rebuild(&flat.to_device(other).unwrap()).unwrap();
    for ((x, tensor), gradient) in model
        .iter()
        .zip(tensors.values())
        .zip(model.iter().map(|x| gradients.get(x).unwrap()))
    {
        assert!(tensor.device().same_device(x.device()) && gradient.device().same_device(x.device()));
        assert_eq!(
            (bits(tensor), bits(gradient)),
            (bits(x), bits(&(x.as_tensor() * 2.0).unwrap()))
        );
    }
    structure
        .assign(&(flat.to_device(other).unwrap() * 3.0).unwrap(), &model)
        .unwrap();
    assert!(
        tensors
            .values()
            .zip(&model)
            .all(|(old, x)| bits(x) == bits(&(old * 3.0).unwrap()))
    );
}

fn parameters() -> impl Strategy<Value = Vec<(Vec<usize>, DType)>> {
    let shape = prop::collection::vec(0..5usize, 0..4);
    prop::collection::vec((shape, prop::sample::select(DTYPES.to_vec())), 1..12)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(128))]

    #[test]
    fn there_and_back_again(parameters in parameters()) {
        let model: Vec<Var> = (0..).zip(&parameters).map(|(seed, (shape, dtype))| var(&random(seed, shape, *dtype, CPU))).collect();
        let by_path = trainables(&model).unwrap();
        let (flat, structure) = destructure(&model).unwrap();
        prop_assert_eq!(values(&flat), by_path.values().flat_map(values).collect::<Vec<_>>());
        let tensors = structure.rebuild(&flat).unwrap();
        prop_assert!(tensors.keys().eq(by_path.keys()));
        for (tensor, x) in tensors.values().zip(by_path.values()) {
            prop_assert_eq!((tensor.dtype(), tensor.shape(), exact(tensor)), (x.dtype(), x.shape(), exact(x)));
        }
        // Small integers are exact in every dtype.
        let moved = random(7, &[structure.elements()], structure.dtype().into(), CPU).affine(8.0, 0.0).unwrap().round().unwrap();
        structure.assign(&moved, &model).unwrap();
        prop_assert_eq!(by_path.values().flat_map(values).collect::<Vec<_>>(), values(&moved));
        prop_assert_eq!(bits(&destructure(&model).unwrap().0), bits(&moved));

        // One backward through both ways: the gradient of the sum of squares is 2x everywhere.
        let (flat, structure) = destructure(&model).unwrap();
        let square = |x: &Tensor| x.to_dtype(DType::F64).and_then(|x| x.sqr()?.sum_all()).unwrap();
        let total = structure.rebuild(&flat).unwrap().values().map(square).reduce(|a, b| (a + b).unwrap()).unwrap();
        let gradients = total.backward().unwrap();
        for x in &model {
            prop_assert_eq!(values(gradients.get(x).unwrap()), values(x).iter().map(|x| 2.0 * x).collect::<Vec<_>>());
        }
    }
}

/// Without its state a model that is assigned to is another; with it, both go on together.
#[test]
fn assigning_to_a_model_with_a_state() {
    let rules: [Optimiser; 4] = [
        Optimiser::new(MixedPrecision::new(DType::F32, Adam::new(0.1))),
        Optimiser::new(SplitMaster::new(Adam::new(0.1))),
        Optimiser::new(MixedPrecision::new(
            DType::F32,
            OptimiserChain::new((Adam::new(0.1), Lookahead::new(2))),
        )),
        Optimiser::new(ScheduleFree::new(0.1)),
    ];
    for rule in rules {
        let wide = named([
            ("a", random(1, &[40], DType::F32, CPU)),
            ("b", random(2, &[3], DType::F32, CPU)),
        ]);
        let narrow: Vars = wide
            .iter()
            .map(|(path, x)| (path.clone(), var(&x.to_dtype(DType::BF16).unwrap())))
            .collect();
        let gradients = || {
            wide.keys()
                .map(|path| (path.clone(), random(3, narrow[path].dims(), DType::BF16, CPU)))
                .collect::<BTreeMap<_, _>>()
        };
        // One more parameter makes the vector f32.
        let model: Vars = narrow
            .clone()
            .into_iter()
            .chain([("c".to_string(), var(&scalar(1.0, DType::F32)))])
            .collect();
        let mut state = setup(rule.clone(), &model).unwrap();
        update(&mut state, &model, &gradients()).unwrap();
        let (_, of_model) = destructure(&model).unwrap();
        // Of the masters, so that nothing is rounded that they can hold.
        let masters: Vars = state
            .masters(&model)
            .unwrap()
            .into_iter()
            .map(|(path, x)| (path, var(&x)))
            .collect();
        let (flat, structure) = destructure(&masters).unwrap();
        let moved = (flat * 1.0371).unwrap();
        let lengths = [("a", 0, 40), ("b", 40, 3)];
        let expected = lengths.map(|(path, start, length)| (path, moved.narrow(0, start, length).unwrap()));

        if rule.name().starts_with("MixedPrecision") {
            of_model.assign(&moved, &model).unwrap();
            let error = update(&mut state, &model, &gradients()).unwrap_err();
            is_kind(
                &error,
                ErrorKind::Changed,
                &["parameter \"a\"", "its master", "refresh_masters"],
            );
        }
        state.rename("a", "renamed").unwrap();
        state
            .set_masters(&model, &structure.rebuild(&moved).unwrap())
            .unwrap();
        state.rename("renamed", "a").unwrap();
        let masters = state.masters(&model).unwrap();
        let digits = if rule.name() == "ScheduleFree" { 8 } else { 24 };
        for (path, expected) in expected {
            let near = |(got, exact): (f64, f64)| (got - exact).abs() <= exact.abs() * 2f64.powi(-digits);
            assert!(
                values(&masters[path])
                    .into_iter()
                    .zip(values(&expected))
                    .all(near),
                "{}, {path}",
                rule.name()
            );
        }
        state.check_masters(&model).unwrap();
        update(&mut state, &model, &gradients()).unwrap();

        let before = snapshot(&model, &state);
        let infinite = (&moved * f64::INFINITY).unwrap();
        let error = state
            .set_masters(&model, &structure.rebuild(&infinite).unwrap())
            .unwrap_err();
        is_kind(&error, ErrorKind::NotFinite, &["inf at element 0"]);
        let error = state
            .set_masters(&narrow, &structure.rebuild(&moved).unwrap())
            .unwrap_err();
        is_kind(
            &error,
            ErrorKind::Model,
            &["\"c\"", "the state has this parameter, but the model does not"],
        );
        assert_same(&[snapshot(&model, &state)], &[before], rule.name());
    }
}
