//! The page's lists of candle's operations without a right backward pass: each entry cuts, is an error or has
//! a wrong gradient, what is before a cut is named by everything that names parameters without a gradient,
//! and what the page recommends trains it.

use candle_core::quantized::{GgmlDType, QMatMul, QTensor};
use candle_core::{
    CpuStorage, CustomOp1, CustomOp2, CustomOp3, D, DType, Device, IndexOp, InplaceOp1, InplaceOp2,
    InplaceOp3, Layout, Module, Result, Shape, Tensor, Var,
};
use candle_nn::attention::cpu_flash::causal::run_causal_attn_cpu;
use candle_nn::attention::{AttnMask, flash_attn, flash_attn_varlen_cpu, flash_attn_varlen_unfused};
use candle_nn::kv_cache::{
    ConcatKvCache, InterleavedKvCache, KvCache, RotatingKvCache, ScatteredCacheBuilder,
};
use candle_nn::ops::{layer_norm, layer_norm_slow, rms_norm, rms_norm_slow, softmax, softmax_last_dim};
use candle_nn::rotary_emb::{rope, rope_i, rope_i_slow, rope_slow, rope_thd};
use candle_nn::sampling::gumbel_softmax;
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

/// What `round` gives, with the gradient of x.
fn straight_through(x: &Tensor, round: Function) -> Result<Tensor> {
    x + (round(x)? - x)?.detach()
}

fn rounded(x: &Tensor) -> Result<Tensor> {
    QTensor::quantize(x, GgmlDType::Q8_0)?.dequantize(CPU)
}

/// Zeros after `write` with x.
fn written(x: &Tensor, write: fn(&Tensor, &Tensor) -> Result<()>) -> Result<Tensor> {
    let y = x.zeros_like()?;
    write(&y, x)?;
    Ok(y)
}

/// A tensor that was computed of x, after `change`.
fn changed(x: &Tensor, change: fn(&Tensor) -> Result<()>) -> Result<Tensor> {
    let y = x.affine(1.0, 0.0)?;
    change(&y)?;
    Ok(y)
}

/// Another order of the last dimension.
fn places() -> Result<Tensor> {
    Tensor::arange_step(WIDTH as i64 - 1, -1, -1, CPU)?
        .broadcast_as(&SHAPE)?
        .contiguous()
}

fn picked(x: &Tensor, dim: usize, places: &[u32]) -> Result<Tensor> {
    x.index_select(&Tensor::new(places, CPU)?, dim)
}

/// The first places of what grows to its double.
fn halves(length: usize) -> Vec<u32> {
    (0..length as u32).map(|place| place / 2).collect()
}

fn wider(x: &Tensor) -> Result<Tensor> {
    let wider = WIDTH as u32 * 3 / 2;
    picked(
        &x.squeeze(0)?,
        2,
        &(0..wider).map(|place| place * 2 / 3).collect::<Vec<_>>(),
    )
}

fn higher(x: &Tensor) -> Result<Tensor> {
    picked(x, 2, &halves(2 * LENGTH))
}

fn smoothly_higher(x: &Tensor) -> Result<Tensor> {
    let identity = Tensor::eye(LENGTH, DType::F32, CPU)?.reshape((1, 1, LENGTH, LENGTH))?;
    identity
        .upsample_bilinear2d(2 * LENGTH, LENGTH, false)?
        .broadcast_matmul(x)
}

fn by_conv2d(x: &Tensor, kernel: &Tensor) -> Result<Tensor> {
    x.unsqueeze(2)?
        .conv2d(&kernel.unsqueeze(2)?, 0, 1, 1, 1)?
        .squeeze(2)
}

/// An operation of a program, without a backward pass.
struct Negation;

fn negated(x: &CpuStorage, layout: &Layout) -> Result<(CpuStorage, Shape)> {
    let negated = x.as_slice::<f32>()?.iter().map(|x| -x).collect();
    Ok((CpuStorage::F32(negated), layout.shape().clone()))
}

