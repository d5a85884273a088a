//! Hyper-parameters that follow schedules: which leaves and fields, from where, and after a restart.

use std::collections::BTreeMap;

use candle_core::{DType, Device, Var};
use optimisers::{
    AccumGrad, Adam, AdamW, Checkpoint, CheckpointFile, Descent, ErrorKind, FieldValue, MixedPrecision,
    Momentum, Muon, OptimiserChain, Outcome, Parameter, RMSProp, Rule, Schedule, Scheduler, StateTree,
    WeightDecay, setup, setup_with, update,
};

use support::common::{Vars, grads, is_kind, model, random, says, values};
use support::crafted_checkpoints::{Pieces, file_of, open};

/// A vector under 0 and a matrix under 1.
fn variables() -> Vars {
    model(&[random(1, &[3], DType::F32, &Device::Cpu), random(2, &[3, 3], DType::F32, &Device::Cpu)])
}

/// What Muon's documentation recommends: matrices with Muon, the rest with AdamW, each with its rate.
fn mixed(model: &Vars) -> StateTree {
    let choose = |_: &str, x: Parameter<'_>| -> Option<Box<dyn Rule>> {
        Some(if x.rank() == 2 { Box::new(Muon::new(0.02)) } else { Box::new(AdamW::new(3e-4)) })
    };
    setup_with(model, choose).expect("a state")
}

fn rates(state: &StateTree) -> Vec<f64> {
    state.leaves().filter_map(|leaf| leaf.learning_rate()).collect()
}

/// A step with gradients of ones.
fn step(model: &Vars, state: &mut StateTree) -> Outcome {
    let gradients = grads(model.values().map(|x| x.ones_like().ok()));
    update(state, model, &gradients).expect("an update")
}

#[test]
fn one_schedule_for_different_rates_is_refused_and_names_two_leaves() {
    let model = variables();
    let mut state = mixed(&model);
    let error = Scheduler::new(Schedule::cosine(0.02, 0.0, 100), &mut state).expect_err("refused");
    let flattened = "one schedule would make its eta, 0.02, and that of \"0\", 0.0003, equal";
    is_kind(&error, ErrorKind::Argument, &[flattened, "Schedule::relative", "Schedule::below", "adjust"]);
    assert_eq!(error.path(), Some("1"), "{error}");
    assert_eq!(rates(&state), [3e-4, 0.02], "nothing has changed");
    let resumed = Scheduler::resume(Schedule::constant(0.02), 7, &mut state).expect_err("refused");
    is_kind(&resumed, ErrorKind::Argument, &[flattened]);

    state.adjust(0.01).expect("one rate");
    let _ = Scheduler::new(Schedule::cosine(0.02, 0.0, 100), &mut state).expect("leaves of one rate");
    assert_eq!(rates(&state), [0.02, 0.02]);
}

#[test]
fn a_relative_schedule_keeps_what_rates_are_to_one_another() {
    let model = variables();
    let mut state = mixed(&model);
    let schedule = Schedule::linear(0.0, 1.0, 2).then(2, Schedule::cosine(1.0, 0.1, 4));
    let mut scheduler = Scheduler::new(schedule.clone().relative(), &mut state).expect("a scheduler");
    for steps in 0..8 {
        let factor = schedule.at(steps);
        assert_eq!((scheduler.steps(), scheduler.current()), (steps, factor));
        assert_eq!(rates(&state), [3e-4 * factor, 0.02 * factor], "exactly, also after a rate of 0");
        let outcome = step(&model, &mut state);
        scheduler.advance(&outcome, &mut state).expect("a step of the schedule");
    }
    let bases: Vec<_> = state.leaves().map(|leaf| leaf.base("eta")).collect();
    assert_eq!(bases, [Some(3e-4), Some(0.02)]);
}

