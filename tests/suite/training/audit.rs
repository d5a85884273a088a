//! What `audit` says of a model and a loss.

#![allow(
    clippy::single_range_in_vec_init,
    reason = "ranges of rows are what is compared"
)]

use std::ops::Range;

use candle_core::{D, DType, Device, Module, Result, Tensor, Var};
use candle_nn::rotary_emb::{rope, rope_slow};
use candle_nn::{
    BatchNormConfig, Embedding, Linear, ModuleT, VarBuilder, VarMap, batch_norm, layer_norm, linear, ops,
};
use optimisers::{AdamW, Audit, ErrorKind, Model, Reach, audit, setup, update};

use crate::training::cuts::listed;
use support::common::{Vars, is_kind, model, random, values, var};

const CPU: &Device = &Device::Cpu;

fn ones(length: usize) -> Tensor {
    Tensor::ones(length, DType::F32, CPU).expect("ones")
}

fn audited(model: &(impl Model + ?Sized), loss: Result<Tensor>) -> Audit {
    audit(model, &loss.expect("a loss")).expect("an audit")
}

fn reaches(audit: &Audit) -> Vec<Reach> {
    audit.variables().iter().map(|variable| variable.reach).collect()
}

#[test]
fn every_kind_of_gradient_is_told() {
    let gradient = |norm| Reach::Gradient { norm };
    let not_finite = [f64::NAN, 1.0, f64::INFINITY, f64::NEG_INFINITY];
    // Squares of some of these are 0 and infinite in f64.
    let cases: [(&[f64], Reach); 6] = [
        (&[3.0, 0.0, -4.0, 0.0], gradient(5.0)),
        (&[3e-200, 4e-200], gradient(5e-200)),
        (&[3e200, 4e200], gradient(5e200)),
        (&[0.0; 4], Reach::Zero),
        (&not_finite, Reach::NonFinite { count: 3 }),
        (&[], gradient(0.0)),
    ];
    let tensors = cases.map(|(weights, _)| Tensor::ones(weights.len(), DType::F64, CPU).expect("ones"));
    let model = model(&[&tensors[..], &[ones(2)]].concat());
    let terms = cases
        .iter()
        .zip(model.values())
        .map(|((weights, _), x)| x.mul(&Tensor::new(*weights, CPU)?));
    let loss = terms
        .reduce(|a, b| Tensor::cat(&[a?, b?], 0))
        .expect("a term")
        .and_then(|x| x.sum_all());
    let loss = loss.expect("a loss");
    let found = audit(&model, &loss).expect("an audit");
    for (i, (reach, (_, expected))) in reaches(&found).into_iter().zip(cases).enumerate() {
        match (reach, expected) {
            (Reach::Gradient { norm }, Reach::Gradient { norm: expected }) => {
                assert!((norm - expected).abs() <= 1e-12 * expected, "{i}: {norm}")
            }
            _ => assert_eq!(reach, expected, "{i}"),
        }
    }
    assert_eq!(
        (reaches(&found)[6], found.unreached().collect::<Vec<_>>()),
        (Reach::Unreached, vec!["6"])
    );
    assert_eq!(
        (&*found.variables()[0].shape, found.variables()[6].dtype),
        (&[4][..], optimisers::DType::F32)
    );
    // The parameters stay, and the graph is still whole.
    assert_eq!(values(&model["1"]), [1.0; 2]);
    assert!(loss.backward().expect("gradients").get(&model["0"]).is_some());
}

