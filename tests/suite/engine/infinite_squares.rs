//! Finite gradients whose squares are not: what is skipped, what clipping makes of them, and what of it all a
//! checkpoint says.

use candle_core::{DType, Device, Tensor, Var};
use optimisers::{
    AccumGrad, AdaMuon, Adafactor, Adam, AdamW, Adjust, Checkpoint, CheckpointFile, ClipGlobalNorm, ClipGrad,
    ClipNorm, Communicator, Engine, Error, ErrorKind, IntoOptimiser, LossScaler, Momentum, Muon,
    OptimiserChain, Outcome, Prodigy, Q8, RMSProp, Rule, SOAP, ScheduleFree, Setup, SkipOutliers, StateTree,
    Status, StoreAs, Update, Warning, WeightDecay, setup, update,
};

use support::common::{
    Grads, Vars, assert_same, bits, constant, engines, given_up, grads, is_kind, model, not_finite,
    rules_and_chains, snapshot, tensor, values,
};
use support::tested::Tested;
use support::threads::on;

const SHAPE: [usize; 2] = [6, 8];
const PLACE: usize = 11;

/// A gradient of ones, but for one element.
fn ones_and(odd: f64, dtype: DType) -> Grads {
    let mut values = vec![1.0; SHAPE[0] * SHAPE[1]];
    values[PLACE] = odd;
    grads([Some(
        Tensor::from_vec(values, &SHAPE, &Device::Cpu)
            .and_then(|g| g.to_dtype(dtype))
            .expect("a gradient"),
    )])
}

fn ones(dtype: DType) -> Vars {
    model(&[constant(1.0, SHAPE[0] * SHAPE[1], dtype)
        .reshape(&SHAPE)
        .expect("a matrix")])
}

fn finite(engine: Engine, state: &mut StateTree, x: &Vars, grads: &Grads) -> Outcome {
    Update::new(state)
        .engine(engine)
        .finite_only()
        .apply(x, grads)
        .expect("an update")
}

fn is_finite(model: &Vars, state: &StateTree) -> bool {
    snapshot(model, state)
        .iter()
        .flat_map(|(_, bits)| bits)
        .all(|bits| f64::from_bits(*bits).is_finite())
}

/// What comes of a call with this gradient after one with ones.
fn second_call(engine: Engine, rule: impl IntoOptimiser, odd: f64) -> (Outcome, Vars, StateTree) {
    let x = ones(DType::F32);
    let mut state = setup(rule, &x).expect("a state");
    finite(engine, &mut state, &x, &ones_and(1.0, DType::F32));
    let before = snapshot(&x, &state);
    let outcome = finite(engine, &mut state, &x, &ones_and(odd, DType::F32));
    assert_eq!(
        outcome.skipped().is_some(),
        snapshot(&x, &state) == before,
        "what is skipped changes nothing"
    );
    (outcome, x, state)
}

/// The refusal of a norm that is not finite.
fn is_norm(error: &Error) -> bool {
    error.kind() == ErrorKind::NotFinite && error.to_string().contains("-norm of its gradient")
}

/// Sizes of one element, and of all, from where no square is infinite to where all are.
#[test]
fn no_rule_keeps_what_is_not_finite() -> Tested {
    for (parameter, gradient, sizes) in [
        (DType::F32, DType::F32, [1e10, 4e18, 1e20, 1e30]),
        (DType::BF16, DType::BF16, [1e10, 4e18, 1e20, 1e30]),
        (DType::F32, DType::F64, [1e10, 4e18, 1e20, 1e30]),
        (DType::F64, DType::F64, [1e10, 3e153, 1e160, 1e200]),
    ] {
        for rule in rules_and_chains() {
            for size in sizes {
                for all in [false, true] {
                    let what = format!("{} with {size} in {gradient:?}, all: {all}", rule.name());
                    let x = ones(parameter);
                    let mut state = setup(rule.clone(), &x)?;
                    let of = |size: f64| {
                        grads([Some(
                            constant(size, SHAPE[0] * SHAPE[1], gradient)
                                .reshape(&SHAPE)
                                .expect("a matrix"),
                        )])
                    };
                    let odd = if all { of(size) } else { ones_and(size, gradient) };
                    for call in [&of(1.0), &odd, &of(1.0), &of(1.0), &of(1.0), &of(1.0)] {
                        // The norm itself may be infinite in f64, and is refused.
                        match Update::new(&mut state).finite_only().apply(&x, call) {
                            Ok(_) => {}
                            Err(error) if is_norm(&error) => {}
                            Err(error) => panic!("{what}: {error}"),
                        }
                    }
                    assert!(is_finite(&x, &state), "{what}");
                }
            }
        }
    }
    Ok(())
}

