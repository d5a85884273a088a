//! Rules and wrappers of recent papers, where more is to be said of them than that they follow their
//! recurrences.

use candle_core::{DType, Device, Tensor};
use half::{bf16, f16};
use optimisers::printed::printed;
use optimisers::{
    AMSGradW, Adam, AdamW, Adjust, Cautious, Clamp, DecoupledDecay, Descent, Ema, Engine, ErrorKind,
    FieldValue, Hyperball, Kahan, Kind, Lion, MarsAdamW, MixedPrecision, Momentum, Muon, NAdamW, Optimiser,
    OptimiserChain, RMSProp, Rule, Schedule, ScheduleFreeSGD, SignDecay, SplitMaster, StableAdamW,
    StochasticRounding, WeightDecay, rules, setup, update,
};

use crate::rules::recurrences::assert_follows;
use support::common::{
    assert_same, bits, constant, engines, grads, is_kind, model, numbers, says, tensor, trajectory, unnamed,
    values,
};
use support::tested::Tested;

const DTYPES: [DType; 4] = [DType::F16, DType::BF16, DType::F32, DType::F64];

/// What two rules with the same state make of the same gradients, bit for bit on every engine.
fn assert_same_steps(rule: impl Rule, expected: impl Rule) {
    let (rule, expected): (Box<dyn Rule>, Box<dyn Rule>) = (Box::new(rule), Box::new(expected));
    for dtype in DTYPES {
        let steps: Vec<_> = (1..=5)
            .map(|call| grads([Some(tensor(call, &[70], dtype))]))
            .collect();
        let run = |engine, rule: Box<dyn Rule>| {
            let numbers = trajectory(engine, rule, &[tensor(0, &[70], dtype)], &steps)
                .into_iter()
                .map(unnamed);
            numbers.collect::<Vec<_>>()
        };
        for engine in engines() {
            assert_same(
                &run(engine, rule.clone()),
                &run(Engine::Fused, expected.clone()),
                format!("{rule:?} in {dtype:?} on {engine:?}"),
            );
        }
    }
}

#[test]
fn a_mask_without_the_mean_is_one_pass() {
    let mut velocity = [0.0; 9];
    let rule = Cautious::new(Momentum {
        rho: 0.95,
        ..Momentum::new(0.1)
    })
    .unscaled();
    assert_eq!(
        (rule.kind(), rule.name().as_str()),
        (Kind::Elementwise, "Cautious(unscaled, Momentum)")
    );
    assert_follows(rule, &[9], |x, g, _| {
        for ((x, v), g) in x.iter_mut().zip(&mut velocity).zip(g) {
            *v = 0.95 * *v + 0.1 * g;
            *x -= if *v * g > 0.0 { *v } else { 0.0 };
        }
    });
    // Nothing is masked of what follows the gradient.
    assert_same_steps(Cautious::new(Descent::new(0.1)).unscaled(), Descent::new(0.1));
}

#[test]
fn a_decay_around_a_rule_is_that_inside() {
    let adamw = AdamW {
        lambda: 0.3,
        ..AdamW::new(0.1)
    };
    assert_same_steps(DecoupledDecay::new(0.3, Adam::new(0.1)), adamw.clone());
    assert_same_steps(
        DecoupledDecay::new(
            0.3,
            AMSGradW {
                lambda: 0.0,
                ..AMSGradW::new(0.1)
            },
        ),
        AMSGradW {
            lambda: 0.3,
            ..AMSGradW::new(0.1)
        },
    );
    assert_same_steps(DecoupledDecay::new(0.0, adamw.clone()).cautious(), adamw);
}

/// The rate of torch's RMSprop with momentum, a chain of three, is the product of its members'.
#[test]
fn a_decay_around_a_chain_has_the_rate_of_its_steps() {
    let chain = OptimiserChain::new((RMSProp::new(0.25), Momentum::new(1.0), Descent::new(0.5)));
    let x = model(&[constant(1.0, 3, DType::F64)]);
    let mut state = setup(DecoupledDecay::new(0.5, chain), &x).expect("a state");
    assert_eq!(state.leaf("0").and_then(|leaf| leaf.learning_rate()), Some(0.125));
    update(&mut state, &x, &grads([Some(constant(0.0, 3, DType::F64))])).expect("an update");
    assert_eq!(values(&x["0"]), [1.0 - 0.125 * 0.5; 3]);
}

