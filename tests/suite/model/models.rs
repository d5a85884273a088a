//! What is trained, and under which path.

use std::collections::{BTreeMap, HashMap};
use std::rc::Rc;
use std::sync::Arc;

use candle_core::backprop::GradStore;
use candle_core::{DType, Device, Tensor, Var};
use candle_nn::{
    BatchNorm, Conv1d, Conv1dConfig, Conv2d, Conv2dConfig, ConvTranspose1d, ConvTranspose1dConfig,
    ConvTranspose2d, ConvTranspose2dConfig, Embedding, LayerNorm, Linear, PReLU, RmsNorm, VarMap,
};
use optimisers::{
    Adam, ClipGlobalNorm, Descent, MixedPrecision, Model, OptimiserChain, Parameter, Status, Visitor, model,
    setup, setup_with, update,
};

use support::common::{Grads, Vars, bits, random, values, var};

pub(crate) const CPU: &Device = &Device::Cpu;

pub(crate) fn plain(shape: &[usize]) -> Tensor {
    random(1, shape, DType::F32, CPU)
}

/// A tensor that is a variable, as layers hold them.
pub(crate) fn trained(shape: &[usize]) -> Tensor {
    var(&plain(shape)).as_tensor().clone()
}

pub(crate) fn of(values: &[f64], dtype: DType) -> Tensor {
    Tensor::new(values, CPU)
        .and_then(|tensor| tensor.to_dtype(dtype))
        .expect("a tensor")
}

pub(crate) fn integers() -> Var {
    Var::from_tensor(&Tensor::new(&[1u32, 2], CPU).expect("a tensor")).expect("a variable")
}

pub(crate) fn var_map(variables: impl IntoIterator<Item = (String, Var)>) -> VarMap {
    let map = VarMap::new();
    map.data().lock().expect("the map").extend(variables);
    map
}

/// All that a model shows, with copies of the values.
fn shown(model: &dyn Model) -> Vec<(String, Tensor, Tensor)> {
    let mut shown = Vec::new();
    model.visit(&mut Visitor::new(&mut |path, tensor| {
        shown.push((path.to_string(), tensor.clone(), tensor.copy().expect("a copy")))
    }));
    shown
}

/// The paths of the leaves; an update must move what is there, each variable once, and nothing else.
fn leaves(model: &dyn Model) -> Vec<String> {
    let mut state = match setup(Descent::new(1.0), model) {
        Ok(state) => state,
        Err(error)
            if error
                .to_string()
                .starts_with("the model has no trainable floating-point variable") =>
        {
            return Vec::new();
        }
        Err(error) => panic!("{error}"),
    };
    let paths: Vec<String> = state.leaves().map(|leaf| leaf.path().to_string()).collect();
    let before = shown(model);
    let is_leaf = |path: &String| paths.contains(path);
    let grads: Grads = before
        .iter()
        .filter(|(path, ..)| is_leaf(path))
        .map(|(path, x, _)| (path.clone(), x.ones_like().expect("ones")))
        .collect();
    let outcome = update(&mut state, model, &grads).expect("an update");
    assert_eq!(
        (outcome.status, outcome.applied),
        (Status::Stepped, paths.len()),
        "{paths:?}"
    );
    for (path, x, old) in before {
        let expected = if is_leaf(&path) {
            (old - 1.0).expect("a step")
        } else {
            old
        };
        assert_eq!(bits(&x), bits(&expected), "{path}");
    }
    paths
}

