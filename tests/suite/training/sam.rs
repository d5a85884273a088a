//! SAM: the steps of the paper and of other code, and parameters that come back bit for bit.

use std::collections::BTreeMap;

use candle_core::{DType, Device, Tensor};
use optimisers::{
    AccumGrad, AdamW, Communicator, Descent, Ema, Engine, Error, ErrorKind, Kahan, LossScaler,
    MixedPrecision, Momentum, Offload, Optimiser, OptimiserChain, Q8, Result, Rule, Sam, Setup, SplitMaster,
    StateTree, StochasticRounding, StoreAs, Update, setup, update,
};

use support::common::{
    Grads, Vars, assert_same, bits, engines, forget_ascent, grads, is_kind, logged, model, says, snapshot,
    tensor, values, var,
};
use support::threads::on;

/// Σ (tanh a - 0.3)² + Σ b⁴ + Σ tanh a · Σ b
fn loss(x: &Vars) -> Result<Tensor> {
    let t = x["0"].tanh()?;
    let sum = ((t.affine(1.0, -0.3)?.sqr()?.sum_all()? + x["1"].sqr()?.sqr()?.sum_all()?)?
        + (t.sum_all()? * x["1"].sum_all()?)?)?;
    Ok(sum)
}

/// The gradient of [`loss`], by hand.
fn gradient(a: &[f64], b: &[f64]) -> Vec<f64> {
    let t: Vec<f64> = a.iter().map(|a| a.tanh()).collect();
    let (sum_t, sum_b) = (t.iter().sum::<f64>(), b.iter().sum::<f64>());
    let of_a = t.iter().map(|t| (2.0 * (t - 0.3) + sum_b) * (1.0 - t * t));
    of_a.chain(b.iter().map(|b| 4.0 * b.powi(3) + sum_t)).collect()
}

const START: [f64; 5] = [0.5, -1.25, 0.75, 0.9, -0.6];

fn start() -> Vars {
    let part = |range: std::ops::Range<usize>| Tensor::new(&START[range], &Device::Cpu).expect("a tensor");
    model(&[part(0..3), part(3..5)])
}

fn all(x: &Vars) -> Vec<f64> {
    x.values().flat_map(|x| values(x)).collect()
}

/// Twenty steps as a user writes them.
fn trained(sam: Sam, rule: impl Rule) -> Vec<f64> {
    let x = start();
    let mut state = setup(rule, &x).expect("a state");
    let mut step = || {
        let climbed = sam.ascend(Update::new(&mut state), &x, &loss(&x)?.backward()?)?;
        let grads = loss(&x)?.backward()?;
        climbed.restore()?;
        update(&mut state, &x, &grads)
    };
    (0..20).for_each(|_| assert_eq!(step().expect("a step").applied, 2));
    all(&x)
}

/// The recurrences written out: ε = ρ·T²·g / ‖T·g‖, T = 1 or |x|, then the optimiser with the gradient at x +
/// ε.
fn by_hand(rho: f64, is_adaptive: bool, mut step: impl FnMut(&mut [f64], &[f64], i32)) -> Vec<f64> {
    let mut x = START.to_vec();
    for t in 1..=20 {
        let g = gradient(&x[..3], &x[3..]);
        let size = |x: f64| if is_adaptive { x.abs() } else { 1.0 };
        let norm = x
            .iter()
            .zip(&g)
            .map(|(x, g)| (size(*x) * g).powi(2))
            .sum::<f64>()
            .sqrt();
        let up: Vec<f64> = x
            .iter()
            .zip(&g)
            .map(|(x, g)| x + rho * size(*x).powi(2) * g / norm)
            .collect();
        step(&mut x, &gradient(&up[..3], &up[3..]), t);
    }
    x
}

fn near(got: &[f64], expected: &[f64], what: &str) {
    let largest = got
        .iter()
        .zip(expected)
        .map(|(got, expected)| (got - expected).abs())
        .fold(0.0, f64::max);
    assert!(
        got.len() == expected.len() && largest < 1e-10,
        "{what}: {largest:e}, {got:?} for {expected:?}"
    );
}

