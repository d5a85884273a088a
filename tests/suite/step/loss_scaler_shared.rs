//! One loss scaler for several models, a scaler that is off, and what can be read of one.

use candle_core::{DType, Device, Tensor, Var};
use optimisers::{
    AccumGrad, Accumulator, Descent, DynamicScale, ErrorKind, Gradients, LossScaler, MixedPrecision,
    OnOverflow, OptimiserChain, Outcome, Result, Sam, StateTree, Status, Update, setup, update,
};
use serde_json::json;

use support::common::{Vars, good_steps, grads, is_kind, model, not_finite, snapshot, values};

fn of(value: f64) -> Tensor {
    Tensor::new(&[value as f32], &Device::Cpu).expect("a tensor")
}

/// A model of one number, and its state.
struct Player {
    model: Vars,
    state: StateTree,
}

impl Player {
    fn new(window: u64) -> Self {
        let model = model(&[of(0.0)]);
        let state = setup(
            OptimiserChain::new((AccumGrad::new(window), Descent::new(1.0))),
            &model,
        )
        .expect("a state");
        Player { model, state }
    }

    /// A step with a gradient that a loss with this scale would have given.
    fn step(&mut self, scaler: &mut LossScaler, gradient: f64, scale: f64) -> Result<Outcome> {
        Update::new(&mut self.state)
            .scaler(scaler)
            .apply(&self.model, &grads([Some(of(gradient * scale))]))
    }

    fn x(&self) -> f64 {
        values(&self.model["0"])[0]
    }
}

fn quick() -> DynamicScale {
    DynamicScale {
        initial: 8.0,
        growth_interval: 2,
        ..DynamicScale::default()
    }
}

fn scale(scaler: &mut LossScaler) -> Result<f64> {
    Ok(scaler.scale(&of(1.0))?.tensor().to_vec1::<f32>()?[0].into())
}

/// torch: `scale`, `scale`, `step`, `step`, `update`. Both losses may be scaled before the first step.
#[test]
fn the_scale_stands_still_in_an_iteration_and_moves_once_at_its_end() {
    let (mut first, mut second) = (Player::new(1), Player::new(1));
    let mut scaler = LossScaler::with(quick());
    // In each iteration the gradients of both, and then the scale and the good steps that torch.amp has.
    let iterations = [
        ([1.0, 1.0], 8.0, 1),
        ([1.0, 1.0], 16.0, 0),
        ([f64::INFINITY, 1.0], 8.0, 0),
        ([1.0, f64::NAN], 4.0, 0),
        ([f64::NAN, f64::INFINITY], 2.0, 0),
        ([1.0, 1.0], 2.0, 1),
        ([1.0, f64::NAN], 1.0, 0),
    ];
    let mut expected = [0.0, 0.0];
    for ([a, b], after, counted) in iterations {
        let before = scaler.current();
        let outcomes = scaler
            .iteration(|scaler| {
                let scales = [scale(scaler)?, scale(scaler)?];
                let first = first.step(scaler, a, scales[0])?;
                assert_eq!(scaler.current(), before);
                Ok([first, second.step(scaler, b, scales[1])?])
            })
            .expect("an iteration");
        for ((outcome, gradient), x) in outcomes.iter().zip([a, b]).zip(&mut expected) {
            assert_eq!(
                (outcome.loss_scale, outcome.status == not_finite("0")),
                (Some(before), !gradient.is_finite())
            );
            *x -= if gradient.is_finite() { gradient } else { 0.0 };
        }
        assert_eq!(
            [first.x(), second.x()],
            expected,
            "each gradient by the scale of its loss, and one that overflows does not stop the other"
        );
        assert_eq!((scaler.current(), good_steps(&scaler)), (after, counted));
    }
}

