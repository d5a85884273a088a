//! Layers that compute in low precision with parameters in F32.

use std::sync::atomic::{AtomicUsize, Ordering};

use candle_core::{DType, Device, Module, ModuleT, Tensor, Var};
use candle_nn::{
    BatchNorm, Conv1d, Conv2d, Embedding, LayerNorm, Linear, VarBuilder, VarMap, batch_norm,
    conv_transpose1d, conv_transpose2d, conv1d, conv2d, embedding, layer_norm_no_bias, linear,
    linear_no_bias, loss::mse,
};
use optimisers::{AdamW, Autocast, AutocastLayer, ErrorKind, LossScaler, Status, Update, setup, trainables};

use crate::model::models::{CPU, of};
use crate::training::precision::{REFUSED, dtypes, policy};
use support::common::{bits, devices, is_kind, logged, random, says, values, var};

fn autocast(dtype: DType) -> Autocast {
    Autocast::new(dtype).expect("autocast")
}

fn f32_builder(variables: &VarMap, device: &Device) -> VarBuilder<'static> {
    VarBuilder::from_varmap(variables, DType::F32, device)
}

fn get(variables: &VarMap, path: &str) -> Tensor {
    trainables(variables)
        .expect("variables")
        .remove(path)
        .expect("the path")
}

/// Output and gradients of a layer have the bits of conversions by hand, and the gradients are F32.
#[test]
fn a_layer_has_the_bits_of_conversions_by_hand() {
    for (device, dtype) in devices()
        .into_iter()
        .flat_map(|device| [DType::BF16, DType::F16].map(|dtype| (device.clone(), dtype)))
    {
        let variables = VarMap::new();
        let layer = autocast(dtype)
            .layer(f32_builder(&variables, &device).pp("a").pp("fc"), |builder| {
                linear(6, 4, builder)
            })
            .expect("a layer");
        let (weight, bias) = (get(&variables, "a.fc.weight"), get(&variables, "a.fc.bias"));
        let by_hand = |x: &Tensor| {
            let layer = Linear::new(weight.to_dtype(dtype)?, Some(bias.to_dtype(dtype)?));
            layer.forward(&x.to_dtype(dtype)?)?.to_dtype(x.dtype())
        };
        for outside in [DType::F32, dtype, DType::F64] {
            let input = var(&random(5, &[3, 6], outside, &device));
            let run = |module: &dyn Module| {
                let output = module.forward(input.as_tensor()).expect("an output");
                let gradients = output
                    .to_dtype(DType::F32)
                    .and_then(|y| y.sqr()?.sum_all()?.backward())
                    .expect("gradients");
                let of = |x: &Tensor| {
                    gradients
                        .get(x)
                        .map(|gradient| (gradient.dtype(), bits(gradient)))
                        .expect("a gradient")
                };
                (output.dtype(), bits(&output), [&weight, &bias, &input].map(of))
            };
            let got = run(&layer);
            assert_eq!(got, run(&by_hand), "{dtype:?} in {outside:?}");
            assert_eq!(
                (got.0, [0, 1, 2].map(|i| got.2[i].0)),
                (outside, [DType::F32, DType::F32, outside])
            );
        }
        assert_eq!(layer.computes_in(), dtype);
    }
}

/// The constructor is called in each forward pass, and makes its variables only once.
#[test]
fn variables_are_made_once_and_read_from_then_on() {
    static CALLS: AtomicUsize = AtomicUsize::new(0);
    let variables = VarMap::new();
    let build = |builder: VarBuilder<'_>| {
        CALLS.fetch_add(1, Ordering::Relaxed);
        linear(3, 2, builder)
    };
    let layer = autocast(DType::BF16)
        .layer(f32_builder(&variables, CPU), build)
        .expect("a layer");
    assert_eq!(CALLS.load(Ordering::Relaxed), 1);
    let (ids, before) = (
        trainables(&variables).expect("variables"),
        variables.all_vars().iter().map(|x| bits(x)).collect::<Vec<_>>(),
    );
    let input = random(1, &[2, 3], DType::F32, CPU);
    let first = layer.forward(&input).expect("an output");
    let calls = CALLS.load(Ordering::Relaxed);
    assert_eq!(bits(&layer.forward(&input).expect("an output")), bits(&first));
    assert_eq!(CALLS.load(Ordering::Relaxed), calls + 1);
    assert_eq!(
        variables.all_vars().iter().map(|x| bits(x)).collect::<Vec<_>>(),
        before
    );
    assert!(
        trainables(&variables)
            .expect("variables")
            .iter()
            .all(|(path, x)| ids[path].id() == x.id())
    );

    // The values are those of the moment, also when the map itself has become another.
    variables.data().lock().expect("the map").clear();
    let weight = &ids["weight"];
    Var::from_tensor(weight)
        .and_then(|x| x.set(&x.zeros_like()?))
        .expect("zeros");
    assert_eq!(
        values(&layer.forward(&input).expect("an output"))[..2],
        values(&ids["bias"].to_dtype(DType::BF16).expect("rounded"))[..]
    );
    assert!(variables.all_vars().is_empty());
}