macro_rules! negations {
    ($($operation:ident, $out:ty, ($($also:ident: $type:ty),*), $negated:expr;)*) => {$(
        impl $operation for Negation {
            fn name(&self) -> &'static str {
                "negation"
            }

            fn cpu_fwd(&self, $($also: $type),*) -> Result<$out> {
                $negated
            }
        }
    )*};
}
negations! {
    CustomOp1, (CpuStorage, Shape), (x: &CpuStorage, l: &Layout), negated(x, l);
    CustomOp2, (CpuStorage, Shape), (x: &CpuStorage, l: &Layout, _y: &CpuStorage, _m: &Layout), negated(x, l);
    CustomOp3, (CpuStorage, Shape),
        (x: &CpuStorage, l: &Layout, _y: &CpuStorage, _m: &Layout, _z: &CpuStorage, _n: &Layout), negated(x, l);
    InplaceOp1, (), (y: &mut CpuStorage, l: &Layout), into(y, negated(y, l));
    InplaceOp2, (), (y: &mut CpuStorage, _l: &Layout, x: &CpuStorage, m: &Layout), into(y, negated(x, m));
    InplaceOp3, (),
        (y: &mut CpuStorage, _l: &Layout, x: &CpuStorage, m: &Layout, _z: &CpuStorage, _n: &Layout),
        into(y, negated(x, m));
}

fn into(y: &mut CpuStorage, numbers: Result<(CpuStorage, Shape)>) -> Result<()> {
    *y = numbers?.0;
    Ok(())
}

/// The same with a backward pass.
struct Differentiable;

impl CustomOp1 for Differentiable {
    fn name(&self) -> &'static str {
        "negation"
    }

    fn cpu_fwd(&self, x: &CpuStorage, layout: &Layout) -> Result<(CpuStorage, Shape)> {
        negated(x, layout)
    }

    fn bwd(&self, _: &Tensor, _: &Tensor, gradient: &Tensor) -> Result<Option<Tensor>> {
        Ok(Some(gradient.neg()?))
    }
}

const LAYER_NORM: &str = "LayerNorm::forward, ops::layer_norm";
const RMS_NORM: &str = "RmsNorm::forward, ops::rms_norm";
const ATTENTION: &str = "attention::flash_attn, flash_attn_varlen_*, run_*_attn_cpu, ops::sdpa";
const CACHE: &str = "kv_cache::*::append";
const STEPS: &str = "Tensor::floor, ceil, round, round_to, sign";
const SCATTER_SET: &str = "Tensor::scatter_set, scatter_add_set";
const READ: &str = "Tensor::inplace_op2, inplace_op3";
const NO_BWD: &str = "Tensor::apply_op*_no_bwd";
const NEAREST_1D: &str = "Tensor::upsample_nearest1d, interpolate1d";
const NEAREST_2D: &str = "Tensor::upsample_nearest2d, interpolate2d";
const BILINEAR: &str = "Tensor::upsample_bilinear2d, upsample_bilinear2d_with_scale";
const WITHOUT_BWD: &str = "Tensor::apply_op1, apply_op2, apply_op3";
const CONV1D: &str = "Tensor::conv1d, Conv1d";
const UPSAMPLED: &str = "Tensor::upsample_nearest1d, upsample_nearest2d";
const IN_PLACE: &str = "Tensor::zero_set, one_set, const_set, inplace_op*";