/// One loss of two models: scaled once, updated twice.
#[test]
fn a_loss_of_two_models_is_scaled_once() {
    let (mut first, mut second) = (Player::new(1), Player::new(1));
    let mut scaler = LossScaler::with(quick());
    scaler
        .iteration(|scaler| {
            let scale = scale(scaler)?;
            first.step(scaler, 1.0, scale)?;
            second.step(scaler, 2.0, scale)
        })
        .expect("an iteration");
    assert_eq!(([first.x(), second.x()], good_steps(&scaler)), ([-1.0, -2.0], 1));
    let unscaled = scaler
        .iteration(|scaler| first.step(scaler, 1.0, 8.0))
        .expect_err("no loss in this iteration");
    let outside = first.step(&mut scaler, 1.0, 8.0).expect_err("nor outside of it");
    for error in [unscaled, outside] {
        is_kind(
            &error,
            ErrorKind::LossScale,
            &["a loss that was not scaled", "LossScaler::iteration"],
        );
    }
}

#[test]
fn an_iteration_that_fails_moves_no_scale() {
    let (mut first, mut second) = (Player::new(1), Player::new(1));
    let mut scaler = LossScaler::with(quick());
    let before = scaler.clone();
    let error = scaler.iteration(|scaler| {
        let scale = scale(scaler)?;
        first.step(scaler, f64::NAN, scale)?;
        second.state.at("7").map(|_| ())
    });
    is_kind(
        &error.expect_err("no such leaf"),
        ErrorKind::UnknownName,
        &["selects no leaf"],
    );
    assert_eq!(scaler, before);
    // The floor is found at the end.
    let mut scaler = LossScaler::with(DynamicScale {
        floor: 8.0,
        ..quick()
    });
    let error = scaler.iteration(|scaler| {
        let scale = scale(scaler)?;
        first.step(scaler, f64::NAN, scale)?;
        second.step(scaler, 1.0, scale)
    });
    let error = error.expect_err("at the floor");
    is_kind(&error, ErrorKind::LossScale, &["at its floor of 8"]);
    assert_eq!((error.path(), error.got()), (Some("0"), Some("8")), "{error}");
    assert_eq!((second.x(), scaler.current()), (-1.0, 8.0));
}

/// Micro-batches of two models: a good step is one that was taken, and windows end where the overflow was.
#[test]
fn iterations_and_windows_go_together() {
    let (mut first, mut second) = (Player::new(2), Player::new(2));
    let mut scaler = LossScaler::with(quick()).on_overflow(OnOverflow::EndWindow);
    let mut run = |a: f64, b: f64| {
        let answer = scaler.iteration(|scaler| {
            // A part of an iteration may be one itself.
            let status = scaler.iteration(|scaler| {
                let scale = scale(scaler)?;
                Ok(first.step(scaler, a, scale)?.status)
            })?;
            let scale = scale(scaler)?;
            Ok([status, second.step(scaler, b, scale)?.status])
        });
        (
            answer.expect("an iteration"),
            good_steps(&scaler),
            scaler.current(),
        )
    };
    assert_eq!(
        run(2.0, 2.0),
        ([Status::Accumulated, Status::Accumulated], 0, 8.0)
    );
    assert_eq!(run(f64::NAN, 2.0), ([not_finite("0"), Status::Stepped], 0, 4.0));
    assert_eq!(
        run(4.0, 4.0),
        ([Status::Accumulated, Status::Accumulated], 0, 4.0),
        "the first window began anew"
    );
    assert_eq!(run(4.0, 4.0), ([Status::Stepped, Status::Stepped], 1, 4.0));
    assert_eq!([first.x(), second.x()], [-4.0, -6.0]);
}