#[test]
fn linear_and_convolution_layers_are_listed_and_others_can_be() {
    let variables = VarMap::new();
    let root = f32_builder(&variables, CPU);
    let computes_in = |autocast: &Autocast| {
        let layers: [AutocastLayer; 7] = [
            autocast
                .layer(root.pp("a"), |builder| linear(2, 2, builder))
                .expect("a layer"),
            autocast
                .layer(root.pp("b"), |builder| {
                    conv1d(2, 2, 1, Default::default(), builder)
                })
                .expect("a layer"),
            autocast
                .layer(root.pp("c"), |builder| {
                    conv2d(2, 2, 1, Default::default(), builder)
                })
                .expect("a layer"),
            autocast
                .layer(root.pp("d"), |builder| {
                    conv_transpose1d(2, 2, 1, Default::default(), builder)
                })
                .expect("a layer"),
            autocast
                .layer(root.pp("e"), |builder| {
                    conv_transpose2d(2, 2, 1, Default::default(), builder)
                })
                .expect("a layer"),
            autocast
                .layer(root.pp("f"), |builder| layer_norm_no_bias(2, 1e-5, builder))
                .expect("a layer"),
            autocast
                .layer(root.pp("g"), |builder| embedding(2, 2, builder))
                .expect("a layer"),
        ];
        layers.map(|layer| layer.computes_in())
    };
    let (low, high) = (DType::F16, DType::F32);
    assert_eq!(computes_in(&autocast(low)), [low, low, low, low, low, high, high]);
    let other = autocast(low)
        .with::<Embedding>()
        .with::<LayerNorm>()
        .with::<LayerNorm>()
        .without::<Conv1d>()
        .without::<LayerNorm>();
    assert_eq!(computes_in(&other), [low, high, low, low, low, high, low]);
    assert_eq!(computes_in(&autocast(high)), [high; 7]);
    assert_eq!((other.dtype(), variables.all_vars().len()), (low, 12));
    assert!(variables.all_vars().iter().all(|x| x.dtype() == DType::F32));
    for dtype in REFUSED.into_iter().chain([DType::F64]) {
        let error = Autocast::new(dtype).expect_err("refused");
        assert_eq!(
            (error.kind(), error.got()),
            (ErrorKind::Argument, Some(&*format!("{dtype:?}"))),
            "{error}"
        );
    }
}

/// What is not listed gets F32 and gives back what it was given; tokens come out in F32.
#[test]
fn other_layers_compute_in_f32() {
    let variables = VarMap::new();
    let root = f32_builder(&variables, CPU);
    let norm = autocast(DType::BF16)
        .layer(root.pp("norm"), |builder| layer_norm_no_bias(4, 1e-5, builder))
        .expect("a layer");
    let input = random(3, &[2, 4], DType::BF16, CPU);
    let expected = LayerNorm::new_no_bias(get(&variables, "norm.weight"), 1e-5)
        .forward(&input.to_dtype(DType::F32).expect("widened"));
    let output = norm.forward(&input).expect("an output");
    assert_eq!(output.dtype(), DType::BF16);
    assert_eq!(
        bits(&output),
        bits(&expected.and_then(|y| y.to_dtype(DType::BF16)).expect("an output"))
    );

    for autocast in [autocast(DType::BF16), autocast(DType::BF16).with::<Embedding>()] {
        let tokens = autocast
            .layer(root.pp("tokens"), |builder| embedding(5, 2, builder))
            .expect("a layer");
        let output = tokens
            .forward(&Tensor::new(&[1u32, 3], CPU).expect("tokens"))
            .expect("an output");
        assert_eq!(output.dtype(), DType::F32);
        let weight = get(&variables, "tokens.weight")
            .to_dtype(tokens.computes_in())
            .and_then(|x| x.get(3))
            .expect("a row");
        assert_eq!(bits(&output.get(1).expect("a row")), bits(&weight));
    }
}

