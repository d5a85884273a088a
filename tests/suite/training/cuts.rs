//! The page's list of candle's operations that cut the graph: each entry cuts, what is before it is named by
//! everything that names parameters without a gradient, and what the page recommends trains it.

use candle_core::quantized::{GgmlDType, QMatMul, QTensor};
use candle_core::{D, DType, Device, Module, Result, Tensor};
use candle_nn::attention::{AttnMask, flash_attn, flash_attn_varlen_cpu, flash_attn_varlen_unfused};
use candle_nn::kv_cache::{ConcatKvCache, KvCache, RotatingKvCache};
use candle_nn::ops::{layer_norm, layer_norm_slow, rms_norm, rms_norm_slow, softmax, softmax_last_dim};
use candle_nn::rotary_emb::{rope, rope_i, rope_i_slow, rope_slow, rope_thd};
use candle_nn::{Conv2dConfig, LayerNorm, RmsNorm, VarBuilder, VarMap, conv2d};
use optimisers::{Adam, ErrorKind, InDtype, audit, setup, update};

use crate::training::audit::names_what_cuts;
use crate::whole::readme::table;
use support::common::{Vars, is_kind, logged, random, values, var};

const CPU: &Device = &Device::Cpu;

/// Batches, heads, positions and the width of a head.
const SHAPE: [usize; 4] = [1, 2, 3, 32];
const LENGTH: usize = SHAPE[2];
const WIDTH: usize = SHAPE[3];

type Function = fn(&Tensor) -> Result<Tensor>;

fn constant(seed: u64, shape: &[usize]) -> Tensor {
    random(seed, shape, DType::F32, CPU)
}

fn weight() -> Tensor {
    constant(1, &[WIDTH])
}

fn bias() -> Tensor {
    constant(2, &[WIDTH])
}

fn turned(x: &Tensor, rope: fn(&Tensor, &Tensor, &Tensor) -> Result<Tensor>) -> Result<Tensor> {
    let angles = constant(3, &[LENGTH, WIDTH / 2]);
    rope(x, &angles.cos()?, &angles.sin()?)
}

fn positions_first(x: &Tensor) -> Result<Tensor> {
    x.transpose(1, 2)?.contiguous()
}

const SCALE: f32 = 0.2;

/// Attention of x to itself; `v` may be another.
fn by_hand(x: &Tensor, v: &Tensor) -> Result<Tensor> {
    softmax(&(x.matmul(&x.t()?)? * f64::from(SCALE))?, D::Minus1)?.matmul(v)
}

/// Positions, heads and numbers, without batches.
fn rows(x: &Tensor) -> Result<Tensor> {
    x.squeeze(0)?.transpose(0, 1)?.contiguous()
}

fn heads(rows: &Tensor) -> Result<Tensor> {
    rows.transpose(0, 1)?.unsqueeze(0)
}

fn lengths() -> Tensor {
    Tensor::new(&[LENGTH as u32], CPU).expect("lengths")
}

fn values_of_others() -> Tensor {
    constant(4, &SHAPE)
}

fn sum((keys, values): (Tensor, Tensor)) -> Result<Tensor> {
    keys + values
}

fn quantised() -> Result<QTensor> {
    QTensor::quantize(&constant(5, &[8, WIDTH]), GgmlDType::Q8_0)
}

const LAYER_NORM: &str = "LayerNorm::forward, ops::layer_norm";
const RMS_NORM: &str = "RmsNorm::forward, ops::rms_norm";
const ATTENTION: &str = "attention::flash_attn, flash_attn_varlen_*, ops::sdpa";
const CACHE: &str = "kv_cache::*::append";

