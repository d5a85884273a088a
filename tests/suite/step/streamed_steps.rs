//! Steps whose gradients come one at a time.

use std::collections::BTreeMap;
use std::thread;

use candle_core::{DType, Device, Tensor, Var};
use optimisers::{
    AccumGrad, AdamW, Average, ClipNorm, Descent, DynamicScale, Ema, ErrorKind, Flow, Gradient,
    IntoOptimiser, Kind, LossScaler, MixedPrecision, Model, Optimiser, OptimiserChain, Outcome, Parameter,
    Result, Rule, Setup, SkipReason, State, StateTree, Status, StreamedStep, TensorSlice, Update, Visitor,
    Warning, hyper_parameters, range, ranks, setup, setup_with, update,
};

use support::common::{
    Grads, Vars, assert_same, bits, constant, engines, forget_ascent, grads, is_kind, model, optimisers_for,
    says, snapshot, tensor, values, var,
};
use support::tested::Tested;

const NOT_FINITE: ErrorKind = ErrorKind::NotFinite;

fn tensors(seed: u64, dtype: DType) -> [Tensor; 4] {
    let shapes: [&[usize]; 4] = [&[3, 5], &[], &[3, 0], &[7]];
    shapes.map(|shape| tensor(seed, shape, dtype))
}

/// A step with these gradients, in an order that the call decides, and from threads in every seventh.
fn streamed(step: StreamedStep<'_>, call: u64, grads: Grads) -> Result<Outcome> {
    let mut grads: Vec<_> = grads.into_iter().collect();
    let places = grads.len().max(1);
    grads.rotate_left(call as usize % places);
    if call.is_multiple_of(2) {
        grads.reverse();
    }
    if call.is_multiple_of(7) {
        let step = &step;
        thread::scope(|scope| {
            let threads: Vec<_> = grads
                .into_iter()
                .map(|(path, gradient)| scope.spawn(move || step.push(&path, gradient)))
                .collect();
            threads
                .into_iter()
                .try_for_each(|thread| thread.join().expect("a thread"))
        })?;
    } else {
        grads
            .into_iter()
            .try_for_each(|(path, gradient)| step.push(&path, gradient))?;
    }
    step.finish()
}

/// A step whose gradients come in another order has the bits and the outcome of an update. A
/// rule of the whole model is refused.
pub(crate) fn assert_streams(optimiser: Optimiser, dtype: DType, steps: u64) {
    let is_of_model = optimiser.rule().kind() == Kind::WholeModel;
    let [whole, parts] = [0; 2].map(|seed| model(&tensors(seed, dtype)));
    let [mut expected, mut state] =
        [&whole, &parts].map(|model| setup(optimiser.clone(), model).expect("a state"));
    for call in 1..=steps {
        if call % 20 == 10 {
            let toggle = |state: &mut StateTree| {
                let leaf = state.at("3").expect("the leaf");
                if call % 40 == 10 {
                    leaf.freeze()
                } else {
                    leaf.thaw()
                }
            };
            [&mut expected, &mut state].into_iter().for_each(toggle);
        }
        // A leaf without a gradient in every fifth call.
        let of_call = || {
            grads(
                tensors(call, DType::F32)
                    .into_iter()
                    .enumerate()
                    .map(|(i, x)| (call % 5 > 0 || i > 0).then_some(x)),
            )
        };
        let outcome = Update::new(&mut expected)
            .weight(call)
            .apply(&whole, &of_call())
            .expect("an update");
        let what = || format!("{} of {dtype:?} in call {call}", optimiser.name());
        if is_of_model {
            let before = snapshot(&parts, &state);
            let error = Update::new(&mut state).begin(&parts).expect_err(&what());
            is_kind(
                &error,
                ErrorKind::Unsupported,
                &[
                    "over the gradients of all parameters",
                    "`update`",
                    "Update::apply_owned",
                ],
            );
            assert_same(&[snapshot(&parts, &state)], &[before], what());
            return;
        }
        let step = Update::new(&mut state).weight(call).begin(&parts);
        let got = step.and_then(|step| streamed(step, call, of_call()));
        assert_eq!(
            got.unwrap_or_else(|error| panic!("{}: {error}", what())),
            outcome,
            "{}",
            what()
        );
    }
    assert_same(
        &[snapshot(&parts, &state)],
        &[snapshot(&whole, &expected)],
        optimiser.name(),
    );
}