/// A weight decay of torch's size, said by the rule's name alone.
#[test]
fn rules_with_a_decay_in_their_names_decay() {
    let rules: [(Box<dyn Rule>, Box<dyn Rule>); 5] = [
        (Box::new(AdamW::new(0.1)), Box::new(AdamW::default())),
        (Box::new(AMSGradW::new(0.1)), Box::new(AMSGradW::default())),
        (Box::new(NAdamW::new(0.1)), Box::new(NAdamW::default())),
        (Box::new(StableAdamW::new(0.1)), Box::new(StableAdamW::default())),
        (Box::new(MarsAdamW::new(0.1)), Box::new(MarsAdamW::default())),
    ];
    for (rule, default) in rules {
        assert_eq!(
            default.field("lambda"),
            Some(FieldValue::Real(0.01)),
            "{}",
            rule.name()
        );
        let x = model(&[constant(1.0, 3, DType::F64)]);
        let mut state = setup(rule.clone(), &x).expect("a state");
        update(&mut state, &x, &grads([Some(constant(0.0, 3, DType::F64))])).expect("an update");
        assert_eq!(values(&x["0"]), [1.0 - 0.1 * 0.01; 3], "{}", rule.name());
    }
}

#[test]
fn cautious_decay_spares_what_moves_away_from_zero() {
    let (eta, lambda) = (0.1, 0.6);
    assert_follows(
        DecoupledDecay::new(lambda, Descent::new(eta)).cautious(),
        &[9],
        |x, g, _| {
            for (x, g) in x.iter_mut().zip(g) {
                *x -= eta * g + if g * *x >= 0.0 { eta * lambda * *x } else { 0.0 };
            }
        },
    );
    // A step of zero lets the parameter decay, also one of which the product with it would underflow.
    let x = model(&[Tensor::new(&[2f32, 1e-30, 1e-30], &Device::Cpu).expect("a tensor")]);
    let mut state = setup(DecoupledDecay::new(0.5, Descent::new(1.0)).cautious(), &x).expect("a state");
    update(
        &mut state,
        &x,
        &grads([Tensor::new(&[0f32, 1e-30, -1e-30], &Device::Cpu).ok()]),
    )
    .expect("an update");
    assert_eq!(
        values(&x["0"]).iter().map(|x| *x as f32).collect::<Vec<_>>(),
        [1.0, -0.5e-30, 2e-30]
    );
}

/// The decay of AdamC is that of a schedule, which moves only the learning rate.
#[test]
fn a_corrected_decay_follows_a_schedule() {
    let (peak, lambda) = (0.2, 0.5);
    let x = model(&[tensor(1, &[5], DType::F64)]);
    let rule = DecoupledDecay::new(
        lambda,
        Adam {
            beta: (0.0, 0.0),
            epsilon: 0.0,
            ..Adam::new(peak)
        },
    )
    .corrected(peak);
    let mut state = setup(rule, &x).expect("a state");
    state
        .schedule(Schedule::linear(peak, 0.0, 10))
        .expect("a schedule");
    let mut expected = values(&x["0"]);
    for t in 0..10 {
        let eta = state
            .leaf("0")
            .and_then(|leaf| leaf.learning_rate())
            .expect("a learning rate");
        let g = tensor(10 + t, &[5], DType::F64);
        update(&mut state, &x, &grads([Some(g.clone())])).expect("an update");
        for (x, g) in expected.iter_mut().zip(values(&g)) {
            *x -= eta * g.signum() + eta * eta / peak * lambda * *x;
        }
    }
    for (got, expected) in values(&x["0"]).into_iter().zip(expected) {
        assert!((got - expected).abs() < 1e-12, "{got} for {expected}");
    }
}

