//! Learning rates as functions of the step.

use optimisers::Schedule;

fn near(got: f64, expected: f64) {
    assert!(
        (got - expected).abs() <= 1e-12 * expected.abs().max(1e-3),
        "{got} for {expected}"
    );
}

/// Values of torch's schedulers of the same names and of the papers' formulas, worked out by hand or with a
/// calculator.
#[test]
fn schedules_have_the_values_of_their_formulas() {
    let cases: [(Schedule, &[(u64, f64)]); 14] = [
        (Schedule::constant(0.3), &[(0, 0.3), (1_000_000, 0.3)]),
        (
            Schedule::linear(0.0, 1.0, 4),
            &[(0, 0.0), (1, 0.25), (4, 1.0), (5, 1.0)],
        ),
        (
            Schedule::polynomial(1.0, 0.2, 4, 2.0),
            &[
                (0, 1.0),
                (1, 0.2 + 0.8 * 0.5625),
                (3, 0.2 + 0.8 * 0.0625),
                (4, 0.2),
                (9, 0.2),
            ],
        ),
        (
            Schedule::one_minus_square_root(1.0, 0.2, 16),
            &[(0, 1.0), (1, 0.8), (4, 0.6), (9, 0.4), (16, 0.2), (17, 0.2)],
        ),
        (
            Schedule::cosine(1.0, 0.0, 3),
            &[(0, 1.0), (1, 0.75), (2, 0.25), (3, 0.0), (4, 0.0)],
        ),
        (
            Schedule::cosine_restarts(1.0, 0.0, 2, 2.0),
            &[
                (0, 1.0),
                (1, 0.5),
                (2, 1.0),
                (4, 0.5),
                (6, 1.0),
                (10, 0.5),
                (14, 1.0),
            ],
        ),
        (
            Schedule::cosine_restarts(1.0, 0.5, 4, 1.0),
            &[(0, 1.0), (2, 0.75), (4, 1.0), (4_000_002, 0.75)],
        ),
        // torch.optim.lr_scheduler.OneCycleLR(max_lr=1, total_steps=10): up to step 2, down to step 9.
        (
            Schedule::one_cycle(1.0, 10),
            &[(0, 0.04), (1, 0.52), (2, 1.0), (9, 4e-6), (10, 4e-6)],
        ),
        // Relative to its `initial_lr`.
        (
            Schedule::one_cycle(25.0, 10),
            &[(0, 1.0), (1, 13.0), (2, 25.0), (9, 1e-4)],
        ),
        (
            Schedule::exponential(2.0, 0.25, 2),
            &[(0, 2.0), (1, 1.0), (2, 0.5), (4, 0.125)],
        ),
        (
            Schedule::step(2.0, 0.1, 3),
            &[(0, 2.0), (2, 2.0), (3, 0.2), (5, 0.2), (6, 0.02)],
        ),
        (
            Schedule::inverse_square_root(1.0, 4),
            &[(0, 0.25), (1, 0.5), (3, 1.0), (15, 0.5), (99, 0.2)],
        ),
        (
            Schedule::warmup_stable_decay(1.0, 0.1, 2, 3, 3),
            &[
                (0, 0.5),
                (1, 1.0),
                (2, 1.0),
                (5, 1.0),
                (6, 0.7),
                (8, 0.1),
                (99, 0.1),
            ],
        ),
        (
            Schedule::warmup_stable_then(1.0, 2, 3, Schedule::one_minus_square_root(1.0, 0.0, 4)),
            &[
                (0, 0.5),
                (1, 1.0),
                (2, 1.0),
                (5, 1.0),
                (6, 0.5),
                (7, 1.0 - 0.5f64.sqrt()),
                (9, 0.0),
                (99, 0.0),
            ],
        ),
    ];
    for (schedule, values) in cases {
        for &(step, expected) in values {
            near(schedule.at(step), expected);
        }
    }
}