#[test]
fn they_give_the_bits_of_update() {
    for (dtype, steps) in [(DType::BF16, 40), (DType::F32, 200)] {
        for optimiser in optimisers_for(dtype) {
            assert_streams(optimiser, dtype, steps);
        }
    }
}

#[test]
fn any_engine_takes_them() -> Tested {
    let chain = OptimiserChain::new((AccumGrad::new(2), ClipNorm::new(0.3), AdamW::new(0.1)));
    for engine in engines() {
        let [whole, parts] = [0; 2].map(|seed| model(&tensors(seed, DType::BF16)));
        let rule = MixedPrecision::new(DType::F32, chain.clone());
        let [mut expected, mut state] =
            [&whole, &parts].map(|model| setup(rule.clone(), model).expect("a state"));
        for call in 0..6 {
            let of_call = || grads(tensors(call, DType::F32).map(Some));
            let outcome = Update::new(&mut expected)
                .engine(engine)
                .apply(&whole, &of_call())?;
            let step = Update::new(&mut state).engine(engine).begin(&parts)?;
            assert_eq!(streamed(step, call, of_call())?, outcome, "{engine:?}");
        }
        assert_same(
            &[snapshot(&parts, &state)],
            &[snapshot(&whole, &expected)],
            engine,
        );
    }
    Ok(())
}

/// A model of two leaves, and its state.
fn started(optimiser: impl IntoOptimiser) -> (Vars, StateTree) {
    let model = model(&[constant(1.0, 2, DType::F32), constant(1.0, 3, DType::F32)]);
    let state = setup(optimiser, &model).expect("a state");
    (model, state)
}

fn numbers(model: &Vars) -> Vec<Vec<f64>> {
    model.values().map(|x| values(x)).collect()
}

fn slice(numbers: &[f32]) -> TensorSlice<'_> {
    TensorSlice::new(numbers.len(), numbers).expect("a slice")
}

fn of(value: f64, count: usize) -> Tensor {
    constant(value, count, DType::F32)
}

#[test]
fn a_gradient_that_is_refused_leaves_its_leaf_as_it_was() -> Tested {
    let (model, mut state) = started(AdamW::new(0.5));
    let step = Update::new(&mut state).begin(&model)?;
    step.push("0", of(1.0, 2))?;
    let moved = numbers(&model);
    assert!(moved[0] != [1.0; 2] && moved[1] == [1.0; 3]);
    for bad in [f64::INFINITY, f64::NAN, 1e30] {
        is_kind(
            &step.push("1", of(bad, 3)).unwrap_err(),
            NOT_FINITE,
            &["\"1\"", "its gradient has"],
        );
    }
    is_kind(
        &step.push("1", of(1.0, 2)).unwrap_err(),
        ErrorKind::Tensor,
        &["\"1\""],
    );
    let integers = Tensor::zeros(3, candle_core::DType::U32, &Device::Cpu)?;
    is_kind(
        &step.push("1", integers).unwrap_err(),
        ErrorKind::Tensor,
        &["\"1\""],
    );
    is_kind(
        &step.push("2", of(1.0, 2)).unwrap_err(),
        ErrorKind::UnknownName,
        &["\"2\"", "one of: 0, 1"],
    );
    is_kind(
        &step.push("1", slice(&[1.0])).unwrap_err(),
        ErrorKind::Tensor,
        &["\"1\""],
    );
    assert_eq!(numbers(&model), moved);
    // It can be pushed after all; others cannot come twice.
    step.push("1", slice(&[1.0; 3]))?;
    for path in ["0", "1"] {
        is_kind(
            &step.push(path, of(1.0, 2)).unwrap_err(),
            ErrorKind::Contract,
            &[path, "in this step already"],
        );
    }
    let outcome = step.finish()?;
    assert_eq!((outcome.status, outcome.applied), (Status::Stepped, 2));
    let steps: Vec<_> = state.leaves().map(|leaf| leaf.steps()).collect();
    assert_eq!(steps, [1, 1]);
    Ok(())
}