#[test]
fn a_relative_schedule_goes_on_after_a_checkpoint() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("run.safetensors");
    let drive = || Schedule::linear(0.0, 1.0, 3).then(3, Schedule::exponential(1.0, 0.5, 2)).relative();
    // At step 0 all rates are 0, and nothing but what was kept can tell them apart.
    for saved_at in [0, 2, 5] {
        let first = variables();
        let mut state = mixed(&first);
        let mut scheduler = Scheduler::new(drive(), &mut state).expect("a scheduler");
        for _ in 0..saved_at {
            let outcome = step(&first, &mut state);
            scheduler.advance(&outcome, &mut state).expect("a step of the schedule");
        }
        Checkpoint::new(&state).save(&path).expect("a file");

        let mut restored = mixed(&variables());
        restored.adjust(7.0).expect("rates that are not the saved ones");
        CheckpointFile::open(&path).and_then(|file| file.restore(&mut restored)).expect("a state");
        let mut resumed = Scheduler::resume(drive(), saved_at, &mut restored).expect("a scheduler");
        assert_eq!(resumed, scheduler);
        for _ in 0..3 {
            assert_eq!(rates(&restored), rates(&state));
            let next = resumed.steps() + 1;
            scheduler.go_to(next, &mut state).expect("a step of the schedule");
            resumed.go_to(next, &mut restored).expect("a step of the schedule");
        }
    }
}

/// A file of a version that knew no relative schedules, or a state that was never driven by one.
#[test]
fn a_relative_schedule_does_not_guess_what_it_started_from() {
    let model = variables();
    let mut state = mixed(&model);
    let error =
        Scheduler::resume(Schedule::exponential(1.0, 0.5, 1).relative(), 3, &mut state).expect_err("refused");
    is_kind(
        &error,
        ErrorKind::Argument,
        &["which eta a relative schedule started from", "adjust", "`new`", "`go_to`"],
    );
    assert_eq!(rates(&state), [3e-4, 0.02]);

    let mut scheduler =
        Scheduler::new(Schedule::exponential(1.0, 0.5, 1).relative(), &mut state).expect("a scheduler");
    scheduler.go_to(3, &mut state).expect("the step of the run");
    assert_eq!(rates(&state), [3e-4 / 8.0, 0.02 / 8.0]);
}

#[test]
fn parts_of_a_model_have_schedules_of_their_own() {
    let model = variables();
    let mut state = mixed(&model);
    let drives = [
        Schedule::linear(0.02, 0.0, 2).select_where(|leaf| leaf.shape().len() == 2),
        Schedule::linear(1e-3, 2e-3, 2),
    ];
    let mut scheduler = Scheduler::new(drives.clone(), &mut state).expect("a scheduler");
    let mut seen = Vec::new();
    for _ in 0..3 {
        seen.push(rates(&state));
        let outcome = step(&model, &mut state);
        scheduler.advance(&outcome, &mut state).expect("a step of the schedule");
    }
    assert_eq!(seen, [[1e-3, 0.02], [1.5e-3, 0.01], [2e-3, 0.0]]);
    assert_eq!(scheduler.current(), 0.0, "the first schedule's");
    assert_eq!(Scheduler::resume(drives, 3, &mut state).expect("a scheduler"), scheduler);

    // By path, and a relative one beside one that is not.
    let mut state = mixed(&model);
    let by_path = vec![Schedule::constant(0.5).relative().below("1"), Schedule::constant(5e-4).below("0")];
    let _ = Scheduler::new(by_path, &mut state).expect("a scheduler");
    assert_eq!(rates(&state), [5e-4, 0.01]);
}

