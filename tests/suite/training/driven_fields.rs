//! The marks of schedules: what takes another optimiser, begins anew, is forgotten, has ended or would leave
//! the range.

use candle_core::{DType, Device, Var};
use candle_nn::Optimizer;
use optimisers::{
    AccumGrad, Adam, AdamW, CandleOptimizer, Checkpoint, ClipGlobalNorm, Descent, ErrorKind, MixedPrecision,
    Momentum, OptimiserChain, Outcome, Q8, Schedule, Scheduler, StateTree, StoreAs, Warning, WeightDecay,
    setup, update,
};

use support::common::{Vars, grads, is_kind, model, random, says};
use support::crafted_checkpoints::{Pieces, file_of, open};

fn variables() -> Vars {
    model(&[random(1, &[3], DType::F32, &Device::Cpu), random(2, &[3, 3], DType::F32, &Device::Cpu)])
}

/// A step with gradients of ones.
fn step(model: &Vars, state: &mut StateTree) -> Outcome {
    let gradients = grads(model.values().map(|x| x.ones_like().ok()));
    update(state, model, &gradients).expect("an update")
}

fn run(model: &Vars, state: &mut StateTree, scheduler: &mut Scheduler, steps: usize) -> Vec<Warning> {
    let mut warnings = Vec::new();
    for _ in 0..steps {
        let outcome = step(model, state);
        scheduler.advance(&outcome, state).expect("a step of the schedule");
        warnings.extend(outcome.warnings);
    }
    warnings
}

fn rates(state: &StateTree) -> Vec<f64> {
    state.leaves().filter_map(|leaf| leaf.learning_rate()).collect()
}

fn warm_up_and_cosine(peak: f64) -> Schedule {
    Schedule::linear(0.0, peak, 5).then(5, Schedule::cosine(peak, 0.0, 40))
}

#[test]
fn another_optimiser_takes_no_step_at_a_rate_that_no_schedule_set() {
    for (drive, own) in [(warm_up_and_cosine(1.0).relative(), 4e-3), (warm_up_and_cosine(1e-3), 1e-3)] {
        let model = variables();
        let mut state = setup(AdamW::new(1e-3), &model).expect("a state");
        let mut scheduler = Scheduler::new(drive.clone(), &mut state).expect("a scheduler");
        run(&model, &mut state, &mut scheduler, 25);
        let before = rates(&state);
        // Into another store and a chain, at a rate of its own.
        let rule = OptimiserChain::new((ClipGlobalNorm::new(1.0), StoreAs::all(Q8, AdamW::new(4e-3))));
        state.at("0").and_then(|leaf| leaf.replace(rule, &model)).expect("another rule");
        let expected = scheduler.current() * if own == 4e-3 { own } else { 1.0 };
        assert_eq!(rates(&state), [expected, before[1]], "{drive:?}");
        // What comes next is what it would have been.
        let mut set = state.try_clone().expect("a copy");
        scheduler.clone().go_to(25, &mut set).expect("the same step");
        assert_eq!(rates(&set), rates(&state));
        run(&model, &mut state, &mut scheduler, 25);
        assert_eq!((rates(&state), scheduler.steps()), (vec![0.0, 0.0], 50));
    }
}

/// The way to another rule in the middle of a run: restore with the rule of the file, replace it, resume.
#[test]
fn a_restored_state_takes_another_optimiser_at_the_driven_rate() {
    let (model, drive) = (variables(), || warm_up_and_cosine(1.0).relative());
    let mut state = setup(AdamW::new(1e-3), &model).expect("a state");
    let mut scheduler = Scheduler::new(drive(), &mut state).expect("a scheduler");
    run(&model, &mut state, &mut scheduler, 25);
    let file = file_of(Checkpoint::new(&state));
    let mut restored = setup(AdamW::new(1e-3), &model).expect("a state");
    open(&file).and_then(|file| file.restore(&mut restored)).expect("a state");
    restored.all().replace(StoreAs::all(Q8, AdamW::new(1e-3)), &model).expect("another rule");
    assert_eq!(rates(&restored), rates(&state));
    let resumed = Scheduler::resume(drive(), 25, &mut restored).expect("a scheduler");
    assert_eq!((resumed, rates(&restored)), (scheduler, rates(&state)));
}