#[test]
fn a_scaler_that_is_off_changes_nothing() {
    let half = |x: &Vars| setup(MixedPrecision::new(DType::F32, Descent::new(0.5)), x).expect("a state");
    let (x, y) = (model(&[of(1.0)]), model(&[of(1.0)]));
    let (mut state, mut expected) = (half(&x), half(&y));
    let mut scaler = LossScaler::with(DynamicScale {
        growth_interval: 1,
        ..quick()
    })
    .enabled(false);
    let before = scaler.clone();
    let loss = of(3.0).to_dtype(DType::F16).expect("a loss");
    for gradient in [1.0, f64::INFINITY, 1.0] {
        let scaled = scaler.scale(&loss).expect("the loss");
        let scaled = scaled.tensor();
        assert_eq!((scaled.id(), scaled.dtype()), (loss.id(), DType::F16));
        let gradient = grads([Some(of(gradient))]);
        let outcome = Update::new(&mut state)
            .scaler(&mut scaler)
            .apply(&x, &gradient)
            .expect("an update");
        assert_eq!((outcome.loss_scale, scaler.current()), (None, 1.0));
        assert_eq!(
            outcome,
            optimisers::update(&mut expected, &y, &gradient).expect("an update")
        );
        assert_eq!(
            snapshot(&x, &state),
            snapshot(&y, &expected),
            "also where a gradient is infinite"
        );
    }
    scaler
        .iteration(|scaler| {
            Update::new(&mut state)
                .scaler(scaler)
                .apply(&x, &grads([Some(of(1.0))]))
                .map(|_| ())
        })
        .expect("an iteration without a loss");
    let checked = Update::new(&mut state)
        .finite_only()
        .scaler(&mut scaler)
        .apply(&x, &grads([Some(of(f64::NAN))]))
        .expect("a skipped update");
    assert_eq!(
        checked.status,
        not_finite("0"),
        "what the update says itself stays"
    );
    assert_eq!(scaler, before);
    assert_eq!(scaler.enabled(true).current(), 8.0);
}

#[test]
fn everything_about_a_scaler_can_be_read() {
    let dynamic = DynamicScale {
        hysteresis: 3,
        ..quick()
    };
    let mut scaler = LossScaler::with(dynamic).on_overflow(OnOverflow::EndWindow);
    let read = |scaler: &LossScaler| serde_json::to_value(scaler).expect("a text");
    assert_eq!(
        (
            &read(&scaler)["dynamic"]["hysteresis"],
            &read(&scaler)["on_overflow"]
        ),
        (&json!(3), &json!("EndWindow"))
    );
    let mut player = Player::new(1);
    let mut seen = Vec::new();
    for gradient in [1.0, f64::NAN, f64::NAN, 1.0] {
        let scale = scale(&mut scaler).expect("a scaled loss");
        player.step(&mut scaler, gradient, scale).expect("an update");
        seen.push((
            good_steps(&scaler),
            read(&scaler)["tolerance"].clone(),
            scaler.current(),
        ));
    }
    assert_eq!(
        seen,
        [
            (1, json!(2), 8.0),
            (0, json!(1), 8.0),
            (0, json!(0), 8.0),
            (1, json!(0), 8.0)
        ]
    );
    assert_eq!(
        (
            &read(&LossScaler::fixed(2.0))["dynamic"],
            LossScaler::fixed(2.0).current()
        ),
        (&json!(null), 2.0)
    );
}