#[test]
fn a_drive_that_drives_nothing_is_refused() {
    let model = variables();
    let mut state = mixed(&model);
    let one = || Schedule::constant(1e-3);
    let mut refused = |schedules: Vec<Schedule>| Scheduler::new(schedules, &mut state).expect_err("refused");
    let empty = refused(vec![one().below("encoder")]);
    is_kind(&empty, ErrorKind::UnknownName, &["\"encoder\" selects no leaf"]);
    let unknown = refused(vec![one().field("rho").below("0")]);
    is_kind(&unknown, ErrorKind::UnknownName, &["no field \"rho\""]);
    assert!(unknown.expected().is_some_and(|available| available.contains("eta")), "{unknown}");
    let count = refused(vec![one().field("ns_steps")]);
    is_kind(&count, ErrorKind::Argument, &["its ns_steps is"]);
    assert_eq!(count.path(), Some("1"), "{count}");
    let idle = refused(vec![one().relative(), one().below("1")]);
    is_kind(&idle, ErrorKind::Argument, &["the schedule with the index 1 drives nothing"]);
    assert_eq!(idle.path(), Some("1"), "{idle}");
    let out_of_range = refused(vec![Schedule::constant(-1.0).relative()]);
    says(&out_of_range, &["\"0\"", "eta", "-0.0003", "a finite number of 0 or more"]);
    let nan = refused(vec![Schedule::constant(f64::NAN).relative()]);
    is_kind(&nan, ErrorKind::Argument, &["Schedule: eta is NaN"]);
    assert_eq!(rates(&state), [3e-4, 0.02]);
    assert!(state.leaves().all(|leaf| leaf.base("eta").is_none()), "nothing has changed");
}

/// A name that several members have needs a place, unless it is that of their rates.
#[test]
fn a_field_of_several_members_needs_its_place() {
    let model = variables();
    let chain = OptimiserChain::new((WeightDecay::new(0.5), AdamW { lambda: 0.25, ..AdamW::new(0.5) }));
    let mut state = setup(MixedPrecision::new(DType::F64, chain), &model).expect("a state");
    for drive in [Schedule::constant(0.5), Schedule::constant(0.5).relative()] {
        let error = Scheduler::new(drive.field("lambda"), &mut state).expect_err("refused");
        is_kind(&error, ErrorKind::Argument, &["Schedule::field(\"0.lambda\")"]);
        assert_eq!(error.got(), Some("0.lambda = 0.5, 1.lambda = 0.25"), "{error}");
    }
    let mut scheduler =
        Scheduler::new(Schedule::linear(0.5, 0.0, 2).field("0.lambda"), &mut state).expect("a scheduler");
    let outcome = step(&model, &mut state);
    scheduler.advance(&outcome, &mut state).expect("a step of the schedule");
    for leaf in state.leaves() {
        assert_eq!((leaf.field("0.lambda"), leaf.field("1.lambda")), (Some(0.25.into()), Some(0.25.into())));
    }
}

/// What a place leaves out is not driven by a schedule for the rest of the model, nor a place by one for the
/// whole.
#[test]
fn a_drive_for_the_rest_means_other_leaves() {
    let model = variables();
    let choose = |path: &str, _: Parameter<'_>| -> Option<Box<dyn Rule>> {
        let chain = || OptimiserChain::new((RMSProp::new(0.01), Momentum::new(1.0)));
        Some(if path == "0" { Box::new(chain()) } else { Box::new(Adam::new(0.5)) })
    };
    let mut state = setup_with(&model, choose).expect("a state");
    let rest = || Schedule::constant(0.25);
    let _ = Scheduler::new([Schedule::constant(0.5).relative().field("0.eta"), rest()], &mut state)
        .expect("a scheduler");
    let rates = |path: &str| {
        ["0.eta", "1.eta", "eta"].map(|place| state.leaf(path).and_then(|leaf| leaf.field(place)))
    };
    assert_eq!(rates("0"), [0.005, 1.0, 0.005].map(|rate| Some(FieldValue::Real(rate))));
    assert_eq!(rates("1"), [None, None, Some(FieldValue::Real(0.25))]);
    // Another place is another field.
    state.all().adjust_fields([("0.eta", 0.01.into()), ("1.eta", 1.0.into())]).expect("rates of their own");
    let _ = Scheduler::new(
        [Schedule::constant(2.0).relative().field("0.eta"), rest().field("1.eta"), rest()],
        &mut state,
    )
    .expect("a scheduler");
    assert_eq!(state.leaf("0").map(|leaf| leaf.optimiser().fields()[4]), Some(("eta", 0.25.into())));
    // The rate of the whole has all its factors.
    let mut state = setup_with(&model, choose).expect("a state");
    let idle = Scheduler::new(
        [rest().below("1"), Schedule::constant(0.5).below("0"), rest().field("0.eta")],
        &mut state,
    );
    is_kind(&idle.expect_err("idle"), ErrorKind::Argument, &["the schedule with the index 2 drives nothing"]);
}