#[test]
fn what_is_not_driven_comes_with_the_rate_of_its_new_optimiser() {
    let model = variables();
    let mut state = setup(Adam::new(0.5), &model).expect("a state");
    let _ = Scheduler::new(Schedule::linear(0.25, 0.0, 4).below("0"), &mut state).expect("a scheduler");
    state.all().replace(Momentum::new(0.125), &model).expect("another rule");
    assert_eq!(rates(&state), [0.25, 0.125]);
    // A rate that was set by hand is no schedule's.
    state.adjust(0.0625).expect("a rate");
    state.all().replace(Descent::new(2.0), &model).expect("another rule");
    assert_eq!(rates(&state), [2.0, 2.0]);
    // A rule without the field has nothing to go on with, and one that has several by the name keeps the
    // place.
    let _ = Scheduler::new(Schedule::linear(0.5, 0.0, 4).relative(), &mut state).expect("a scheduler");
    state.at("0").and_then(|leaf| leaf.replace(ClipGlobalNorm::new(1.0), &model)).expect("another rule");
    assert_eq!(
        (
            state.leaf("0").and_then(|leaf| leaf.base("eta")),
            state.leaf("1").and_then(|leaf| leaf.base("eta"))
        ),
        (None, Some(2.0))
    );
    let chain =
        |rate| OptimiserChain::new((WeightDecay::new(rate), AdamW { lambda: rate, ..AdamW::new(1e-3) }));
    let mut state = setup(chain(0.5), &model).expect("a state");
    let _ = Scheduler::new(Schedule::linear(0.5, 0.0, 4).relative().field("1.lambda"), &mut state)
        .expect("a scheduler");
    state.all().replace(chain(0.25), &model).expect("another rule");
    let lambdas = ["0.lambda", "1.lambda"].map(|place| state.leaf("0").and_then(|leaf| leaf.field(place)));
    assert_eq!(lambdas, [0.25, 0.125].map(|value| Some(value.into())));
}

#[test]
fn a_relative_schedule_that_begins_anew_is_refused() {
    let (model, drive) = (variables(), || warm_up_and_cosine(1.0).relative());
    let mut state = setup(Adam::new(0.5), &model).expect("a state");
    let mut scheduler = Scheduler::new(drive(), &mut state).expect("a scheduler");
    run(&model, &mut state, &mut scheduler, 20);
    let file = file_of(Checkpoint::new(&state));
    let mut restored = setup(Adam::new(0.5), &model).expect("a state");
    open(&file).and_then(|file| file.restore(&mut restored)).expect("a state");
    for state in [&mut state.try_clone().expect("a copy"), &mut restored] {
        let before = rates(state);
        let error = Scheduler::new(drive(), state).expect_err("refused");
        assert_eq!((error.path(), error.got()), (Some("0"), Some(&*before[0].to_string())), "{error}");
        let words = ["would multiply the eta", "`Scheduler::resume(.., steps, ..)`", "20 steps", "`adjust`"];
        is_kind(&error, ErrorKind::Argument, &words);
        assert_eq!(
            (rates(state), state.leaf("0").and_then(|leaf| leaf.base("eta"))),
            (before, Some(0.5)),
            "nothing has changed"
        );

        let resumed = Scheduler::resume(drive(), 20, state).expect("a scheduler");
        assert_eq!(resumed, scheduler);
        // What is meant is said by hand.
        state.adjust(0.25).expect("a rate");
        let _ = Scheduler::new(drive(), state).expect("a second phase");
        assert_eq!(state.leaf("0").and_then(|leaf| leaf.base("eta")), Some(0.25));
        assert_eq!(state.warnings(), []);
    }
    // One that is not relative has no values of their own to offer either.
    let mut state = setup(Adam::new(0.5), &model).expect("a state");
    let _ = Scheduler::new(Schedule::linear(0.0, 0.5, 10), &mut state).expect("a scheduler");
    let error = Scheduler::new(drive(), &mut state).expect_err("refused");
    is_kind(&error, ErrorKind::Argument, &["would multiply the eta"]);
    assert_eq!(error.got(), Some("0"), "{error}");
}