/// Entries of the list, a function that cuts, and one that computes the same. The numbers are those of
/// candle's issues.
const PAIRS: [(&str, Function, Function); 34] = [
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
    (
        RMS_NORM,
        |x| RmsNorm::new(weight(), 1e-5).forward(x),
        |x| RmsNorm::new(weight(), 1e-5).forward_diff(x),
    ),
    (
        RMS_NORM,
        |x| rms_norm(x, &weight(), 1e-5),
        |x| rms_norm_slow(x, &weight(), 1e-5),
    ),
    // 3569.
    ("ops::softmax_last_dim", softmax_last_dim, |x| {
        softmax(x, D::Minus1)
    }),
    // 3568.
    ("rotary_emb::rope", |x| turned(x, rope), |x| turned(x, rope_slow)),
    (
        "rotary_emb::rope_i",
        |x| turned(x, rope_i),
        |x| turned(x, rope_i_slow),
    ),
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
            let x = positions_first(x)?;
            run_causal_attn_cpu::<f32>(&x, &x, &x, SCALE, LENGTH, None, None)
        },
        |x| by_hand(x, x),
    ),
    (
        ATTENTION,
        |x| {
            let (x, n, m) = (rows(x)?, lengths(), LENGTH);
            heads(&flash_attn_varlen_cpu(
                &x, &x, &x, None, &n, &n, m, m, SCALE, false, None, None,
            )?)
        },
        |x| by_hand(x, x),
    ),
    (
        ATTENTION,
        |x| {
            let (x, v, n, m) = (rows(x)?, rows(&values_of_others())?, lengths(), LENGTH);
            heads(&flash_attn_varlen_unfused(
                &x, &x, &v, None, &n, &n, m, m, SCALE, false, None, None,
            )?)
        },
        |x| by_hand(x, &values_of_others()),
    ),
    (CACHE, |x| sum(KvCache::new(2, 8).append(x, x)?), |x| x + x),
    (CACHE, |x| sum(ConcatKvCache::new(2).append(x, x)?), |x| x + x),
    (
        CACHE,
        |x| sum(RotatingKvCache::new(2, 8).append(x, x)?),
        |x| x + x,
    ),
    (
        CACHE,
        |x| {
            let mut builder = ScatteredCacheBuilder::new(1, 8, DType::F32, CPU)?;
            let places = builder.indices_and_mask(LENGTH, &[true])?;
            sum(builder.make_cache(SHAPE[1], WIDTH)?.append(x, x, &places)?)?.narrow(2, 0, LENGTH)
        },
        |x| x + x,
    ),
    (
        CACHE,
        |x| InterleavedKvCache::new(WIDTH).append(x, x),
        |x| rows(&Tensor::cat(&[x, x], 3)?),
    ),
    (
        "QMatMul::forward",
        |x| QMatMul::from_qtensor(quantised()?)?.forward(x),
        |x| QMatMul::Tensor(quantised()?.dequantize(CPU)?).forward(x),
    ),
    ("QTensor::quantize*, dequantize*", rounded, |x| {
        straight_through(x, rounded)
    }),
    (STEPS, |x| x.floor(), |x| straight_through(x, Tensor::floor)),
    (STEPS, |x| x.ceil(), |x| straight_through(x, Tensor::ceil)),
    (STEPS, |x| x.round(), |x| straight_through(x, Tensor::round)),
    (
        STEPS,
        |x| x.round_to(1),
        |x| straight_through(x, |x| x.round_to(1)),
    ),
    (STEPS, |x| x.sign(), |x| straight_through(x, Tensor::sign)),
    (
        "Tensor::slice_set",
        |x| written(x, |y, x| y.slice_set(x, 0, 0)),
        |x| x.zeros_like()?.slice_scatter(x, 0, 0),
    ),
    (
        SCATTER_SET,
        |x| written(x, |y, x| y.scatter_set(&places()?, x, 3)),
        |x| x.zeros_like()?.scatter(&places()?, x, 3),
    ),
    (
        SCATTER_SET,
        |x| written(x, |y, x| y.scatter_add_set(&places()?, x, 3)),
        |x| x.zeros_like()?.scatter_add(&places()?, x, 3),
    ),
    (
        READ,
        |x| written(x, |y, x| y.inplace_op2(x, &Negation)),
        |x| x.apply_op1(Differentiable),
    ),
    (
        READ,
        |x| written(x, |y, x| y.inplace_op3(x, x, &Negation)),
        |x| x.apply_op1(Differentiable),
    ),
    (
        NO_BWD,
        |x| x.apply_op1_no_bwd(&Negation),
        |x| x.apply_op1(Differentiable),
    ),
    (
        NO_BWD,
        |x| x.apply_op2_no_bwd(x, &Negation),
        |x| x.apply_op1(Differentiable),
    ),
    (
        NO_BWD,
        |x| x.apply_op3_no_bwd(x, x, &Negation),
        |x| x.apply_op1(Differentiable),
    ),
    (
        "Var::set",
        |x| {
            let y = Var::zeros(&SHAPE, DType::F32, CPU)?;
            y.set(x)?;
            // A variable itself has a gradient, and no model shows this one.
            Ok(y.as_detached_tensor())
        },
        |x| Ok(x.clone()),
    ),
];