#[test]
fn the_fields_of_a_decay_have_names_of_their_own() {
    let mut rule = OptimiserChain::new((
        WeightDecay::new(0.1),
        DecoupledDecay::new(0.2, AdamW::new(0.3)).corrected(0.4),
    ));
    assert_eq!(
        rule.places(),
        [
            "0.lambda",
            "1.decay_lambda",
            "1.decay_eta_max",
            "1.eta",
            "1.beta",
            "1.lambda",
            "1.epsilon",
            "1.couple",
            "1.bias_correction"
        ]
    );
    rule.adjust_fields([
        ("decay_lambda", 0.5.into()),
        ("1.decay_eta_max", 0.8.into()),
        ("eta", 0.7.into()),
    ])
    .expect("fields");
    assert_eq!(
        rule,
        OptimiserChain::new((
            WeightDecay::new(0.1),
            DecoupledDecay::new(0.5, AdamW::new(0.7)).corrected(0.8)
        ))
    );

    let values: Vec<FieldValue> = rule.fields().into_iter().map(|(_, value)| value).collect();
    let mut other = OptimiserChain::new((WeightDecay::new(0.0), DecoupledDecay::new(0.0, AdamW::new(0.0))));
    other.set_fields(&values).expect("the values of such a rule");
    assert_eq!(other, rule);

    let x = model(&[tensor(1, &[2], DType::F32)]);
    let corrected = |eta_max| DecoupledDecay::new(0.1, Adam::new(0.1)).corrected(eta_max);
    let error = setup(corrected(0.05), &x).expect_err("a rate above the largest");
    let words = [
        "DecoupledDecay",
        "decay_eta_max is 0.05",
        "at least 0.1",
        "largest η of the schedule to `corrected`",
    ];
    says(&error, &words);
    let mut state = setup(corrected(0.1), &x).expect("a state");
    let error = state
        .schedule(Schedule::linear(0.0, 0.2, 10))
        .expect_err("a peak above the largest");
    says(&error, &["decay_eta_max"]);
    state.schedule(Schedule::linear(0.0, 0.1, 10)).expect("a peak");
    let no_decay = DecoupledDecay::new(0.0, Adam::new(0.1)).corrected(0.05);
    assert!(setup(no_decay, &x).is_ok(), "nothing decays");
    let fallback = Muon::new(0.02).with_fallback(Adam::new(0.1));
    let error = setup(DecoupledDecay::new(0.1, fallback).corrected(0.1), &x).expect_err("two rates");
    says(&error, &["different rates", "a decay", "around each alternative"]);
    let error =
        setup(DecoupledDecay::new(0.1, SignDecay::new(0.1)), &x).expect_err("a rule without a learning rate");
    says(&error, &["\"eta\"", "lambda"]);
    let error = setup(DecoupledDecay::new(-0.1, Lion::new(0.1)), &x).expect_err("a decay that grows");
    says(&error, &["DecoupledDecay", "decay_lambda", "-0.1", "0 or more"]);
    says(
        &rule.adjust_field("decay_lambda", true).expect_err("a flag"),
        &["decay_lambda", "a real number"],
    );
}

/// The sums of a rule that takes each parameter by itself do not depend on the others, missing ones included.
#[test]
fn stable_adamw_looks_at_one_parameter() {
    let rule = StableAdamW {
        beta: (0.5, 0.5),
        ..StableAdamW::new(0.1)
    };
    let (a, b) = (tensor(1, &[6], DType::F32), tensor(2, &[2, 40_000], DType::F32));
    let (both, alone) = (model(&[a.clone(), b]), model(&[a]));
    let [mut of_both, mut of_one] = [&both, &alone].map(|model| setup(rule.clone(), model).expect("a state"));
    for call in 0..6 {
        let own = (tensor(10 + call, &[6], DType::F32) * 100f64.powi(call as i32 % 2)).ok();
        let other = (call != 3).then(|| tensor(20 + call, &[2, 40_000], DType::F32));
        update(&mut of_both, &both, &grads([own.clone(), other])).expect("an update");
        update(&mut of_one, &alone, &grads([own])).expect("an update");
        assert_eq!(bits(&both["0"]), bits(&alone["0"]), "call {call}");
    }
    assert_eq!(of_both.leaf("1").map(|leaf| leaf.steps()), Some(5));
}

