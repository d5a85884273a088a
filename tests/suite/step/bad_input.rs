//! Bad input is refused with the facts and the remedy, and changes not one bit. Odd shapes and layouts are
//! not bad input.

use std::collections::BTreeMap;

use candle_core::{DType, Device, Tensor, Var};
use optimisers::{
    AccumGrad, Adam, AdamW, ClipGlobalNorm, ClipGrad, ClipNorm, Descent, Error, ErrorKind, Flow, Gradient,
    IntoOptimiser, MixedPrecision, Momentum, Muon, NonFinite, Optimiser, OptimiserChain, Parameter, Result,
    Rule, Slot, State, StateTree, Status, Update, WeightDecay, setup, setup_with, update,
};

use support::common::{
    Grads, Vars, bits, devices, engines, is_kind, not_finite, random, snapshot, values, var,
};

const SHAPE: ErrorKind = ErrorKind::Tensor;
const DTYPE: ErrorKind = ErrorKind::Tensor;

const CPU: &Device = &Device::Cpu;

fn model(leaves: usize) -> Vars {
    (0..leaves)
        .map(|i| {
            (
                format!("layer.{i:02}"),
                var(&random(i as u64, &[2, 3], DType::F32, CPU)),
            )
        })
        .collect()
}

fn gradients(model: &Vars, seed: u64) -> Grads {
    let leaf = |(i, (path, var)): (usize, (&String, &Var))| {
        (path.clone(), random(seed + i as u64, var.dims(), DType::F32, CPU))
    };
    model.iter().enumerate().map(leaf).collect()
}

/// The update fails with this kind of error, which contains the words, and left model and state as they were.
fn refused(model: &Vars, state: &mut StateTree, grads: &Grads, kind: ErrorKind, words: &[&str]) {
    for engine in engines() {
        let before = snapshot(model, state);
        let error = Update::new(state)
            .engine(engine)
            .apply(model, grads)
            .expect_err("an error");
        is_kind(&error, kind, words);
        assert!(snapshot(model, state) == before, "{error}: something changed");
    }
}

/// A stateful optimiser after one step, so that there is something to change.
fn started(optimiser: impl IntoOptimiser, model: &Vars) -> StateTree {
    let mut state = setup(optimiser, model).unwrap();
    update(&mut state, model, &gradients(model, 77)).unwrap();
    state
}

#[test]
fn gradients_that_do_not_fit() {
    let model = model(3);
    let zeros = |shape: &[usize], dtype| Tensor::zeros(shape, dtype, CPU).unwrap();
    let shape = |got: &str| format!("parameter \"layer.02\": the gradient has shape {got}, expected [2, 3]");
    let dtype =
        |got: &str| format!("parameter \"layer.02\": the gradient is {got}, expected F16, BF16, F32 or F64");
    let cases: [(&str, Tensor, ErrorKind, [&str; 2]); 6] = [
        (
            "layer.02",
            zeros(&[3, 2], DType::F32),
            SHAPE,
            [&shape("[3, 2]"), ""],
        ),
        ("layer.02", zeros(&[6], DType::F32), SHAPE, [&shape("[6]"), ""]),
        ("layer.02", zeros(&[], DType::F32), SHAPE, [&shape("[]"), ""]),
        ("layer.02", zeros(&[2, 3], DType::U32), DTYPE, [&dtype("U32"), ""]),
        ("layer.02", zeros(&[2, 3], DType::I64), DTYPE, [&dtype("I64"), ""]),
        (
            "layer.03",
            zeros(&[2, 3], DType::F32),
            ErrorKind::UnknownName,
            ["gradient of \"layer.03\"", "layer.00, layer.01, layer.02"],
        ),
    ];
    for (path, gradient, kind, words) in cases {
        for rule in support::common::optimisers() {
            let mut state = setup(rule, &model).unwrap();
            update(&mut state, &model, &gradients(&model, 5)).unwrap();
            let mut grads = gradients(&model, 1);
            grads.insert(path.to_string(), gradient.clone());
            refused(&model, &mut state, &grads, kind, &words);
        }
    }
}

#[test]
fn gradients_on_another_device() {
    let [cpu, other] = &devices()[..] else {
        return; // One device: no gradient can be elsewhere.
    };
    let model = model(3);
    let mut state = started(Adam::new(0.1), &model);
    let mut grads = gradients(&model, 1);
    let moved = grads["layer.02"].to_device(other).unwrap();
    grads.insert("layer.02".to_string(), moved);
    let words = [
        "parameter \"layer.02\": the gradient is on",
        "expected Cpu",
        "to_device",
    ];
    refused(&model, &mut state, &grads, ErrorKind::Tensor, &words);
    assert!(cpu.is_cpu());
}