#[test]
fn a_square_that_is_infinite_is_no_step_and_names_the_parameter() {
    let rules: [Box<dyn Rule>; 8] = [
        Box::new(AdamW::new(0.1)),
        Box::new(RMSProp::new(0.1)),
        Box::new(StoreAs::all(DType::BF16, Adam::new(0.1))),
        Box::new(SOAP::new(0.1)),
        Box::new(Adafactor::new(0.1)),
        Box::new(Prodigy::new(1.0)),
        Box::new(ScheduleFree::new(0.1)),
        Box::new(OptimiserChain::new((WeightDecay::new(0.1), Adam::new(0.1)))),
    ];
    for rule in rules {
        for engine in engines() {
            for odd in [1e20, -1e20, 3e38] {
                let (outcome, ..) = second_call(engine, rule.clone(), odd);
                assert_eq!(
                    outcome.status,
                    not_finite("0"),
                    "{} {engine:?} {odd}",
                    rule.name()
                );
            }
            let (outcome, x, state) = second_call(engine, rule.clone(), 1e15);
            assert!(
                outcome.status == Status::Stepped && is_finite(&x, &state),
                "{} {engine:?}",
                rule.name()
            );
        }
    }
}

/// The limit is that of the arithmetic, and the loss scale is divided out before.
#[test]
fn the_limit_is_a_quarter_of_the_root_of_the_largest_number() {
    let single = f64::from(f32::MAX).sqrt() / 4.0;
    for (dtype, limit) in [(DType::F32, single), (DType::F64, f64::MAX.sqrt() / 4.0)] {
        for engine in engines() {
            let status = |factor: f64, scale: f64| {
                let x = ones(dtype);
                let mut state = setup(Adam::new(0.1), &x).expect("a state");
                let mut scaler = LossScaler::fixed(scale);
                let gradient = ones_and(limit * factor * scale, dtype);
                scaler.factor().expect("a scale");
                Update::new(&mut state)
                    .engine(engine)
                    .scaler(&mut scaler)
                    .apply(&x, &gradient)
                    .expect("an update")
                    .status
            };
            for scale in [1.0, 1024.0, 3.0] {
                assert_eq!(
                    status(1.0 - 1e-6, scale),
                    Status::Stepped,
                    "{engine:?} {dtype:?} {scale}"
                );
                assert_eq!(
                    status(1.0 + 1e-6, scale),
                    not_finite("0"),
                    "{engine:?} {dtype:?} {scale}"
                );
            }
        }
    }
}

