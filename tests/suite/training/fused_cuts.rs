//! A cut behind a part of a matrix that is several in one: `audit` says which rows have
//! no gradient at all, and accuses nobody else.

#![allow(clippy::single_range_in_vec_init, reason = "ranges of rows are what is compared")]

use std::ops::Range;

use candle_core::{D, DType, Device, IndexOp, Module, Result, Tensor, Var};
use candle_nn::{Embedding, Linear, ops};
use optimisers::{Audit, Model, Reach, audit, model};

use crate::training::audit::names_what_cuts;
use support::common::{random, tensor, var};

const CPU: &Device = &Device::Cpu;
/// Of the model, and of a head.
const WIDTH: usize = 8;
const HEAD: usize = 4;

fn linear(seed: u64, outputs: usize, inputs: usize) -> Linear {
    Linear::new(trained(seed, &[outputs, inputs]), None)
}

fn trained(seed: u64, shape: &[usize]) -> Tensor {
    var(&tensor(seed, shape, DType::F32)).as_tensor().clone()
}

/// How the rows of the fused matrix are laid out.
#[derive(Clone, Copy, Debug)]
enum Layout {
    /// All queries, all keys, all values.
    Parts,
    /// Fewer keys and values than queries: heads share them.
    Grouped,
    /// Queries, keys and values of each head in turn.
    ByHead,
}

/// Attention with queries, keys and values from one matrix.
struct Attention {
    qkv: Linear,
    output: Linear,
    layout: Layout,
}
model!(Attention { qkv, output, .. });

type Softmax = fn(&Tensor) -> Result<Tensor>;

fn healthy(x: &Tensor) -> Result<Tensor> {
    ops::softmax(x, D::Minus1)
}

impl Attention {
    fn new(layout: Layout) -> Self {
        let rows = if matches!(layout, Layout::Grouped) { WIDTH + 2 * HEAD } else { 3 * WIDTH };
        Attention { qkv: linear(1, rows, WIDTH), output: linear(2, WIDTH, WIDTH), layout }
    }

    /// Queries, keys and values by head, position and number.
    fn split(&self, x: &Tensor) -> Result<[Tensor; 3]> {
        let (positions, heads) = (x.dim(0)?, WIDTH / HEAD);
        let by_head = |part: Tensor, heads: usize| {
            part.reshape((positions, heads, HEAD))?.transpose(0, 1)?.contiguous()
        };
        let part = |start: usize, length: usize| x.narrow(1, start, length);
        Ok(match self.layout {
            Layout::Parts => [
                by_head(part(0, WIDTH)?, heads)?,
                by_head(part(WIDTH, WIDTH)?, heads)?,
                by_head(part(2 * WIDTH, WIDTH)?, heads)?,
            ],
            Layout::Grouped => {
                let shared = |start| by_head(part(start, HEAD)?, 1)?.repeat((heads, 1, 1));
                [by_head(part(0, WIDTH)?, heads)?, shared(WIDTH)?, shared(WIDTH + HEAD)?]
            }
            Layout::ByHead => {
                let x = x.reshape((positions, heads, 3, HEAD))?;
                let of = |index: usize| x.i((.., .., index))?.transpose(0, 1)?.contiguous();
                [of(0)?, of(1)?, of(2)?]
            }
        })
    }

    fn forward(&self, x: &Tensor, softmax: Softmax) -> Result<Tensor> {
        let [q, k, v] = self.split(&self.qkv.forward(x)?)?;
        let weights = softmax(&q.matmul(&k.t()?)?)?;
        self.output.forward(&weights.matmul(&v)?.transpose(0, 1)?.reshape((x.dim(0)?, WIDTH))?)
    }
}

fn audited(model: &impl Model, output: Result<Tensor>) -> Audit {
    let loss = output.and_then(|output| output.sqr()?.mean_all()).expect("a loss");
    audit(model, &loss).expect("an audit")
}

fn rows<'a>(audit: &'a Audit, path: &str) -> &'a [Range<usize>] {
    &audit.variables().iter().find(|variable| variable.paths[0] == path).expect("a variable").cut_rows
}