#[test]
fn no_gradient_at_all() {
    let model = model(3);
    let mut state = started(OptimiserChain::new((AccumGrad::new(3), Adam::new(0.1))), &model);
    let words = [
        "any of the 3 parameters",
        "`audit`",
        "the loss depends on this model",
    ];
    refused(&model, &mut state, &Grads::new(), ErrorKind::NoGradient, &words);

    let before = snapshot(&model, &state);
    let elsewhere = Var::ones(2, DType::F32, CPU).unwrap();
    let error = update(
        &mut state,
        &model,
        &elsewhere.sum_all().unwrap().backward().unwrap(),
    )
    .unwrap_err();
    is_kind(&error, ErrorKind::NoGradient, &["any of the 3 parameters"]);
    assert!(snapshot(&model, &state) == before);
}

/// Chains that take a norm, for each answer to one that is not finite. Those with AccumGrad release on the
/// second call.
fn clipping(non_finite: NonFinite) -> Vec<(bool, Optimiser)> {
    let global = ClipGlobalNorm {
        non_finite,
        ..ClipGlobalNorm::new(0.5)
    };
    let leaf = |p| ClipNorm {
        non_finite,
        p,
        ..ClipNorm::new(0.5)
    };
    vec![
        (
            false,
            Optimiser::new(OptimiserChain::new((global.clone(), Adam::new(0.1)))),
        ),
        (
            false,
            Optimiser::new(OptimiserChain::new((leaf(2.0), Adam::new(0.1)))),
        ),
        (
            false,
            Optimiser::new(OptimiserChain::new((
                Momentum::new(0.1),
                leaf(1.0),
                WeightDecay::new(0.1),
                leaf(3.0),
            ))),
        ),
        (
            true,
            Optimiser::new(OptimiserChain::new((
                AccumGrad::new(2),
                global.clone(),
                Adam::new(0.1),
            ))),
        ),
        (
            true,
            Optimiser::new(MixedPrecision::new(
                DType::F64,
                OptimiserChain::new((AccumGrad::new(2), leaf(f64::INFINITY), Adam::new(0.1))),
            )),
        ),
    ]
}

#[test]
fn a_norm_that_is_not_finite_in_the_last_of_40_leaves() {
    let model = model(40);
    for poison in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
        let mut bad = gradients(&model, 3);
        bad.insert(
            "layer.39".to_string(),
            Tensor::new(&[[0f32, 1.0, 2.0], [3.0, 4.0, poison]], CPU).unwrap(),
        );
        for (_, optimiser) in clipping(NonFinite::Error) {
            let mut state = started(optimiser, &model);
            let words = [
                "parameter \"layer.39\"",
                "-norm of its gradient is",
                "this call has changed nothing",
                "`non_finite` of the clipping rule to Pass or Skip",
            ];
            refused(&model, &mut state, &bad, ErrorKind::NotFinite, &words);
        }
        for (windowed, optimiser) in clipping(NonFinite::Skip) {
            let mut state = started(optimiser, &model);
            for engine in engines() {
                let before = snapshot(&model, &state);
                let outcome = Update::new(&mut state)
                    .engine(engine)
                    .apply(&model, &bad)
                    .unwrap();
                assert_eq!(
                    (outcome.status, outcome.applied, outcome.accumulated),
                    (not_finite("layer.39"), 0, 0)
                );
                assert!(snapshot(&model, &state) == before);
            }
            // The window is where it was: this call ends it.
            let outcome = update(&mut state, &model, &gradients(&model, 4)).unwrap();
            assert_eq!(
                (outcome.status, outcome.applied),
                (Status::Stepped, 40),
                "window: {windowed}"
            );
            assert!(
                model
                    .values()
                    .all(|var| values(var).into_iter().all(f64::is_finite))
            );
        }
        let model = model_copy(&model);
        let pass = ClipGlobalNorm {
            non_finite: NonFinite::Pass,
            ..ClipGlobalNorm::new(0.5)
        };
        let mut state = setup(OptimiserChain::new((pass, Descent::new(1.0))), &model).unwrap();
        let before: Vec<Vec<f64>> = model.values().map(|x| values(x)).collect();
        assert_eq!(update(&mut state, &model, &bad).unwrap().applied, 40);
        // As torch's clip_grad_norm_ and Optimisers.jl have it: times ω/∞, or times NaN.
        for ((path, x), before) in model.iter().zip(before) {
            for (index, (now, before)) in values(x).into_iter().zip(before).enumerate() {
                let stays = poison.is_infinite() && (path != "layer.39" || index < 5);
                assert!(
                    if stays { now == before } else { now.is_nan() },
                    "{path}[{index}]: {now} after {before}"
                );
            }
        }
    }
}