/// A variable under two paths.
struct Tied(Var);

impl Model for Tied {
    fn visit<'m>(&'m self, visitor: &mut Visitor<'m, '_>) {
        visitor.child("a", &self.0);
        visitor.child("b", &self.0);
    }
}

#[test]
fn tied_frozen_and_left_out_parameters_are_known() -> Tested {
    let tied = Tied(var(&of(1.0, 2)));
    let mut state = setup(Descent::new(1.0), &tied)?;
    let step = Update::new(&mut state).begin(&tied)?;
    step.push("b", of(1.0, 2))?;
    is_kind(
        &step.push("a", of(1.0, 2)).unwrap_err(),
        ErrorKind::Contract,
        &["add up"],
    );
    assert_eq!(step.finish()?.applied, 1);
    assert_eq!(values(&tied.0), [0.0; 2]);

    let model = model(&[of(1.0, 2), of(1.0, 2), of(1.0, 2)]);
    let mut state = setup_with(&model, |path, _| (path != "2").then(|| Descent::new(1.0)))?;
    state.at("1")?.freeze();
    let step = Update::new(&mut state).begin(&model)?;
    for path in ["0", "1", "2"] {
        step.push(path, of(1.0, 2))?;
    }
    let outcome = step.finish()?;
    assert_eq!(
        (outcome.applied, outcome.frozen, outcome.without_gradient.len()),
        (1, 1, 0)
    );
    assert_eq!(numbers(&model), [[0.0; 2], [1.0; 2], [1.0; 2]]);
    Ok(())
}

#[test]
fn what_is_not_pushed_is_missing_at_the_end() -> Tested {
    let (model, mut state) = started(Descent::new(1.0));
    state.require_all();
    let step = Update::new(&mut state).begin(&model)?;
    step.push("0", of(1.0, 2))?;
    let error = step.finish().unwrap_err();
    is_kind(
        &error,
        ErrorKind::NoGradient,
        &[
            "1 of 2 parameters",
            "the parameters whose gradients were pushed have moved",
        ],
    );
    assert_eq!(numbers(&model), [vec![0.0; 2], vec![1.0; 3]]);
    let step = Update::new(&mut state).begin(&model)?;
    is_kind(
        &step.finish().unwrap_err(),
        ErrorKind::NoGradient,
        &["for any of the 2"],
    );
    let outcome = Update::new(&mut state)
        .allow_no_gradients()
        .begin(&model)?
        .finish()?;
    assert_eq!(outcome.status, Status::Skipped(SkipReason::NothingToMove));
    state.at("1")?.allow_missing();
    let step = Update::new(&mut state).begin(&model)?;
    step.push("0", of(1.0, 2))?;
    assert_eq!(step.finish()?.without_gradient.iter().collect::<Vec<_>>(), ["1"]);
    let waited: Vec<_> = state
        .leaves()
        .map(|leaf| (leaf.steps(), leaf.calls_without_gradient()))
        .collect();
    assert_eq!(waited, [(2, 0), (0, 1)]);
    Ok(())
}