#[test]
fn what_clips_in_front_prevents_it() {
    type Chain = Box<dyn Rule>;
    let chain =
        |clip: Chain| -> Chain { Box::new(OptimiserChain::new(vec![clip, Box::new(Adam::new(0.1))])) };
    let small: [Chain; 8] = [
        Box::new(ClipGlobalNorm::new(1.0)),
        Box::new(ClipNorm::new(1.0)),
        Box::new(ClipNorm {
            p: 3.0,
            ..ClipNorm::new(1.0)
        }),
        Box::new(ClipNorm {
            p: f64::INFINITY,
            ..ClipNorm::new(1.0)
        }),
        Box::new(ClipGrad::new(1.0)),
        Box::new(ClipGlobalNorm::new(1e18)),
        Box::new(OptimiserChain::new((
            WeightDecay::new(0.1),
            ClipGlobalNorm::new(1.0),
        ))),
        Box::new(OptimiserChain::new((Momentum::new(1.0), ClipGrad::new(1.0)))),
    ];
    let none: [Chain; 5] = [
        Box::new(ClipGlobalNorm::new(1e30)),
        Box::new(ClipNorm::new(1e30)),
        Box::new(ClipGrad::new(1e30)),
        Box::new(SkipOutliers::default()),
        Box::new(Momentum::new(1.0)),
    ];
    for engine in engines() {
        for clip in &small {
            let (outcome, x, state) = second_call(engine, chain(clip.clone()), 1e20);
            assert!(
                outcome.status == Status::Stepped && is_finite(&x, &state),
                "{} on {engine:?}: {outcome:?}",
                clip.name()
            );
        }
        for clip in &none {
            let (outcome, ..) = second_call(engine, chain(clip.clone()), 1e20);
            assert_eq!(outcome.status, not_finite("0"), "{} on {engine:?}", clip.name());
        }
        // Nothing is squared, or only what has been made small.
        let unsquared: [Box<dyn Rule>; 3] = [
            Box::new(Momentum::new(1e-30)),
            Box::new(Muon::new(0.1)),
            Box::new(AdaMuon::new(0.1)),
        ];
        for rule in unsquared {
            let (outcome, ..) = second_call(engine, rule.clone(), 1e20);
            assert_eq!(outcome.status, Status::Stepped, "{} on {engine:?}", rule.name());
        }
    }
}

/// The norm of many numbers that are small enough is not, and no reason to skip.
#[test]
fn a_large_norm_of_small_numbers_is_no_overflow() -> Tested {
    for engine in engines() {
        let x = ones(DType::F32);
        let mut state = setup(
            OptimiserChain::new((ClipGlobalNorm::new(1e30), Adam::new(0.1))),
            &x,
        )?;
        let all = constant(4e18, SHAPE[0] * SHAPE[1], DType::F32).reshape(&SHAPE)?;
        let outcome = finite(engine, &mut state, &x, &grads([Some(all)]));
        assert!(
            outcome.status == Status::Stepped && is_finite(&x, &state),
            "{engine:?}"
        );
    }
    Ok(())
}

/// What a window has collected is looked at when it ends; a window that no call can end is given up.
#[test]
fn sums_of_windows_that_are_too_large() -> Tested {
    let x = ones(DType::F32);
    let mut state = setup(OptimiserChain::new((AccumGrad::new(2), Adam::new(0.1))), &x)?;
    let statuses = [1e20, 1.0, 1.0, 1.0]
        .map(|odd| finite(Engine::Fused, &mut state, &x, &ones_and(odd, DType::F32)).status);
    assert_eq!(
        statuses,
        [
            Status::Accumulated,
            given_up("0"),
            Status::Accumulated,
            Status::Stepped
        ]
    );
    assert!(is_finite(&x, &state));
    Ok(())
}

/// One rank has the large number, and another the part of the parameter that it is of.
#[test]
fn ranks_skip_together() {
    let rules: [fn() -> Box<dyn Rule>; 3] = [
        || Box::new(AdamW::new(0.1)),
        || Box::new(Adafactor::new(0.1)),
        || Box::new(OptimiserChain::new((ClipGlobalNorm::new(1e30), Adam::new(0.1)))),
    ];
    for rule in rules {
        let skipped = on(3, move |world| {
            let x = ones(DType::F32);
            let rank = world.rank();
            let mut state = Setup::over(&world).build(rule(), &x).expect("a state");
            let mut call = |odd: f64| finite(Engine::Fused, &mut state, &x, &ones_and(odd, DType::F32));
            let outcomes = [call(1.0), call(if rank == 2 { 1e22 } else { 1.0 }), call(1.0)];
            (
                outcomes.map(|outcome| outcome.status),
                values(&x["0"]).iter().all(|x| x.is_finite()),
            )
        });
        for said in skipped {
            assert_eq!(said, ([Status::Stepped, not_finite("0"), Status::Stepped], true));
        }
    }
}