/// The formula of the Transformer paper, whose peak follows from the width of the model and the warm-up.
#[test]
fn the_inverse_square_root_is_that_of_the_transformer() {
    let (width, warmup) = (512f64, 4000);
    let schedule = Schedule::inverse_square_root((width * warmup as f64).powf(-0.5), warmup);
    for step in [1, 2, 100, 3999, 4000, 4001, 8000, 100_000] {
        let (t, warmup) = (step as f64, warmup as f64);
        near(
            schedule.at(step - 1),
            width.powf(-0.5) * f64::min(t.powf(-0.5), t * warmup.powf(-1.5)),
        );
    }
}

#[test]
fn joined_schedules_count_anew() {
    let schedule = Schedule::constant(1.0)
        .then(2, Schedule::linear(0.5, 0.0, 5))
        .then(4, Schedule::constant(3.0));
    assert_eq!(
        [0, 1, 2, 3, 4, 5].map(|step| schedule.at(step)),
        [1.0, 1.0, 0.5, 0.4, 3.0, 3.0]
    );
    // However they are put together, and parts that never come.
    let [a, b, c] = [1.0, 2.0, 3.0].map(Schedule::constant);
    let nested = a.clone().then(2, b.clone().then(2, c.clone()));
    assert_eq!(nested, a.clone().then(2, b.clone()).then(4, c.clone()));
    assert_eq!(
        a.clone().then(3, b.clone()).then(2, c.clone()),
        a.clone().then(2, c.clone())
    );
    assert_eq!(a.clone().then(0, b.clone()), b);
    assert_eq!(
        a.clone().then(u64::MAX, b.then(2, c)),
        a.then(u64::MAX, Schedule::constant(2.0))
    );
}

/// What is said of one part of a schedule holds for the whole, so that a `relative` in the wrong place is no
/// other schedule.
#[test]
fn parts_of_a_schedule_drive_the_same() {
    let (rise, fall) = (|| Schedule::linear(0.0, 1.0, 4), || Schedule::cosine(1.0, 0.0, 8));
    let whole = || rise().then(4, fall());
    assert_eq!(rise().relative().then(4, fall()), whole().relative());
    assert_eq!(rise().then(4, fall().relative()), whole().relative());
    assert_eq!(rise().then(4, fall().field("lambda")), whole().field("lambda"));
    assert_eq!(
        rise().field("rho").then(4, fall().field("lambda")),
        whole().field("rho"),
        "the first counts"
    );
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
        Schedule::one_minus_square_root(1.0, 0.0, 0),
    ] {
        for step in [0, 1, 2, 1000, u64::MAX / 2] {
            assert!(schedule.at(step).is_finite(), "{schedule:?} at {step}");
        }
    }
}

/// What a phase that never ends does, and a count that is as large as it can be.
#[test]
fn phases_may_be_as_long_as_a_count_can_be() {
    let for_ever = Schedule::warmup_stable_decay(1.0, 0.0, 100, u64::MAX, 1000);
    for (step, rate) in [
        (0, 0.01),
        (49, 0.5),
        (99, 1.0),
        (100, 1.0),
        (1_000_000, 1.0),
        (u64::MAX - 1, 1.0),
        (u64::MAX, 1.0),
    ] {
        near(for_ever.at(step), rate);
    }
    let schedules = [
        Schedule::warmup_stable_decay(1.0, 0.0, u64::MAX, u64::MAX, u64::MAX),
        Schedule::constant(1.0)
            .then(u64::MAX, Schedule::constant(2.0))
            .then(u64::MAX, Schedule::constant(3.0)),
        Schedule::linear(0.0, 1.0, u64::MAX),
        Schedule::polynomial(1.0, 0.1, u64::MAX, -2.0),
        Schedule::cosine(1.0, 0.1, u64::MAX),
        Schedule::one_minus_square_root(1.0, 0.1, u64::MAX),
        Schedule::cosine_restarts(1.0, 0.1, u64::MAX, 1.5),
        Schedule::cosine_restarts(1.0, 0.1, 1, 1.0),
        Schedule::cosine_restarts(1.0, 0.1, 10, 1.0 + f64::EPSILON),
        Schedule::cosine_restarts(1.0, 0.1, 1, 1e300),
        Schedule::cosine_restarts(1.0, 0.1, 1, f64::INFINITY),
        Schedule::one_cycle(1.0, u64::MAX),
        Schedule::exponential(1.0, 1.5, 10),
        Schedule::exponential(0.0, 2.0, 1),
        Schedule::step(-1.0, 1.5, 10),
        Schedule::step(1e-3, 0.5, 1),
        Schedule::inverse_square_root(1.0, 1),
        Schedule::inverse_square_root(1.0, u64::MAX),
    ];
    for schedule in schedules {
        for step in [0, 1, 1 << 32, u64::MAX / 2, u64::MAX - 1, u64::MAX] {
            assert!(
                schedule.at(step).is_finite(),
                "{schedule:?} at {step}: {}",
                schedule.at(step)
            );
        }
    }
    assert_eq!(Schedule::exponential(2.0, 1.5, 10).at(u64::MAX), f64::MAX);
    assert_eq!(Schedule::exponential(0.0, 1.5, 10).at(u64::MAX), 0.0);
    near(
        Schedule::inverse_square_root(1.0, 4).at(u64::MAX),
        4f64.sqrt() / (u64::MAX as f64).sqrt(),
    );
}