/// What a damaged or edited text can say.
#[test]
fn counts_that_no_scaler_has_are_refused_and_overflow_nothing() {
    let text = serde_json::to_string(&LossScaler::with(quick())).expect("a text");
    let read = |from: &str, to: &str| -> LossScaler {
        assert!(text.contains(from), "{text}");
        serde_json::from_str(&text.replace(from, to)).expect("a scaler")
    };
    let largest = u64::MAX.to_string();
    for (field, from, to) in [
        (
            "good_steps",
            "\"good_steps\":0",
            format!("\"good_steps\":{largest}"),
        ),
        ("good_steps", "\"good_steps\":0", "\"good_steps\":2".to_string()),
        ("tolerance", "\"tolerance\":0", format!("\"tolerance\":{largest}")),
        ("tolerance", "\"tolerance\":0", "\"tolerance\":1".to_string()),
    ] {
        let mut scaler = read(from, &to);
        let error = scaler.scale(&of(1.0)).expect_err("refused");
        is_kind(
            &error,
            ErrorKind::Argument,
            &[&format!("LossScaler: {field} is ")],
        );
    }
    // A scale that never grows counts for ever.
    let mut scaler = read("\"growth_interval\":2", &format!("\"growth_interval\":{largest}"));
    scaler = serde_json::from_str(
        &serde_json::to_string(&scaler)
            .expect("a text")
            .replace("\"good_steps\":0", &format!("\"good_steps\":{}", u64::MAX - 1)),
    )
    .expect("a scaler");
    let mut player = Player::new(1);
    for _ in 0..2 {
        let scale = scale(&mut scaler).expect("a scaled loss");
        player.step(&mut scaler, 1.0, scale).expect("an update");
    }
    assert_eq!(good_steps(&scaler), 1, "it has grown once");
}

#[test]
fn a_text_says_whether_a_scaler_is_on() {
    for enabled in [true, false] {
        let scaler = LossScaler::dynamic().enabled(enabled);
        let text = serde_json::to_string(&scaler).expect("a text");
        assert_eq!(
            serde_json::from_str::<LossScaler>(&text).expect("a scaler"),
            scaler
        );
    }
}

#[test]
fn the_functional_form_takes_a_scaler_and_all_that_an_update_can_say() {
    let x = model(&[of(0.0)]);
    let mut parameters = optimisers::trainables(&x).expect("parameters");
    let mut state = setup(OptimiserChain::new((AccumGrad::new(2), Descent::new(1.0))), &x).expect("a state");
    let mut scaler = LossScaler::with(quick()).on_overflow(OnOverflow::EndWindow);
    let mut statuses = Vec::new();
    for gradient in [100.0, f64::NAN, 2.0, 4.0] {
        let scale = scale(&mut scaler).expect("a scaled loss");
        let before = (parameters["0"].id(), state.leaf("0").map(|leaf| leaf.counters()));
        let gradients = [("0", of(gradient * scale))];
        let (next_state, next, outcome) = Update::functional(&state)
            .scaler(&mut scaler)
            .apply(&parameters, &gradients)
            .expect("an update");
        assert_eq!(
            (outcome.loss_scale, state.leaf("0").map(|leaf| leaf.counters())),
            (Some(scale), before.1),
            "the old state stays"
        );
        statuses.push(outcome.status);
        (state, parameters) = (next_state, next);
    }
    assert_eq!(
        statuses,
        [
            Status::Accumulated,
            not_finite("0"),
            Status::Accumulated,
            Status::Stepped
        ]
    );
    assert_eq!(
        (values(&parameters["0"]), scaler.current()),
        (vec![-3.0], 4.0),
        "the window was given up in the new state"
    );
    let unscaled = Update::functional(&state)
        .scaler(&mut scaler)
        .apply(&parameters, &[("0", of(1.0))])
        .expect_err("no loss");
    is_kind(&unscaled, ErrorKind::LossScale, &["a loss that was not scaled"]);

    // The same bits as in place, with every option.
    for engine in support::common::engines() {
        let (in_place, start) = (model(&[of(1.0)]), model(&[of(1.0)]));
        let rule = || {
            MixedPrecision::new(
                DType::F64,
                OptimiserChain::new((AccumGrad::new(2), Descent::new(0.1))),
            )
        };
        let (mut left, mut right) = (
            setup(rule(), &in_place).expect("a state"),
            setup(rule(), &start).expect("a state"),
        );
        let mut parameters = optimisers::trainables(&start).expect("parameters");
        let (mut scaler, mut twin) = (LossScaler::with(quick()), LossScaler::with(quick()));
        for (weight, gradient) in [(3, 0.5), (1, f64::NAN), (5, 0.25)] {
            scale(&mut scaler).expect("a scaled loss");
            scale(&mut twin).expect("a scaled loss");
            let gradients = grads([Some(of(gradient))]);
            let update = Update::new(&mut left)
                .engine(engine)
                .weight(weight)
                .keep_masters();
            let expected = update
                .scaler(&mut scaler)
                .apply(&in_place, &gradients)
                .expect("an update");
            let update = Update::functional(&right)
                .engine(engine)
                .weight(weight)
                .keep_masters();
            let (state, next, outcome) = update
                .scaler(&mut twin)
                .apply(&parameters, &gradients)
                .expect("an update");
            assert_eq!((outcome, &twin), (expected, &scaler));
            (right, parameters) = (state, next);
            assert_eq!(values(&parameters["0"]), values(&in_place["0"]), "{engine:?}");
        }
    }
}