#[test]
fn a_step_that_is_dropped_leaves_each_leaf_whole() -> Tested {
    let chain = || OptimiserChain::new((AccumGrad::new(2), AdamW::new(0.1)));
    let (model, mut state) = started(MixedPrecision::new(DType::F64, chain()));
    drop(Update::new(&mut state).begin(&model)?);
    assert!(state.warnings().is_empty());
    for _ in 0..2 {
        let step = Update::new(&mut state).begin(&model)?;
        step.push("0", of(1.0, 2))?;
        drop(step);
    }
    assert_eq!(
        state.warnings(),
        [Warning::StepDropped {
            moved: 1,
            parameters: 2
        }]
    );
    says_of(
        &state.warnings()[0],
        &["1 of 2 parameters had moved", "StreamedStep::finish"],
    );
    let counters: Vec<_> = state.leaves().map(|leaf| leaf.counters()[0].clone()).collect();
    // What was pushed has been collected, and the calls of windows were not counted: two more end them.
    assert_eq!(counters, [("0.calls".to_string(), 2), ("0.calls".to_string(), 0)]);
    for status in [Status::Accumulated, Status::Stepped] {
        let gradients = grads([Some(of(1.0, 2)), Some(of(1.0, 3))]);
        assert_eq!(update(&mut state, &model, &gradients)?.status, status);
    }
    let numbers = numbers(&model);
    assert!(
        numbers.iter().flatten().all(|x| (x - 0.899).abs() < 1e-6),
        "{numbers:?}"
    );
    Ok(())
}

pub(crate) fn says_of(warning: &Warning, words: &[&str]) {
    let text = warning.to_string();
    words
        .iter()
        .for_each(|word| assert!(text.contains(word), "no {word:?} in {text}"));
}

#[test]
fn a_scaler_divides_and_learns_of_overflows() -> Tested {
    let (model, mut state) = started(Descent::new(1.0));
    let mut scaler = LossScaler::dynamic();
    let first = scaler.current();
    is_kind(
        &Update::new(&mut state)
            .scaler(&mut scaler)
            .begin(&model)
            .unwrap_err(),
        ErrorKind::LossScale,
        &["was not scaled"],
    );
    let mut step = |gradients: [f64; 2], is_finished: bool| {
        let scale = scaler.factor().expect("a factor");
        let step = Update::new(&mut state)
            .scaler(&mut scaler)
            .begin(&model)
            .expect("a step");
        for ((path, gradient), count) in ["0", "1"].iter().zip(gradients).zip([2, 3]) {
            match step.push(path, of(gradient * scale, count)) {
                Ok(()) => assert!(gradient.is_finite()),
                Err(error) => is_kind(&error, NOT_FINITE, &["`finish` lowers the scale"]),
            }
        }
        let outcome = is_finished.then(|| step.finish().expect("an outcome"));
        (
            outcome.map(|outcome| (outcome.status, outcome.loss_scale == Some(scale))),
            scaler.current() / first,
            numbers(&model),
        )
    };
    let (stepped, skipped) = (Some((Status::Stepped, true)), |path: &str| {
        Some((
            Status::Skipped(SkipReason::NotFinite {
                path: path.to_string(),
            }),
            true,
        ))
    });
    assert_eq!(
        step([0.5, 0.5], true),
        (stepped.clone(), 1.0, vec![vec![0.5; 2], vec![0.5; 3]])
    );
    // One has moved.
    assert_eq!(
        step([0.5, f64::NAN], true),
        (stepped, 0.5, vec![vec![0.0; 2], vec![0.5; 3]])
    );
    assert_eq!(
        step([f64::NAN, f64::INFINITY], true),
        (skipped("0"), 0.25, vec![vec![0.0; 2], vec![0.5; 3]])
    );
    assert_eq!(
        step([f64::NAN, f64::NAN], false),
        (None, 0.125, vec![vec![0.0; 2], vec![0.5; 3]])
    );
    // With all required the end is an error, and the scale falls all the same.
    state.require_all();
    let scale = scaler.factor()?;
    let step = Update::new(&mut state).scaler(&mut scaler).begin(&model)?;
    step.push("0", of(scale, 2))?;
    step.push("1", of(f64::NAN, 3)).unwrap_err();
    is_kind(&step.finish().unwrap_err(), ErrorKind::NoGradient, &["1 of 2"]);
    assert_eq!(scaler.current() / first, 0.0625);
    Ok(())
}