fn model_copy(model: &Vars) -> Vars {
    model.iter().map(|(path, x)| (path.clone(), var(x))).collect()
}

#[test]
fn the_state_of_another_model() {
    let mine = model(3);
    let mut state = started(Adam::new(0.1), &mine);
    let before = snapshot(&mine, &state);
    let mut more = mine.clone();
    more.extend(model(4).into_iter().filter(|(path, _)| path == "layer.03"));
    let mut fewer = mine.clone();
    fewer.remove("layer.01");
    let cases: [(Vars, &[&str]); 3] = [
        (
            model_copy(&mine),
            &[
                "parameter \"layer.00\": it is not in this state",
                "another model",
                "set up a state",
            ],
        ),
        (
            more,
            &[
                "parameter \"layer.03\": it is not in this state",
                "added after `setup`",
            ],
        ),
        (
            fewer,
            &[
                "parameter \"layer.01\"",
                "but the model does not",
                "pass the model that `setup` saw",
            ],
        ),
    ];
    for (other, words) in cases {
        let theirs = snapshot(&other, &state);
        let error = update(&mut state, &other, &gradients(&mine, 2)).unwrap_err();
        is_kind(&error, ErrorKind::Model, words);
        assert!(
            snapshot(&mine, &state) == before && snapshot(&other, &state) == theirs,
            "{error}"
        );
    }
}

#[test]
fn hyper_parameters_out_of_range() {
    let optimisers: Vec<(Optimiser, &[&str])> = vec![
        (
            Optimiser::new(Descent::new(-0.1)),
            &["Descent: eta is -0.1, expected a finite number of 0 or more"],
        ),
        (Optimiser::new(Adam::new(f64::NAN)), &["Adam: eta is NaN"]),
        (Optimiser::new(AdamW::new(f64::INFINITY)), &["AdamW: eta is inf"]),
        (
            Optimiser::new(Adam {
                beta: (0.9, 1.0),
                ..Adam::default()
            }),
            &["Adam: beta is (0.9, 1), expected two numbers in [0, 1)"],
        ),
        (
            Optimiser::new(Adam {
                beta: (-0.1, 0.9),
                ..Adam::default()
            }),
            &["Adam: beta is (-0.1, 0.9)"],
        ),
        (
            Optimiser::new(Adam {
                epsilon: -1.0,
                ..Adam::default()
            }),
            &["Adam: epsilon is -1"],
        ),
        (
            Optimiser::new(Momentum {
                rho: 1.0,
                ..Momentum::default()
            }),
            &["Momentum: rho is 1, expected a number in [0, 1)"],
        ),
        (
            Optimiser::new(AccumGrad::new(0)),
            &["AccumGrad: n is 0, expected 1 or more"],
        ),
        (
            Optimiser::new(Muon {
                ns_steps: 101,
                ..Muon::default()
            }),
            &["Muon: ns_steps is 101, expected 100 or less"],
        ),
        (
            Optimiser::new(ClipGrad::new(0.0)),
            &["ClipGrad: delta is 0, expected a number above 0"],
        ),
        (Optimiser::new(ClipNorm::new(0.0)), &["ClipNorm: omega is 0"]),
        (
            Optimiser::new(ClipNorm {
                p: -1.0,
                ..ClipNorm::default()
            }),
            &["ClipNorm: p is -1"],
        ),
        (
            Optimiser::new(ClipGlobalNorm::new(f64::NAN)),
            &["ClipGlobalNorm: omega is NaN"],
        ),
        (
            Optimiser::new(OptimiserChain::new((
                Some(ClipGrad::new(1.0)),
                WeightDecay::new(-1.0),
            ))),
            &["WeightDecay: lambda is -1"],
        ),
        (
            Optimiser::new(MixedPrecision::new(
                DType::F32,
                OptimiserChain::new((AccumGrad::new(0), Adam::new(0.1))),
            )),
            &["AccumGrad: n is 0"],
        ),
        (
            Optimiser::new(MixedPrecision::new(DType::F16, Adam::new(0.1))),
            &["the dtype of the copy that MixedPrecision keeps is F16, expected F32 or F64"],
        ),
        (
            Optimiser::new(MixedPrecision::new(DType::BF16, Adam::new(0.1))),
            &["the dtype of the copy that MixedPrecision keeps is BF16"],
        ),
        (
            Optimiser::new(MixedPrecision::new(DType::U32, Adam::new(0.1))),
            &["the dtype of the copy that MixedPrecision keeps is U32"],
        ),
    ];
    let model = model(2);
    for (optimiser, words) in optimisers {
        is_kind(
            &setup(optimiser.clone(), &model).unwrap_err(),
            ErrorKind::Argument,
            words,
        );
        let error =
            setup_with(&model, |path, _| (path == "layer.01").then(|| optimiser.clone())).unwrap_err();
        is_kind(&error, ErrorKind::Argument, words);
        is_kind(&error, ErrorKind::Argument, &["parameter \"layer.01\""]);
    }
}