/// Entries of the list, a function that cuts, and one that computes the same. The numbers are those of
/// candle's issues.
const PAIRS: [(&str, Function, Function); 16] = [
    // 2977, 3011, 3752.
    (
        LAYER_NORM,
        |x| LayerNorm::new(weight(), bias(), 1e-5).forward(x),
        |x| layer_norm_slow(x, &weight(), &bias(), 1e-5),
    ),
    (
        LAYER_NORM,
        |x| layer_norm(x, &weight(), &bias(), 1e-5),
        |x| layer_norm_slow(x, &weight(), &bias(), 1e-5),
    ),
    (
        LAYER_NORM,
        |x| layer_norm(x, &weight(), &bias().zeros_like()?, 1e-5),
        |x| LayerNorm::new_no_bias(weight(), 1e-5).forward(x),
    ),
    // 2168.
    (RMS_NORM, |x| RmsNorm::new(weight(), 1e-5).forward(x), |x| RmsNorm::new(weight(), 1e-5).forward_diff(x)),
    (RMS_NORM, |x| rms_norm(x, &weight(), 1e-5), |x| rms_norm_slow(x, &weight(), 1e-5)),
    // 3569.
    ("ops::softmax_last_dim", softmax_last_dim, |x| softmax(x, D::Minus1)),
    // 3568.
    ("rotary_emb::rope", |x| turned(x, rope), |x| turned(x, rope_slow)),
    ("rotary_emb::rope_i", |x| turned(x, rope_i), |x| turned(x, rope_i_slow)),
    (
        "rotary_emb::rope_thd",
        |x| turned(&positions_first(x)?, rope_thd),
        |x| turned(x, rope_slow)?.transpose(1, 2),
    ),
    (
        ATTENTION,
        |x| {
            let x = positions_first(x)?;
            flash_attn::<f32>(&x, &x, &x, SCALE, AttnMask::None, None, None)
        },
        |x| by_hand(x, x),
    ),
    (
        ATTENTION,
        |x| {
            let (x, n, m) = (rows(x)?, lengths(), LENGTH);
            heads(&flash_attn_varlen_cpu(&x, &x, &x, None, &n, &n, m, m, SCALE, false, None, None)?)
        },
        |x| by_hand(x, x),
    ),
    (
        ATTENTION,
        |x| {
            let (x, v, n, m) = (rows(x)?, rows(&values_of_others())?, lengths(), LENGTH);
            heads(&flash_attn_varlen_unfused(&x, &x, &v, None, &n, &n, m, m, SCALE, false, None, None)?)
        },
        |x| by_hand(x, &values_of_others()),
    ),
    (CACHE, |x| sum(KvCache::new(2, 8).append(x, x)?), |x| x + x),
    (CACHE, |x| sum(ConcatKvCache::new(2).append(x, x)?), |x| x + x),
    (CACHE, |x| sum(RotatingKvCache::new(2, 8).append(x, x)?), |x| x + x),
    (
        "QMatMul::forward",
        |x| QMatMul::from_qtensor(quantised()?)?.forward(x),
        |x| QMatMul::Tensor(quantised()?.dequantize(CPU)?).forward(x),
    ),
];

/// The operations that the page lists, and what to use in their place. Messages name the same.
pub(crate) fn listed() -> Vec<(&'static str, &'static str)> {
    let rows = table(include_str!("../../../src/guide/cuts.md"), "What cuts").into_iter();
    rows.map(|row| {
        let cells: Vec<&str> = row.split(" | ").collect();
        (cells[0].trim_matches(['|', ' ', '`']), cells[2].trim_end_matches(" |"))
    })
    .collect()
}

#[test]
fn every_entry_of_the_list_cuts_and_its_replacement_does_not() {
    let mut tested: Vec<&str> = PAIRS.iter().map(|(operation, ..)| *operation).collect();
    tested.dedup();
    // For CUDA only.
    tested.push("moe::moe_gemm, moe_gemm_gguf");
    assert_eq!(listed().into_iter().map(|(operation, _)| operation).collect::<Vec<_>>(), tested);

    for (i, (operation, cuts, replacement)) in PAIRS.into_iter().enumerate() {
        let what = format!("{operation}, {i}");
        let x = var(&constant(6, &SHAPE));
        let (cut, whole) = (cuts(&x).expect("an output"), replacement(&x).expect("an output"));
        // An input is quantised as well.
        let tolerance = if operation == "QMatMul::forward" { 0.05 } else { 1e-5 };
        for (a, b) in values(&cut).into_iter().zip(values(&whole)) {
            assert!((a - b).abs() <= tolerance * (1.0 + b.abs()), "{what}: {a} for {b}");
        }
        let behind = var(&constant(7, cut.dims()));
        let model: Vars =
            [("before", &x), ("behind", &behind)].map(|(path, x)| (path.to_string(), x.clone())).into();
        let loss = |y: &Tensor| y.mul(&behind).and_then(|y| y.sum_all()).expect("a loss");
        let mut state = setup(Adam::new(0.1), &model).expect("a state");

        let gradients = loss(&cut).backward().expect("no error from candle");
        let (outcome, lines) = logged(|| update(&mut state, &model, &gradients).expect("an update"));
        assert_eq!(outcome.without_gradient, ["before"], "{what}");
        assert!(lines.len() == 1 && lines[0].contains("1 of 2 parameters"), "{what}: {lines:?}");
        state.require_all();
        let error = update(&mut state, &model, &gradients).expect_err("no gradient");
        is_kind(&error, ErrorKind::NoGradient, &["1 of 2 parameters have no gradient", ": before; "]);
        let found = audit(&model, &loss(&cut)).expect("an audit");
        assert_eq!(found.unreached().collect::<Vec<_>>(), ["before"], "{what}");
        names_what_cuts(&found.to_string());

        let gradients = loss(&whole).backward().expect("gradients");
        update(&mut state, &model, &gradients).expect("all gradients");
        let gradient = gradients.get(&x).map(values).unwrap_or_default();
        assert!(
            gradient.iter().all(|g| g.is_finite()) && gradient.iter().any(|g| g.abs() > 1e-3),
            "{what}: {gradient:?}"
        );
    }
}