/// The chain of RMSProp's documentation, against torch's recurrence written out, while the rate moves.
#[test]
fn rmsprop_with_momentum_and_a_schedule_is_torchs() {
    let x = model(&[random(1, &[4], DType::F64, &Device::Cpu)]);
    let mut expected = values(&x["0"]);
    let rule = OptimiserChain::new((
        RMSProp { rho: 0.99, ..RMSProp::new(1.0) },
        Momentum::new(1.0),
        Descent::new(0.01),
    ));
    let mut state = setup(rule, &x).expect("a state");
    let schedule = Schedule::cosine(0.02, 0.0, 20);
    let mut scheduler = Scheduler::new(schedule.clone(), &mut state).expect("a scheduler");
    let (mut mean, mut buffer) = ([0.0; 4], [0.0; 4]);
    for call in 0..15 {
        let gradient = random(10 + call, &[4], DType::F64, &Device::Cpu);
        for (i, g) in values(&gradient).into_iter().enumerate() {
            mean[i] = 0.99 * mean[i] + (1.0 - 0.99) * g * g;
            buffer[i] = 0.9 * buffer[i] + g / (f64::sqrt(mean[i]) + 1e-8);
            expected[i] -= schedule.at(call) * buffer[i];
        }
        let outcome = update(&mut state, &x, &grads([Some(gradient)])).expect("an update");
        scheduler.advance(&outcome, &mut state).expect("a step of the schedule");
        for (got, expected) in values(&x["0"]).into_iter().zip(expected.clone()) {
            assert!((got - expected).abs() < 1e-12, "step {call}: {got} for {expected}");
        }
    }
}

#[test]
fn schedules_drive_other_fields_too_and_several_of_one_leaf() {
    let model = variables();
    let chain = OptimiserChain::new((WeightDecay::new(0.1), AdamW { lambda: 0.5, ..AdamW::new(1e-3) }));
    let mut state = setup(chain, &model).expect("a state");
    let drives = [
        Schedule::linear(1.0, 0.0, 4),
        Schedule::linear(1.0, 0.0, 2).relative().field("0.lambda"),
        Schedule::constant(0.5).relative().field("1.lambda").below("1"),
    ];
    let mut scheduler = Scheduler::new(drives, &mut state).expect("a scheduler");
    scheduler.go_to(1, &mut state).expect("a step of the schedule");
    let fields = |path: &str| {
        ["0.lambda", "1.eta", "1.lambda"].map(|field| state.leaf(path).and_then(|leaf| leaf.field(field)))
    };
    assert_eq!(fields("0"), [0.05, 0.75, 0.5].map(|value| Some(FieldValue::Real(value))));
    assert_eq!(fields("1"), [0.05, 0.75, 0.25].map(|value| Some(FieldValue::Real(value))));
}

/// Frozen leaves are driven, leaves without a rate passed over, and renamed ones known.
#[test]
fn all_leaves_are_driven_whatever_becomes_of_them() {
    let model = model(&[
        random(1, &[3], DType::F32, &Device::Cpu),
        random(2, &[3], DType::F32, &Device::Cpu),
        random(3, &[3], DType::F32, &Device::Cpu),
    ]);
    let choose = |path: &str, _: Parameter<'_>| -> Option<Box<dyn Rule>> {
        Some(match path {
            "0" => Box::new(Descent::new(0.25)),
            "1" => Box::new(Descent::new(0.5)),
            _ => Box::new(AccumGrad::new(2)),
        })
    };
    let mut state = setup_with(&model, choose).expect("a state");
    state.at("1").expect("a leaf").freeze();
    let mut scheduler =
        Scheduler::new(Schedule::exponential(1.0, 0.5, 1).relative(), &mut state).expect("a scheduler");
    state.rename("", "layers").expect("new names");
    let mut state = state.try_clone().expect("a copy");
    scheduler.go_to(2, &mut state).expect("a step of the schedule");
    assert_eq!(rates(&state), [0.0625, 0.125]);
}