struct Normed {
    layer: Linear,
    norm: BatchNorm,
}

impl Normed {
    fn new(builder: VarBuilder) -> candle_core::Result<Self> {
        Ok(Normed {
            layer: linear(2, 2, builder.pp("layer"))?,
            norm: batch_norm(2, 1e-5, builder.pp("norm"))?,
        })
    }
}

impl Module for Normed {
    fn forward(&self, x: &Tensor) -> candle_core::Result<Tensor> {
        self.norm.forward_t(&self.layer.forward(x)?, true)
    }
}

#[test]
fn running_statistics_are_refused_where_they_would_be_forgotten() {
    let root = |variables: &VarMap| f32_builder(variables, CPU).pp("block");
    let listed = autocast(DType::BF16).with::<Normed>();
    let error = listed
        .layer(root(&VarMap::new()), |builder| Normed::new(builder))
        .expect_err("refused");
    assert_eq!(
        (error.kind(), error.path()),
        (ErrorKind::Unsupported, Some("block.norm.running_mean")),
        "{error}"
    );
    is_kind(
        &error,
        ErrorKind::Unsupported,
        &["a running statistic", "Normed out of the list"],
    );
    // In F32 the layer is made once, and its statistics move.
    let variables = VarMap::new();
    let layer = autocast(DType::BF16)
        .layer(root(&variables), |builder| Normed::new(builder))
        .expect("a layer");
    layer
        .forward(
            &of(&[1.0, 2.0, 3.0, 5.0], DType::F32)
                .reshape((2, 2))
                .expect("an input"),
        )
        .expect("an output");
    assert!(
        values(&get(&variables, "block.norm.running_var"))
            .iter()
            .all(|x| *x != 1.0)
    );
    let trained: Vec<String> = trainables(&layer).expect("variables").into_keys().collect();
    assert_eq!(
        trained,
        ["layer.bias", "layer.weight", "norm.bias", "norm.weight"]
    );
}

#[test]
fn parameters_are_f32_or_refused() {
    let variables = VarMap::new();
    let build = |builder: VarBuilder<'_>| linear_no_bias(2, 2, builder);
    for dtype in [DType::BF16, DType::F64] {
        let builder = VarBuilder::from_varmap(&variables, dtype, CPU);
        autocast(DType::BF16)
            .layer(builder.pp(format!("new{dtype:?}")), build)
            .expect("a layer");
        let _other = builder.get((2, 2), "old.weight");
        let error = autocast(DType::BF16)
            .layer(builder.pp("old"), build)
            .expect_err("refused");
        let facts = (error.kind(), error.path(), error.got(), error.expected());
        let got = format!("{dtype:?}");
        assert_eq!(
            facts,
            (ErrorKind::Tensor, Some("old.weight"), Some(&*got), Some("F32")),
            "{error}"
        );
        variables.data().lock().expect("the map").remove("old.weight");
    }
    assert_eq!(
        dtypes(&variables),
        [
            ("newBF16.weight".to_string(), DType::F32),
            ("newF64.weight".to_string(), DType::F32)
        ]
    );
    let low = policy(&[("*", DType::BF16)]).builder(&variables, CPU);
    let error = autocast(DType::F32)
        .layer(low.pp("low"), build)
        .expect_err("refused");
    assert_eq!(
        (error.kind(), error.got()),
        (ErrorKind::Tensor, Some("BF16")),
        "{error}"
    );
    let other = autocast(DType::BF16).layer(f32_builder(&variables, CPU).pp("newF64"), |builder| {
        linear(3, 3, builder)
    });
    says(
        &other.expect_err("another shape"),
        &["newF64.weight", "[3, 3]", "[2, 2]"],
    );
}