#[test]
fn the_functional_form_skips_what_is_not_finite_and_keeps_masters() {
    let x = model(&[of(1.0).to_dtype(DType::BF16).expect("a tensor")]);
    let state = setup(MixedPrecision::new(DType::F32, Descent::new(0.5)), &x).expect("a state");
    let parameters = optimisers::trainables(&x).expect("parameters");
    let infinite = [("0", of(f64::INFINITY))];
    let (_, next, outcome) = Update::functional(&state)
        .finite_only()
        .apply(&parameters, &infinite)
        .expect("a skipped update");
    assert_eq!((outcome.status, values(&next["0"])), (not_finite("0"), vec![1.0]));

    x["0"]
        .set(&of(3.0).to_dtype(DType::BF16).expect("a tensor"))
        .expect("another parameter");
    let changed = optimisers::trainables(&x).expect("parameters");
    let error = Update::functional(&state)
        .apply(&changed, &[("0", of(1.0))])
        .expect_err("changed");
    is_kind(&error, ErrorKind::Changed, &["its master"]);
    let (_, next, _) = Update::functional(&state)
        .keep_masters()
        .apply(&changed, &[("0", of(1.0))])
        .expect("an update");
    assert_eq!(values(&next["0"]), [0.5], "from the master");
}

#[test]
fn gradients_of_a_scaled_loss_go_to_its_scaler_alone() {
    let x = Var::new(2f32, &Device::Cpu).expect("a variable");
    let loss = || x.sqr().expect("a loss");
    let mut state = setup(Descent::new(0.25), &x).expect("a state");
    let mut scaler = LossScaler::with(quick());
    let gradients = |scaler: &mut LossScaler| {
        scaler
            .scale(&loss())
            .and_then(|loss| Ok(loss.backward()?))
            .expect("gradients")
    };

    let scaled = gradients(&mut scaler);
    assert_eq!(
        (scaled.inner().get(&x).map(values), scaled.loss_scale()),
        (Some(vec![32.0]), Some(8.0))
    );
    // Nobody would divide.
    let mut off = LossScaler::dynamic().enabled(false);
    let refused = [
        update(&mut state, &x, &scaled),
        Update::new(&mut state).finite_only().apply(&x, &scaled),
        Update::functional(&state)
            .apply(&optimisers::trainables(&x).expect("parameters"), &scaled)
            .map(|(.., outcome)| outcome),
        Update::new(&mut state).scaler(&mut off).apply(&x, &scaled),
    ];
    for refused in refused {
        let error = refused.expect_err("refused");
        is_kind(
            &error,
            ErrorKind::LossScale,
            &["multiplied by 8", "`Update::scaler`"],
        );
        assert_eq!(error.got(), Some("8"));
    }
    assert_eq!(
        (values(&x), state.leaf("").map(|leaf| leaf.steps())),
        (vec![2.0], Some(0)),
        "nothing has moved"
    );
    // An ascent does not mind.
    Sam::new(0.5)
        .ascend(Update::new(&mut state), &x, &scaled)
        .and_then(|climbed| climbed.restore())
        .expect("an ascent");
    Update::new(&mut state)
        .scaler(&mut scaler)
        .apply(&x, &scaled)
        .expect("an update");
    assert_eq!(values(&x), [1.0]);

    // Gradients that are older than the scale.
    let old = gradients(&mut scaler);
    Update::new(&mut state)
        .scaler(&mut scaler)
        .apply(&x, &old)
        .expect("an update, and the scale grows");
    let _newer = gradients(&mut scaler);
    let error = Update::new(&mut state)
        .scaler(&mut scaler)
        .apply(&x, &old)
        .expect_err("refused");
    is_kind(&error, ErrorKind::LossScale, &["multiplied by 8", "expected 16"]);

    // Those of a scaler that is off know no scale, and those of a sum of losses neither.
    assert_eq!(gradients(&mut off).loss_scale(), None);
    update(&mut state, &x, &gradients(&mut off)).expect("an update");
    let losses = [
        scaler.scale(&loss()).expect("a loss"),
        scaler.scale(&loss()).expect("a loss"),
    ];
    let sum = (losses[0].tensor() + losses[1].tensor())
        .and_then(|sum| sum.backward())
        .expect("gradients");
    Update::new(&mut state)
        .scaler(&mut scaler)
        .apply(&x, &sum)
        .expect("an update");
    assert_eq!(
        gradients(&mut scaler).into_inner().get(&x).map(values),
        Some(vec![0.0])
    );
}