/// The last numbers are those of pytorch_optimizer 4.1.0 on torch 2.15.0, with its norm in f64 and nothing
/// added to it.
#[test]
fn trajectories_are_those_of_the_recurrence_and_of_pytorch_optimizer() {
    let adamw = |x: &mut [f64], g: &[f64], t: i32, m: &mut [f64], v: &mut [f64]| {
        for i in 0..x.len() {
            m[i] = 0.9 * m[i] + 0.1 * g[i];
            v[i] = 0.999 * v[i] + 0.001 * g[i] * g[i];
            let (m, v) = (m[i] / (1.0 - 0.9f64.powi(t)), v[i] / (1.0 - 0.999f64.powi(t)));
            x[i] -= 0.05 * (m / (v.sqrt() + 1e-8) + 0.1 * x[i]);
        }
    };
    let cases: [(f64, bool, [f64; 5], [f64; 5]); 2] = [
        (
            0.05,
            false,
            [
                0.08068705128335153,
                -0.1530510409762081,
                -0.024111997280753212,
                0.25269308716977074,
                0.3280587914143338,
            ],
            [
                0.5742829605522668,
                0.4988978415697486,
                0.581511308325717,
                -0.5147647863279808,
                -0.6719742121943814,
            ],
        ),
        (
            0.5,
            true,
            [
                0.0074404165619201285,
                -0.13282082090085232,
                -0.03750545280238257,
                0.2824795375729521,
                0.3599718548480004,
            ],
            [
                0.8322628297060588,
                0.12769377282471342,
                0.8529105394534265,
                -0.6905041983698512,
                -0.6907371866807844,
            ],
        ),
    ];
    for (rho, is_adaptive, of_adamw, of_sgd) in cases {
        let sam = |rho| {
            if is_adaptive {
                Sam::new(rho).adaptive()
            } else {
                Sam::new(rho)
            }
        };
        let got = trained(
            sam(rho),
            AdamW {
                lambda: 0.1,
                ..AdamW::new(0.05)
            },
        );
        let (mut m, mut v) = ([0.0; 5], [0.0; 5]);
        near(
            &got,
            &by_hand(rho, is_adaptive, |x, g, t| adamw(x, g, t, &mut m, &mut v)),
            "AdamW",
        );
        near(&got, &of_adamw, "AdamW of pytorch_optimizer");

        let rho = if is_adaptive { 0.7 } else { 0.3 };
        let got = trained(sam(rho), Descent::new(0.1));
        near(
            &got,
            &by_hand(rho, is_adaptive, |x, g, _| {
                x.iter_mut().zip(g).for_each(|(x, g)| *x -= 0.1 * g)
            }),
            "Descent",
        );
        near(&got, &of_sgd, "SGD of pytorch_optimizer");
    }
}

fn gradients(dtype: DType) -> Grads {
    grads([Some(tensor(7, &[4, 5], dtype)), Some(tensor(8, &[300], dtype))])
}

fn parameters(dtype: DType) -> Vars {
    model(&[tensor(1, &[4, 5], dtype), tensor(2, &[300], dtype)])
}