/// Operations whose backward pass is an error, a word of the error, and what computes the same.
const ERRORS: [(&str, &str, Function, Function); 15] = [
    (
        "Tensor::conv_transpose1d, ConvTranspose1d",
        "conv-transpose1d",
        |x| {
            x.squeeze(0)?
                .conv_transpose1d(&constant(8, &[3, 4, 2]), 1, 0, 2, 1, 1)
        },
        |x| {
            let y = x.squeeze(0)?.unsqueeze(2)?;
            let y = y
                .conv_transpose2d(&constant(8, &[3, 4, 2]).unsqueeze(2)?, 0, 0, 2, 1)?
                .squeeze(2)?;
            y.narrow(2, 1, y.dim(2)? - 2)
        },
    ),
    (
        "Tensor::conv2d, Conv2d",
        "mismatch",
        |x| x.conv2d(&constant(8, &[4, 2, 2, 2]), 0, 2, 1, 1),
        |x| x.narrow(2, 0, 2)?.conv2d(&constant(8, &[4, 2, 2, 2]), 0, 2, 1, 1),
    ),
    (
        "Tensor::avg_pool2d_with_stride",
        "avgpool2d",
        |x| x.avg_pool2d_with_stride(2, 1),
        |x| x.conv2d(&Tensor::full(0.25f32, (2, 1, 2, 2), CPU)?, 0, 1, 1, 2),
    ),
    (
        "Tensor::max_pool2d_with_stride",
        "maxpool2d",
        |x| x.max_pool2d_with_stride((2, 1), (1, 1)),
        |x| picked(x, 2, &[0, 1])?.maximum(&picked(x, 2, &[1, 2])?),
    ),
    (
        NEAREST_1D,
        "non integer",
        |x| x.squeeze(0)?.upsample_nearest1d(48),
        wider,
    ),
    (
        NEAREST_1D,
        "non integer",
        |x| x.squeeze(0)?.interpolate1d(48),
        wider,
    ),
    (
        NEAREST_2D,
        "non uniform",
        |x| x.upsample_nearest2d(6, WIDTH),
        higher,
    ),
    (NEAREST_2D, "non uniform", |x| x.interpolate2d(6, WIDTH), higher),
    (
        NEAREST_2D,
        "non integer",
        |x| x.upsample_nearest2d(2, WIDTH),
        |x| picked(x, 2, &[0, 1]),
    ),
    (
        BILINEAR,
        "bilinear2d",
        |x| x.upsample_bilinear2d(6, WIDTH, false),
        smoothly_higher,
    ),
    (
        BILINEAR,
        "bilinear2d",
        |x| x.upsample_bilinear2d_with_scale(2.0, 1.0, false),
        smoothly_higher,
    ),
    (
        "Tensor::unfold",
        "mismatch",
        |x| x.unfold(2, 2, 1),
        |x| {
            picked(x, 2, &[0, 1, 1, 2])?
                .reshape((1, 2, 2, 2, WIDTH))?
                .transpose(3, 4)
        },
    ),
    (
        WITHOUT_BWD,
        "negation",
        |x| x.apply_op1(Negation),
        |x| x.apply_op1(Differentiable),
    ),
    (
        WITHOUT_BWD,
        "negation",
        |x| x.apply_op2(x, Negation),
        |x| x.apply_op1(Differentiable),
    ),
    (
        WITHOUT_BWD,
        "negation",
        |x| x.apply_op3(x, x, Negation),
        |x| x.apply_op1(Differentiable),
    ),
];