#[test]
fn models_without_parameters() {
    let integer = Var::from_tensor(&Tensor::new(&[1u32, 2], CPU).unwrap()).unwrap();
    for error in [
        setup(Adam::new(0.1), &Vars::new()).unwrap_err(),
        setup(Adam::new(0.1), &integer).unwrap_err(),
        setup(Adam::new(0.1), &Tensor::ones(2, DType::F32, CPU).unwrap()).unwrap_err(),
    ] {
        is_kind(
            &error,
            ErrorKind::Model,
            &["no trainable floating-point variable", "`Var`"],
        );
    }
    let error = setup_with(&model(2), |_, _| None::<Adam>).unwrap_err();
    is_kind(
        &error,
        ErrorKind::Model,
        &[
            "leaves out all 2 trainable variables of the model: layer.00, layer.01",
            "patterns",
        ],
    );
}

#[test]
fn variables_that_no_rule_can_train() {
    let eight = Var::from_tensor(
        &Tensor::ones(2, DType::F32, CPU)
            .unwrap()
            .to_dtype(DType::F8E4M3)
            .unwrap(),
    )
    .unwrap();
    let model = Vars::from([
        ("half".to_string(), eight),
        ("whole".to_string(), var(&random(1, &[2], DType::F32, CPU))),
    ]);
    is_kind(
        &setup(Adam::new(0.1), &model).unwrap_err(),
        DTYPE,
        &["parameter \"half\": it is F8E4M3", "setup_with"],
    );
    assert_eq!(
        setup_with(&model, |path, _| (path == "whole").then(Adam::default))
            .unwrap()
            .len(),
        1
    );
}

#[test]
fn two_variables_with_one_path() {
    let (a, b) = (
        var(&random(1, &[2], DType::F32, CPU)),
        var(&random(2, &[2], DType::F32, CPU)),
    );
    let twice = |second: &Var| -> BTreeMap<&str, Box<dyn optimisers::Model>> {
        BTreeMap::from([
            (
                "a",
                Box::new(BTreeMap::from([("b", a.clone())])) as Box<dyn optimisers::Model>,
            ),
            ("a.b", Box::new(second.clone())),
        ])
    };
    let error = setup(Adam::new(0.1), &twice(&b)).unwrap_err();
    is_kind(
        &error,
        ErrorKind::Model,
        &[
            "parameter \"a.b\": two variables of the model have this path",
            "rename one",
        ],
    );
    let state = setup(Adam::new(0.1), &twice(&a)).unwrap();
    assert_eq!(
        state
            .leaves()
            .map(|leaf| leaf.paths().count())
            .collect::<Vec<_>>(),
        [1],
        "the same variable twice is one leaf"
    );
}

/// What goes wrong, on the leaf with 4 elements.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Fault {
    Init,
    Apply,
    Function,
    ResultShape,
    ResultDtype,
    StateShape,
}

#[derive(Clone, Debug)]
struct Faulty(Fault);

impl optimisers::Describe for Faulty {
    fn describe(&mut self, rule: &mut optimisers::Describer<'_>) {
        rule.kind("Faulty");
    }
}

impl Rule for Faulty {
    fn init(&self, x: Parameter<'_>) -> Result<State> {
        match self.0 {
            Fault::Init if x.elem_count() == 4 => Err(Error::other("no init")),
            _ => State::empty().with_counter("t").with_slot(
                Slot::zeros("kept").stored_as(x.dtype()),
                x,
                x.shape(),
            ),
        }
    }