/// Every way to keep a parameter: up there it is another, and back it is what it was, with all state, and the
/// next update goes on.
#[test]
fn parameters_come_back_bit_for_bit_whatever_keeps_them() {
    let rule = || OptimiserChain::new((AdamW::new(0.01), Ema::new(0.5)));
    for dtype in [DType::F16, DType::BF16, DType::F32, DType::F64] {
        let mut optimisers: Vec<Optimiser> = vec![
            Optimiser::new(rule()),
            Optimiser::new(MixedPrecision::new(DType::F32, rule())),
            Optimiser::new(MixedPrecision::new(DType::F64, rule())),
            Optimiser::new(Kahan::new(rule())),
            Optimiser::new(StochasticRounding::new(3, rule())),
            Optimiser::new(Offload::new(MixedPrecision::new(DType::F32, rule())).everywhere()),
            Optimiser::new(MixedPrecision::new(
                DType::F32,
                StoreAs::all(Q8, AdamW::new(0.01)),
            )),
        ];
        if dtype != DType::F16 {
            optimisers.push(Optimiser::new(SplitMaster::new(rule())));
            optimisers.push(Optimiser::new(SplitMaster::of_24_bits(rule())));
        }
        for optimiser in optimisers {
            for (engine, sam) in
                engines()
                    .into_iter()
                    .zip([Sam::new(0.5), Sam::new(0.5).adaptive(), Sam::new(0.5)])
            {
                let (x, alone) = (parameters(dtype), parameters(dtype));
                let mut states = [&x, &alone].map(|x| setup(optimiser.clone(), x).expect("a state"));
                for _ in 0..3 {
                    let before = snapshot(&x, &states[0]);
                    let climbed = sam
                        .ascend(Update::new(&mut states[0]).engine(engine), &x, &gradients(dtype))
                        .expect("an ascent");
                    assert!(climbed.norm().is_some_and(|norm| norm > 0.0));
                    let up: Vec<_> = x.values().map(|x| bits(x)).collect();
                    climbed.restore().expect("parameters");
                    assert_same(
                        &[snapshot(&x, &states[0])],
                        std::slice::from_ref(&before),
                        optimiser.name(),
                    );
                    assert!(
                        up.iter().zip(&before).all(|(up, (_, before))| up != before),
                        "{} has moved",
                        optimiser.name()
                    );
                    states[0].check_masters(&x).expect("masters of these parameters");
                    for (state, x) in states.iter_mut().zip([&x, &alone]) {
                        Update::new(state)
                            .engine(engine)
                            .apply(x, &gradients(dtype))
                            .expect("an update");
                    }
                    assert_same(
                        &[snapshot(&x, &states[0])],
                        &[snapshot(&alone, &states[1])],
                        optimiser.name(),
                    );
                }
            }
        }
    }
}

/// The way starts at the master, and is rounded to the parameter once.
#[test]
fn a_parameter_with_a_master_is_moved_from_there() {
    let x = parameters(DType::BF16);
    let mut state = setup(MixedPrecision::new(DType::F32, Descent::new(0.1)), &x).expect("a state");
    update(&mut state, &x, &gradients(DType::BF16)).expect("an update");
    let master = |path: &str| {
        values(
            &state
                .leaf(path)
                .and_then(|leaf| leaf.tensor("master").ok())
                .expect("a master"),
        )
    };
    let masters = ["0", "1"].map(master);
    let gradients = gradients(DType::F32);
    let norm = gradients
        .values()
        .flat_map(values)
        .map(|g| g * g)
        .sum::<f64>()
        .sqrt();
    let climbed = Sam::new(0.25)
        .ascend(Update::new(&mut state), &x, &gradients)
        .expect("an ascent");
    assert!((climbed.norm().expect("a norm") / norm - 1.0).abs() < 1e-12);
    for (path, master) in ["0", "1"].iter().zip(&masters) {
        let up = master
            .iter()
            .zip(values(&gradients[*path]))
            .map(|(x, g)| *x as f32 - g as f32 * (-(0.25 / norm)) as f32);
        let expected: Vec<f64> = up.map(|up| half::bf16::from_f32(up).to_f64()).collect();
        assert_eq!(values(&x[*path]), expected);
    }
    climbed.restore().expect("parameters");
}

#[test]
fn missing_gradients_and_frozen_leaves_stay_where_they_are() {
    let x = model(&[
        tensor(1, &[3], DType::F64),
        tensor(2, &[3], DType::F64),
        tensor(3, &[3], DType::F64),
    ]);
    let mut state = setup(Momentum::new(0.1), &x).expect("a state");
    state.at("2").expect("a leaf").freeze();
    let before: Vec<_> = x.values().map(|x| values(x)).collect();
    let g = tensor(4, &[3], DType::F64);
    let with_frozen = grads([Some(g.clone()), None, Some(tensor(5, &[3], DType::F64))]);
    let ((), lines) = logged(|| {
        let climbed = Sam::new(0.5)
            .ascend(Update::new(&mut state), &x, &with_frozen)
            .expect("an ascent");
        let norm = values(&g).iter().map(|g| g * g).sum::<f64>().sqrt();
        assert!((climbed.norm().expect("a norm") - norm).abs() < 1e-12);
        let moved = before[0]
            .iter()
            .zip(values(&x["0"]))
            .map(|(x, up)| (up - x).powi(2))
            .sum::<f64>()
            .sqrt();
        assert!((moved - 0.5).abs() < 1e-12, "{moved}");
        assert_eq!(
            [values(&x["1"]), values(&x["2"])],
            [before[1].clone(), before[2].clone()]
        );
    });
    assert_eq!(lines, [""; 0], "what is missing is said by the update");
    assert_eq!(values(&x["0"]), before[0], "dropped");

    // What the update refuses is the update's concern.
    state.require_all();
    Sam::new(0.5)
        .ascend(Update::new(&mut state), &x, &with_frozen)
        .and_then(|climbed| climbed.restore())
        .expect("an ascent");
    let none: Grads = BTreeMap::new();
    let refused = Sam::new(0.5)
        .ascend(Update::new(&mut state), &x, &none)
        .map(drop)
        .expect_err("no gradients");
    is_kind(
        &refused,
        ErrorKind::NoGradient,
        &["no gradient for any of the 3 parameters"],
    );
    let climbed = Sam::new(0.5)
        .ascend(Update::new(&mut state).allow_no_gradients(), &x, &none)
        .expect("nowhere");
    assert_eq!(climbed.norm(), None);
    climbed.restore().expect("parameters");
}