#[test]
fn a_schedule_that_begins_anew_is_warned_of() {
    let (model, schedule) = (variables(), || Schedule::cosine(0.5, 0.0, 40));
    let mut state = setup(Adam::new(0.5), &model).expect("a state");
    let _ = Scheduler::new(Schedule::linear(0.0, 0.5, 9), &mut state).expect("a scheduler");
    let mut scheduler = Scheduler::new(schedule(), &mut state).expect("another before the first step");
    run(&model, &mut state, &mut scheduler, 20);
    assert_eq!(state.warnings(), []);
    let mut meant = state.try_clone().expect("a copy");
    let mut elsewhere = state.try_clone().expect("a copy");
    let before = rates(&state)[0];
    let _ = Scheduler::new(schedule(), &mut state).expect("a warning at most");
    let expected = Warning::ScheduleBegunAnew {
        path: "0".to_string(),
        field: "eta".to_string(),
        before,
        now: 0.5,
        steps: 20,
    };
    assert_eq!(state.warnings(), std::slice::from_ref(&expected));
    let said = state.warnings()[0].to_string();
    assert_eq!(step(&model, &mut state).warnings, [expected], "in the outcome of the next call");
    assert_eq!(state.warnings().len(), 1);
    assert!(
        ["`Scheduler::resume(.., steps, ..)`", "20 steps", "`adjust` eta"]
            .iter()
            .all(|part| said.contains(part)),
        "{said}"
    );

    meant.adjust(0.5).expect("a rate");
    let _ = Scheduler::new(schedule(), &mut meant).expect("a second phase");
    assert_eq!(meant.warnings(), []);
    // So does one that goes to the step of the one before, as programs without `resume` do.
    let mut placed = elsewhere.try_clone().expect("a copy");
    let mut scheduler = Scheduler::new(schedule(), &mut placed).expect("a scheduler");
    scheduler.go_to(20, &mut placed).expect("its place");
    assert_eq!(placed.warnings(), []);
    assert_eq!(step(&model, &mut placed).warnings, []);
    // Another field is driven for the first time.
    let _ = Scheduler::resume(schedule(), 20, &mut elsewhere).expect("a scheduler");
    let _ = Scheduler::new(Schedule::linear(1e-8, 1e-6, 9).field("epsilon"), &mut elsewhere)
        .expect("a scheduler");
    assert_eq!(elsewhere.warnings(), []);
}

/// As of a trainer with parts that come and go.
#[test]
fn schedulers_of_parts_begin_when_they_like() {
    let model = variables();
    let mut state = setup(Adam::new(0.5), &model).expect("a state");
    let part = |path: &str| Schedule::cosine(1.0, 0.0, 4000).relative().below(path);
    let mut first = Scheduler::new(part("0"), &mut state).expect("a scheduler");
    run(&model, &mut state, &mut first, 5);
    let mut second = Scheduler::new(part("1"), &mut state).expect("a scheduler of another part");
    for _ in 0..15 {
        let outcome = step(&model, &mut state);
        first
            .advance(&outcome, &mut state)
            .and_then(|()| second.advance(&outcome, &mut state))
            .expect("steps of the schedules");
    }
    assert_eq!(state.warnings(), []);
    // The second is forgotten.
    run(&model, &mut state, &mut first, 100);
    let expected =
        Warning::ScheduleNotAdvanced { path: "1".to_string(), field: "eta".to_string(), steps: 100 };
    assert_eq!(state.warnings(), [expected]);
}

#[test]
fn a_scheduler_that_is_never_advanced_is_warned_of_once() {
    let model = variables();
    let mut state = setup(OptimiserChain::new((AccumGrad::new(2), Adam::new(0.5))), &model).expect("a state");
    let _scheduler = Scheduler::new(warm_up_and_cosine(0.5), &mut state).expect("a scheduler");
    let met: Vec<(usize, Warning)> = (1..=210)
        .flat_map(|call| step(&model, &mut state).warnings.into_iter().map(move |warning| (call, warning)))
        .collect();
    let expected =
        Warning::ScheduleNotAdvanced { path: "0".to_string(), field: "1.eta".to_string(), steps: 100 };
    assert_eq!(met, [(200, expected.clone())], "two calls are a step");
    assert_eq!(state.warnings(), [expected]);
    let said = state.warnings()[0].to_string();
    assert!(said.contains("`scheduler.advance(&outcome, &mut state)`"), "{said}");

    // One that says nothing new needs no advance.
    for schedule in
        [Schedule::constant(0.25), Schedule::linear(0.5, 0.25, 1).then(1, Schedule::constant(0.25))]
    {
        let mut state = setup(Adam::new(0.5), &model).expect("a state");
        let _ = Scheduler::resume(schedule, 1, &mut state).expect("a scheduler");
        let met: usize = (0..30).map(|_| step(&model, &mut state).warnings.len()).sum();
        assert_eq!(met, 0);
    }
}