#[test]
fn queries_and_keys_behind_a_cut_are_named() {
    let cases: [(Layout, &[Range<usize>], &str); 3] = [
        (Layout::Parts, &[0..16], "Rows 0..16 of the 24 of \"qkv.weight\" have no gradient at all."),
        (Layout::Grouped, &[0..12], "Rows 0..12 of the 16 of \"qkv.weight\" have no gradient at all."),
        (
            Layout::ByHead,
            &[0..8, 12..20],
            "Rows 0..8 (and so on, 2 times) of the 24 of \"qkv.weight\" have no gradient at all.",
        ),
    ];
    let x = random(3, &[5, WIDTH], DType::F32, CPU);
    for (layout, expected, remark) in cases {
        let attention = Attention::new(layout);
        let cut = audited(&attention, attention.forward(&x, ops::softmax_last_dim));
        assert!(
            cut.variables().iter().all(|variable| matches!(variable.reach, Reach::Gradient { .. })),
            "{cut}"
        );
        assert_eq!(rows(&cut, "qkv.weight"), expected, "{layout:?}\n{cut}");
        assert_eq!(cut.partly_cut().collect::<Vec<_>>(), ["qkv.weight"]);
        let text = cut.to_string();
        assert!(text.contains(remark), "no {remark:?} in\n{text}");
        names_what_cuts(text.lines().last().expect("a line"));

        let whole = audited(&attention, attention.forward(&x, healthy));
        assert_eq!(
            (whole.partly_cut().count(), whole.to_string().lines().count()),
            (0, 3),
            "{layout:?}\n{whole}"
        );
    }
}

/// The matrix that is multiplied with is a copy of the variable then.
#[test]
fn rows_are_found_where_the_weight_is_cast() {
    let x = random(3, &[5, WIDTH], DType::BF16, CPU);
    let attention = Attention::new(Layout::Parts);
    let cast = |softmax| {
        let narrow =
            |layer: &Linear| layer.weight().to_dtype(DType::BF16).map(|weight| Linear::new(weight, None));
        Attention { qkv: narrow(&attention.qkv)?, output: narrow(&attention.output)?, layout: Layout::Parts }
            .forward(&x, softmax)?
            .to_dtype(DType::F32)
    };
    assert_eq!(rows(&audited(&attention, cast(ops::softmax_last_dim)), "qkv.weight"), [0..16]);
    assert_eq!(audited(&attention, cast(healthy)).partly_cut().count(), 0);
}

/// Two positions of four, and one half of the tokens: rows without a gradient by right. The matrices of other
/// layers have the same shape.
struct Lookup {
    tokens: Embedding,
    positions: Embedding,
    same_shape: Linear,
}
model!(Lookup { tokens, positions, same_shape });

#[test]
fn embeddings_are_not_accused() {
    let table = |seed| Embedding::new(trained(seed, &[16, WIDTH]), WIDTH);
    let model = Lookup { tokens: table(1), positions: table(2), same_shape: linear(3, 16, WIDTH) };
    let tokens = Tensor::new(&[8u32, 9, 10, 11, 12, 13, 14, 15], CPU).expect("tokens");
    let places = Tensor::arange(0u32, 8, CPU).expect("positions");
    let x = model.tokens.forward(&tokens).and_then(|x| x + model.positions.forward(&places)?);
    let found = audited(&model, x.and_then(|x| model.same_shape.forward(&x)));
    assert_eq!((found.partly_cut().count(), found.unreached().count()), (0, 0), "{found}");
}

/// Outputs that a ReLU switches off lie anywhere, and a row or two at an end are no part.
#[test]
fn outputs_that_happen_to_have_no_influence_are_not_accused() {
    let x = random(4, &[3, WIDTH], DType::F32, CPU);
    for dead in [&[0usize, 1, 2][..], &[1, 2, 3, 4], &[0, 1, 2, 3, 9], &[3, 7, 11], &[0]] {
        let layer = linear(5, 12, WIDTH);
        let gates: Vec<f32> = (0..12).map(|row| if dead.contains(&row) { 0.0 } else { 1.0 }).collect();
        let gates = Tensor::new(gates, CPU).expect("gates");
        let found = audited(&layer, layer.forward(&x).and_then(|x| x.broadcast_mul(&gates)));
        assert_eq!(found.partly_cut().count(), 0, "{dead:?}\n{found}");
    }
}

struct Shown {
    first: Var,
    second: Var,
}
model!(Shown { first, .. });

/// What a model leaves out has no path: the audit has its shape and dtype, and says what to do.
#[test]
fn a_variable_that_the_model_leaves_out_is_told_with_what_to_do() {
    let model = Shown { first: var(&tensor(1, &[2], DType::F32)), second: var(&tensor(2, &[2], DType::F32)) };
    let found = audited(&model, model.first.as_tensor() * model.second.as_tensor());
    assert_eq!(found.outside(), [(vec![2], optimisers::DType::F32)]);
    let text = found.to_string();
    assert!(
        text.contains("does not show: [2] of F32")
            && text.contains("name the field in the struct's `model!`"),
        "{text}"
    );
}
