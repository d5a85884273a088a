//! Learning rates as functions of the step.

use candle_core::{DType, Device};
use optimisers::{AccumGrad, Descent, OptimiserChain, Schedule, Scheduler, Status, Update, setup};

use crate::common::{grads, model, random};

fn near(got: f64, expected: f64) {
    assert!((got - expected).abs() <= 1e-12 * expected.abs().max(1e-3), "{got} for {expected}");
}

/// Values of torch's schedulers of the same names and of the papers' formulas, worked out by hand or with a calculator.
#[test]
fn schedules_have_the_values_of_their_formulas() {
    let cases: [(Schedule, &[(u64, f64)]); 11] = [
        (Schedule::constant(0.3), &[(0, 0.3), (1_000_000, 0.3)]),
        (Schedule::linear(0.0, 1.0, 4), &[(0, 0.0), (1, 0.25), (4, 1.0), (5, 1.0)]),
        (Schedule::polynomial(1.0, 0.2, 4, 2.0), &[(0, 1.0), (1, 0.2 + 0.8 * 0.5625), (3, 0.2 + 0.8 * 0.0625), (4, 0.2), (9, 0.2)]),
        (Schedule::cosine(1.0, 0.0, 3), &[(0, 1.0), (1, 0.75), (2, 0.25), (3, 0.0), (4, 0.0)]),
        (Schedule::cosine_restarts(1.0, 0.0, 2, 2.0), &[(0, 1.0), (1, 0.5), (2, 1.0), (4, 0.5), (6, 1.0), (10, 0.5), (14, 1.0)]),
        (Schedule::cosine_restarts(1.0, 0.5, 4, 1.0), &[(0, 1.0), (2, 0.75), (4, 1.0), (4_000_002, 0.75)]),
        // torch.optim.lr_scheduler.OneCycleLR(max_lr=1, total_steps=10): up to step 2, down to step 9.
        (Schedule::one_cycle(1.0, 10), &[(0, 0.04), (1, 0.52), (2, 1.0), (9, 4e-6), (10, 4e-6)]),
        (Schedule::exponential(2.0, 0.25, 2), &[(0, 2.0), (1, 1.0), (2, 0.5), (4, 0.125)]),
        (Schedule::step(2.0, 0.1, 3), &[(0, 2.0), (2, 2.0), (3, 0.2), (5, 0.2), (6, 0.02)]),
        (Schedule::inverse_square_root(1.0, 4), &[(0, 0.0), (2, 0.5), (4, 1.0), (16, 0.5), (100, 0.2)]),
        (Schedule::warmup_stable_decay(1.0, 0.1, 2, 3, 3), &[(0, 0.0), (1, 0.5), (2, 1.0), (5, 1.0), (6, 0.7), (8, 0.1), (99, 0.1)]),
    ];
    for (schedule, values) in cases {
        for &(step, expected) in values {
            near(schedule.at(step), expected);
        }
    }
}

#[test]
fn joined_schedules_count_anew() {
    let schedule = Schedule::constant(1.0).then(2, Schedule::linear(0.5, 0.0, 5)).then(4, Schedule::constant(3.0));
    assert_eq!([0, 1, 2, 3, 4, 5].map(|step| schedule.at(step)), [1.0, 1.0, 0.5, 0.4, 3.0, 3.0]);
}

#[test]
fn schedules_without_steps_have_values_all_the_same() {
    for schedule in [
        Schedule::linear(0.0, 1.0, 0),
        Schedule::cosine(0.0, 1.0, 0),
        Schedule::cosine_restarts(1.0, 0.0, 0, 2.0),
        Schedule::cosine_restarts(1.0, 0.0, 3, 0.5),
        Schedule::one_cycle(1.0, 0),
        Schedule::one_cycle(1.0, 1),
        Schedule::exponential(1.0, 0.5, 0),
        Schedule::inverse_square_root(1.0, 0),
        Schedule::warmup_stable_decay(1.0, 0.0, 0, 0, 0),
    ] {
        for step in [0, 1, 2, 1000, u64::MAX / 2] {
            assert!(schedule.at(step).is_finite(), "{schedule:?} at {step}");
        }
    }
}

/// T23: neither micro-batches nor skipped calls advance it.
#[test]
fn t23_a_scheduler_advances_with_applied_steps() {
    let x = model(&[random(1, &[3], DType::F32, &Device::Cpu)]);
    let mut state = setup(OptimiserChain::new((AccumGrad::new(2), Descent::default())), &x).expect("a state");
    let schedule = Schedule::linear(1.0, 0.0, 4);
    let mut scheduler = Scheduler::new(schedule.clone(), &mut state).expect("a learning rate");
    let rate = |state: &optimisers::StateTree| state.leaf("0").and_then(|leaf| leaf.learning_rate());
    assert_eq!(rate(&state), Some(1.0));
    let finite = grads([Some(random(2, &[3], DType::F32, &Device::Cpu))]);
    let infinite = grads([finite["0"].affine(f64::INFINITY, 0.0).ok()]);
    for (gradient, status, steps) in [
        (&finite, Status::Accumulated, 0),
        (&infinite, Status::Skipped, 0),
        (&finite, Status::Stepped, 1),
        (&finite, Status::Accumulated, 1),
        (&finite, Status::Stepped, 2),
    ] {
        let outcome = Update::new(&mut state).finite_only().apply(&x, gradient).expect("an update");
        scheduler.advance(&outcome, &mut state).expect("a learning rate");
        assert_eq!((outcome.status, scheduler.steps()), (status, steps));
        assert_eq!(rate(&state), Some(schedule.at(steps)));
    }
    let resumed = Scheduler::resume(schedule, 2, &mut state).expect("a learning rate");
    assert_eq!((resumed, rate(&state)), (scheduler, Some(0.5)));
    assert!(Scheduler::new(Schedule::linear(-1.0, 0.0, 4), &mut state).is_err());
    assert!(Scheduler::new(Schedule::constant(f64::NAN), &mut state).is_err());
    let mut without = setup(AccumGrad::new(2), &x).expect("a state");
    assert!(Scheduler::new(Schedule::constant(0.1), &mut without).is_err());
}