/// A constructor with a mind of its own is found out, and makes no variables behind one's back.
#[test]
fn constructors_must_ask_for_the_same_each_time() {
    static CALLS: AtomicUsize = AtomicUsize::new(0);
    let variables = VarMap::new();
    let build = |builder: VarBuilder<'_>| {
        let name = if CALLS.fetch_add(1, Ordering::Relaxed) == 0 {
            "first"
        } else {
            "other"
        };
        linear_no_bias(2, 2, builder.pp(name))
    };
    let layer = autocast(DType::BF16)
        .layer(f32_builder(&variables, CPU).pp("x"), build)
        .expect("a layer");
    let error = layer
        .forward(&of(&[1.0, 2.0], DType::F32).unsqueeze(0).expect("an input"))
        .expect_err("refused")
        .to_string();
    assert!(
        error.starts_with(r#"parameter "x.other.weight": the constructor of "#),
        "{error}"
    );
    assert!(
        error.contains("requests this tensor in a forward pass")
            && error.contains("expected one of: x.first.weight"),
        "{error}"
    );
    assert_eq!(variables.all_vars().len(), 1);
}

/// A constructor that looks what there is finds the same in each forward pass, also of what it makes itself.
#[test]
fn constructors_find_what_they_found_at_first() {
    let variables = VarMap::new();
    let builder = f32_builder(&variables, CPU).pp("x");
    let _mark = builder.get(1, "mark").expect("a variable");
    let build = |builder: VarBuilder<'_>| {
        let marked = if builder.contains_tensor("mark") {
            "marked"
        } else {
            "unmarked"
        };
        let name = if builder.contains_tensor("new.weight") {
            marked
        } else {
            "new"
        };
        linear_no_bias(2, 2, builder.pp(name))?;
        linear_no_bias(2, 2, builder.pp(marked))
    };
    let layer = autocast(DType::BF16).layer(builder, build).expect("a layer");
    layer
        .forward(&random(1, &[1, 2], DType::F32, CPU))
        .expect("an output");
    assert_eq!(
        trainables(&layer)
            .expect("variables")
            .into_keys()
            .collect::<Vec<_>>(),
        ["marked.weight", "new.weight"]
    );
    fn is_shared<T: Send + Sync>(_: &T) {}
    is_shared(&layer);
}

/// candle's CPU multiplies no BF16 matrices inside a convolution. A transposed one gets through the forward
/// pass and fails in the backward pass.
#[test]
fn a_layer_without_kernel_computes_in_f32_and_says_so_once() {
    let variables = VarMap::new();
    let root = f32_builder(&variables, CPU);
    let autocast = autocast(DType::BF16);
    let layers = [
        autocast
            .layer(root.pp("plain"), |builder| {
                conv2d(2, 3, 3, Default::default(), builder)
            })
            .expect("a layer"),
        autocast
            .layer(root.pp("transposed"), |builder| {
                conv_transpose2d(2, 3, 3, Default::default(), builder)
            })
            .expect("a layer"),
    ];
    let input = random(7, &[2, 2, 5, 5], DType::F32, CPU);
    let by_hand = Conv2d::new(
        get(&variables, "plain.weight"),
        Some(get(&variables, "plain.bias")),
        Default::default(),
    );
    let ((), lines) = logged(|| {
        for layer in &layers {
            assert_eq!(layer.computes_in(), DType::BF16);
            for _ in 0..3 {
                let output = layer.forward(&input).expect("an output");
                output
                    .sum_all()
                    .and_then(|sum| sum.backward())
                    .expect("gradients");
                assert_eq!((layer.computes_in(), output.dtype()), (DType::F32, DType::F32));
            }
        }
    });
    assert_eq!(
        bits(&layers[0].forward(&input).expect("an output")),
        bits(&by_hand.forward(&input).expect("an output"))
    );
    for prefix in ["plain", "transposed"] {
        let mine: Vec<_> = lines
            .iter()
            .filter(|line| line.starts_with(&format!("\"{prefix}\"")))
            .collect();
        assert_eq!(mine.len(), 1, "{lines:?}");
        assert!(
            mine[0].contains("computes in F32, because BF16 does not work here")
                && mine[0].contains("matmul"),
            "{mine:?}"
        );
    }

    // An input that fits in no dtype says nothing about the dtype.
    let layer = autocast
        .layer(root.pp("fc"), |builder| linear(4, 2, builder))
        .expect("a layer");
    layer.forward(&input).expect_err("another width");
    layer
        .forward(&random(1, &[3, 4], DType::F32, CPU))
        .expect("an output");
    assert_eq!(layer.computes_in(), DType::BF16);
}