#[test]
fn the_table_has_a_line_for_each_variable_and_names_what_cuts() {
    let variables = VarMap::new();
    let builder = VarBuilder::from_varmap(&variables, DType::BF16, CPU);
    let first = linear(4, 8, builder.pp("first")).expect("a layer");
    let norm = layer_norm(8, 1e-5, builder.pp("norm")).expect("a norm");
    let last = linear(8, 1, builder.pp("last")).expect("a layer");
    let hidden = first
        .forward(&random(1, &[2, 4], DType::BF16, CPU))
        .expect("an output");
    let loss = || norm.forward(&hidden).and_then(|x| last.forward(&x)?.sum_all());
    let text = audited(&variables, loss()).to_string();
    let lines: Vec<&str> = text.lines().collect();
    let words = |line: &str| line.split_whitespace().collect::<Vec<_>>().join(" ");
    let table = [
        "variable shape dtype gradient",
        "first.bias [8] BF16 none",
        "first.weight [8, 4] BF16 none",
        "last.bias [1] BF16 norm 2.000e0",
    ];
    assert_eq!([0, 1, 2, 3].map(|i| words(lines[i])), table);
    assert_eq!(lines[1].find("none"), lines[6].find("none"), "columns:\n{text}");
    let remark =
        "The loss does not reach 4 of 6 variables. If it should depend on them, something cuts the graph.";
    assert_eq!((lines[7], lines.len()), (remark, 9));
    names_cuts(lines[8], &NORMS);

    let whole = audited(&variables, last.forward(&hidden).and_then(|x| x.sum_all()));
    assert_eq!(
        whole.unreached().collect::<Vec<_>>(),
        ["norm.bias", "norm.weight"]
    );
    let none = audited(&variables, ones(1).sum_all());
    assert!(
        none.to_string()
            .contains("The loss reaches none of the 6 variables. Pass the model"),
        "{none}"
    );
}

/// candle's `VarMap` makes zeros of what has no initialiser, and `require_all` is content with the gradients.
#[test]
fn variables_with_a_gradient_of_exactly_zero_are_told() {
    let variables = VarMap::new();
    let builder = VarBuilder::from_varmap(&variables, DType::F32, CPU);
    let layer = linear(4, 8, builder.pp("layer")).expect("a layer");
    let output = layer
        .forward(&random(1, &[2, 4], DType::F32, CPU))
        .expect("an output");
    let loss = |scale: &Tensor| output.broadcast_mul(scale)?.sum_all();
    let text = audited(
        &variables,
        loss(&builder.get(8, "norm.scale").expect("a variable")),
    )
    .to_string();
    let last = text.lines().last().expect("a line");
    let told = "2 of 3 variables have a gradient of exactly zero: layer.bias, layer.weight. ";
    assert!(last.starts_with(told), "{text}");
    assert!(
        last.contains("LoRA") && last.contains("`VarBuilder::get`") && !text.contains("cuts"),
        "{text}"
    );
    assert!(
        !audited(&layer, loss(&ones(8)))
            .to_string()
            .contains("exactly zero")
    );
}

/// Its statistics are variables of the map, and nothing that a loss is differentiated by.
#[test]
fn of_batch_norms_statistics_no_operation_is_accused() {
    let variables = VarMap::new();
    let builder = VarBuilder::from_varmap(&variables, DType::F32, CPU);
    let (first, norm) = (
        linear(4, 4, builder.pp("a")),
        batch_norm(4, BatchNormConfig::default(), builder.pp("norm")),
    );
    let (first, norm) = (first.expect("a layer"), norm.expect("a norm"));
    let input = random(1, &[5, 4], DType::F32, CPU);
    let loss = |x: &Tensor| {
        norm.forward_t(x, true)
            .and_then(|x| x.powf(3.0)?.sum_all())
            .expect("a loss")
    };
    let told = |loss: Tensor| {
        let text = audit(&variables, &loss).expect("an audit").to_string();
        let mut state = setup(AdamW::new(0.1), &variables).expect("a state");
        let gradients = loss.backward().expect("gradients");
        let warning = update(&mut state, &variables, &gradients)
            .expect("an update")
            .warnings
            .remove(0)
            .to_string();
        state.require_all();
        let error = update(&mut state, &variables, &gradients)
            .expect_err("a missing gradient")
            .to_string();
        [text, warning, error]
    };
    for text in told(loss(&first.forward(&input).expect("an output"))) {
        assert!(
            text.contains("BatchNorm")
                && text.contains("with `None` for them in `setup_with`")
                && !text.contains("cut"),
            "{text}"
        );
    }
    // With another one missing, that one is named first.
    const NAMES: &str = "a.bias, a.weight, norm.running_mean, norm.running_var";
    // The audit knows that the norm has a gradient.
    let likely = [&[][..], &[QUERIES, NORMS].concat(), &[QUERIES, NORMS].concat()];
    for ((text, names), likely) in told(loss(&input)).iter().zip(["", NAMES, NAMES]).zip(likely) {
        assert!(!text.contains("BatchNorm") && text.contains(names), "{text}");
        names_cuts(text, likely);
    }
}