#[test]
fn gradients_of_zero_move_nothing_and_those_without_a_direction_are_refused() {
    for dtype in [DType::BF16, DType::F32, DType::F64] {
        for sam in [Sam::new(0.5), Sam::new(0.0), Sam::new(0.5).adaptive()] {
            let x = parameters(dtype);
            let mut state = setup(AdamW::new(0.1), &x).expect("a state");
            let before = snapshot(&x, &state);
            let zeros = grads(x.values().map(|x| x.zeros_like().ok()));
            let climbed = sam
                .ascend(Update::new(&mut state), &x, &zeros)
                .expect("an ascent");
            assert_eq!(climbed.norm(), Some(0.0));
            assert!(x.values().zip(&before).all(|(x, (_, before))| bits(x) == *before));
            climbed.restore().expect("parameters");
            for number in [f64::NAN, f64::INFINITY] {
                let mut gradients = gradients(dtype);
                gradients.insert(
                    "1".to_string(),
                    gradients["1"].affine(0.0, number).expect("a tensor"),
                );
                let error = sam
                    .ascend(Update::new(&mut state), &x, &gradients)
                    .expect_err("no direction");
                is_kind(&error, ErrorKind::NotFinite, &["Update::scaler", "no direction"]);
                let norm = error.got().and_then(|norm| norm.parse::<f64>().ok());
                assert!(
                    error.path() == Some("1") && norm.is_some_and(|norm| !norm.is_finite()),
                    "{error}"
                );
            }
            assert_same(&[snapshot(&x, &state)], &[before], dtype);
        }
    }
    let x = parameters(DType::F32);
    let mut state = setup(Descent::new(0.1), &x).expect("a state");
    for rho in [-0.1, f64::NAN, f64::INFINITY] {
        let error = Sam::new(rho)
            .ascend(Update::new(&mut state), &x, &gradients(DType::F32))
            .expect_err("refused");
        is_kind(&error, ErrorKind::Argument, &["Sam: rho is "]);
    }
    let wrong = grads([Some(tensor(1, &[2], DType::F32))]);
    let shape = Sam::new(0.1)
        .ascend(Update::new(&mut state), &x, &wrong)
        .map(drop)
        .expect_err("another shape");
    assert_eq!(
        (shape.kind(), shape.path(), shape.got()),
        (ErrorKind::Tensor, Some("0"), Some("[2]"))
    );
    assert_same(
        &[snapshot(&x, &state)],
        &[snapshot(&parameters(DType::F32), &state)],
        "after the refusals",
    );
}

/// Tiny gradients have a direction like any other.
#[test]
fn the_size_of_gradients_does_not_matter() {
    for size in [1e-30, 1.0, 1e30] {
        let x = parameters(DType::F32);
        let mut state = setup(Descent::new(0.1), &x).expect("a state");
        let before: Vec<f64> = all(&x);
        let scaled = grads(
            gradients(DType::F32)
                .values()
                .map(|gradient| gradient.affine(size, 0.0).ok()),
        );
        let climbed = Sam::new(0.5)
            .ascend(Update::new(&mut state), &x, &scaled)
            .expect("an ascent");
        let far = all(&x)
            .iter()
            .zip(&before)
            .map(|(up, x)| (up - x).powi(2))
            .sum::<f64>()
            .sqrt();
        assert!((far - 0.5).abs() < 1e-5, "{far} at {size:e}");
        climbed.restore().expect("parameters");
    }
}

