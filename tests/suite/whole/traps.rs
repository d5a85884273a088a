//! Mistakes that other optimisers made, each by its number in `tests/TRAPS.md` in a test of its own.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use candle_core::{DType, Device, Tensor, Var};
use optimisers::{
    AccumGrad, Adam, AdamW, ClipGlobalNorm, ClipNorm, Descent, ErrorKind, IntoOptimiser, Lion,
    MixedPrecision, Momentum, NonFinite, Optimiser, OptimiserChain, RMSProp, StateTree, Status, setup,
    update,
};

use crate::whole::structure::files;
use support::common::{
    Grads, Vars, assert_same, bits16, is_kind, model, nearest16, not_finite, random, snapshot, values, var,
};

const HALVES: [DType; 2] = [DType::F16, DType::BF16];

fn full(value: f64, dtype: DType) -> Tensor {
    Tensor::full(value, 3, &Device::Cpu)
        .and_then(|tensor| tensor.to_dtype(dtype))
        .expect("a tensor")
}

/// A parameter of one value after `calls` gradients of one value, with its state.
fn run(optimiser: impl IntoOptimiser, x: &Tensor, gradient: &Tensor, calls: usize) -> (Var, StateTree) {
    let x = Var::from_tensor(x).expect("a variable");
    let mut state = setup(optimiser, &x).expect("a state");
    for _ in 0..calls {
        update(&mut state, &x, &Grads::from([(String::new(), gradient.clone())])).expect("an update");
    }
    (x, state)
}

/// The first element of a state tensor.
fn first(state: &StateTree, name: &str) -> f64 {
    values(
        &state
            .leaves()
            .next()
            .expect("a leaf")
            .tensor(name)
            .expect("a copy"),
    )[0]
}

fn assert_near(got: f64, expected: f64, tolerance: f64, what: impl std::fmt::Debug) {
    assert!(
        (got - expected).abs() <= tolerance * expected.abs(),
        "{what:?}: {got:e} for {expected:e}"
    );
}

/// bf16(0.999) is 1, and bf16 arithmetic leaves v at 0.25 or 0.5 for a gradient that is always 1.
#[test]
fn t1_beta2_is_not_rounded_to_the_parameter() {
    for dtype in HALVES {
        let (_, state) = run(Adam::new(0.0), &full(1.0, dtype), &full(1.0, dtype), 5000);
        assert_near(first(&state, "v"), 1.0 - 0.999f64.powi(5000), 1e-4, dtype);
    }
}

/// 1 - η·λ = 1 - 1e-5 is 1 in 16 bits.
#[test]
fn t2_decoupled_decay_arrives() {
    let rule = MixedPrecision::new(DType::F32, AdamW::new(1e-3));
    for dtype in HALVES {
        let (x, state) = run(rule.clone(), &full(1.0, dtype), &full(0.0, dtype), 1000);
        assert_near(first(&state, "master"), (1.0 - 1e-5f64).powi(1000), 1e-5, dtype);
        assert!(values(&x)[0] < 1.0);
    }
}

/// 1 - 1e-4 is 1 in 16 bits.
#[test]
fn t3_small_updates_add_up() {
    for dtype in HALVES {
        let (x, state) = run(
            MixedPrecision::new(DType::F32, Descent::new(1e-4)),
            &full(1.0, dtype),
            &full(1.0, dtype),
            1000,
        );
        assert_near(first(&state, "master"), 0.9, 1e-4, dtype);
        assert_near(values(&x)[0], 0.9, 3e-3, dtype);
    }
}

/// The square of an f16 number below 1.7e-4 is 0, and above 256 infinite.
#[test]
fn t5_gradients_are_widened_before_they_are_squared() {
    for gradient in [1e-4, 300.0] {
        let gradient = full(gradient, DType::F16);
        let expected = 0.001 * values(&gradient)[0].powi(2);
        let rules: [Optimiser; 2] = [
            Optimiser::new(Adam::new(1e-3)),
            Optimiser::new(MixedPrecision::new(DType::F32, Adam::new(1e-3))),
        ];
        for rule in rules {
            let (x, state) = run(rule.clone(), &full(1.0, DType::F16), &gradient, 1);
            assert_near(first(&state, "v"), expected, 1e-6, &rule);
            assert_near(values(&x)[0], 0.999, 5e-4, &rule);
        }
    }
}