/// Operations whose gradient is not the slope of their output, and what computes the same.
const WRONG: [(&str, Function, Function); 14] = [
    (
        CONV1D,
        |x| constant(8, &[2, 3, 40]).conv1d(&x.squeeze(0)?, 0, 1, 1, 1),
        |x| by_conv2d(&constant(8, &[2, 3, 40]), &x.squeeze(0)?),
    ),
    (
        CONV1D,
        |x| x.squeeze(0)?.conv1d(&constant(8, &[4, 3, 2]), 0, 1, 1, 1),
        |x| by_conv2d(&x.squeeze(0)?, &constant(8, &[4, 3, 2])),
    ),
    (
        "Tensor::scatter_add",
        |x| x.scatter_add(&places()?, &values_of_others(), 3),
        |x| x + x.zeros_like()?.scatter_add(&places()?, &values_of_others(), 3)?,
    ),
    (
        "Tensor::scatter",
        |x| x.scatter(&places()?, &values_of_others(), 3),
        |x| {
            let overwritten = x.zeros_like()?.scatter(&places()?, &x.ones_like()?, 3)?;
            overwritten
                .gt(0.0)?
                .where_cond(&x.zeros_like()?.scatter(&places()?, &values_of_others(), 3)?, x)
        },
    ),
    (
        UPSAMPLED,
        |x| {
            let x = x.squeeze(0)?;
            x.upsample_nearest1d(2 * WIDTH)?.narrow(2, 0, WIDTH)? + x
        },
        |x| {
            x.squeeze(0)?
                .copy()?
                .upsample_nearest1d(2 * WIDTH)?
                .narrow(2, 0, WIDTH)?
                + x.squeeze(0)?
        },
    ),
    (
        UPSAMPLED,
        |x| {
            x.upsample_nearest2d(2 * LENGTH, 2 * WIDTH)?
                .narrow(2, 0, LENGTH)?
                .narrow(3, 0, WIDTH)?
                + x
        },
        |x| picked(&picked(x, 2, &halves(LENGTH))?, 3, &halves(WIDTH))? + x,
    ),
    (
        "Tensor::max_pool2d",
        |x| x.narrow(2, 0, 2)?.max_pool2d(2),
        |x| {
            x.narrow(2, 0, 2)?
                .reshape((1, 2, 1, 2, WIDTH / 2, 2))?
                .max(5)?
                .max(3)
        },
    ),
    (
        "Tensor::avg_pool2d",
        |x| x.avg_pool2d(2),
        |x| x.narrow(2, 0, 2)?.avg_pool2d(2),
    ),
    (
        "Tensor::unfold",
        |x| x.unfold(1, 2, 2),
        |x| x.permute((0, 2, 3, 1))?.unsqueeze(1),
    ),
    (IN_PLACE, |x| changed(x, Tensor::zero_set), |x| x * 0.0),
    (IN_PLACE, |x| changed(x, Tensor::one_set), |x| x.affine(0.0, 1.0)),
    (
        IN_PLACE,
        |x| changed(x, |y| y.const_set(2f32.into())),
        |x| x.affine(0.0, 2.0),
    ),
    (
        IN_PLACE,
        |x| changed(x, |y| y.inplace_op1(&Negation)),
        |x| x.neg(),
    ),
    (
        IN_PLACE,
        |x| changed(x, |y| y.inplace_op2(&values_of_others(), &Negation)),
        |_| values_of_others().neg(),
    ),
];

/// Where the page says that a program asks for an end of the graph: what is in its text, and an example.
const ENDS: [(&str, Function); 12] = [
    ("`Tensor::detach`", |x| Ok(x.detach())),
    ("`Var::as_detached_tensor`", |x| {
        Ok(Var::from_tensor(x)?.as_detached_tensor())
    }),
    ("`to_vec1`", |x| {
        Tensor::from_vec(x.flatten_all()?.to_vec1::<f32>()?, x.shape(), CPU)
    }),
    ("`to_scalar`", |x| {
        Tensor::new(x.sum_all()?.to_scalar::<f32>()?, CPU)
    }),
    ("`argmax`", |x| x.argmax(3)),
    ("`argmin`", |x| x.argmin(3)),
    ("`arg_sort_last_dim`", |x| x.arg_sort_last_dim(true)),
    ("comparisons", |x| x.gt(0.5)),
    ("`gumbel_softmax`", |x| gumbel_softmax(x, 0.5, 3)),
    ("a conversion to such a dtype", |x| x.to_dtype(DType::I64)),
    ("even if another one follows", |x| {
        x.to_dtype(DType::U8)?.to_dtype(DType::F32)
    }),
    ("`loss * 0.0`", |x| x * 0.0),
];