/// One variable in two places moves once, by both gradients.
#[test]
fn tied_weights_move_once() {
    let tied = var(&tensor(1, &[3], DType::F64));
    let x: Vars = [("a".to_string(), tied.clone()), ("b".to_string(), tied.clone())].into();
    let mut state = setup(Descent::new(0.1), &x).expect("a state");
    let [g, h] = [4, 5].map(|seed| tensor(seed, &[3], DType::F64));
    let before = values(&tied);
    let both: Grads = [("a".to_string(), g.clone()), ("b".to_string(), h.clone())].into();
    let climbed = Sam::new(0.5)
        .ascend(Update::new(&mut state), &x, &both)
        .expect("an ascent");
    let sum: Vec<f64> = values(&g).iter().zip(values(&h)).map(|(g, h)| g + h).collect();
    let norm = sum.iter().map(|g| g * g).sum::<f64>().sqrt();
    for ((up, x), g) in values(&tied).iter().zip(&before).zip(&sum) {
        assert!((up - (x + 0.5 * g / norm)).abs() < 1e-12);
    }
    climbed.restore().expect("parameters");
    assert_eq!(values(&tied), before);
}

/// An error between ascent and restore leaves the loop, not the parameters; and a guard that is forgotten is
/// found out.
#[test]
fn parameters_come_back_without_a_restore() {
    let x = parameters(DType::BF16);
    let mut state = setup(
        MixedPrecision::new(DType::F32, OptimiserChain::new((AdamW::new(0.1), Ema::new(0.5)))),
        &x,
    )
    .expect("a state");
    let before = snapshot(&x, &state);
    let mut step = || -> Result<()> {
        let _climbed = Sam::new(3.0).ascend(Update::new(&mut state), &x, &gradients(DType::BF16))?;
        Err(Error::other("the loss is not finite"))
    };
    step().expect_err("the error of the loop");
    assert_same(
        &[snapshot(&x, &state)],
        std::slice::from_ref(&before),
        "after an error",
    );

    let remedies: [fn(&mut StateTree, &Vars) -> Result<()>; 2] = [
        |state, x| {
            Sam::new(3.0)
                .ascend(Update::new(state), x, &gradients(DType::BF16))?
                .restore()
        },
        |state, x| state.with_averages(x, || Ok(())),
    ];
    for remedy in remedies {
        forget_ascent(&mut state, &x, &gradients(DType::BF16));
        says(
            &update(&mut state, &x, &gradients(DType::BF16)).expect_err("refused"),
            &["`Sam`", "with_averages", "Sam::ascend"],
        );
        remedy(&mut state, &x).expect("parameters");
        assert_same(
            &[snapshot(&x, &state)],
            std::slice::from_ref(&before),
            "after the remedy",
        );
    }
    update(&mut state, &x, &gradients(DType::BF16)).expect("an update");
}

/// Each micro-batch ascends; nothing of that is left in the window.
#[test]
fn windows_and_loss_scales_do_not_notice_an_ascent() {
    let rule = || OptimiserChain::new((AccumGrad::new(2), AdamW::new(0.1)));
    let run = |ascends: bool| {
        let x = parameters(DType::F16);
        let mut state = setup(MixedPrecision::new(DType::F32, rule()), &x).expect("a state");
        let mut scaler = LossScaler::dynamic();
        let unit = Tensor::new(1f32, &Device::Cpu).expect("a loss");
        for _ in 0..6 {
            let scaled = |scaler: &mut LossScaler| {
                let scale = values(scaler.scale(&unit).expect("a loss").tensor())[0];
                grads(
                    gradients(DType::F32)
                        .values()
                        .map(|gradient| gradient.affine(scale, 0.0).ok()),
                )
            };
            if ascends {
                let first = scaled(&mut scaler);
                let climbed = Sam::new(0.05)
                    .ascend(Update::new(&mut state).scaler(&mut scaler), &x, &first)
                    .expect("an ascent");
                climbed.restore().expect("parameters");
            }
            let second = scaled(&mut scaler);
            Update::new(&mut state)
                .scaler(&mut scaler)
                .apply(&x, &second)
                .expect("an update");
        }
        (snapshot(&x, &state), scaler)
    };
    let (with, without) = (run(true), run(false));
    assert_same(&[with.0], &[without.0], "with an ascent");
    assert_eq!(with.1, without.1);
}