/// An operation, and what to use for it.
type Remedy = (&'static str, &'static str);

/// What cuts off queries and keys, and what a norm.
const QUERIES: [Remedy; 2] = [
    ("rotary_emb::rope", "rotary_emb::rope_slow"),
    ("ops::softmax_last_dim", "ops::softmax"),
];
const NORMS: [Remedy; 2] = [
    ("LayerNorm::forward", "ops::layer_norm_slow"),
    ("RmsNorm::forward", "RmsNorm::forward_diff"),
];

/// Asserts that a text names these of the list and no others, and the page that has all.
#[track_caller]
fn names_cuts(text: &str, likely: &[Remedy]) {
    for (operation, instead) in likely {
        assert!(
            text.contains(&format!("`{operation}` (use `{instead}`)")),
            "{text}"
        );
        assert!(
            listed("What cuts")
                .iter()
                .any(|(cuts, replacement)| cuts.contains(operation) && replacement.contains(instead)),
            "{operation}"
        );
    }
    assert_eq!(text.matches("(use ").count(), likely.len(), "{text}");
    assert!(
        text.contains("`optimisers::guide::cuts`") && text.len() < 1000,
        "{text}"
    );
}

/// The text of a message that knows nothing of the cut.
#[track_caller]
pub(crate) fn names_what_cuts(text: &str) {
    names_cuts(text, &[QUERIES, NORMS].concat());
}

/// What is likely follows from the variables without a gradient: a norm, or two of three or four matrices
/// side by side. If all norms have a gradient, none of them cuts.
#[test]
fn what_is_likely_to_cut_is_named() {
    const BOTH: [Remedy; 4] = [QUERIES[0], QUERIES[1], NORMS[0], NORMS[1]];
    // The variables that the loss does not reach, those that it reaches, and the operations named.
    let cases: [(&str, &str, &[Remedy]); 10] = [
        (
            "self.q.weight self.k.weight self.k.bias",
            "self.v.weight self.o.weight norm.weight",
            &QUERIES,
        ),
        ("0.q 0.k", "0.v 0.norm.weight", &QUERIES),
        ("wq.weight wk.weight", "wv.weight", &QUERIES),
        ("q.weight k.weight q_norm.weight", "v.weight norm.weight", &BOTH),
        ("0.first.weight norm.weight norm.bias", "0.last.weight", &NORMS),
        ("norm.gamma", "x.weight x.bias", &NORMS),
        ("0.weight 1.weight", "2.weight norm.weight", &[]),
        ("q.weight k.weight v.weight", "o.weight norm.weight", &[]),
        ("first.weight first.bias norm.running_mean", "norm.weight", &[]),
        ("first.weight first.bias", "last.weight", &BOTH),
    ];
    for (cut, reached, likely) in cases {
        let is_vector =
            |path: &str| path.contains("norm") || path.ends_with("bias") || path.ends_with("gamma");
        let model: Vars = [cut, reached]
            .iter()
            .flat_map(|paths| paths.split(' '))
            .map(|path| {
                (
                    path.to_string(),
                    var(&random(
                        1,
                        &[4, 4][usize::from(is_vector(path))..],
                        DType::F32,
                        CPU,
                    )),
                )
            })
            .collect();
        let terms = reached.split(' ').map(|path| model[path].sqr()?.sum_all());
        let text = audited(&model, terms.reduce(|a, b| a? + b?).expect("a term")).to_string();
        names_cuts(&text, likely);
    }
}