/// Where nobody looks, one number in 8 bits becomes infinite, and hurts no other.
#[test]
fn an_infinite_number_in_8_bits_hurts_itself_alone() -> Tested {
    const LENGTH: usize = 4096;
    let run = |engine: Engine, rule: Box<dyn Rule>, odd: f64| {
        let x = model(&[constant(1.0, LENGTH, DType::F32)]);
        let mut state = setup(rule, &x).expect("a state");
        for step in 0..6 {
            let mut gradient = vec![1f32; LENGTH];
            gradient[200] = if step == 3 { odd as f32 } else { 1.0 };
            update_on(
                engine,
                &mut state,
                &x,
                &[("0", Tensor::new(&gradient[..], &Device::Cpu).expect("a gradient"))],
            );
        }
        (x, state)
    };
    fn update_on(engine: Engine, state: &mut StateTree, x: &Vars, gradient: &[(&str, Tensor); 1]) {
        Update::new(state)
            .engine(engine)
            .apply(x, gradient)
            .expect("an update");
    }
    let rules: [fn() -> Box<dyn Rule>; 2] = [
        || Box::new(StoreAs::new([("v", Q8)], Adam::new(0.1))),
        || Box::new(StoreAs::all(Q8, Adam::new(0.1))),
    ];
    for rule in rules {
        let (expected, _) = run(Engine::Tensors, rule(), 1.0);
        for odd in [1e20, f64::INFINITY, f64::NAN] {
            let (by_tensors, state) = run(Engine::Tensors, rule(), odd);
            for engine in engines() {
                let (x, own) = run(engine, rule(), odd);
                assert_same(
                    &[snapshot(&x, &own)],
                    &[snapshot(&by_tensors, &state)],
                    (engine, odd),
                );
                let changed: Vec<usize> = bits(&x["0"])
                    .into_iter()
                    .zip(bits(&expected["0"]))
                    .enumerate()
                    .filter(|(_, (a, b))| a != b)
                    .map(|(i, _)| i)
                    .collect();
                let of_sign = own.leaf("0").expect("a leaf").tensor("m")?;
                if odd.is_finite() && values(&of_sign)[201] != values(&of_sign)[2000] {
                    // A large number takes the digits of the small ones in its block, as it always did.
                    assert!(values(&x["0"]).iter().all(|x| x.is_finite()));
                } else {
                    assert_eq!(changed, [200], "{engine:?} {odd}");
                }
            }
        }
    }
    Ok(())
}

fn with_infinite_v() -> (Var, StateTree) {
    let x = Var::ones(300, DType::F32, &Device::Cpu).expect("a variable");
    let mut state = setup(AdamW::new(0.1), &x).expect("a state");
    let mut gradient = vec![1f32; 300];
    gradient[200] = 1e20;
    update(
        &mut state,
        &x,
        &[("", Tensor::new(&gradient[..], &Device::Cpu).expect("a gradient"))],
    )
    .expect("an update");
    (x, state)
}

/// A save says what a restore would refuse.
#[test]
fn a_checkpoint_says_that_it_is_not_finite() -> Tested {
    let folder = tempfile::tempdir()?;
    let path = folder.path().join("run");
    let (x, state) = with_infinite_v();
    let warnings = Checkpoint::new(&state).model(&x).save(&path)?;
    let expected = Warning::NotFinite {
        file: path.clone(),
        tensors: 1,
        entry: "/v".to_string(),
        index: 200,
        value: "inf".to_string(),
    };
    assert_eq!(warnings, std::slice::from_ref(&expected));
    let text = expected.to_string();
    assert!(
        ["\"/v\" with inf at element 200", "accepting_non_finite"]
            .iter()
            .all(|words| text.contains(words)),
        "{text}"
    );

    let mut other = setup(AdamW::new(0.1), &x)?;
    let error = CheckpointFile::open(&path)?
        .restore(&mut other)
        .expect_err("not finite");
    is_kind(&error, ErrorKind::NotFinite, &["\"/v\" is inf at element 200"]);

    let of_torch = Warning::NotFinite {
        file: path.clone(),
        tensors: 1,
        entry: "/exp_avg_sq".to_string(),
        index: 200,
        value: "inf".to_string(),
    };
    assert_eq!(state.save_torch(&path)?, [of_torch]);

    let fine = setup(AdamW::new(0.1), &x)?;
    assert_eq!(Checkpoint::new(&fine).model(&x).save(&path)?, []);
    assert_eq!(Checkpoint::new(&fine).save(&path)?, []);
    Ok(())
}