/// Ranks ascend together, by the mean of their gradients, to where one process does with that mean.
#[test]
fn ranks_ascend_by_the_mean_of_their_gradients() {
    let of_rank = |rank: u64| {
        grads([
            Some(tensor(7 + rank, &[4, 5], DType::F64)),
            Some(tensor(70 + rank, &[300], DType::F64)),
        ])
    };
    let optimisers: [fn() -> Optimiser; 2] = [
        || Optimiser::new(AdamW::new(0.1)),
        || Optimiser::new(MixedPrecision::new(DType::F64, Momentum::new(0.1))),
    ];
    for (optimiser, dtype) in optimisers.into_iter().zip([DType::F64, DType::BF16]) {
        for sam in [Sam::new(0.5), Sam::new(0.5).adaptive()] {
            let x = parameters(dtype);
            let mut state = setup(optimiser(), &x).expect("a state");
            // Three of the first and one of the second.
            let mean = |path: &str| {
                let [g, h] = [0, 1].map(|rank| of_rank(rank)[path].clone());
                ((g * 0.75).expect("a tensor") + (h * 0.25).expect("a tensor")).ok()
            };
            let climbed = sam
                .ascend(Update::new(&mut state), &x, &grads(["0", "1"].map(mean)))
                .expect("an ascent");
            let (norm, up) = (climbed.norm().expect("a norm"), all(&x));
            climbed.restore().expect("parameters");
            let ranks = on(2, move |world| {
                let x = parameters(dtype);
                let mut state = Setup::over(&world).build(optimiser(), &x).expect("a state");
                let before = snapshot(&x, &state);
                let go_up = |state: &mut StateTree| {
                    let update = Update::new(state).weight([3, 1][world.rank()]);
                    let climbed = sam
                        .ascend(update, &x, &of_rank(world.rank() as u64))
                        .expect("an ascent");
                    let found = (climbed.norm().expect("a norm"), all(&x));
                    climbed.restore().expect("parameters");
                    found
                };
                let found = go_up(&mut state);
                assert_same(&[snapshot(&x, &state)], &[before], "restored");
                update(&mut state, &x, &of_rank(world.rank() as u64)).expect("an update");
                go_up(&mut state);
                // One has no direction, and so has none.
                let broken = grads(
                    of_rank(0)
                        .values()
                        .map(|gradient| gradient.affine(f64::NAN, 0.0).ok()),
                );
                let mine = if world.rank() == 1 { broken } else { of_rank(0) };
                let error = sam
                    .ascend(Update::new(&mut state), &x, &mine)
                    .map(drop)
                    .expect_err("refused");
                is_kind(&error, ErrorKind::NotFinite, &["no direction"]);
                (found, all(&x))
            });
            for ((own_norm, own_up), after) in &ranks {
                assert!((own_norm - norm).abs() < 1e-12 * norm, "{own_norm} for {norm}");
                assert_eq!(after, &ranks[0].1);
                near(own_up, &up, "ranks");
            }
        }
    }
}

/// All engines move a model to the same place.
#[test]
fn engines_ascend_alike() {
    let up = |engine: Engine, sam: Sam| {
        let x = parameters(DType::BF16);
        let mut state = setup(MixedPrecision::new(DType::F32, AdamW::new(0.1)), &x).expect("a state");
        let climbed = sam
            .ascend(Update::new(&mut state).engine(engine), &x, &gradients(DType::F32))
            .expect("an ascent");
        let up: Vec<_> = x.values().map(|x| bits(x)).collect();
        climbed.restore().expect("parameters");
        up
    };
    for sam in [Sam::default(), Sam::new(1.0).adaptive()] {
        let expected = up(Engine::Fused, sam);
        for engine in engines() {
            assert_eq!(up(engine, sam), expected, "{engine:?}");
        }
    }
    assert_eq!(Sam::default(), Sam::new(0.05));
}