/// A warm-up is not begun again by new weights, also where z is all the state there is.
#[test]
fn schedule_free_descent_warms_up_once() {
    let x = model(&[tensor(1, &[3], DType::F32)]);
    let mut state = setup(
        ScheduleFreeSGD {
            warmup_steps: 2,
            ..ScheduleFreeSGD::new(0.1)
        },
        &x,
    )
    .expect("a state");
    let step = |state: &mut _, seed| {
        update(state, &x, &grads([Some(tensor(seed, &[3], DType::F32))]))
            .map(drop)
            .expect("an update")
    };
    (2..5).for_each(|seed| step(&mut state, seed));
    state
        .set_masters(&x, &grads([Some(tensor(9, &[3], DType::F32))]))
        .expect("new weights");
    let new = bits(&x["0"]);
    step(&mut state, 5);
    assert_ne!(bits(&x["0"]), new);
    assert_eq!(
        state.leaf("0").expect("the leaf").counters(),
        [("t".to_string(), 4)]
    );
}

/// The bounds of these tests: no numbers of 16 bits, nor of f32.
const BOUNDS: (f64, f64) = (-0.3, 0.7);

/// Half the distance between numbers of a dtype between a half and one.
fn half_unit(dtype: DType) -> f64 {
    match dtype {
        DType::F16 => 2f64.powi(-12),
        DType::BF16 => 2f64.powi(-9),
        DType::F32 => 2f64.powi(-25),
        _ => 0.0,
    }
}

/// By how much the parameter, and what is most precise of it, come to lie beyond the bounds in steps of every
/// size.
fn beyond(dtype: DType, store: impl Fn(Box<dyn Rule>) -> Optimiser) -> [f64; 2] {
    let mut largest = [0f64; 2];
    for engine in engines() {
        let rule = OptimiserChain::new((Momentum::new(0.3), Clamp::new(BOUNDS)));
        let x = model(&[tensor(1, &[300], dtype).clamp(-0.25, 0.65).expect("a tensor")]);
        let mut state = setup(store(Box::new(rule)), &x).expect("a state");
        let mut has_moved = false;
        for call in 0..12 {
            let sizes = numbers(5 + call, 300)
                .into_iter()
                .enumerate()
                .map(|(i, g)| g * 10f64.powi(i as i32 % 9 - 5));
            let gradient = Tensor::from_iter(sizes, &Device::Cpu)
                .and_then(|gradient| gradient.to_dtype(dtype))
                .expect("a gradient");
            let before = bits(&x["0"]);
            optimisers::Update::new(&mut state)
                .engine(engine)
                .apply(&x, &grads([Some(gradient)]))
                .expect("an update");
            has_moved |= bits(&x["0"]) != before;
            let precise = state.masters(&x).expect("masters")["0"].clone();
            for (largest, tensor) in largest.iter_mut().zip([x["0"].as_tensor(), &precise]) {
                let distances = values(tensor)
                    .into_iter()
                    .map(|x| (x - BOUNDS.1).max(BOUNDS.0 - x));
                *largest = distances.fold(*largest, f64::max);
            }
        }
        assert!(has_moved);
    }
    largest
}