/// The error of an overflow at the floor says what has moved, and not that nothing has.
#[test]
fn an_overflow_at_the_floor_does_not_deny_what_has_moved() -> Tested {
    let scaler = || {
        LossScaler::with(DynamicScale {
            initial: 2.0,
            floor: 2.0,
            ..DynamicScale::default()
        })
    };
    for (first, has_moved) in [(2.0, true), (f64::NAN, false)] {
        let ((model, mut state), mut scaler) = (started(Descent::new(1.0)), scaler());
        let scale = scaler.factor()?;
        let step = Update::new(&mut state).scaler(&mut scaler).begin(&model)?;
        assert_eq!(step.push("0", of(first * scale, 2)).is_ok(), has_moved);
        step.push("1", of(f64::NAN, 3)).unwrap_err();
        let error = step.finish().unwrap_err();
        is_kind(
            &error,
            ErrorKind::LossScale,
            &["at its floor of 2", "make the floor lower"],
        );
        let text = error.to_string();
        assert_eq!(
            (
                text.contains("other parameters have moved"),
                text.contains("nothing")
            ),
            (has_moved, false),
            "{error}"
        );
        assert_eq!(numbers(&model)[0][0] != 1.0, has_moved);
    }
    // So do the updates of an iteration.
    let ((model, mut state), mut scaler) = (started(Descent::new(1.0)), scaler());
    let ended = scaler.iteration(|scaler| {
        let scale = scaler.factor()?;
        for (first, second) in [(2.0, 2.0), (2.0, f64::NAN)] {
            Update::new(&mut state).scaler(&mut *scaler).apply(
                &model,
                &grads([Some(of(first * scale, 2)), Some(of(second * scale, 3))]),
            )?;
        }
        Ok(())
    });
    is_kind(
        &ended.unwrap_err(),
        ErrorKind::LossScale,
        &["at its floor of 2", "other parameters have moved"],
    );
    Ok(())
}

/// A scaled loss is for one step, whether that is finished or not; a step in which nothing has moved may be
/// begun again.
#[test]
fn a_step_that_is_dropped_uses_its_scaled_loss_up() -> Tested {
    for (is_required, is_pushed, is_finished) in
        [(false, true, false), (false, false, false), (true, true, true)]
    {
        let ((model, mut state), mut scaler) = (started(Descent::new(1.0)), LossScaler::fixed(4.0));
        if is_required {
            state.require_all();
        }
        let _ = scaler.factor()?;
        let step = Update::new(&mut state).scaler(&mut scaler).begin(&model)?;
        if is_pushed {
            step.push("0", of(4.0, 2))?;
        }
        match is_finished {
            true => is_kind(
                &step.finish().unwrap_err(),
                ErrorKind::NoGradient,
                &["the parameters whose gradients were pushed have moved"],
            ),
            false => drop(step),
        }
        let again = Update::new(&mut state)
            .scaler(&mut scaler)
            .begin(&model)
            .map(drop);
        assert_eq!(
            again.map_err(|error| error.kind()),
            if is_pushed {
                Err(ErrorKind::LossScale)
            } else {
                Ok(())
            }
        );
    }
    Ok(())
}