struct Shown {
    first: Var,
    again: Var,
    second: Var,
}
optimisers::model!(Shown { first, again, .. });

/// What a model leaves out has no path: the audit has its shape and dtype, and says what to do.
#[test]
fn a_variable_that_the_model_does_not_show_is_told_with_what_to_do() {
    let first = var(&ones(3));
    let model = Shown {
        again: first.clone(),
        first,
        second: var(&random(1, &[2, 3], DType::F32, CPU)),
    };
    let loss = || model.first.broadcast_mul(&model.second).and_then(|x| x.sum_all());
    let found = audited(&model, loss());
    assert_eq!(found.outside(), [(vec![2, 3], optimisers::DType::F32)]);
    assert_eq!(found.variables()[0].paths, ["again", "first"]);
    let text = found.to_string();
    for words in [
        "again = first",
        "does not show: [2, 3] of F32",
        "name its field in the `model!` of the struct",
    ] {
        assert!(text.contains(words), "no {words:?} in {text}");
    }
    let whole = audited(&vec![model.first.clone(), model.second.clone()], loss());
    assert!(
        whole.outside().is_empty() && !whole.to_string().contains("not show"),
        "{whole}"
    );
}

#[test]
fn what_cannot_be_audited_is_an_error() {
    let x = Var::ones(2, DType::F32, CPU).expect("a variable");
    let error = audit(&Vec::<Var>::new(), &x.sum_all().expect("a loss")).expect_err("no variables");
    is_kind(
        &error,
        ErrorKind::Model,
        &["no trainable floating-point variable"],
    );
    let kernel = Tensor::ones((1, 1, 2), DType::F32, CPU).expect("a kernel");
    let loss = x
        .reshape((1, 1, 2))
        .and_then(|x| x.conv_transpose1d(&kernel, 0, 0, 1, 1, 1)?.sum_all());
    let error = audit(&x, &loss.expect("a loss")).expect_err("no backward pass");
    assert!(error.to_string().contains("conv-transpose1d"), "{error}");
}

const WIDTH: usize = 8;

type Rope = fn(&Tensor, &Tensor, &Tensor) -> Result<Tensor>;
type Softmax = fn(&Tensor) -> Result<Tensor>;

/// Attention whose queries, keys and values come from one matrix, of this dtype.
fn attention(qkv: &Var, dtype: DType, rope: Rope, softmax: Softmax) -> Result<Tensor> {
    let x = random(3, &[1, 1, 5, WIDTH], dtype, CPU);
    let x = Linear::new(qkv.to_dtype(dtype)?, None).forward(&x)?;
    let [q, k, v] = [0, WIDTH, 2 * WIDTH].map(|start| x.narrow(3, start, WIDTH)?.contiguous());
    let [cos, sin] = [4, 5].map(|seed| random(seed, &[5, WIDTH / 2], dtype, CPU));
    let [q, k] = [q?, k?].map(|x| rope(&x, &cos, &sin));
    softmax(&q?.matmul(&k?.t()?)?)?
        .matmul(&v?)?
        .to_dtype(DType::F32)?
        .sqr()?
        .mean_all()
}