#[test]
fn steps_after_the_end_at_a_rate_of_0_are_warned_of_once() {
    let model = variables();
    let mut state = setup(Adam::new(0.5), &model).expect("a state");
    let mut scheduler = Scheduler::new(Schedule::cosine(0.5, 0.0, 10), &mut state).expect("a scheduler");
    assert_eq!(run(&model, &mut state, &mut scheduler, 10), [], "a run of as many steps");
    let mut resumed = state.try_clone().expect("a copy");
    let expected = Warning::ScheduleOver { path: "0".to_string(), field: "eta".to_string() };
    assert_eq!(run(&model, &mut state, &mut scheduler, 20), std::slice::from_ref(&expected));
    assert_eq!(state.warnings(), std::slice::from_ref(&expected));
    let said = expected.to_string();
    assert!(["\"0\"", "ended at 0", "more steps"].iter().all(|part| said.contains(part)), "{said}");

    let mut scheduler =
        Scheduler::resume(Schedule::cosine(0.5, 0.0, 10), 10, &mut resumed).expect("a scheduler");
    assert_eq!(run(&model, &mut resumed, &mut scheduler, 1), [expected]);

    // No end, an end above 0, a rate that is 0 all the time, and a field that may well be 0.
    let quiet = [
        Schedule::constant(0.0).relative(),
        Schedule::linear(0.5, 1e-3, 3),
        Schedule::cosine_restarts(1.0, 0.0, 3, 1.0).relative(),
        Schedule::linear(1.0, 0.0, 3).relative().field("epsilon"),
    ];
    for drive in quiet {
        let mut state = setup(Adam::new(0.5), &model).expect("a state");
        let mut scheduler = Scheduler::new(drive, &mut state).expect("a scheduler");
        assert_eq!(run(&model, &mut state, &mut scheduler, 12), []);
    }
}

#[test]
fn a_schedule_that_would_leave_the_range_is_refused_before_the_first_step() {
    let model = variables();
    let mut state = setup(Adam::new(0.5), &model).expect("a state");
    let error = Scheduler::new(Schedule::linear(0.5, -0.5, 100), &mut state).expect_err("refused");
    let words =
        ["in step 99 the schedule leaves the range", "\"0\"", "eta is -0.49", "a finite number of 0 or more"];
    is_kind(&error, ErrorKind::Argument, &words);
    let leaving = [
        Schedule::linear(0.5, -0.5, 100).relative(),
        Schedule::linear(0.0, 0.5, 10).then(10, Schedule::one_minus_square_root(0.5, -1e-3, 10)),
        Schedule::cosine_restarts(0.5, -1e-3, 100, 1.0),
        Schedule::cosine_restarts(0.5, -1e-9, 2, 2.0),
        Schedule::exponential(0.5, -0.5, 2),
        Schedule::step(0.5, -0.5, 2),
        Schedule::warmup_stable_decay(0.5, -0.1, 10, 10, 10),
        Schedule::linear(1e-8, -1e-8, 2).field("epsilon"),
    ];
    for drive in leaving {
        let error = Scheduler::new(drive.clone(), &mut state).expect_err("refused");
        assert!(error.to_string().contains("the schedule leaves the range"), "{drive:?}: {error}");
        assert_eq!(error.kind(), ErrorKind::Argument, "{drive:?}: {error}");
        let _ = Scheduler::resume(drive, 1, &mut state).expect_err("refused");
        assert_eq!((rates(&state), state.warnings()), (vec![0.5, 0.5], &[][..]), "nothing has changed");
    }
    // What is cut before it leaves, and what grows for as long as one likes.
    let staying = [
        Schedule::linear(0.5, -0.5, 100).then(50, Schedule::constant(0.0)),
        Schedule::exponential(1e-7, 1.1, 1),
        Schedule::one_cycle(0.5, 3),
        Schedule::one_cycle(0.5, 100),
        Schedule::inverse_square_root(0.5, 10),
        Schedule::polynomial(0.5, 0.0, 10, 0.5),
        Schedule::cosine_restarts(0.5, 0.0, 10, 1.5),
        Schedule::linear(0.0, 0.5, u64::MAX),
    ];
    for schedule in staying {
        let mut state = setup(Adam::new(0.5), &model).expect("a state");
        let _ = Scheduler::new(schedule.clone(), &mut state)
            .unwrap_or_else(|error| panic!("{schedule:?}: {error}"));
    }
}