#[test]
fn a_parameter_ends_within_its_bounds() {
    for dtype in DTYPES {
        assert_eq!(beyond(dtype, Optimiser::new), [0.0; 2], "{dtype:?}");
        assert_eq!(
            beyond(dtype, |rule| Optimiser::new(StochasticRounding::new(3, rule))),
            [0.0; 2],
            "{dtype:?}"
        );
        for master in [DType::F32, DType::F64] {
            let [parameter, precise] =
                beyond(dtype, |rule| Optimiser::new(MixedPrecision::new(master, rule)));
            assert!(
                precise == 0.0 && parameter <= half_unit(dtype),
                "{dtype:?} {master:?}: {parameter:e} {precise:e}"
            );
        }
        if dtype != DType::F16 {
            assert_eq!(
                beyond(dtype, |rule| Optimiser::new(SplitMaster::new(rule))),
                [0.0; 2],
                "{dtype:?}"
            );
            assert_eq!(
                beyond(dtype, |rule| Optimiser::new(SplitMaster::of_24_bits(rule))),
                [0.0; 2],
                "{dtype:?}"
            );
        }
        let [parameter, _] = beyond(dtype, |rule| Optimiser::new(Kahan::new(rule)));
        let is_compensated = dtype.size_in_bytes() == 2;
        assert!(
            parameter
                <= if is_compensated {
                    2.0 * half_unit(dtype)
                } else {
                    0.0
                },
            "{dtype:?}: {parameter:e}"
        );
    }
}

#[test]
fn a_parameter_outside_of_its_bounds_is_moved_in() {
    let x = model(&[Tensor::new(&[5f32, -7.0, 0.5], &Device::Cpu).expect("a tensor")]);
    let mut state = setup(Clamp::new((0.0, 1.0)), &x).expect("a state");
    update(
        &mut state,
        &x,
        &grads([Tensor::zeros(3, DType::F32, &Device::Cpu).ok()]),
    )
    .expect("an update");
    assert_eq!(values(&x["0"]), [1.0, 0.0, 0.5]);
    state
        .all()
        .adjust_field("bounds", (0.25, f64::INFINITY))
        .expect("bounds");
    update(
        &mut state,
        &x,
        &grads([Tensor::new(&[-9f32, 0.0, 1.0], &Device::Cpu).ok()]),
    )
    .expect("an update");
    assert_eq!(values(&x["0"]), [10.0, 0.25, 0.25]);
}

#[test]
fn bounds_without_a_number_between_them_are_refused() {
    let x = |dtype| model(&[tensor(1, &[2], dtype)]);
    for bounds in [(1.0, 0.0), (f64::NAN, 1.0)] {
        says(
            &setup(Clamp::new(bounds), &x(DType::F32)).expect_err("bounds out of order"),
            &["bounds", "not above"],
        );
    }
    for (dtype, bounds) in [
        (DType::BF16, (0.3, 0.3)),
        (DType::F16, (1e5, 2e5)),
        (DType::F32, (0.1, 0.1)),
    ] {
        let x = x(dtype);
        let before = bits(&x["0"]);
        let mut state = setup(Clamp::new(bounds), &x).expect("a state");
        let error = update(&mut state, &x, &grads([Some(tensor(2, &[2], dtype))])).expect_err("no number");
        is_kind(
            &error,
            ErrorKind::Argument,
            &["parameter \"0\"", "Clamp", "bounds", &format!("{dtype:?}")],
        );
        assert_eq!(bits(&x["0"]), before);
    }
    let exact = [
        (DType::BF16, (0.5, 0.5)),
        (DType::F16, (f16::MAX.to_f64(), 1e9)),
        (DType::BF16, (bf16::MIN.to_f64(), 0.0)),
    ];
    for (dtype, bounds) in exact {
        let x = x(dtype);
        let mut state = setup(Clamp::new(bounds), &x).expect("a state");
        update(&mut state, &x, &grads([Some(tensor(2, &[2], dtype))])).expect("a number of the dtype");
        assert!(
            values(&x["0"])
                .into_iter()
                .all(|x| (bounds.0..=bounds.1).contains(&x)),
            "{dtype:?}"
        );
    }
}

