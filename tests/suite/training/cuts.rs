//! The page's list of candle's operations that cut the graph: each entry cuts, and what it recommends does
//! not.

use candle_core::quantized::{GgmlDType, QMatMul, QTensor};
use candle_core::{D, DType, Device, Module, Result, Tensor, Var};
use candle_nn::attention::{AttnMask, flash_attn, flash_attn_varlen_cpu, flash_attn_varlen_unfused};
use candle_nn::kv_cache::{ConcatKvCache, KvCache, RotatingKvCache};
use candle_nn::ops::{layer_norm, layer_norm_slow, rms_norm, rms_norm_slow, softmax, softmax_last_dim};
use candle_nn::rotary_emb::{rope, rope_i, rope_i_slow, rope_slow, rope_thd};
use candle_nn::{Conv2dConfig, LayerNorm, RmsNorm, VarBuilder, VarMap, conv2d};
use optimisers::InDtype;

use crate::whole::readme::table;
use support::common::{random, values, var};

const CPU: &Device = &Device::Cpu;

/// Batches, heads, positions and the width of a head.
const SHAPE: [usize; 4] = [1, 2, 3, 32];
const WIDTH: usize = SHAPE[3];

type Function = Box<dyn Fn(&Tensor) -> Result<Tensor>>;

/// Two functions that compute the same.
struct Pair {
    cuts: Function,
    replacement: Function,
    tolerance: f64,
}

fn pair(
    cuts: impl Fn(&Tensor) -> Result<Tensor> + 'static,
    replacement: impl Fn(&Tensor) -> Result<Tensor> + 'static,
) -> Pair {
    Pair { cuts: Box::new(cuts), replacement: Box::new(replacement), tolerance: 1e-5 }
}

fn constant(seed: u64, shape: &[usize]) -> Tensor {
    random(seed, shape, DType::F32, CPU)
}

fn norms() -> Vec<Pair> {
    let (weight, bias) = (constant(1, &[WIDTH]), constant(2, &[WIDTH]));
    let module = LayerNorm::new(weight.clone(), bias.clone(), 1e-5);
    let without_bias = LayerNorm::new_no_bias(weight.clone(), 1e-5);
    let no_bias = bias.zeros_like().expect("zeros");
    let (w, b) = (weight.clone(), bias.clone());
    let slow = move |x: &Tensor| layer_norm_slow(x, &w, &b, 1e-5);
    vec![
        pair(move |x| module.forward(x), slow.clone()),
        pair(
            {
                let w = weight.clone();
                move |x| layer_norm(x, &w, &bias, 1e-5)
            },
            slow,
        ),
        pair(move |x| layer_norm(x, &weight, &no_bias, 1e-5), move |x| without_bias.forward(x)),
    ]
}

fn rms_norms() -> Vec<Pair> {
    let weight = constant(1, &[WIDTH]);
    let norm = RmsNorm::new(weight.clone(), 1e-5);
    let (same, w) = (norm.clone(), weight.clone());
    vec![
        pair(move |x| norm.forward(x), move |x| same.forward_diff(x)),
        pair(move |x| rms_norm(x, &w, 1e-5), move |x| rms_norm_slow(x, &weight, 1e-5)),
    ]
}

type Rope = fn(&Tensor, &Tensor, &Tensor) -> Result<Tensor>;

fn ropes(cuts: Rope, replacement: Rope) -> Vec<Pair> {
    let angles = constant(3, &[SHAPE[2], WIDTH / 2]);
    let (cos, sin) = (angles.cos().expect("cosines"), angles.sin().expect("sines"));
    let (c, s) = (cos.clone(), sin.clone());
    vec![pair(move |x| cuts(x, &c, &s), move |x| replacement(x, &cos, &sin))]
}

/// Positions before heads.
fn thd(rope: Rope) -> Vec<Pair> {
    let mut pairs = ropes(rope_thd, rope);
    let Pair { cuts, replacement, tolerance } = pairs.remove(0);
    vec![Pair {
        cuts: Box::new(move |x| cuts(&x.transpose(1, 2)?.contiguous()?)),
        replacement: Box::new(move |x| replacement(x)?.transpose(1, 2)),
        tolerance,
    }]
}

/// Attention of x to itself; `v` may be another.
fn by_hand(x: &Tensor, v: &Tensor) -> Result<Tensor> {
    softmax(&(x.matmul(&x.t()?)? / (WIDTH as f64).sqrt())?, D::Minus1)?.matmul(v)
}

fn attentions() -> Vec<Pair> {
    let scale = 1.0 / (WIDTH as f32).sqrt();
    let positions_first = |x: &Tensor| x.transpose(1, 2)?.contiguous();
    let lengths = Tensor::new(&[SHAPE[2] as u32], CPU).expect("lengths");
    let (same, other) = (lengths.clone(), constant(4, &SHAPE));
    let v = other.clone();
    let (n, rows) = (SHAPE[2], move |x: &Tensor| x.squeeze(0)?.transpose(0, 1)?.contiguous());
    vec![
        pair(
            move |x| {
                let x = positions_first(x)?;
                flash_attn::<f32>(&x, &x, &x, scale, AttnMask::None, None, None)
            },
            |x| by_hand(x, x),
        ),
        pair(
            move |x| {
                let x = rows(x)?;
                let y = flash_attn_varlen_cpu(
                    &x, &x, &x, None, &lengths, &lengths, n, n, scale, false, None, None,
                )?;
                y.transpose(0, 1)?.unsqueeze(0)
            },
            |x| by_hand(x, x),
        ),
        pair(
            move |x| {
                let (x, v) = (rows(x)?, rows(&v)?);
                let y = flash_attn_varlen_unfused(
                    &x, &x, &v, None, &same, &same, n, n, scale, false, None, None,
                )?;
                y.transpose(0, 1)?.unsqueeze(0)
            },
            move |x| by_hand(x, &other),
        ),
    ]
}