const PAGE: &str = include_str!("../../../src/guide/cuts.md");

/// The operations of a table of the page, and what to use for them. Messages name the same.
pub(crate) fn listed(heading: &str) -> Vec<(&'static str, &'static str)> {
    table(PAGE, heading)
        .into_iter()
        .map(|row| {
            let cells: Vec<&str> = row.split(" | ").collect();
            (
                cells[0].trim_matches(['|', ' ', '`']),
                cells[2].trim_end_matches(" |"),
            )
        })
        .collect()
}

/// Asserts that these are what a table lists, and last what only other devices or versions of candle have.
fn are_listed<'t>(heading: &str, tested: impl Iterator<Item = &'t str>, elsewhere: &'t [&'t str]) {
    let mut tested: Vec<&str> = tested.collect();
    tested.dedup();
    tested.extend(elsewhere);
    assert_eq!(
        listed(heading)
            .into_iter()
            .map(|(operation, _)| operation)
            .collect::<Vec<_>>(),
        tested
    );
}

/// Asserts that two tensors have almost the same values.
fn are_close(what: &str, a: &Tensor, b: &Tensor, tolerance: f64) {
    assert_eq!(a.dims(), b.dims(), "{what}");
    for (a, b) in values(a).into_iter().zip(values(b)) {
        assert!(
            (a - b).abs() <= tolerance * (1.0 + b.abs()),
            "{what}: {a} for {b}"
        );
    }
}

/// The gradient of x in a sum of what is computed of it, with random weights.
fn gradient(x: &Tensor, y: &Tensor) -> Result<Option<Tensor>> {
    Ok((y * constant(9, y.dims()))?.sum_all()?.backward()?.remove(x))
}

