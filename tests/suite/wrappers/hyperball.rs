//! A parameter that keeps its norm.

use std::collections::HashMap;

use candle_core::{DType, Device, Tensor};
use optimisers::{
    Adam, AdamW, Adjust, Centralise, Descent, Engine, ErrorKind, Fallback, Hyperball, Kind, Leaf,
    MixedPrecision, Muon, OptimiserChain, Rule, Setup, SignDecay, StateTree, Update, Weights, setup, update,
};

use support::common::{
    Vars, bits, constant, engines, grads, is_kind, model, random, says, snapshot, tensor, values,
};
use support::threads::on;

fn norm(numbers: &[f64]) -> f64 {
    numbers.iter().map(|x| x * x).sum::<f64>().sqrt()
}

fn leaf(state: &StateTree) -> &Leaf {
    state.leaf("0").expect("a leaf")
}

fn radius(state: &StateTree) -> f64 {
    let numbers = leaf(state).numbers();
    numbers
        .iter()
        .find(|(name, _)| name == "radius")
        .expect("a radius")
        .1
}

#[test]
fn the_norm_stays_for_hundreds_of_steps() {
    let rules: [Box<dyn Rule>; 3] = [
        Box::new(Hyperball::new(AdamW {
            lambda: 0.0,
            ..AdamW::new(0.03)
        })),
        Box::new(Hyperball::new(Muon::new(0.3))),
        Box::new(Hyperball::new(Descent::new(2.0))),
    ];
    for (rule, dtype) in rules
        .iter()
        .flat_map(|rule| [(rule, DType::F32), (rule, DType::BF16)])
    {
        let first = tensor(1, &[20, 30], dtype);
        let (x, expected) = (model(std::slice::from_ref(&first)), norm(&values(&first)));
        let mut state =
            setup(MixedPrecision::new(optimisers::DType::F32, rule.clone()), &x).expect("a state");
        for call in 0..200 {
            update(&mut state, &x, &grads([Some(tensor(2 + call, &[20, 30], dtype))])).expect("an update");
            // In F32 the parameter is its own master.
            let master = leaf(&state).tensor("master").ok();
            let got = norm(&values(master.as_ref().unwrap_or(&x["0"])));
            assert!(
                (got / expected - 1.0).abs() < 1e-6,
                "{rule:?} in {dtype:?}: {got} for {expected}"
            );
        }
        assert!((radius(&state) / expected - 1.0).abs() < 1e-12);
        let moved: Vec<f64> = values(&x["0"])
            .iter()
            .zip(values(&first))
            .map(|(a, b)| a - b)
            .collect();
        assert!(norm(&moved) > 0.1 * expected, "{rule:?} in {dtype:?}");
    }
}

/// Nothing is written, neither of the parameter at 0 nor of the one before it.
#[test]
fn a_parameter_of_norm_0_is_refused_and_named() {
    for engine in engines() {
        let x = model(&[tensor(1, &[3, 4], DType::F32), constant(0.0, 4, DType::F32)]);
        let mut state = setup(Hyperball::new(Adam::new(0.1)), &x).expect("a state");
        let before = snapshot(&x, &state);
        let gradients = [&[3, 4][..], &[4]].map(|shape| Some(tensor(3, shape, DType::F32)));
        let gradients = grads(gradients);
        let error = Update::new(&mut state)
            .engine(engine)
            .apply(&x, &gradients)
            .expect_err("a norm of 0");
        is_kind(
            &error,
            ErrorKind::Unsupported,
            &["parameter \"1\"", "`Hyperball`", "`Fallback::except`"],
        );
        assert_eq!(snapshot(&x, &state), before);
        // It is only refused where it would move.
        let alone = grads([Some(tensor(3, &[3, 4], DType::F32))]);
        Update::new(&mut state)
            .engine(engine)
            .apply(&x, &alone)
            .expect("an update");
    }
}