    fn apply<'a>(&'a self, state: &'a mut State, x: Parameter<'a>, dx: Gradient<'a>) -> Result<Flow<'a>> {
        let fault = if x.elem_count() == 4 { Some(self.0) } else { None };
        if fault == Some(Fault::Apply) {
            return Err(Error::other("no apply"));
        }
        Ok(Flow::Step(dx.with_tensors(state, move |_, _, dx, slots| {
            slots[0] = (&slots[0] + 1.0)?;
            match fault {
                Some(Fault::Function) => return Err(Error::other("no function")),
                Some(Fault::ResultShape) => return Ok(dx.flatten_all()?),
                Some(Fault::ResultDtype) => return Ok(dx.to_dtype(DType::U32)?),
                Some(Fault::StateShape) => slots[0] = slots[0].flatten_all()?,
                _ => {}
            }
            Ok(dx)
        })))
    }
}

#[test]
fn a_failing_rule_of_the_user() {
    let mut model = model(6);
    model.insert("layer.04".to_string(), var(&random(9, &[2, 2], DType::F32, CPU)));
    let chain = |fault| {
        OptimiserChain::new((
            Momentum::new(0.1),
            Faulty(fault),
            AccumGrad::new(1),
            Adam::new(0.1),
        ))
    };
    is_kind(
        &setup(chain(Fault::Init), &model).unwrap_err(),
        ErrorKind::Other,
        &["parameter \"layer.04\": no init"],
    );
    use ErrorKind::{Contract, Other};
    let cases: [(Fault, ErrorKind, &[&str]); 5] = [
        (Fault::Apply, Other, &["\"layer.04\"", "no apply"]),
        (Fault::Function, Other, &["\"layer.04\"", "no function"]),
        (Fault::ResultShape, Contract, &["\"layer.04\"", "[4]", "[2, 2]"]),
        (
            Fault::ResultDtype,
            Contract,
            &["\"layer.04\"", "U32", "expected F16, BF16, F32 or F64"],
        ),
        (Fault::StateShape, Contract, &["\"layer.04\"", "[4]", "[2, 2]"]),
    ];
    for (fault, kind, words) in cases {
        let mut bare = setup(chain(fault), &model).unwrap();
        refused(&model, &mut bare, &gradients(&model, 1), kind, words);
        let mut mixed = setup(MixedPrecision::new(DType::F64, chain(fault)), &model).unwrap();
        refused(&model, &mut mixed, &gradients(&model, 1), kind, words);
    }
}

#[test]
fn empty_and_scalar_tensors_train() {
    for engine in engines() {
        for optimiser in support::common::optimisers() {
            let shapes: [&[usize]; 4] = [&[3, 0], &[0], &[], &[1, 2]];
            let model: Vars = shapes
                .iter()
                .enumerate()
                .map(|(i, shape)| (i.to_string(), var(&random(i as u64 + 1, shape, DType::BF16, CPU))))
                .collect();
            let mut state = setup(optimiser.clone(), &model).unwrap();
            for seed in 0..6 {
                Update::new(&mut state)
                    .engine(engine)
                    .apply(&model, &gradients(&model, seed))
                    .unwrap();
            }
            let steps: Vec<u64> = state.leaves().map(|leaf| leaf.steps()).collect();
            assert!(
                steps[0] > 0 && steps.iter().all(|&count| count == steps[0]),
                "{}: {steps:?}",
                optimiser.name()
            );
        }
    }
}

#[test]
fn gradients_of_any_layout() {
    let whole = random(1, &[5, 4, 3], DType::F32, CPU);
    let layouts = [
        whole.transpose(0, 2).unwrap(),
        whole.narrow(1, 1, 2).unwrap(),
        whole.narrow(0, 1, 1).unwrap().broadcast_as((2, 4, 3)).unwrap(),
        whole.i_column().broadcast_as((5, 7)).unwrap(),
        Tensor::new(2f32, CPU).unwrap().broadcast_as((70_000,)).unwrap(),
    ];
    for gradient in layouts {
        let start = random(2, gradient.dims(), DType::F32, CPU);
        let results = [gradient.clone(), gradient.force_contiguous().unwrap()].map(|gradient| {
            let x = var(&start);
            let mut state = setup(Adam::new(0.1), &x).unwrap();
            update(&mut state, &x, &BTreeMap::from([("", gradient)])).unwrap();
            bits(&x)
        });
        assert!(
            results[0] == results[1] && results[0] != bits(&start),
            "{:?}",
            gradient.layout()
        );
    }
}

trait Column {
    fn i_column(&self) -> Tensor;
}

impl Column for Tensor {
    /// The first column of the last two dimensions, not contiguous.
    fn i_column(&self) -> Tensor {
        self.narrow(2, 1, 1)
            .and_then(|x| x.narrow(1, 0, 1))
            .and_then(|x| x.squeeze(2))
            .unwrap()
    }
}