#[test]
fn a_window_whose_sum_is_not_finite_is_given_up_alone() -> Tested {
    let (model, mut state) = started(OptimiserChain::new((
        AccumGrad {
            average: Average::Sum,
            ..AccumGrad::new(2)
        },
        AdamW::new(0.1),
    )));
    let mut push = |path: &'static str, gradient: f64| {
        let step = Update::new(&mut state).begin(&model).expect("a step");
        let pushed = step.push(path, of(gradient, if path == "0" { 2 } else { 3 }));
        (
            pushed,
            step.finish(),
            state
                .leaves()
                .map(|leaf| leaf.counters()[0].1)
                .collect::<Vec<_>>(),
        )
    };
    let (_, outcome, calls) = push("0", 4e18);
    assert_eq!((outcome?.status, calls), (Status::Accumulated, vec![1, 1]));
    let (pushed, outcome, calls) = push("0", 4e18);
    is_kind(
        &pushed.unwrap_err(),
        NOT_FINITE,
        &["the sum of its window", "given up"],
    );
    is_kind(&outcome.unwrap_err(), ErrorKind::NoGradient, &[]);
    assert_eq!(calls, [0, 1]);
    // The window of the other one is still to be ended.
    let (pushed, outcome, calls) = push("1", 1.0);
    pushed?;
    assert_eq!((outcome?.status, calls), (Status::Stepped, vec![0, 0]));

    // A sum that is not finite without a gradient of the call that ends the window.
    let (model, mut state) = started(OptimiserChain::new((
        AccumGrad {
            average: Average::Sum,
            ..AccumGrad::new(3)
        },
        AdamW::new(0.1),
    )));
    for call in 0..3 {
        let step = Update::new(&mut state).begin(&model)?;
        step.push("1", of(1.0, 3))?;
        if call < 2 {
            step.push("0", of(4e18, 2))?;
        }
        let outcome = step.finish()?;
        let lost = [Warning::WindowsGivenUp {
            path: "0".to_string(),
        }];
        let warnings: Vec<_> = outcome
            .warnings
            .into_iter()
            .filter(|met| matches!(met, Warning::WindowsGivenUp { .. }))
            .collect();
        assert_eq!(
            (warnings, outcome.applied),
            if call < 2 { (vec![], 0) } else { (lost.to_vec(), 1) }
        );
    }
    assert_eq!(numbers(&model)[0], [1.0; 2]);
    assert!(numbers(&model)[1] != [1.0; 3]);
    Ok(())
}

#[test]
fn all_windows_that_no_call_can_end_are_given_up() -> Tested {
    let model = model(&[1.0; 4].map(|one| constant(one, 2, DType::F32)));
    let rule = OptimiserChain::new((
        AccumGrad {
            average: Average::Sum,
            ..AccumGrad::new(2)
        },
        AdamW {
            lambda: 0.0,
            ..AdamW::new(0.1)
        },
    ));
    let mut state = setup(rule, &model)?;
    let step = Update::new(&mut state).begin(&model)?;
    for path in ["0", "1", "2", "3"] {
        step.push(path, of(if path == "1" { 1.0 } else { 3e38 }, 2))?;
    }
    assert_eq!(step.finish()?.accumulated, 4);
    let step = Update::new(&mut state).begin(&model)?;
    step.push("1", of(1.0, 2))?;
    let outcome = step.finish()?;
    assert_eq!((outcome.status, outcome.applied), (Status::Stepped, 1));
    assert_eq!(outcome.without_gradient, ["0", "2", "3"]);
    let is_given_up = |met: &&Warning| matches!(met, Warning::WindowsGivenUp { .. });
    assert_eq!(outcome.warnings.iter().filter(is_given_up).count(), 1);
    for (leaf, numbers) in state.leaves().zip(numbers(&model)) {
        let is_moved = leaf.path() == "1";
        assert_eq!(
            (leaf.counters()[0].1, leaf.steps()),
            (0, u64::from(is_moved)),
            "{}",
            leaf.path()
        );
        assert_eq!(numbers == [1.0; 2], !is_moved, "{}", leaf.path());
        let sum = leaf.tensor(&leaf.tensor_names()[0])?;
        assert_eq!(values(&sum), [0.0; 2], "{}", leaf.path());
    }
    Ok(())
}