/// One rank has the whole parameter and the other none of it: both refuse, and go on.
#[test]
fn ranks_refuse_a_norm_of_0_together() {
    let shapes: [&[usize]; 2] = [&[3, 4], &[2, 2]];
    let all = on(2, move |world| {
        let x = model(&[tensor(1, shapes[0], DType::F32), constant(0.0, 4, DType::F32)]);
        let rule = Hyperball::new(OptimiserChain::new((Centralise::default(), Adam::new(0.1))));
        let mut state = Setup::over(&world).build(rule, &x).expect("a state");
        let before = snapshot(&x, &state);
        let first = Some(tensor(3, shapes[0], DType::F32));
        let error = update(
            &mut state,
            &x,
            &grads([first.clone(), Some(constant(1.0, 4, DType::F32))]),
        );
        is_kind(
            &error.expect_err("a norm of 0"),
            ErrorKind::Unsupported,
            &["parameter \"1\""],
        );
        assert_eq!(snapshot(&x, &state), before);
        // Without a direction nothing is lost.
        update(
            &mut state,
            &x,
            &grads([first, Some(constant(0.0, 4, DType::F32))]),
        )
        .expect("an update");
        x.values().map(|x| bits(x)).collect::<Vec<_>>()
    });
    assert_eq!(all[0], all[1]);
    assert_eq!(all[0][1], [0; 4]);
}

/// With other rows it is another sphere.
#[test]
fn new_rows_have_a_new_norm() {
    let x = model(&[tensor(1, &[2, 3], DType::F32)]);
    let mut state = setup(Hyperball::new(Adam::new(0.1)), &x).expect("a state");
    update(&mut state, &x, &grads([Some(tensor(2, &[2, 3], DType::F32))])).expect("an update");
    let rows = |rows: &[usize]| {
        x["0"].index_select(
            &Tensor::from_slice(
                &rows.iter().map(|row| *row as u32).collect::<Vec<_>>(),
                rows.len(),
                &Device::Cpu,
            )?,
            0,
        )
    };
    let doubled = model(&[rows(&[0, 1, 0, 1]).expect("rows")]);
    state
        .resize_rows("0", &doubled, &[Some(0), Some(1), None, None])
        .expect("rows");
    let before = norm(&values(&doubled["0"]));
    update(
        &mut state,
        &doubled,
        &grads([Some(tensor(3, &[4, 3], DType::F32))]),
    )
    .expect("an update");
    assert!(
        (norm(&values(&doubled["0"])) / before - 1.0).abs() < 1e-6
            && (radius(&state) / before - 1.0).abs() < 1e-12
    );
}

#[test]
fn a_step_onto_0_is_refused() {
    let x = model(&[constant(2.0, 4, DType::F64)]);
    let mut state = setup(Hyperball::new(Descent::new(1.0)), &x).expect("a state");
    let error = update(&mut state, &x, &grads([Some(constant(0.5, 4, DType::F64))])).expect_err("x - u is 0");
    is_kind(
        &error,
        ErrorKind::Unsupported,
        &["parameter \"0\"", "expected a number above 0"],
    );
    assert_eq!(values(&x["0"]), [2.0; 4]);
}

#[test]
fn new_weights_have_a_new_norm() {
    let x = model(&[tensor(1, &[5, 6], DType::BF16)]);
    let rule = MixedPrecision::new(optimisers::DType::F32, Hyperball::new(Adam::new(0.1)));
    let mut state = setup(rule, &x).expect("a state");
    let gradients = grads([Some(tensor(2, &[5, 6], DType::BF16))]);
    update(&mut state, &x, &gradients).expect("an update");
    let new = (tensor(3, &[5, 6], DType::BF16) * 3.0).expect("a tensor");
    x["0"].set(&new).expect("new weights");
    state.refresh_masters(&x).expect("masters");
    assert_eq!(radius(&state), 0.0);
    update(&mut state, &x, &gradients).expect("an update");
    assert!((radius(&state) / norm(&values(&new)) - 1.0).abs() < 1e-12);
    let master = leaf(&state).tensor("master").expect("a copy");
    assert!((norm(&values(&master)) / norm(&values(&new)) - 1.0).abs() < 1e-6);
}