fn check(rows: &[(Box<dyn Model + '_>, &[&str])]) {
    for (i, (model, expected)) in rows.iter().enumerate() {
        assert_eq!(leaves(&**model), *expected, "row {i}");
    }
}

#[test]
fn layers_show_their_variables() {
    let (weight, square, both) = (&["weight"][..], &[3, 3][..], &["bias", "weight"][..]);
    let statistics = || trained(&[3]);
    let (tensor, cubic, quartic) = (
        || trained(&[3]),
        || trained(&[3, 3, 2]),
        || trained(&[3, 3, 2, 2]),
    );
    check(&[
        (Box::new(var(&plain(square))), &[""]),
        (Box::new(tensor()), &[""]),
        (Box::new(plain(square)), &[]),
        (Box::new((plain(&[2]), tensor(), integers())), &["1"]),
        (Box::new(Linear::new(trained(square), Some(tensor()))), both),
        (Box::new(Linear::new(trained(square), None)), weight),
        (Box::new(Linear::new(plain(square), Some(tensor()))), &["bias"]),
        (Box::new(Linear::new(plain(square), None)), &[]),
        (Box::new(Embedding::new(trained(square), 3)), weight),
        (Box::new(LayerNorm::new(tensor(), tensor(), 1e-5)), both),
        (Box::new(LayerNorm::new_no_bias(tensor(), 1e-5)), weight),
        (Box::new(RmsNorm::new(tensor(), 1e-5)), weight),
        (
            Box::new(Conv1d::new(cubic(), Some(tensor()), Conv1dConfig::default())),
            both,
        ),
        (
            Box::new(Conv1d::new(cubic(), None, Conv1dConfig::default())),
            weight,
        ),
        (
            Box::new(Conv2d::new(quartic(), Some(tensor()), Conv2dConfig::default())),
            both,
        ),
        (
            Box::new(Conv2d::new(quartic(), None, Conv2dConfig::default())),
            weight,
        ),
        (
            Box::new(ConvTranspose1d::new(
                cubic(),
                Some(tensor()),
                ConvTranspose1dConfig::default(),
            )),
            both,
        ),
        (
            Box::new(ConvTranspose1d::new(
                cubic(),
                None,
                ConvTranspose1dConfig::default(),
            )),
            weight,
        ),
        (
            Box::new(ConvTranspose2d::new(
                quartic(),
                Some(tensor()),
                ConvTranspose2dConfig::default(),
            )),
            both,
        ),
        (
            Box::new(ConvTranspose2d::new(
                quartic(),
                None,
                ConvTranspose2dConfig::default(),
            )),
            weight,
        ),
        (
            Box::new(
                BatchNorm::new(
                    3,
                    statistics(),
                    plain(&[3]).sqr().unwrap(),
                    tensor(),
                    tensor(),
                    1e-5,
                )
                .unwrap(),
            ),
            both,
        ),
        (
            Box::new(BatchNorm::new_no_bias(3, statistics(), plain(&[3]).sqr().unwrap(), 1e-5).unwrap()),
            &[],
        ),
        (Box::new(PReLU::new(tensor(), false)), weight),
    ]);
}

#[test]
fn containers_extend_the_path() {
    let v = || var(&plain(&[2]));
    let linear = || Linear::new(trained(&[2, 2]), None);
    let mut own = v();
    let (slice, two) = ([v(), v()], &["0", "1"][..]);
    check(&[
        (Box::new(&slice[1..]), &["0"]),
        (Box::new(&mut own), &[""]),
        (Box::new(vec![v(), v()].into_boxed_slice()), two),
        (Box::new(vec![Some(v()), None, Some(v())]), &["0", "2"]),
        (Box::new(Vec::<Var>::new()), &[]),
        (
            Box::new([(); 11].map(|()| v())),
            &["0", "1", "10", "2", "3", "4", "5", "6", "7", "8", "9"],
        ),
        (Box::new((v(),)), &["0"]),
        (
            Box::new((
                v(),
                linear(),
                [v()],
                plain(&[2]),
                Some(v()),
                None::<Var>,
                vec![linear()],
                v(),
            )),
            &["0", "1.weight", "2.0", "4", "6.0.weight", "7"],
        ),
        (Box::new(Some(linear())), &["weight"]),
        (Box::new(None::<Linear>), &[]),
        (
            Box::new((Box::new(v()), Arc::new(linear()), Rc::new([v()]))),
            &["0", "1.weight", "2.0"],
        ),
        (
            Box::new(vec![Box::new(v()) as Box<dyn Model>, Box::new(linear())]),
            &["0", "1.weight"],
        ),
        (
            Box::new(HashMap::from([("b", linear()), ("a", linear())])),
            &["a.weight", "b.weight"],
        ),
        (
            Box::new(HashMap::from([("c".to_string(), vec![v(), v()])])),
            &["c.0", "c.1"],
        ),
        (Box::new(BTreeMap::from([("c.d", v()), ("", v())])), &["", "c.d"]),
        (
            Box::new(var_map([
                ("z.bias".to_string(), v()),
                ("count".to_string(), integers()),
                ("a".to_string(), v()),
            ])),
            &["a", "z.bias"],
        ),
        (
            Box::new((var_map([("x".to_string(), v())]), VarMap::new())),
            &["0.x"],
        ),
    ]);
}

struct Block {
    attention: Linear,
    heads: usize,
    feed_forward: Vec<Linear>,
}
model!(Block {
    attention,
    feed_forward,
    ..
});

struct Classifier<E, H> {
    encoder: Vec<E>,
    head: H,
}
model!([E: Model, H: Model] Classifier<E, H> { encoder, head, });

struct Borrowed<'a, M, const N: usize> {
    parts: &'a [M; N],
}
model!(['a, M: Model, const N: usize] Borrowed<'a, M, N> { parts });

struct Nothing;
model!(Nothing {});

struct Keywords {
    r#type: Linear,
    r#match: Vec<Linear>,
    r#plain: Linear,
}
model!(Keywords {
    r#type,
    r#match,
    r#plain
});

#[test]
fn structs_show_their_fields() {
    let linear = || Linear::new(trained(&[2, 2]), Some(trained(&[2])));
    let bare = || Linear::new(trained(&[2, 2]), None);
    let block = || Block {
        attention: bare(),
        heads: 4,
        feed_forward: vec![bare(), linear()],
    };
    assert_eq!(block().heads, 4);
    let parts = [bare(), bare()];
    let of_block = [
        "attention.weight",
        "feed_forward.0.weight",
        "feed_forward.1.bias",
        "feed_forward.1.weight",
    ];
    let nested: Vec<String> = of_block
        .iter()
        .map(|path| format!("encoder.0.{path}"))
        .chain(["head.bias".into(), "head.weight".into()])
        .collect();
    check(&[
        (Box::new(block()), &of_block),
        (
            Box::new(Classifier {
                encoder: vec![bare(), bare()],
                head: None::<Linear>,
            }),
            &["encoder.0.weight", "encoder.1.weight"],
        ),
        (
            Box::new(Classifier {
                encoder: vec![block()],
                head: linear(),
            }),
            &nested.iter().map(String::as_str).collect::<Vec<_>>(),
        ),
        (
            Box::new(Borrowed { parts: &parts }),
            &["parts.0.weight", "parts.1.weight"],
        ),
        (Box::new(Nothing), &[]),
        (
            Box::new(Keywords {
                r#type: bare(),
                r#match: vec![bare()],
                plain: bare(),
            }),
            &["match.0.weight", "plain.weight", "type.weight"],
        ),
    ]);
}

/// The gradients of the sum of all squares, 2x, as candle finds them.
pub(crate) fn squares<'v>(variables: impl IntoIterator<Item = &'v Var>) -> GradStore {
    let square = |x: &Var| {
        x.to_dtype(DType::F64)
            .and_then(|x| x.sqr()?.sum_all())
            .expect("a square")
    };
    let total = variables
        .into_iter()
        .map(square)
        .reduce(|a, b| (a + b).expect("a sum"));
    total.expect("a variable").backward().expect("gradients")
}

/// Running statistics in a `VarMap`, and the base of a LoRA layer: no state, no complaint, no bit moves, and
/// no share in the norm.
#[test]
fn what_is_left_out_costs_nothing() {
    for (kept, left_out) in [
        (["bn.weight", "fc.bias"], ["bn.running_mean", "bn.running_var"]),
        (["l.a", "l.b"], ["l.base", "l.base_bias"]),
    ] {
        let sizes = [5, 7].into_iter().chain([1000, 3]);
        let names = kept.iter().chain(&left_out);
        let model: Vars = names
            .zip(sizes)
            .map(|(name, size)| {
                (
                    name.to_string(),
                    var(&random(size as u64, &[size], DType::BF16, CPU)),
                )
            })
            .collect();
        let rule = MixedPrecision::new(
            DType::F32,
            OptimiserChain::new((ClipGlobalNorm::new(1.0), Adam::new(0.1))),
        );
        let mut asked = Vec::new();
        let choose = |path: &str, x: Parameter<'_>| {
            asked.push((path.to_string(), x.elem_count()));
            kept.contains(&path).then(|| rule.clone())
        };
        let map = var_map(model.clone());
        let mut state = setup_with(&map, choose).unwrap();
        assert_eq!(
            asked,
            model
                .iter()
                .map(|(path, x)| (path.clone(), x.elem_count()))
                .collect::<Vec<_>>(),
            "in sorted order"
        );
        assert_eq!(state.leaves().map(|leaf| leaf.path()).collect::<Vec<_>>(), kept);
        assert_eq!(state.bytes(), 3 * 4 * (5 + 7), "master, m and v in f32");
        assert!(left_out.iter().all(|path| state.leaf(path).is_none()));

        let before: Vec<_> = left_out.iter().map(|&path| bits(&model[path])).collect();
        let norm = kept
            .iter()
            .flat_map(|&path| values(&model[path]))
            .map(|x| 4.0 * x * x)
            .sum::<f64>()
            .sqrt();
        let by_path: Grads = model
            .iter()
            .map(|(path, x)| (path.clone(), (x.to_dtype(DType::F64).unwrap() * 2.0).unwrap()))
            .collect();
        let first = update(&mut state, &map, &by_path).unwrap();
        assert!(
            (first.global_norm.unwrap() / norm - 1.0).abs() < 1e-12,
            "{first:?} for {norm}"
        );
        for outcome in [first, update(&mut state, &map, &squares(model.values())).unwrap()] {
            assert_eq!(
                (
                    outcome.status,
                    outcome.applied,
                    outcome.frozen,
                    outcome.without_gradient.len()
                ),
                (Status::Stepped, 2, 0, 0)
            );
        }
        assert_eq!(
            left_out
                .iter()
                .map(|&path| bits(&model[path]))
                .collect::<Vec<_>>(),
            before
        );
    }
}