/// A quarter of the smallest f16 is 0 in f16.
#[test]
fn t17_gradients_are_widened_before_they_are_divided() {
    let rule = MixedPrecision::new(
        DType::F32,
        OptimiserChain::new((AccumGrad::new(4), Descent::new(1.0))),
    );
    let smallest = 2f64.powi(-24);
    let (x, state) = run(rule, &full(0.0, DType::F16), &full(smallest, DType::F16), 4);
    assert_eq!((first(&state, "master"), values(&x)[0]), (-smallest, -smallest));
}

/// 1000 times 1/1000 is 0.5 in bf16.
#[test]
fn t18_sums_are_kept_in_f32() {
    for dtype in HALVES {
        let rule = MixedPrecision::new(
            DType::F32,
            OptimiserChain::new((AccumGrad::new(1001), Descent::new(1.0))),
        );
        let gradient = full(1e-3, dtype);
        let (_, state) = run(rule, &full(0.0, dtype), &gradient, 1000);
        assert_near(first(&state, "0.acc"), 1000.0 * values(&gradient)[0], 1e-4, dtype);
    }
}

/// One gradient that is not finite, anywhere in the model, and nothing moves.
#[test]
fn t20_a_skipped_step_changes_nothing() {
    let clip = ClipGlobalNorm {
        non_finite: NonFinite::Skip,
        ..ClipGlobalNorm::new(1.0)
    };
    let model = model(&[full(1.0, DType::BF16), full(2.0, DType::BF16)]);
    let mut state = setup(
        MixedPrecision::new(
            DType::F32,
            OptimiserChain::new((AccumGrad::new(2), clip, Adam::new(0.1))),
        ),
        &model,
    )
    .expect("a state");
    let mut step = |gradient: f64| {
        let gradients = Grads::from([
            ("0".to_string(), full(gradient, DType::BF16)),
            ("1".to_string(), full(1.0, DType::BF16)),
        ]);
        let outcome = update(&mut state, &model, &gradients).expect("an update");
        (outcome.status, snapshot(&model, &state))
    };
    for gradient in [0.5, 0.5, 0.5] {
        step(gradient);
    }
    let (status, good) = step(0.25);
    assert_eq!(status, Status::Stepped);
    let (_, collected) = step(0.5);
    assert_ne!(collected, good);
    for poison in [f64::INFINITY, f64::NAN, f64::NEG_INFINITY] {
        let (status, after) = step(poison);
        assert_eq!(status, not_finite("0"));
        assert_same(&[after], std::slice::from_ref(&collected), poison);
    }
    assert_eq!(step(0.5).0, Status::Stepped);
}

/// With one counter for all, a late parameter's first step has hardly any bias correction.
#[test]
fn t21_counters_are_per_leaf() {
    let model = model(&[full(0.0, DType::F64), full(0.0, DType::F64)]);
    let mut state = setup(Adam::new(0.1), &model).expect("a state");
    let early = Grads::from([("0".to_string(), full(2.0, DType::F64))]);
    for _ in 0..50 {
        update(&mut state, &model, &early).expect("an update");
    }
    let late = Grads::from([("1".to_string(), full(2.0, DType::F64))]);
    update(&mut state, &model, &late).expect("an update");
    assert_near(values(&model["1"])[0], -0.1, 1e-7, "the first step");
    assert_eq!(
        state.leaves().map(|leaf| leaf.steps()).collect::<Vec<_>>(),
        [50, 1]
    );
}

/// Zeros let moments decay and momentum act; a missing gradient does not.
#[test]
fn t22_zero_is_not_missing() {
    let model = model(&[full(0.0, DType::F64), full(0.0, DType::F64)]);
    let mut state = setup(
        Momentum {
            rho: 0.5,
            ..Momentum::new(1.0)
        },
        &model,
    )
    .expect("a state");
    let gradients = |second: Option<f64>| {
        let named = [("0", Some(0.0)), ("1", second)].into_iter();
        named
            .filter_map(|(path, g)| Some((path.to_string(), full(g?, DType::F64))))
            .collect::<Grads>()
    };
    for (second, x, v) in [
        (Some(8.0), -8.0, 8.0),
        (Some(0.0), -12.0, 4.0),
        (None, -12.0, 4.0),
        (Some(0.0), -14.0, 2.0),
    ] {
        update(&mut state, &model, &gradients(second)).expect("an update");
        let velocity = state
            .leaf("1")
            .and_then(|leaf| leaf.tensor("velocity").ok())
            .expect("v");
        assert_eq!((values(&model["1"])[0], values(&velocity)[0]), (x, v));
    }
}