/// A gradient of weight 0 is not read, so the sum of the window decides.
#[test]
fn a_gradient_of_weight_0_does_not_keep_a_window_open() -> Tested {
    let rule = || {
        OptimiserChain::new((
            AccumGrad {
                average: Average::Weighted,
                ..AccumGrad::new(2)
            },
            AdamW {
                lambda: 0.0,
                ..AdamW::new(0.1)
            },
        ))
    };
    for is_streamed in [true, false] {
        let model = model(&[constant(1.0, 2, DType::F32)]);
        let mut state = setup(rule(), &model)?;
        let mut call = |weight: u64, gradient: f64| {
            let update = Update::new(&mut state).weight(weight);
            if !is_streamed {
                let status = update
                    .finite_only()
                    .apply(&model, &grads([Some(of(gradient, 2))]));
                return status.expect("an outcome").status;
            }
            let step = update.begin(&model).expect("a step");
            let pushed = step.push("0", of(gradient, 2));
            let path = "0".to_string();
            match pushed {
                Ok(()) => step.finish().expect("an outcome").status,
                Err(error) => {
                    is_kind(&error, NOT_FINITE, &["the sum of its window", "given up"]);
                    is_kind(&step.finish().unwrap_err(), ErrorKind::NoGradient, &[]);
                    Status::Skipped(SkipReason::WindowsGivenUp { path })
                }
            }
        };
        assert_eq!(call(2, 3e38), Status::Accumulated);
        let given_up = Status::Skipped(SkipReason::WindowsGivenUp {
            path: "0".to_string(),
        });
        assert_eq!(call(0, f64::NAN), given_up, "{is_streamed}");
        assert_eq!(state.leaf("0").expect("a leaf").counters()[0].1, 0);
        assert_eq!(numbers(&model)[0], [1.0; 2]);
    }
    Ok(())
}

#[test]
fn what_an_update_refuses_of_model_and_state_is_refused_at_the_beginning() -> Tested {
    let (model, mut state) = started(Descent::new(1.0));
    let (other, _) = started(Descent::new(1.0));
    is_kind(
        &Update::new(&mut state).begin(&other).unwrap_err(),
        ErrorKind::Model,
        &[],
    );
    forget_ascent(&mut state, &model, &grads([Some(of(1.0, 2)), Some(of(1.0, 3))]));
    is_kind(
        &Update::new(&mut state).begin(&model).unwrap_err(),
        ErrorKind::Changed,
        &[],
    );
    let refuses = |world| {
        let (model, _) = started(Descent::new(1.0));
        let mut state = Setup::over(&world)
            .build(Descent::new(1.0), &model)
            .expect("a state");
        is_kind(
            &Update::new(&mut state).begin(&model).unwrap_err(),
            ErrorKind::Unsupported,
            &["come one at a time", "2 ranks"],
        );
    };
    thread::scope(|scope| {
        ranks(2)
            .into_iter()
            .for_each(|world| _ = scope.spawn(move || refuses(world)))
    });
    // A parameter that was changed is met by its push.
    let model = [Var::from_tensor(&constant(1.0, 2, DType::BF16))?];
    let mut state = setup(MixedPrecision::new(DType::F32, Descent::new(1.0)), &model)?;
    model[0].set(&constant(2.0, 2, DType::BF16))?;
    let step = Update::new(&mut state).begin(&model)?;
    is_kind(
        &step.push("0", of(1.0, 2)).unwrap_err(),
        ErrorKind::Changed,
        &["\"0\""],
    );
    drop(step);
    let step = Update::new(&mut state).keep_masters().begin(&model)?;
    step.push("0", of(1.0, 2))?;
    assert_eq!((step.finish()?.applied, values(&model[0])), (1, vec![0.0; 2]));
    Ok(())
}

#[test]
fn figures_and_averages_are_those_of_update() -> Tested {
    let chain = OptimiserChain::new((AdamW::new(0.1), Ema::new(0.5)));
    let [whole, parts] = [0; 2].map(|seed| model(&tensors(seed, DType::F32)));
    let [mut expected, mut state] =
        [&whole, &parts].map(|model| setup(chain.clone(), model).expect("a state"));
    for call in 0..3 {
        let of_call = || grads(tensors(call, DType::F32).map(Some));
        let outcome = Update::new(&mut expected)
            .with_figures()
            .apply(&whole, &of_call())?;
        let step = Update::new(&mut state).with_figures().begin(&parts)?;
        step.push("0", of(f64::NAN, 15).reshape((3, 5))?).unwrap_err();
        assert_eq!(streamed(step, call, of_call())?, outcome);
        assert_eq!(outcome.figures.len(), 4);
    }
    let [expected, averages] = [(&mut expected, &whole), (&mut state, &parts)].map(|(state, model)| {
        state.with_averages(model, || {
            Ok::<_, optimisers::Error>(model.values().map(|x| bits(x)).collect::<Vec<_>>())
        })
    });
    assert_eq!(averages?, expected?);
    Ok(())
}