#[test]
fn a_step_is_as_long_whatever_the_size_of_the_gradient() {
    let first = tensor(1, &[8], DType::F32);
    let moved = |size: f64, engine: Engine| {
        let x = model(std::slice::from_ref(&first));
        let mut state = setup(Hyperball::new(Descent::new(0.25)), &x).expect("a state");
        let gradient = (tensor(2, &[8], DType::F32) * size).expect("a tensor");
        Update::new(&mut state)
            .engine(engine)
            .apply(&x, &grads([Some(gradient)]))
            .expect("an update");
        values(&x["0"])
    };
    for engine in engines() {
        let expected = moved(1.0, engine);
        assert!((norm(&expected) / norm(&values(&first)) - 1.0).abs() < 1e-6);
        for size in [1e-20, 1e-6, 1e6, 1e36] {
            for (got, expected) in moved(size, engine).into_iter().zip(&expected) {
                assert!(
                    (got - expected).abs() < 1e-5,
                    "{size:e} on {engine:?}: {got} for {expected}"
                );
            }
        }
        // What is left of a gradient that has vanished is no direction.
        assert_eq!(moved(1e-25, engine), values(&first));
    }
}

/// A parameter that the program has changed comes back to the sphere only if the program says so, then also
/// without a gradient.
#[test]
fn a_changed_parameter_is_refused_or_scaled_back() {
    let (first, zeros) = (tensor(1, &[9], DType::F64), constant(0.0, 9, DType::F64));
    let x = model(std::slice::from_ref(&first));
    let mut state = setup(Hyperball::new(Descent::new(0.5)), &x).expect("a state");
    update(&mut state, &x, &grads([Some(zeros.clone())])).expect("an update");
    assert_eq!(bits(&x["0"]), bits(&first));
    x["0"]
        .set(&(&first * 2.0).expect("a tensor"))
        .expect("other weights");
    let gradients = grads([Some(zeros)]);
    let before = snapshot(&x, &state);
    let error = update(&mut state, &x, &gradients).expect_err("other weights");
    is_kind(
        &error,
        ErrorKind::Changed,
        &["parameter \"0\"", "`refresh_masters`", "`Update::keep_masters`"],
    );
    assert_eq!(snapshot(&x, &state), before);
    Update::new(&mut state)
        .keep_masters()
        .apply(&x, &gradients)
        .expect("an update");
    for (got, expected) in values(&x["0"]).into_iter().zip(values(&first)) {
        assert!((got - expected).abs() < 1e-15);
    }
}

/// Whatever rounding does to the norm in hundreds of steps is no change from outside. Other weights are, in
/// every dtype and however they come.
#[test]
fn t56_weights_from_outside_are_refused_and_drift_is_not() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("weights");
    for dtype in [DType::F64, DType::F32, DType::F16, DType::BF16] {
        let x = model(&[tensor(1, &[20, 30], dtype), tensor(2, &[7], dtype)]);
        let mut state = setup(Hyperball::new(Adam::new(0.03)), &x).expect("a state");
        let gradients = |seed| {
            grads([
                Some(tensor(seed, &[20, 30], dtype)),
                Some(tensor(seed + 1, &[7], dtype)),
            ])
        };
        for call in 0..300 {
            update(&mut state, &x, &gradients(3 + call)).unwrap_or_else(|error| panic!("{dtype:?}: {error}"));
        }
        let refused = |state: &mut StateTree, x: &Vars| {
            let before = snapshot(x, state);
            let error = update(state, x, &gradients(5)).expect_err("other weights");
            is_kind(
                &error,
                ErrorKind::Changed,
                &["follows from the old values", "`refresh_masters`"],
            );
            assert_eq!(snapshot(x, state), before, "{dtype:?}");
        };
        let original = x["1"].copy().expect("a copy");
        x["1"]
            .set(&(&original * 10.0).expect("a tensor"))
            .expect("other weights");
        refused(&mut state, &x);
        x["1"].set(&original).expect("the weights");
        update(&mut state, &x, &gradients(7)).expect("an update");

        let others = model(&[tensor(11, &[20, 30], dtype), tensor(12, &[7], dtype)]);
        let named = others
            .iter()
            .map(|(path, x)| (path.clone(), x.as_tensor().clone()));
        candle_core::safetensors::save(&named.collect::<HashMap<_, _>>(), &path).expect("a file");
        let weights = Weights::open([&path]).expect("weights");
        weights.load_into(&x).expect("other weights");
        refused(&mut state, &x);
        state.refresh_masters(&x).expect("masters");
        update(&mut state, &x, &gradients(9)).expect("an update");
        let first = norm(&values(&others["0"]));
        assert!(
            (radius(&state) / first - 1.0).abs() < 1e-12,
            "{dtype:?}: {} for {first}",
            radius(&state)
        );
        state.set_masters(&x, &weights).expect("masters");
        update(&mut state, &x, &gradients(9)).expect("an update");
    }
}