/// Modules decide by their input and by how they were made.
#[test]
fn what_cuts_in_some_cases_does_not_in_others() {
    let vector = |seed| constant(seed, &[3]);
    let layer = LayerNorm::new(vector(1), vector(2), 1e-5);
    let rms = RmsNorm::new(vector(1), 1e-5);
    let x = var(&constant(3, &[3, 4]));
    let reaches = |y: Result<Tensor>| {
        y.and_then(|y| Ok(y.sqr()?.sum_all()?.backward()?.get(&x).is_some())).expect("gradients")
    };
    let (strided, contiguous) = (x.t().expect("a view"), x.t().and_then(|x| x.contiguous()).expect("a copy"));
    let cached =
        |length| RotatingKvCache::new(0, length).append(&contiguous, &contiguous).map(|(keys, _)| keys);
    let (q, n) = (constant(4, &[4, 1, 3]), Tensor::new(&[4u32], CPU).expect("lengths"));
    let v = contiguous.unsqueeze(1).expect("values");
    let cases = [
        (true, layer.forward(&strided)),
        (false, layer.forward(&contiguous)),
        (true, rms.forward(&strided)),
        (false, rms.forward(&contiguous)),
        (true, LayerNorm::new_no_bias(vector(1), 1e-5).forward(&contiguous)),
        (true, LayerNorm::rms_norm(vector(1), 1e-5).forward(&contiguous)),
        (true, cached(3)),
        (true, cached(4)),
        (false, cached(5)),
        (true, flash_attn_varlen_unfused(&q, &q, &v, None, &n, &n, 4, 4, 1.0, false, None, None)),
    ];
    for (i, (expected, output)) in cases.into_iter().enumerate() {
        assert_eq!(reaches(output), expected, "{i}");
    }
}

/// What the page says below the list: the forward pass fails in one dtype, and a layer in F32 trains.
#[test]
fn convolutions_have_no_bf16_on_the_cpu_and_in_dtype_is_the_remedy() {
    let reaches = |dtype: DType, inner: Option<DType>| {
        let variables = VarMap::new();
        let builder = VarBuilder::from_varmap(&variables, inner.unwrap_or(dtype), CPU);
        let layer = conv2d(1, 2, 3, Conv2dConfig::default(), builder).expect("a layer");
        let x = constant(1, &[1, 1, 5, 5]).to_dtype(dtype).expect("an input");
        let y = match inner {
            Some(inner) => InDtype::new(inner, layer).expect("a layer").forward(&x)?,
            None => layer.forward(&x)?,
        };
        assert_eq!(y.dtype(), dtype);
        let gradients = y.sum_all()?.backward()?;
        Result::Ok(variables.all_vars().iter().all(|x| gradients.get(x).is_some()))
    };
    let error = reaches(DType::BF16, None).expect_err("no kernel").to_string();
    assert!(error.contains("unsupported dtype BF16 for op matmul"), "{error}");
    for (dtype, inner) in [(DType::F16, None), (DType::BF16, Some(DType::F32))] {
        assert!(reaches(dtype, inner).unwrap_or_else(|error| panic!("{dtype:?}: {error}")), "{dtype:?}");
    }
}