/// Optimisers.jl 0.4.8 weighs the old momentum with 1 - β₂ in Lion, and its step is the sign of the gradient,
/// whatever came before.
#[test]
fn t44_lion_remembers() {
    let x = var(&full(0.0, DType::F64));
    let mut state = setup(Lion::new(1.0), &x).expect("a state");
    for (gradient, expected) in [(1.0, -1.0), (1.0, -2.0), (-0.1, -3.0), (-0.3, -2.0)] {
        update(
            &mut state,
            &x,
            &Grads::from([(String::new(), full(gradient, DType::F64))]),
        )
        .expect("an update");
        assert_eq!(values(&x)[0], expected);
    }
    assert_near(
        first(&state, "m"),
        0.99 * (0.99 * (0.99 * 0.01 + 0.01) - 0.001) - 0.003,
        1e-12,
        "m",
    );
}

/// The mean of the square can be less than the square of the mean, by rounding.
#[test]
fn t46_centred_rmsprop_takes_no_root_of_a_negative_number() {
    let x = var(&full(0.0, DType::F32));
    let rule = RMSProp {
        centred: true,
        epsilon: 1e-3,
        rho: 0.5,
        ..RMSProp::new(1e-3)
    };
    let mut state = setup(rule, &x).expect("a state");
    let mut negative = 0;
    for call in 0..200 {
        let gradient = full(0.1 + 1e-3 * f64::from(call / 40), DType::F32);
        update(&mut state, &x, &Grads::from([(String::new(), gradient)])).expect("an update");
        let (v, m) = (first(&state, "v") as f32, first(&state, "m") as f32);
        negative += usize::from(v - m * m < 0.0);
        assert!(values(&x)[0].is_finite());
    }
    assert!(negative > 0, "the test has to see such numbers");
}

/// An f32 parameter is its own master.
#[test]
fn t29_f32_parameters_are_not_copied() {
    let rule = MixedPrecision::new(DType::F32, Adam::new(0.1));
    let (_, state) = run(rule.clone(), &full(1.0, DType::F32), &full(1.0, DType::F32), 1);
    assert_eq!(
        state
            .leaves()
            .flat_map(|leaf| leaf.tensor_names())
            .collect::<Vec<_>>(),
        ["m", "v"]
    );
    let (_, state) = run(rule, &full(1.0, DType::BF16), &full(1.0, DType::BF16), 1);
    assert_eq!(
        state
            .leaves()
            .flat_map(|leaf| leaf.tensor_names())
            .collect::<Vec<_>>(),
        ["master", "m", "v"]
    );
}

/// The parameter is the master's rounding even where the master is a rounding itself: 1 + 2⁻⁸ is a tie of
/// bf16, and an f64 gradient asks for a little more than that, which an f32 master cannot hold.
#[test]
fn t32_the_parameter_is_the_stored_master_rounded() {
    for (dtype, tie) in [(DType::BF16, 2f64.powi(-8)), (DType::F16, 2f64.powi(-11))] {
        let gradient = full(-(tie + 2f64.powi(-40)), DType::F64);
        for (master, expected) in [(DType::F32, 1.0 + tie), (DType::F64, 1.0 + tie + 2f64.powi(-40))] {
            let (x, state) = run(
                MixedPrecision::new(master, Descent::new(1.0)),
                &full(1.0, dtype),
                &gradient,
                1,
            );
            assert_eq!(first(&state, "master"), expected);
            assert_eq!(
                bits16(&x)[0],
                nearest16(dtype, expected),
                "{dtype:?} with {master:?}"
            );
        }
    }
}