/// In 8 bits, and for every dtype of a model.
#[test]
fn a_checkpoint_of_any_format_says_it() -> Tested {
    let folder = tempfile::tempdir()?;
    let path = folder.path().join("run");
    for dtype in [DType::F16, DType::BF16, DType::F32, DType::F64] {
        let mut weights = values(&tensor(1, &[5000], DType::F32));
        weights[4321] = f64::NEG_INFINITY;
        let x = model(&[Tensor::new(&weights[..], &Device::Cpu).and_then(|x| x.to_dtype(dtype))?]);
        let state = setup(StoreAs::all(Q8, Adam::new(0.1)), &x)?;
        let warnings = Checkpoint::new(&state).model(&x).save(&path)?;
        let value = "-inf".to_string();
        assert_eq!(
            warnings,
            [Warning::NotFinite {
                file: path.clone(),
                tensors: 1,
                entry: "0".to_string(),
                index: 4321,
                value
            }],
            "{dtype:?}"
        );
        assert_eq!(state.save_masters(&x, &path)?, warnings, "{dtype:?}");
    }
    let x = model(&[constant(1.0, 5000, DType::F32)]);
    let mut state = setup(StoreAs::all(Q8, Adam::new(0.1)), &x)?;
    let mut gradient = vec![1f32; 5000];
    (gradient[4444], gradient[4999]) = (1e20, f32::NAN);
    update(
        &mut state,
        &x,
        &[("0", Tensor::new(&gradient[..], &Device::Cpu)?)],
    )?;
    let warnings = Checkpoint::new(&state).save(&path)?;
    let [
        Warning::NotFinite {
            tensors: 2,
            entry,
            index: 4999,
            value,
            ..
        },
    ] = &warnings[..]
    else {
        panic!("{warnings:?}")
    };
    assert_eq!((&**entry, &**value), ("0/m", "NaN"));
    let mut other = setup(StoreAs::all(Q8, Adam::new(0.1)), &x)?;
    let error = CheckpointFile::open(&path)
        .and_then(|file| file.restore(&mut other))
        .expect_err("not finite");
    is_kind(&error, ErrorKind::NotFinite, &["\"0/m\" is NaN at element 4999"]);
    let file = CheckpointFile::open(&path)?.accepting_non_finite();
    file.restore(&mut other)?;
    assert_same(
        &[snapshot(&x, &other)],
        &[snapshot(&x, &state)],
        "what is accepted",
    );
    Ok(())
}

/// All ranks hear of it, whoever has the part.
#[test]
fn ranks_say_alike_that_a_checkpoint_is_not_finite() -> Tested {
    let folder = std::sync::Arc::new(tempfile::tempdir()?);
    let path = folder.path().join("run");
    let shared = path.clone();
    let said = on(3, move |world| {
        let x = model(&[constant(1.0, 70_000, DType::F32)]);
        let mut state = Setup::over(&world).build(Adam::new(0.1), &x).expect("a state");
        let mut gradient = vec![1f32; 70_000];
        (gradient[69_000], gradient[1234]) = (3e20, 3e20);
        update(
            &mut state,
            &x,
            &[("0", Tensor::new(&gradient[..], &Device::Cpu).expect("a gradient"))],
        )
        .expect("an update");
        Checkpoint::new(&state).model(&x).save(&shared).expect("a save")
    });
    let expected = Warning::NotFinite {
        file: path,
        tensors: 1,
        entry: "0/v".to_string(),
        index: 1234,
        value: "inf".to_string(),
    };
    assert_eq!(said, vec![vec![expected]; 3]);
    Ok(())
}