#[test]
fn every_entry_of_the_list_cuts_and_its_replacement_does_not() {
    // The last is for CUDA.
    const CUDA: &str =
        "moe::moe_gemm, moe_gemm_gguf, cutile::routed_grouped_matmul, QTensor::indexed_moe_forward";
    are_listed(
        "What cuts",
        PAIRS.iter().map(|(operation, ..)| *operation),
        &[CUDA],
    );

    for (i, (operation, cuts, replacement)) in PAIRS.into_iter().enumerate() {
        let what = format!("{operation}, {i}");
        let x = var(&constant(6, &SHAPE));
        let (cut, whole) = (cuts(&x).expect("an output"), replacement(&x).expect("an output"));
        // An input is quantised as well.
        let tolerance = if operation == "QMatMul::forward" {
            0.05
        } else {
            1e-5
        };
        are_close(&what, &cut, &whole, tolerance);
        let behind = var(&constant(7, cut.dims()));
        let model: Vars = [("before", &x), ("behind", &behind)]
            .map(|(path, x)| (path.to_string(), x.clone()))
            .into();
        let loss = |y: &Tensor| y.mul(&behind).and_then(|y| y.sum_all()).expect("a loss");
        let mut state = setup(Adam::new(0.1), &model).expect("a state");

        let gradients = loss(&cut).backward().expect("no error from candle");
        let (outcome, lines) = logged(|| update(&mut state, &model, &gradients).expect("an update"));
        assert_eq!(outcome.without_gradient, ["before"], "{what}");
        assert!(
            lines.len() == 1 && lines[0].contains("1 of 2 parameters"),
            "{what}: {lines:?}"
        );
        state.require_all();
        let error = update(&mut state, &model, &gradients).expect_err("no gradient");
        is_kind(
            &error,
            ErrorKind::NoGradient,
            &["1 of 2 parameters have no gradient", ": before; "],
        );
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

#[test]
fn every_entry_of_the_errors_is_one_and_its_replacement_trains() {
    // Of candle 0.10.
    are_listed(
        "What is an error",
        ERRORS.iter().map(|(operation, ..)| *operation),
        &["Tensor::index_select"],
    );
    for (operation, word, fails, replacement) in ERRORS {
        let x = var(&constant(6, &SHAPE));
        let (y, whole) = (fails(&x).expect("an output"), replacement(&x).expect("an output"));
        are_close(operation, &y, &whole, 1e-5);
        let error = gradient(&x, &y).expect_err(operation).to_string();
        assert!(error.contains(word), "{operation}: {error}");
        let found = gradient(&x, &whole)
            .expect("gradients")
            .map(|g| values(&g))
            .unwrap_or_default();
        assert!(found.iter().any(|g| g.abs() > 1e-3), "{operation}: {found:?}");
    }
}

/// The slope is measured in one direction.
#[test]
fn every_wrong_gradient_of_the_list_is_wrong_and_its_replacement_has_the_right_one() {
    are_listed(
        "What has a wrong gradient",
        WRONG.iter().map(|(operation, ..)| *operation),
        &[],
    );
    const STEP: f64 = 1e-2;
    for (i, (operation, wrong, right)) in WRONG.into_iter().enumerate() {
        let what = format!("{operation}, {i}");
        let (x, direction) = (constant(6, &SHAPE), constant(10, &SHAPE));
        let moved = (&direction * STEP)
            .and_then(|step| &x + step)
            .expect("another input");
        let loss = |x: &Tensor| right(x).and_then(|y| (&y * constant(9, y.dims()))?.sum_all());
        let loss = |x: &Tensor| values(&loss(x).expect("a loss"))[0];
        let slope = (loss(&moved) - loss(&x)) / STEP;
        let x = var(&x);
        let (y, same) = (wrong(&x).expect("an output"), right(&x).expect("an output"));
        are_close(&what, &y, &same, 1e-5);
        let told = |y: &Tensor| match gradient(&x, y).expect("gradients") {
            Some(gradient) => values(&(gradient * &direction).expect("a product")).iter().sum(),
            None => 0.0,
        };
        let (wrong, right): (f64, f64) = (told(&y), told(&same));
        assert!(
            (right - slope).abs() < 0.02 * (1.0 + slope.abs()),
            "{what}: {right} for {slope}"
        );
        assert!(
            (wrong - slope).abs() > 0.05 * (1.0 + slope.abs()),
            "{what}: {wrong} for {slope}"
        );
    }
}

#[test]
fn where_a_program_asks_for_it_the_graph_ends() {
    for (words, end) in ENDS {
        assert!(PAGE.contains(words), "{words}");
        let x = var(&constant(6, &SHAPE).abs().expect("an input"));
        let y = end(&x).and_then(|y| y.to_dtype(DType::F32)).expect("an output");
        assert!(gradient(&x, &y).expect("gradients").is_none(), "{words}");
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
        y.and_then(|y| Ok(y.sqr()?.sum_all()?.backward()?.get(&x).is_some()))
            .expect("gradients")
    };
    let (strided, contiguous) = (
        x.t().expect("a view"),
        x.t().and_then(|x| x.contiguous()).expect("a copy"),
    );
    let cached = |length| {
        RotatingKvCache::new(0, length)
            .append(&contiguous, &contiguous)
            .map(|(keys, _)| keys)
    };
    let (q, n) = (
        constant(4, &[4, 1, 3]),
        Tensor::new(&[4u32], CPU).expect("lengths"),
    );
    let v = contiguous.unsqueeze(1).expect("values");
    let strided_places = Tensor::new(&[[0u32, 1], [1, 2]], CPU)
        .and_then(|x| x.i((.., 1)))
        .expect("places");
    let cases = [
        (true, layer.forward(&strided)),
        (false, layer.forward(&contiguous)),
        (true, rms.forward(&strided)),
        (false, rms.forward(&contiguous)),
        (true, LayerNorm::new_no_bias(vector(1), 1e-5).forward(&contiguous)),
        (true, LayerNorm::rms_norm(vector(1), 1e-5).forward(&contiguous)),
        (true, cached(3)),
        (true, x.index_select(&strided_places, 0)),
        (true, cached(4)),
        (false, cached(5)),
        (
            true,
            flash_attn_varlen_unfused(&q, &q, &v, None, &n, &n, 4, 4, 1.0, false, None, None),
        ),
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
        assert!(
            reaches(dtype, inner).unwrap_or_else(|error| panic!("{dtype:?}: {error}")),
            "{dtype:?}"
        );
    }
}