#[test]
fn a_file_has_the_marks_and_those_without_load() {
    let mut state = setup(Adam::new(0.5), &variables()).expect("a state");
    assert!(Pieces::of(&file_of(Checkpoint::new(&state))).description["leaves"]["0"].get("driven").is_none());
    let drives = [Schedule::linear(0.25, 1.0, 4).relative().below("0"), Schedule::linear(0.125, 1.0, 4)];
    let _ = Scheduler::new(drives, &mut state).expect("a scheduler");
    let pieces = Pieces::of(&file_of(Checkpoint::new(&state)));
    assert_eq!(pieces.description["leaves"]["0"]["driven"], serde_json::json!([["eta", 0.25]]));
    assert_eq!(pieces.description["leaves"]["1"]["driven"], serde_json::json!([["eta", null]]));
    for driven in [serde_json::json!([["eta", "nan"]]), serde_json::json!([["1.eta", null]])] {
        let mut damaged = pieces.clone();
        damaged.description["leaves"]["1"]["driven"] = driven;
        let mut restored = setup(Adam::new(2.0), &variables()).expect("a state");
        let error = open(&damaged.bytes()).and_then(|file| file.restore(&mut restored)).expect_err("refused");
        says(&error, &["parameter \"1\"", "schedule"]);
        assert_eq!(rates(&restored), [2.0, 2.0], "nothing has changed");
    }
    // The file of a version without marks says nothing of what drove it.
    let mut old = pieces;
    for path in ["0", "1"] {
        old.description["leaves"][path].as_object_mut().expect("a leaf").remove("driven").expect("a mark");
    }
    let mut restored = setup(Adam::new(2.0), &variables()).expect("a state");
    open(&old.bytes()).and_then(|file| file.restore(&mut restored)).expect("a state");
    assert_eq!(
        (rates(&restored), restored.leaf("0").and_then(|leaf| leaf.base("eta"))),
        (vec![0.125, 0.125], Some(0.5))
    );
    let _ = Scheduler::new(Schedule::constant(0.5).relative(), &mut restored).expect("a scheduler");
}

/// The trait of candle-nn sets rates by hand.
#[test]
fn a_rate_that_is_set_through_candles_trait_is_the_leafs_own() {
    let x = Var::zeros(2, DType::F32, &Device::Cpu).expect("a variable");
    let mut optimizer = CandleOptimizer::new(vec![x], Adam::new(0.5)).expect("an optimiser");
    let drive = || Schedule::linear(0.5, 1.0, 2).relative();
    let _ = Scheduler::new(drive(), optimizer.state_mut()).expect("a scheduler");
    let _ = Scheduler::new(drive(), optimizer.state_mut()).expect_err("begun anew");
    optimizer.set_learning_rate(0.25);
    let _ = Scheduler::new(drive(), optimizer.state_mut()).expect("a rate of its own");
    assert_eq!(optimizer.learning_rate(), 0.125);
}

/// Names, sizes and copies are no reason to begin anew.
#[test]
fn marks_stay_with_their_leaves() {
    let model = variables();
    let mut state = setup(MixedPrecision::new(DType::F64, Adam::new(0.5)), &model).expect("a state");
    let drive = || Schedule::linear(0.5, 1.0, 2).relative();
    let _ = Scheduler::new(drive(), &mut state).expect("a scheduler");
    state.rename("", "layers").expect("new names");
    state.rename("layers", "").expect("the old names");
    let mut state = state.try_clone().expect("a copy");
    let longer = support::common::model(&[
        random(1, &[3], DType::F32, &Device::Cpu),
        random(2, &[5, 3], DType::F32, &Device::Cpu),
    ]);
    state.resize_rows("1", &longer, &[Some(0), Some(1), Some(2), None, None]).expect("more rows");
    state.remove("0").expect("a leaf less");
    assert_eq!(state.leaf("1").and_then(|leaf| leaf.base("eta")), Some(0.5));
    is_kind(
        &Scheduler::new(drive(), &mut state).expect_err("begun anew"),
        ErrorKind::Argument,
        &["would multiply the eta"],
    );
}

/// The warning about a schedule of 40 steps in a state of 20, whose value it finds.
fn mismatch(found: f64, expected: f64, step: u64, is_factor: bool) -> Warning {
    Warning::ScheduleMismatch {
        path: "0".to_string(),
        field: "eta".to_string(),
        is_factor,
        found,
        expected,
        step,
        steps: 20,
    }
}