fn caches() -> Vec<Pair> {
    let sum = |(keys, values): (Tensor, Tensor)| keys + values;
    vec![
        pair(move |x| sum(KvCache::new(2, 8).append(x, x)?), |x| x + x),
        pair(move |x| sum(ConcatKvCache::new(2).append(x, x)?), |x| x + x),
        pair(move |x| sum(RotatingKvCache::new(2, 8).append(x, x)?), |x| x + x),
    ]
}

fn quantised() -> Vec<Pair> {
    let weight = QTensor::quantize(&constant(5, &[8, WIDTH]), GgmlDType::Q8_0).expect("a quantised weight");
    let dense = QMatMul::Tensor(weight.dequantize(CPU).expect("a weight"));
    let quantised = QMatMul::from_qtensor(weight).expect("a product");
    // The input is quantised as well.
    vec![Pair { tolerance: 0.05, ..pair(move |x| quantised.forward(x), move |x| dense.forward(x)) }]
}

/// The operations that the page lists, and what to use in their place. Messages name the same.
pub(crate) fn listed() -> Vec<(&'static str, &'static str)> {
    let rows = table(include_str!("../../../src/guide/cuts.md"), "What cuts").into_iter();
    rows.map(|row| {
        let cells: Vec<&str> = row.split(" | ").collect();
        (cells[0].trim_matches(['|', ' ', '`']), cells[2].trim_end_matches(" |"))
    })
    .collect()
}

fn pairs(operation: &str) -> Vec<Pair> {
    match operation {
        "LayerNorm::forward, ops::layer_norm" => norms(),
        "RmsNorm::forward, ops::rms_norm" => rms_norms(),
        "ops::softmax_last_dim" => vec![pair(softmax_last_dim, |x| softmax(x, D::Minus1))],
        "rotary_emb::rope" => ropes(rope, rope_slow),
        "rotary_emb::rope_i" => ropes(rope_i, rope_i_slow),
        "rotary_emb::rope_thd" => thd(rope_slow),
        // `sdpa` is for Metal only.
        "attention::flash_attn, flash_attn_varlen_*, ops::sdpa" => attentions(),
        "kv_cache::*::append" => caches(),
        "QMatMul::forward" => quantised(),
        // For CUDA only.
        "moe::moe_gemm, moe_gemm_gguf" => Vec::new(),
        other => panic!("{other} has no test"),
    }
}

#[test]
fn every_entry_of_the_list_cuts_and_its_replacement_does_not() {
    for (operation, _) in listed() {
        for (i, Pair { cuts, replacement, tolerance }) in pairs(operation).into_iter().enumerate() {
            let what = format!("{operation}, {i}");
            let x = var(&constant(6, &SHAPE));
            let (cut, whole) = (cuts(&x).expect("an output"), replacement(&x).expect("an output"));
            for (a, b) in values(&cut).into_iter().zip(values(&whole)) {
                assert!((a - b).abs() <= tolerance * (1.0 + b.abs()), "{what}: {a} for {b}");
            }
            let gradient = |y: &Tensor, x: &Var| {
                let weights = constant(7, y.dims());
                let store =
                    y.mul(&weights).and_then(|y| y.sum_all()?.backward()).expect("no error from candle");
                store.get(x).map(values)
            };
            assert_eq!(gradient(&cut, &x), None, "{what}");
            let gradient = gradient(&whole, &x).unwrap_or_else(|| panic!("{what}: no gradient"));
            assert!(
                gradient.iter().all(|g| g.is_finite()) && gradient.iter().any(|g| g.abs() > 1e-3),
                "{what}: {gradient:?}"
            );
        }
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
    assert_eq!([reaches(layer.forward(&strided)), reaches(layer.forward(&contiguous))], [true, false]);
    assert_eq!([reaches(rms.forward(&strided)), reaches(rms.forward(&contiguous))], [true, false]);
    assert!(reaches(LayerNorm::new_no_bias(vector(1), 1e-5).forward(&contiguous)));
    assert!(reaches(LayerNorm::rms_norm(vector(1), 1e-5).forward(&contiguous)));
    let cached =
        |length| RotatingKvCache::new(0, length).append(&contiguous, &contiguous).map(|(keys, _)| keys);
    assert_eq!([3, 4, 5].map(|length| reaches(cached(length))), [true, true, false]);
    let (q, lengths) = (constant(4, &[4, 1, 3]), Tensor::new(&[4u32], CPU).expect("lengths"));
    let v = contiguous.unsqueeze(1).expect("values");
    assert!(reaches(flash_attn_varlen_unfused(
        &q, &q, &v, None, &lengths, &lengths, 4, 4, 1.0, false, None, None
    )));
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