hyper_parameters! {
    /// Descent that panics at a path.
    struct Panicking {
        /// The learning rate.
        eta: f64 = 1.0 => range::any,
    }
}

impl Rule for Panicking {
    fn apply<'a>(&'a self, _state: &'a mut State, _x: Parameter<'a>, dx: Gradient<'a>) -> Result<Flow<'a>> {
        assert_ne!(dx.path(), "1", "on purpose");
        Ok(Flow::Step(dx.scale(self.eta)))
    }
}

#[test]
fn a_rule_that_panics_takes_no_leaf_with_it() -> Tested {
    let (model, mut state) = started(Panicking::default());
    let step = Update::new(&mut state).begin(&model)?;
    step.push("0", of(1.0, 2))?;
    std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| step.push("1", of(1.0, 3)))).unwrap_err();
    drop(step);
    assert_eq!(
        state
            .leaves()
            .map(|leaf| (leaf.path().to_string(), leaf.steps()))
            .collect::<Vec<_>>(),
        [("0".into(), 1), ("1".into(), 0)]
    );
    assert_eq!(numbers(&model), [vec![0.0; 2], vec![1.0; 3]]);
    Ok(())
}

#[test]
fn threads_push_large_and_small_leaves_at_once() -> Tested {
    let of_model = |seed| -> BTreeMap<String, Tensor> {
        let length = |i: u64| {
            if i.is_multiple_of(8) {
                100_000
            } else {
                50 + i as usize
            }
        };
        (0..40)
            .map(|i| (format!("{i:02}"), tensor(seed + i, &[length(i)], DType::F32)))
            .collect()
    };
    let variables = || -> Vars { of_model(1).into_iter().map(|(path, x)| (path, var(&x))).collect() };
    let [whole, parts] = [variables(), variables()];
    let rule = || MixedPrecision::new(DType::F64, AdamW::new(0.1));
    let [mut expected, mut state] = [&whole, &parts].map(|model| setup(rule(), model).expect("a state"));
    for call in 0..5 {
        update(&mut expected, &whole, &of_model(100 * call))?;
        let step = Update::new(&mut state).begin(&parts)?;
        let grads: Vec<_> = of_model(100 * call).into_iter().collect();
        let refused: usize = thread::scope(|scope| {
            // Each thread pushes all, beginning elsewhere: every leaf is taken once.
            let push_all = |first: usize| {
                let (end, start) = grads.split_at(first);
                let pushed = start
                    .iter()
                    .chain(end)
                    .map(|(path, gradient)| step.push(path, gradient.clone()));
                pushed
                    .filter(|pushed| {
                        pushed
                            .as_ref()
                            .is_err_and(|error| error.kind() == ErrorKind::Contract)
                    })
                    .count()
            };
            let threads: Vec<_> = [0, 10, 20, 39]
                .into_iter()
                .map(|first| scope.spawn(move || push_all(first)))
                .collect();
            threads
                .into_iter()
                .map(|thread| thread.join().expect("a thread"))
                .sum()
        });
        assert_eq!((refused, step.finish()?.applied), (120, 40));
    }
    assert_same(
        &[snapshot(&parts, &state)],
        &[snapshot(&whole, &expected)],
        "large and small",
    );
    Ok(())
}

#[test]
fn its_debug_is_short() -> Tested {
    let (model, mut state) = started(Descent::new(1.0));
    let step = Update::new(&mut state).begin(&model)?;
    assert_eq!(
        format!("{step:?}"),
        "StreamedStep { leaves: 2, overflow: None, .. }"
    );
    says(
        &step.push("", of(1.0, 2)).unwrap_err(),
        &["there is no parameter for the gradient of \"\""],
    );
    Ok(())
}