#[test]
fn a_schedule_that_finds_other_values_than_its_own_is_warned_of() {
    for is_relative in [false, true] {
        let relative = |schedule: Schedule| if is_relative { schedule.relative() } else { schedule };
        let of_length = |steps| relative(Schedule::cosine(1.0, 0.0, steps));
        let (model, schedule) = (variables(), || of_length(40));
        let mut saved = setup(Adam::new(1.0), &model).expect("a state");
        let mut scheduler = Scheduler::new(schedule(), &mut saved).expect("a scheduler");
        run(&model, &mut saved, &mut scheduler, 20);
        let file = file_of(Checkpoint::new(&saved));
        let restored =
            |state: &mut StateTree| open(&file).and_then(|file| file.restore(state)).expect("a restore");
        let fresh = || setup(Adam::new(1.0), &model).expect("a state");

        // A scheduler that was made before the restore begins at its own step.
        let mut early = fresh();
        let mut scheduler = Scheduler::new(schedule(), &mut early).expect("a scheduler");
        restored(&mut early);
        let mut moved = early.try_clone().expect("a copy");
        assert_eq!(
            run(&model, &mut early.try_clone().expect("a copy"), &mut scheduler.clone(), 1),
            [],
            "the call before `advance`"
        );
        let expected = Warning::ScheduleMismatch {
            steps: 21,
            path: "0".to_string(),
            field: "eta".to_string(),
            is_factor: is_relative,
            found: schedule().at(20),
            expected: 1.0,
            step: 0,
        };
        assert_eq!(run(&model, &mut early, &mut scheduler, 2), std::slice::from_ref(&expected));
        assert_eq!(run(&model, &mut early, &mut scheduler, 5), [], "once");
        let said = expected.to_string();
        assert!(
            ["\"0\"", "in step 0", "`Scheduler::resume`", "21 steps", "`adjust`"]
                .iter()
                .all(|part| said.contains(part)),
            "{said}"
        );
        assert_eq!(said.starts_with("the factor of eta"), is_relative, "{said}");
        // It may be moved to its place.
        let mut scheduler = Scheduler::new(schedule(), &mut fresh()).expect("a scheduler");
        scheduler.go_to(20, &mut moved).expect("its place");
        assert_eq!(run(&model, &mut moved, &mut scheduler, 5), []);

        // Another step, another length; and the same.
        for (steps, length) in [(0, 40), (19, 40), (20, 400), (20, 40)] {
            let mut state = fresh();
            restored(&mut state);
            let mut scheduler = Scheduler::resume(of_length(length), steps, &mut state).expect("a scheduler");
            let expected = mismatch(schedule().at(20), of_length(length).at(steps), steps, is_relative);
            let expected = if (steps, length) == (20, 40) { Vec::new() } else { vec![expected] };
            assert_eq!(run(&model, &mut state, &mut scheduler, 15), expected, "step {steps} of {length}");
        }
        // A rate that was set by hand is meant.
        let mut meant = fresh();
        restored(&mut meant);
        meant.adjust(0.125).expect("a rate");
        let resumed =
            Scheduler::resume(Schedule::cosine(0.25, 0.0, 400), 20, &mut meant).expect("a scheduler");
        assert_eq!((resumed.steps(), meant.warnings()), (20, &[][..]));
    }
}

#[test]
fn a_restored_state_without_a_scheduler_is_warned_of_once() {
    let model = variables();
    let mut saved = setup(Adam::new(1.0), &model).expect("a state");
    let mut scheduler = Scheduler::new(Schedule::cosine(1.0, 0.0, 4000), &mut saved).expect("a scheduler");
    run(&model, &mut saved, &mut scheduler, 20);
    let mut state = setup(Adam::new(1.0), &model).expect("a state");
    open(&file_of(Checkpoint::new(&saved))).and_then(|file| file.restore(&mut state)).expect("a restore");
    let mut meant = state.try_clone().expect("a copy");
    let met: Vec<Warning> = (0..210).flat_map(|_| step(&model, &mut state).warnings).collect();
    assert_eq!(
        met,
        [Warning::ScheduleNotAdvanced { path: "0".to_string(), field: "eta".to_string(), steps: 100 }]
    );
    assert!(met[0].to_string().contains("`Scheduler::resume` after a restore"), "{}", met[0]);
    // A rate that was set by hand is meant.
    meant.adjust(0.125).expect("a rate");
    assert_eq!((0..210).map(|_| step(&model, &mut meant).warnings.len()).sum::<usize>(), 0);
}