/// What each leaf of a model received in each call, and where it stands after it. The window belongs to the
/// call.
#[test]
fn accumulation_windows_stay_in_step() {
    // With η = 3 and n = 3 a step subtracts the sum.
    let model: Vars = model(&[
        full(0.0, DType::F64),
        full(0.0, DType::F64),
        full(0.0, DType::F64),
    ]);
    let mut state = setup(
        OptimiserChain::new((AccumGrad::new(3), Descent::new(3.0))),
        &model,
    )
    .expect("a state");
    let calls = [
        ([Some(1.0), Some(1.0), None], [0.0, 0.0, 0.0], (0, 2)),
        ([Some(2.0), Some(2.0), None], [0.0, 0.0, 0.0], (0, 2)),
        ([Some(4.0), None, None], [-7.0, -3.0, 0.0], (2, 0)), // 1 misses the last call but received before, 2 nothing
        ([Some(1.0), None, Some(8.0)], [-7.0, -3.0, 0.0], (0, 2)),
        ([Some(1.0), None, None], [-7.0, -3.0, 0.0], (0, 1)),
        ([Some(1.0), Some(5.0), None], [-10.0, -8.0, -8.0], (3, 0)), // 1 received in the last call only, 2 in the first only
        ([None, Some(1.0), None], [-10.0, -8.0, -8.0], (0, 1)),
    ];
    for (received, expected, (applied, accumulated)) in calls {
        let named = received
            .iter()
            .enumerate()
            .filter_map(|(i, g)| Some((i.to_string(), full((*g)?, DType::F64))));
        let outcome = update(&mut state, &model, &named.collect::<Grads>()).expect("an update");
        let status = if applied > 0 {
            Status::Stepped
        } else {
            Status::Accumulated
        };
        assert_eq!(
            (outcome.status, outcome.applied, outcome.accumulated),
            (status, applied, accumulated)
        );
        for (var, expected) in model.values().zip(expected) {
            let x = values(var)[0];
            assert!((x - expected).abs() < 1e-14, "{x} for {expected}");
        }
    }
    assert_eq!(
        state.leaves().map(|leaf| leaf.steps()).collect::<Vec<_>>(),
        [2, 2, 1]
    );
}

/// A new learning rate is for new gradients: the velocity keeps the old one.
#[test]
fn an_adjusted_learning_rate_acts_from_the_next_step_on() {
    let x = Var::from_tensor(&full(0.0, DType::F64)).expect("a variable");
    let mut state = setup(
        MixedPrecision::new(
            DType::F64,
            Momentum {
                rho: 0.5,
                ..Momentum::new(1.0)
            },
        ),
        &x,
    )
    .expect("a state");
    let gradient = Grads::from([(String::new(), full(4.0, DType::F64))]);
    update(&mut state, &x, &gradient).expect("an update");
    assert_eq!((first(&state, "velocity"), values(&x)[0]), (4.0, -4.0));
    state.adjust(0.25).expect("a learning rate");
    update(&mut state, &x, &gradient).expect("an update");
    assert_eq!((first(&state, "velocity"), values(&x)[0]), (3.0, -7.0));
}

const EXPONENTS: [f64; 5] = [1.0, 2.0, 3.0, 0.5, f64::INFINITY];

/// A clipped gradient has the norm ω, in whichever exponent, however long it is.
#[test]
fn clipping_brings_the_norm_down() {
    for (p, length) in EXPONENTS
        .into_iter()
        .flat_map(|p| [1, 17, 70_001].map(|length| (p, length)))
    {
        let gradient = random(1, &[length], DType::F64, &Device::Cpu);
        let clip = ClipNorm {
            p,
            ..ClipNorm::new(1e-3)
        };
        let (x, _) = run(
            OptimiserChain::new((clip, Descent::new(1.0))),
            &gradient.zeros_like().expect("zeros"),
            &gradient,
            1,
        );
        let sizes = values(&x).into_iter().map(f64::abs);
        let norm = if p.is_infinite() {
            sizes.fold(0.0, f64::max)
        } else {
            sizes.map(|x| x.powf(p)).sum::<f64>().powf(1.0 / p)
        };
        assert_near(norm, 1e-3, 1e-12, (p, length));
    }
}