/// Restarts as they are defined, period by period. Where rounding puts a whole step right before the end of a
/// period, it is the start of the next.
fn restarts_by_a_loop(step: u64, steps: u64, factor: f64) -> f64 {
    let (mut step, mut steps) = (step as f64, steps as f64);
    while step >= steps - 1e-6 {
        step -= steps;
        steps *= factor;
    }
    0.5 * (1.0 + (std::f64::consts::PI * (step / steps).max(0.0)).cos())
}

#[test]
fn restarts_are_those_of_the_loop_over_all_periods() {
    for steps in [1, 2, 3, 10, 97, 1000] {
        for factor in [
            1.0,
            1.0 + 1e-12,
            1.000_001,
            1.001,
            1.01,
            1.1,
            1.25,
            1.5,
            1.9,
            2.0,
            2.5,
            3.0,
            7.0,
            1e6,
        ] {
            let schedule = Schedule::cosine_restarts(1.0, 0.0, steps, factor);
            for step in (0..3000).chain((3000..1_000_000).step_by(9973)) {
                let (got, expected) = (schedule.at(step), restarts_by_a_loop(step, steps, factor));
                assert!(
                    (got - expected).abs() < 1e-6,
                    "{steps} times {factor} at {step}: {got} for {expected}"
                );
            }
        }
    }
}

/// Whole factors and such as 1.5 have periods that start at whole steps, and there the rate is the highest
/// there is, with every bit.
#[test]
fn restarts_are_exact_where_a_period_starts() {
    for (steps, factor, most) in [
        (10, 2.0, 48),
        (7, 3.0, 30),
        (1, 2.0, 62),
        (1 << 20, 1.5, 20),
        (81, 4.0 / 3.0, 4),
        (1000, 1.1, 3),
        (100, 1.1, 3),
        (5, 10.0, 15),
    ] {
        let schedule = Schedule::cosine_restarts(0.3, 0.1, steps, factor);
        let (mut start, mut length) = (0.0, steps as f64);
        for period in 0..=most {
            let step = f64::round(start) as u64;
            assert_eq!(
                schedule.at(step),
                0.3,
                "{steps} times {factor}, period {period}, step {step}"
            );
            if step > 0 && step < 1 << 50 && length > 4.0 {
                assert!(
                    schedule.at(step - 1) < 0.2,
                    "{steps} times {factor}, before period {period}: {}",
                    schedule.at(step - 1)
                );
            }
            (start, length) = (start + length, length * factor);
        }
    }
}

/// A loop over the periods would not come back.
#[test]
fn a_factor_just_above_one_takes_no_time() {
    let schedule = Schedule::cosine_restarts(1.0, 0.0, 1, 1.0 + f64::EPSILON);
    for step in 0..1000 {
        assert!((0.0..=1.0).contains(&schedule.at(u64::MAX - step)));
    }
}