/// Every rule with a decoupled decay multiplies it by its learning rate.
#[test]
fn new_rules_do_not_move_without_a_learning_rate() {
    let names = [
        "ADOPT",
        "LaProp",
        "Grams",
        "MADGRAD",
        "StableAdamW",
        "MarsAdamW",
        "MarsLion",
        "NAdamW",
        "AMSGradW",
        "ScheduleFreeSGD",
    ];
    for listing in rules::catalogue()
        .into_iter()
        .filter(|listing| names.contains(&listing.name))
    {
        let mut rule = listing.rule;
        rule.set_field("eta", FieldValue::Real(0.0))
            .expect("a learning rate");
        rule.set_field("lambda", FieldValue::Real(0.5)).expect("a decay");
        let x = model(&[tensor(1, &[4], DType::F32)]);
        let before = bits(&x["0"]);
        let mut state = setup(rule, &x).expect("a state");
        for call in 2..5 {
            update(&mut state, &x, &grads([Some(tensor(call, &[4], DType::F32))])).expect("an update");
        }
        assert_eq!(bits(&x["0"]), before, "{}", listing.name);
    }
}

/// NAdamW goes on from Adam's moments with the product of all μ so far.
#[test]
fn nadamw_takes_over_from_adam() {
    let gradient = || grads([Some(constant(0.5, 3, DType::F64))]);
    let run = |late: bool| {
        let x = model(&[constant(0.0, 3, DType::F64)]);
        let rules: [Box<dyn Rule>; 2] = [
            Box::new(Adam::new(0.01)),
            Box::new(NAdamW {
                lambda: 0.0,
                ..NAdamW::new(0.01)
            }),
        ];
        let mut state = setup(rules[usize::from(!late)].clone(), &x).expect("a state");
        for call in 0..60 {
            if late && call == 50 {
                state.all().replace(rules[1].clone(), &x).expect("NAdamW");
            }
            update(&mut state, &x, &gradient()).expect("an update");
        }
        let before = values(&x["0"])[0];
        update(&mut state, &x, &gradient()).expect("an update");
        before - values(&x["0"])[0]
    };
    // The moments are the same in both, as the gradients are.
    assert!((run(true) / run(false) - 1.0).abs() < 1e-9);
}

/// The product of all momenta up to a step is computed as far as it has digits. Rounding would keep the
/// product above 0 for ever.
#[test]
fn nadamw_takes_over_after_any_number_of_steps() -> Tested {
    let mut nadamw = printed(NAdamW::new(0.01), DType::F64, DType::F64)?;
    let mut progress = nadamw.progress();
    assert_eq!(progress.numbers[0].1, 1.0, "no product yet");
    progress.counters[0].1 = u64::MAX / 4;
    nadamw.resume(&progress)?;
    nadamw.step()?;
    Ok(())
}

/// The copy would lack what the wrapper changes, and would pull the parameter back.
#[test]
fn t69_a_rule_with_a_copy_of_the_parameter_is_refused() {
    type Wrap = fn(Box<dyn Rule>) -> Box<dyn Rule>;
    let wrappers: [Wrap; 2] = [
        |rule| Box::new(DecoupledDecay::new(0.1, rule)),
        |rule| Box::new(Hyperball::new(rule)),
    ];
    let x = model(&[tensor(1, &[3, 2], DType::F32)]);
    let refusal = |wrapped| {
        setup(wrapped, &x)
            .err()
            .filter(|error| error.to_string().contains("a copy or an average"))
    };
    for wrap in wrappers {
        let refused: Vec<&str> = rules::catalogue()
            .into_iter()
            .filter(|listing| {
                let error = refusal(wrap(listing.rule.clone()));
                error
                    .inspect(|error| is_kind(error, ErrorKind::Unsupported, &["after the wrapper"]))
                    .is_some()
            })
            .map(|listing| listing.name)
            .collect();
        assert_eq!(
            refused,
            [
                "MADGRAD",
                "Prodigy",
                "ScheduleFreeSGD",
                "ScheduleFreeRAdam",
                "ScheduleFree"
            ]
        );
        let averaged = OptimiserChain::new((Adam::new(0.1), Ema::default()));
        assert!(refusal(wrap(Box::new(averaged))).is_some());
        let after = OptimiserChain::new((wrap(Box::new(Adam::new(0.1))), Ema::default()));
        assert!(setup(after, &x).is_ok());
    }
}