#[test]
fn layers_train_with_a_loss_scaler() {
    for (device, dtype) in devices()
        .into_iter()
        .flat_map(|device| [DType::F16, DType::BF16].map(|dtype| (device.clone(), dtype)))
    {
        let variables = VarMap::new();
        let (root, autocast) = (f32_builder(&variables, &device), autocast(dtype));
        let stem = autocast
            .layer(root.pp("stem"), |builder| {
                conv2d(1, 4, 3, Default::default(), builder)
            })
            .expect("a layer");
        let hidden = autocast
            .layer(root.pp("hidden"), |builder| linear(64, 16, builder))
            .expect("a layer");
        let norm = autocast
            .layer(root.pp("norm"), |builder| layer_norm_no_bias(16, 1e-5, builder))
            .expect("a layer");
        let output = autocast
            .layer(root.pp("output"), |builder| linear(16, 1, builder))
            .expect("a layer");
        let input = random(1, &[32, 1, 6, 6], DType::F32, &device);
        let targets = input
            .mean((1, 2, 3))
            .and_then(|x| (x * 4.0)?.unsqueeze(1))
            .expect("targets");
        let forward = || {
            let x = stem.forward(&input)?.relu()?.flatten_from(1)?;
            mse(
                &output.forward(&norm.forward(&hidden.forward(&x)?.relu()?)?)?,
                &targets,
            )
        };

        let mut state = setup(AdamW::new(1e-2), &variables).expect("a state");
        assert!(
            state
                .leaves()
                .all(|leaf| leaf.dtype() == DType::F32 && leaf.tensor_names() == ["m", "v"])
        );
        let mut scaler = LossScaler::dynamic();
        let (mut losses, mut steps) = (Vec::new(), 0);
        for _ in 0..60 {
            let loss = forward().expect("a loss");
            let gradients = scaler
                .scale(&loss)
                .and_then(|loss| Ok(loss.backward()?))
                .expect("gradients");
            for x in variables.all_vars() {
                assert_eq!(gradients.inner().get(&x).map(Tensor::dtype), Some(DType::F32));
            }
            let outcome = Update::new(&mut state)
                .scaler(&mut scaler)
                .apply(&variables, &gradients)
                .expect("an update");
            assert_eq!((outcome.without_gradient.len(), loss.dtype()), (0, DType::F32));
            steps += usize::from(outcome.status == Status::Stepped);
            losses.push(loss.to_scalar::<f32>().expect("a number"));
        }
        assert!(
            steps > 50 && losses[59] < 0.3 * losses[0],
            "{dtype:?}: {steps} steps, {losses:?}"
        );
    }
}

/// The layer itself is a model: its parameters in F32, under the names that the constructor gave them.
#[test]
fn a_layer_is_a_model() {
    let variables = VarMap::new();
    let root = f32_builder(&variables, CPU);
    let build = |builder: VarBuilder<'_>| linear(2, 2, builder.pp("inner"));
    let layers = vec![
        autocast(DType::BF16)
            .layer(root.pp("x").pp(0), build)
            .expect("a layer"),
        autocast(DType::F32).layer(root.clone(), build).expect("a layer"),
    ];
    let paths: Vec<String> = trainables(&layers).expect("variables").into_keys().collect();
    assert_eq!(
        paths,
        ["0.inner.bias", "0.inner.weight", "1.inner.bias", "1.inner.weight"]
    );
    assert_eq!(
        trainables(&layers).expect("variables")["0.inner.bias"].id(),
        get(&variables, "x.0.inner.bias").id()
    );
    let shown = format!("{:?}", layers[0]);
    assert!(
        shown.contains("x.0") && shown.contains("Linear") && shown.contains("BF16"),
        "{shown}"
    );
}