#[test]
fn leaves_that_are_added_or_replaced_later_are_driven_as_documented() {
    let variable = || Var::zeros(2, DType::F32, &Device::Cpu).expect("a variable");
    let mut model = vec![variable(), variable()];
    let mut state = setup(Adam::new(1.0), &model).expect("a state");
    let mut relative =
        Scheduler::new(Schedule::exponential(1.0, 0.5, 1).relative(), &mut state).expect("a scheduler");
    relative.go_to(2, &mut state).expect("a step of the schedule");
    model.push(variable());
    state.add(Adam::new(8.0), &model).expect("a new leaf");
    state.at("1").expect("a leaf").replace(Descent::new(4.0), &model).expect("another rule");
    assert_eq!(rates(&state), [0.25, 1.0, 8.0], "what is replaced is driven on");
    relative.go_to(relative.steps(), &mut state).expect("the same step");
    assert_eq!(rates(&state), [0.25, 1.0, 2.0], "a rate of its own is the one it came with");
    relative.go_to(3, &mut state).expect("a step of the schedule");
    assert_eq!(rates(&state), [0.125, 0.5, 1.0]);

    let mut model = vec![variable()];
    let mut state = setup(Adam::new(1.0), &model).expect("a state");
    let mut absolute = Scheduler::new(Schedule::linear(1.0, 0.0, 4), &mut state).expect("a scheduler");
    absolute.go_to(1, &mut state).expect("a step of the schedule");
    model.push(variable());
    state.add(Adam::new(8.0), &model).expect("a new leaf");
    let before = absolute.clone();
    let error = absolute.advance(&moved(), &mut state).expect_err("rates that differ");
    is_kind(
        &error,
        ErrorKind::Argument,
        &["one schedule would make its eta, 8, and that of \"0\", 0.75, equal"],
    );
    assert_eq!(error.path(), Some("1"), "{error}");
    assert_eq!((absolute.clone(), rates(&state)), (before, vec![0.75, 8.0]), "nothing has changed");
    state.adjust(absolute.current()).expect("one rate");
    absolute.advance(&moved(), &mut state).expect("a step of the schedule");
    assert_eq!(rates(&state), [0.5, 0.5]);
}

/// What an update says that moved something.
fn moved() -> Outcome {
    let x = model(&[random(1, &[1], DType::F32, &Device::Cpu)]);
    step(&x, &mut setup(Descent::new(0.1), &x).expect("a state"))
}

/// A schedule that takes over from a relative one leaves nothing behind that a later one could mistake for
/// its start.
#[test]
fn a_new_scheduler_starts_from_the_rates_that_were_set() {
    let model = variables();
    let mut state = mixed(&model);
    let half = || Schedule::constant(0.5).relative();
    let _ = Scheduler::new(half(), &mut state).expect("a scheduler");
    state.at("0").and_then(|mut leaf| leaf.adjust(3e-4 / 2.0)).expect("a rate");
    state.at("1").and_then(|mut leaf| leaf.adjust(0.02 / 2.0)).expect("a rate");
    let _ = Scheduler::new(half(), &mut state).expect("a second phase");
    assert_eq!(rates(&state), [3e-4 / 4.0, 0.02 / 4.0]);
    assert_eq!(state.leaf("1").and_then(|leaf| leaf.base("eta")), Some(0.01));
    state.adjust(0.25).expect("one rate");
    let _ = Scheduler::new(Schedule::constant(0.125), &mut state).expect("a third phase");
    assert!(state.leaves().all(|leaf| leaf.base("eta").is_none()));
    let no_base = Scheduler::resume(half(), 1, &mut state).expect_err("no base");
    is_kind(&no_base, ErrorKind::Argument, &["which eta a relative schedule started from"]);
}