/// A mean carries the scale of the gradients in it, so that an update cannot forget it.
#[test]
fn t59_a_mean_of_scaled_gradients_carries_their_scale() {
    let x = Var::new(&[2f32], &Device::Cpu).expect("a variable");
    let mut state = setup(Descent::new(0.25), &x).expect("a state");
    let scaled = |scaler: &mut LossScaler| {
        let loss = x.sqr().and_then(|x| x.sum_all()).expect("a loss");
        scaler
            .scale(&loss)
            .and_then(|loss| Ok(loss.backward()?))
            .expect("gradients")
    };
    let mut scaler = LossScaler::with(DynamicScale {
        initial: 8.0,
        growth_interval: 1,
        ..DynamicScale::default()
    });
    let mut sum = Accumulator::new(DType::F32, &x).expect("an accumulator");
    let of_eight = scaled(&mut scaler);
    for _ in 0..2 {
        sum.add(&of_eight).expect("a sum");
    }

    let plain = x.sqr().and_then(|x| x.backward()).expect("gradients");
    let of_other = scaled(&mut LossScaler::fixed(16.0));
    for (refused, got) in [(sum.add(&plain), "no scale"), (sum.add(&of_other), "16")] {
        let error = refused.expect_err("another scale");
        is_kind(&error, ErrorKind::LossScale, &["`LossScaler::scale`", "`take`"]);
        assert_eq!(
            (error.got(), error.expected()),
            (Some(got), Some("8, as of the gradients in the sum"))
        );
    }
    // Gradients without weight are not read.
    sum.add_weighted(&plain, 0).expect("nothing");

    let weight = sum.weight();
    let mean = sum.take().expect("a mean");
    assert_eq!(
        (weight, mean.loss_scale(), values(&mean.inner()[""])),
        (2, Some(8.0), vec![32.0])
    );
    let error = update(&mut state, &x, &mean).expect_err("no scaler");
    is_kind(
        &error,
        ErrorKind::LossScale,
        &["multiplied by 8", "`Update::scaler`"],
    );
    Update::new(&mut state)
        .scaler(&mut scaler)
        .apply(&x, &mean)
        .expect("an update");
    assert_eq!((values(&x), scaler.current()), (vec![1.0], 16.0));

    // The next window has the new scale, and may have none.
    sum.add(&scaled(&mut scaler)).expect("a sum");
    assert_eq!(sum.take().expect("a mean").loss_scale(), Some(16.0));
    sum.add(&plain).expect("a sum");
    update(&mut state, &x, &sum.take().expect("a mean")).expect("an update");
}