/// A NaN or an infinity is found wherever it stands, in every norm.
#[test]
fn t19_a_gradient_that_is_not_finite_is_refused() {
    for (p, poison) in EXPONENTS
        .into_iter()
        .flat_map(|p| [f64::NAN, f64::INFINITY, f64::NEG_INFINITY].map(|poison| (p, poison)))
    {
        for place in [0, 20, 39] {
            let mut numbers = vec![1e30; 40];
            numbers[place] = poison;
            let model = model(&[Tensor::zeros(40, DType::F32, &Device::Cpu).expect("zeros")]);
            let rule = OptimiserChain::new((
                Momentum::new(0.1),
                ClipNorm {
                    p,
                    ..ClipNorm::default()
                },
            ));
            let mut state = setup(rule, &model).expect("a state");
            let before = snapshot(&model, &state);
            let gradients = Grads::from([(
                "0".to_string(),
                Tensor::new(numbers, &Device::Cpu).expect("a tensor"),
            )]);
            let error = update(&mut state, &model, &gradients).expect_err("a norm that is not finite");
            is_kind(&error, ErrorKind::NotFinite, &["norm of its gradient is"]);
            assert_eq!(error.path(), Some("0"), "{error}");
            assert_same(&[snapshot(&model, &state)], &[before], (p, poison, place));
        }
    }
}

/// The numbers after `mark` at the front of a text that goes on with more of them: `t10_t12_gradients`,
/// `T10, T12: gradients`.
fn trap_numbers(mark: char, text: &str) -> BTreeSet<u32> {
    let words = text
        .split(|c: char| !c.is_ascii_alphanumeric())
        .filter(|word| !word.is_empty());
    words
        .map_while(|word| word.strip_prefix(mark)?.parse().ok())
        .collect()
}

/// Every test of the integration tests with the numbers of its name, and the numbers that comments mention.
fn tests_and_mentions() -> (BTreeMap<String, BTreeSet<u32>>, BTreeSet<u32>) {
    let (mut tests, mut mentions) = (BTreeMap::new(), BTreeSet::new());
    let all = files(Path::new(env!("CARGO_MANIFEST_DIR")));
    for file in all
        .into_iter()
        .filter(|path| path.extension().is_some_and(|extension| extension == "rs"))
    {
        let module = file.file_stem().expect("a name").to_string_lossy().into_owned();
        let text = std::fs::read_to_string(&file).expect("a source file");
        let mut is_test = false;
        for line in text.lines().map(str::trim_start) {
            is_test |= line == "#[test]";
            if let Some(name) = line
                .strip_prefix("fn ")
                .and_then(|rest| rest.split('(').next())
                .filter(|_| is_test)
            {
                tests.insert(format!("{module}::{name}"), trap_numbers('t', name));
                is_test = false;
            }
            if line.starts_with("//") {
                mentions.extend(trap_numbers('T', line));
            }
        }
    }
    (tests, mentions)
}

/// The list and the tests know each other.
#[test]
fn every_trap_has_its_test() {
    let list = include_str!("../../TRAPS.md");
    let mut held: BTreeMap<u32, BTreeSet<&str>> = BTreeMap::new();
    for entry in list.split("\n- **").skip(1) {
        let number = entry
            .strip_prefix('T')
            .and_then(|rest| rest.split(':').next()?.parse().ok())
            .expect("- **T1: what goes wrong.**");
        let tests = entry
            .split('`')
            .skip(1)
            .step_by(2)
            .filter(|text| text.contains("::") && text.starts_with(|c: char| c.is_lowercase()));
        assert!(
            held.insert(number, tests.collect()).is_none(),
            "T{number} is there twice"
        );
    }
    let (tests, mentions) = tests_and_mentions();
    for (number, named) in &held {
        assert!(!named.is_empty(), "T{number} names no test");
        for test in named {
            assert!(
                tests.contains_key(*test),
                "T{number} names {test}, which does not exist"
            );
        }
    }
    for (test, numbers) in &tests {
        for number in numbers {
            assert!(
                held.get(number)
                    .is_some_and(|named| named.contains(test.as_str())),
                "{test} is not in T{number} of tests/TRAPS.md"
            );
        }
    }
    assert!(tests.values().flatten().count() >= 30, "the tests were read");
    let unknown: Vec<_> = mentions
        .iter()
        .filter(|number| !held.contains_key(number))
        .collect();
    assert!(
        unknown.is_empty() && !mentions.is_empty(),
        "comments mention {unknown:?}"
    );
}