/// Leaves that share an optimiser go on sharing it, and a rate that does not change is not set.
#[test]
fn a_scheduler_changes_rates_only() {
    let model = variables();
    let mut state = setup(MixedPrecision::new(DType::F32, Adam::new(0.5)), &model).expect("a state");
    let shared = |state: &StateTree| {
        let places: Vec<_> =
            state.leaves().map(|leaf| std::ptr::from_ref(leaf.optimiser()).cast::<()>()).collect();
        (places[0] == places[1], places[0])
    };
    let mut scheduler = Scheduler::new(Schedule::constant(0.5).then(2, Schedule::constant(0.25)), &mut state)
        .expect("a scheduler");
    let before = shared(&state);
    scheduler.go_to(1, &mut state).expect("a step of the schedule");
    assert_eq!(shared(&state), before);
    scheduler.go_to(2, &mut state).expect("a step of the schedule");
    assert!(shared(&state).0);
    let fields: BTreeMap<_, _> =
        state.leaves().map(|leaf| (leaf.path().to_string(), leaf.optimiser().fields())).collect();
    assert_eq!(fields["0"], [("eta", 0.25.into()), ("beta", (0.9, 0.999).into()), ("epsilon", 1e-8.into())]);
}

#[test]
fn a_file_says_of_bases_only_what_there_is_and_a_damaged_base_is_refused() {
    let mut state = mixed(&variables());
    let plain = Pieces::of(&file_of(Checkpoint::new(&state)));
    assert!(
        plain.description["leaves"]["0"].get("bases").is_none(),
        "the file of a version without relative schedules"
    );
    let _ = Scheduler::new(Schedule::constant(0.5).relative(), &mut state).expect("a scheduler");
    let pieces = Pieces::of(&file_of(Checkpoint::new(&state)));
    assert_eq!(pieces.description["leaves"]["1"]["bases"], serde_json::json!([["eta", 0.02]]));
    for bases in [
        serde_json::json!([["eta", "nan"]]),
        serde_json::json!([["0.eta", 0.5]]),
        serde_json::json!([["", 0.5]]),
    ] {
        let mut damaged = pieces.clone();
        damaged.description["leaves"]["1"]["bases"] = bases;
        let mut restored = mixed(&variables());
        let error = open(&damaged.bytes()).and_then(|file| file.restore(&mut restored)).expect_err("refused");
        says(&error, &["parameter \"1\"", "base"]);
        assert_eq!(
            (rates(&restored), restored.leaf("0").and_then(|leaf| leaf.base("eta"))),
            (vec![3e-4, 0.02], None),
            "nothing has changed"
        );
    }
    // A state that was driven takes over that the file's was not.
    open(&plain.bytes()).and_then(|file| file.restore(&mut state)).expect("a state");
    assert_eq!((rates(&state), state.leaf("0").and_then(|leaf| leaf.base("eta"))), (vec![3e-4, 0.02], None));
}

/// What is said of one part of a schedule holds for the whole, so that a `relative` in the wrong place is no
/// other schedule.
#[test]
fn parts_of_a_schedule_drive_the_same() {
    let (rise, fall) = (|| Schedule::linear(0.0, 1.0, 4), || Schedule::cosine(1.0, 0.0, 8));
    let whole = || rise().then(4, fall());
    assert_eq!(rise().relative().then(4, fall()), whole().relative());
    assert_eq!(rise().then(4, fall().relative()), whole().relative());
    assert_eq!(rise().then(4, fall().field("lambda").below("0")), whole().field("lambda").below("0"));
    let both = rise().field("rho").below("1").then(4, fall().field("lambda").below("0"));
    assert_eq!(both, whole().field("rho").below("1"), "the first counts");
}