/// The matrix that is multiplied with is a copy of the variable where it is cast.
#[test]
fn queries_and_keys_behind_a_cut_are_named() {
    let model: Vars = [(
        "qkv".to_string(),
        var(&random(1, &[3 * WIDTH, WIDTH], DType::F32, CPU)),
    )]
    .into();
    let softmax: Softmax = |x| ops::softmax(x, D::Minus1);
    for dtype in [DType::F32, DType::BF16] {
        for (rope, softmax) in [(rope as Rope, softmax), (rope_slow, ops::softmax_last_dim)] {
            let cut = audited(&model, attention(&model["qkv"], dtype, rope, softmax));
            assert!(
                matches!(cut.variables()[0].reach, Reach::Gradient { .. }),
                "{cut}"
            );
            assert_eq!(cut.variables()[0].cut_rows, [0..16]);
            names_cuts(cut.to_string().lines().last().expect("a line"), &QUERIES);
        }
        let whole = audited(&model, attention(&model["qkv"], dtype, rope_slow, softmax));
        assert_eq!(
            (
                whole.variables()[0].cut_rows.len(),
                whole.to_string().lines().count()
            ),
            (0, 2),
            "{whole}"
        );
    }
}

/// Parts of each head or of all heads. A row or two at an end are no part, and rows that a ReLU switches off
/// lie anywhere.
#[test]
fn rows_without_a_gradient_are_a_cut_if_they_are_whole_parts() {
    // How many rows there are, those without a gradient, and what is said of them.
    let cases: [(usize, &[Range<usize>], &str); 9] = [
        (
            24,
            &[0..16],
            "Rows 0..16 of the 24 rows of \"layer\" have no gradient at all.",
        ),
        (
            16,
            &[0..12],
            "Rows 0..12 of the 16 rows of \"layer\" have no gradient at all.",
        ),
        (
            24,
            &[0..8, 12..20],
            "Rows 0..8 (and so on, 2 times) of the 24 rows of \"layer\" have no",
        ),
        (24, &[0..4], ""),
        (12, &[0..3], ""),
        (12, &[1..5], ""),
        (12, &[0..4, 9..10], ""),
        (12, &[3..4, 7..8, 11..12], ""),
        (12, &[0..1], ""),
    ];
    for (rows, dead, remark) in cases {
        let gates: Vec<f32> = (0..rows)
            .map(|row| {
                if dead.iter().any(|dead| dead.contains(&row)) {
                    0.0
                } else {
                    1.0
                }
            })
            .collect();
        let model: Vars = [(
            "layer".to_string(),
            var(&random(5, &[rows, WIDTH], DType::F32, CPU)),
        )]
        .into();
        let layer = Linear::new(model["layer"].as_tensor().clone(), None);
        let loss = layer.forward(&random(4, &[3, WIDTH], DType::F32, CPU));
        let loss = loss.and_then(|x| x.broadcast_mul(&Tensor::new(gates, CPU)?)?.sqr()?.mean_all());
        let found = audited(&model, loss);
        let expected = if remark.is_empty() { &[] } else { dead };
        assert_eq!(found.variables()[0].cut_rows, expected, "{found}");
        assert!(found.to_string().contains(remark), "{remark:?} in {found}");
    }
}

/// Two positions of four, and one half of the tokens: rows without a gradient by right. The matrices of other
/// layers have the same shape.
#[test]
fn embeddings_are_not_accused() {
    let weights = [1, 2, 3].map(|seed| random(seed, &[16, WIDTH], DType::F32, CPU));
    let model = model(&weights);
    let [tokens, positions] = ["0", "1"].map(|path| Embedding::new(model[path].as_tensor().clone(), WIDTH));
    let same_shape = Linear::new(model["2"].as_tensor().clone(), None);
    let loss = tokens
        .forward(&Tensor::arange(8u32, 16, CPU).expect("tokens"))
        .and_then(|x| {
            let x = (x + positions.forward(&Tensor::arange(0u32, 8, CPU)?)?)?;
            same_shape.forward(&x)?.sqr()?.mean_all()
        });
    let found = audited(&model, loss);
    assert!(
        found
            .variables()
            .iter()
            .all(|variable| variable.cut_rows.is_empty()),
        "{found}"
    );
    assert_eq!(found.unreached().count(), 0, "{found}");
}