/// A call that writes nothing, and a rule that takes the state over, do not hide other weights.
#[test]
fn weights_from_outside_are_refused_after_skips_errors_and_replacements() {
    let fine = || grads([Some(constant(0.5, 4, DType::F32))]);
    type Between = fn(&mut StateTree, &Vars);
    let between: [(&str, Between); 5] = [
        ("nothing", |_, _| {}),
        ("a skipped call", |state, x| {
            let infinite = grads([Some(constant(f64::INFINITY, 4, DType::F32))]);
            let outcome = Update::new(state)
                .finite_only()
                .apply(x, &infinite)
                .expect("a call");
            assert!(!outcome.has_stepped());
        }),
        ("a refused call", |state, x| {
            drop(update(state, x, &grads([Some(constant(0.5, 3, DType::F32))])).expect_err("another shape"));
        }),
        ("a refused push", |state, x| {
            let step = Update::new(state).begin(x).expect("a step");
            drop(
                step.push("0", constant(f64::NAN, 4, DType::F32))
                    .expect_err("NaN"),
            );
            drop(step.finish());
        }),
        ("another rate", |state, x| {
            let rule = Hyperball::new(Adam::new(0.25));
            drop(state.all().replace(rule, x).expect("a rule"));
        }),
    ];
    for (name, between) in between {
        let x = model(&[tensor(1, &[4], DType::F32)]);
        let mut state = setup(Hyperball::new(Adam::new(0.1)), &x).expect("a state");
        update(&mut state, &x, &fine()).expect("an update");
        between(&mut state, &x);
        let old = x["0"].copy().expect("a copy");
        x["0"]
            .set(&(&old * 10.0).expect("a tensor"))
            .expect("other weights");
        let error = update(&mut state, &x, &fine()).map(drop).expect_err(name);
        is_kind(&error, ErrorKind::Changed, &["`refresh_masters`"]);
        x["0"].set(&old).expect("the weights");
        update(&mut state, &x, &fine()).unwrap_or_else(|error| panic!("{name}: {error}"));
    }
}

#[test]
fn it_is_around_rules_with_one_learning_rate() {
    let x = model(&[random(1, &[2, 3], DType::F32, &Device::Cpu)]);
    let error = setup(Hyperball::new(SignDecay::new(0.1)), &x).expect_err("a rule without a learning rate");
    says(
        &error,
        &["SignDecay", "`Hyperball` around a rule with a learning rate"],
    );
    let rule = Hyperball::new(OptimiserChain::new((Descent::new(0.5), Descent::new(0.1))));
    assert_eq!(
        (rule.kind(), rule.name().as_str()),
        (Kind::WholeTensor, "Hyperball(OptimiserChain(Descent, Descent))")
    );
    // η is the product.
    let moved = |rule: Box<dyn Rule>| {
        let x = model(&[tensor(1, &[2, 3], DType::F32)]);
        let mut state = setup(rule, &x).expect("a state");
        update(&mut state, &x, &grads([Some(tensor(2, &[2, 3], DType::F32))])).expect("an update");
        values(&x["0"])
    };
    let single = moved(Box::new(Hyperball::new(Descent::new(0.05))));
    for (got, expected) in moved(Box::new(rule)).into_iter().zip(single) {
        assert!((got - expected).abs() < 1e-6, "{got} for {expected}");
    }
    let fallback = Fallback::new(Descent::new(0.1), Adam::new(0.2));
    let state = setup(Hyperball::new(fallback), &x).expect("a state");
    assert_eq!(leaf(&state).learning_rate(), Some(0.1));
}
