//! Rules written outside of the crate, with what is public: they are fused, and have the bits of the crate's
//! own, on every engine.

use std::ops::Range;

use candle_core::DType::{BF16, F16, F32, F64};
use candle_core::Device;
use optimisers::{
    Arithmetic, Elementwise, ErrorKind, Flow, Gradient, IntoOptimiser, Kind, MixedPrecision, NonFinite, Norm,
    Norms, OptimiserChain, Parameter, Parts, Resolved, Result, Rule, Slot, Slots, SplitMaster, State, Sums,
    choice, hyper_parameters, range, setup, value::Value,
};

use support::common::{Grads, assert_same, engines, grads, random, trajectory};

choice! {
    /// What to do about a norm that is infinite or NaN.
    pub enum Answer {
        /// Refuse the call.
        Error,
        /// Go on.
        Pass,
        /// Skip the call.
        Skip,
    }
}

hyper_parameters! {
    /// `min(1, ω / ‖dx‖ₚ)` times the gradient.
    pub struct ClipNorm {
        /// ω: the largest norm.
        omega: f64 = 10.0 => range::positive,
        /// p: the exponent.
        p: f64 = 2.0 => range::positive,
        /// What happens if the norm is infinite or NaN.
        non_finite: Answer = Answer::Error => range::any,
    }
}

impl Rule for ClipNorm {
    fn apply<'a>(&'a self, _state: &'a mut State, _x: Parameter<'a>, dx: Gradient<'a>) -> Result<Flow<'a>> {
        let omega = self.omega;
        let non_finite = match self.non_finite {
            Answer::Error => NonFinite::Error,
            Answer::Pass => NonFinite::Pass,
            Answer::Skip => NonFinite::Skip,
        };
        let factor = move |Norms { gradient, .. }| if gradient <= omega { 1.0 } else { omega / gradient };
        Ok(Flow::Step(dx.scale_by_norm(
            Norm::new(self.p).on_non_finite(non_finite),
            factor,
        )))
    }
}

hyper_parameters! {
    /// AdamW's direction, as long as a part of the parameter.
    pub struct LAMB {
        /// η: the learning rate.
        eta: f64 = 1e-3 => range::non_negative,
        /// β₁, β₂: the decays of the moments.
        beta: (f64, f64) = (0.9, 0.999) => range::decays,
        /// λ: the weight decay.
        lambda: f64 = 0.0 => range::non_negative,
        /// ε: keeps the denominator from zero.
        epsilon: f64 = 1e-6 => range::non_negative,
    }
}

/// u = m̂ / (√v̂ + ε) + λ·x
#[derive(Clone, Copy)]
struct Direction {
    beta: (f64, f64),
    lambda: f64,
    epsilon: f64,
    corrections: (f64, f64),
}

impl Arithmetic for Direction {
    type Slots<T> = [T; 2];

    #[inline(always)]
    fn step<V: Value>(self, x: V, dx: V, [m, v]: &mut [V; 2]) -> V {
        *m = *m * self.beta.0 + dx * (1.0 - self.beta.0);
        *v = *v * self.beta.1 + dx * dx * (1.0 - self.beta.1);
        *m * self.corrections.0 / ((*v * self.corrections.1).sqrt() + self.epsilon) + x * self.lambda
    }
}

impl Rule for LAMB {
    fn init(&self, x: Parameter<'_>) -> Result<State> {
        State::for_slots(x, &[Slot::zeros("m"), Slot::zeros("v").second_moment()])
    }

    fn apply<'a>(&'a self, state: &'a mut State, _x: Parameter<'a>, dx: Gradient<'a>) -> Result<Flow<'a>> {
        let Parts { slots, counters, .. } = state.parts();
        let (dx, t) = dx.next_step(counters)?;
        let LAMB {
            eta,
            beta,
            lambda,
            epsilon,
        } = *self;
        let correction = |beta: f64| 1.0 / (1.0 - beta.powf(t as f64));
        let direction = Direction {
            beta,
            lambda,
            epsilon,
            corrections: (correction(beta.0), correction(beta.1)),
        };
        let length = move |Norms {
                               gradient, parameter, ..
                           }| {
            let trusts = parameter > 0.0 && gradient > 0.0;
            if trusts { parameter / gradient * eta } else { eta }
        };
        Ok(Flow::Step(
            dx.map(direction, slots)
                .scale_by_norm(Norm::new(2.0).with_parameter(), length),
        ))
    }
}

hyper_parameters! {
    /// A learning rate from sums over the model.
    pub struct Prodigy {
        /// η: a factor on the learning rate.
        eta: f64 = 1.0 => range::non_negative,
        /// β₁, β₂: the decays of the moments.
        beta: (f64, f64) = (0.9, 0.999) => range::decays,
        /// λ: the weight decay.
        lambda: f64 = 0.0 => range::non_negative,
        /// ε: keeps the denominator from zero.
        epsilon: f64 = 1e-8 => range::non_negative,
        /// d₀: the first estimate.
        estimate: f64 = 1e-6 => range::positive,
        /// c: a factor on the estimate.
        coefficient: f64 = 1.0 => range::positive,
        /// Whether the moments are corrected for their start.
        bias_correction: bool = true => range::any,
    }
}

/// dx·(x₀ - x), times a factor.
#[derive(Clone, Copy)]
struct Way(f64);

impl Arithmetic for Way {
    type Slots<T> = [T; 1];

    #[inline(always)]
    fn step<V: Value>(self, x: V, dx: V, [start]: &mut [V; 1]) -> V {
        dx * (*start - x) * self.0
    }
}

/// The next s.
#[derive(Clone, Copy)]
struct Path(f64, f64);

impl Arithmetic for Path {
    type Slots<T> = [T; 1];

    #[inline(always)]
    fn step<V: Value>(self, _x: V, dx: V, [s]: &mut [V; 1]) -> V {
        *s * self.0 + dx * self.1
    }
}

#[derive(Clone, Copy)]
struct Step {
    path: Path,
    beta: (f64, f64),
    d: f64,
    eta: f64,
    lambda: f64,
    epsilon: f64,
}

impl Arithmetic for Step {
    type Slots<T> = [T; 3];

    #[inline(always)]
    fn step<V: Value>(self, x: V, dx: V, [m, v, s]: &mut [V; 3]) -> V {
        *s = self.path.step(x, dx, &mut [*s]);
        let dx = dx * self.d;
        *m = *m * self.beta.0 + dx * (1.0 - self.beta.0);
        *v = *v * self.beta.1 + dx * dx * (1.0 - self.beta.1);
        (*m / (v.sqrt() + self.epsilon) + x * self.lambda) * self.eta
    }
}

impl Rule for Prodigy {
    fn init(&self, x: Parameter<'_>) -> Result<State> {
        let slots = [
            Slot::parameter("start"),
            Slot::zeros("scaled_m"),
            Slot::zeros("scaled_v").second_moment(),
            Slot::zeros("path"),
        ];
        Ok(State::for_slots(x, &slots)?
            .with_number("d", self.estimate, range::finite)
            .with_number("r", 0.0, range::finite))
    }

    fn apply<'a>(&'a self, state: &'a mut State, _x: Parameter<'a>, dx: Gradient<'a>) -> Result<Flow<'a>> {
        let (d, r) = (state.number("d")?, state.number("r")?);
        let Parts {
            slots,
            counters,
            numbers,
            ..
        } = state.parts();
        let (dx, t) = dx.next_step(counters)?;
        let Prodigy {
            beta,
            lambda,
            epsilon,
            coefficient,
            bias_correction,
            ..
        } = *self;
        let correction = |beta: f64| {
            if bias_correction {
                1.0 - beta.powf(t as f64)
            } else {
                1.0
            }
        };
        let eta = d * self.eta * correction(beta.1).sqrt() / correction(beta.0);
        let factor = d / self.estimate * eta;
        let path = Path(beta.1.sqrt(), factor);
        let sums = Sums::new(slots, numbers)
            .sum(Way(factor), 0..1)
            .sum_of_absolutes(path, 3..4)
            .step_on(1..4)
            .of_group(self, 0);
        Ok(Flow::Step(dx.map_with_sums(sums, move |sums| {
            let r = sums[0] + path.0 * r;
            let found = r * coefficient / sums[1];
            let next = if found.is_finite() && found > d { found } else { d };
            Resolved::new(
                Step {
                    path,
                    beta,
                    d,
                    eta,
                    lambda,
                    epsilon: next * epsilon,
                },
                [next, r],
            )
        })))
    }

    fn kind(&self) -> Kind {
        Kind::WholeModel
    }
}

const SHAPES: [&[usize]; 4] = [&[40, 25], &[16], &[], &[3, 0]];

/// Asserts that two optimisers move parameters of every dtype that they can have by the same bits.
fn assert_twins<A: IntoOptimiser + Clone, B: IntoOptimiser + Clone>(
    outside: A,
    inside: B,
    dtypes: &[candle_core::DType],
) {
    for (engine, &dtype) in engines()
        .into_iter()
        .flat_map(|engine| dtypes.iter().map(move |dtype| (engine, dtype)))
    {
        let tensors = |seed: u64| {
            SHAPES
                .iter()
                .zip(seed..)
                .map(|(shape, seed)| random(seed, shape, dtype, &Device::Cpu))
                .collect::<Vec<_>>()
        };
        let steps: Vec<Grads> = (1..5)
            .map(|step| grads(tensors(step * 10).into_iter().map(Some)))
            .collect();
        let expected = trajectory(engine, inside.clone(), &tensors(1), &steps);
        assert_same(
            &trajectory(engine, outside.clone(), &tensors(1), &steps),
            &expected,
            (engine, dtype, inside.name()),
        );
    }
}

#[test]
fn lamb_has_the_bits_of_the_crates_own() {
    let (own, theirs) = (
        LAMB {
            lambda: 0.1,
            ..LAMB::new(0.05)
        },
        optimisers::LAMB {
            lambda: 0.1,
            ..optimisers::LAMB::new(0.05)
        },
    );
    assert_twins(own.clone(), theirs.clone(), &[F32, F64, BF16, F16]);
    assert_twins(
        MixedPrecision::new(F32, own.clone()),
        MixedPrecision::new(F32, theirs.clone()),
        &[BF16, F16],
    );
    assert_twins(SplitMaster::new(own), SplitMaster::new(theirs), &[BF16]);
}

#[test]
fn clip_norm_has_the_bits_of_the_crates_own() {
    for p in [1.0, 2.0, 3.0, f64::INFINITY] {
        let (own, theirs) = (
            ClipNorm {
                p,
                ..ClipNorm::new(0.5)
            },
            optimisers::ClipNorm {
                p,
                ..optimisers::ClipNorm::new(0.5)
            },
        );
        let (own, theirs) = ((own, LAMB::new(0.1)), (theirs, optimisers::LAMB::new(0.1)));
        let (own, theirs) = (OptimiserChain::new(own), OptimiserChain::new(theirs));
        assert_twins(own.clone(), theirs.clone(), &[F32, F64]);
        assert_twins(
            MixedPrecision::new(F32, own),
            MixedPrecision::new(F32, theirs),
            &[BF16],
        );
    }
}

#[test]
fn sums_over_the_model_have_the_bits_of_the_crates_own() {
    for bias_correction in [true, false] {
        let theirs = optimisers::Prodigy {
            estimate: 1e-3,
            bias_correction,
            ..optimisers::Prodigy::default()
        };
        let own = Prodigy {
            estimate: 1e-3,
            bias_correction,
            ..Prodigy::default()
        };
        assert_twins(own.clone(), theirs.clone(), &[F32, F64]);
        assert_twins(
            MixedPrecision::new(F32, own),
            MixedPrecision::new(F32, theirs),
            &[BF16, F16],
        );
    }
}

/// Rules of two crates may have the same sums by name, and are two estimates all the same.
#[test]
fn two_rules_with_sums_do_not_mix_them() {
    let x = random(1, &[4], F32, &Device::Cpu);
    for engine in engines() {
        let dx = || [grads([Some(random(2, &[4], F32, &Device::Cpu))])];
        let both = trajectory(
            engine,
            OptimiserChain::new((Prodigy::default(), optimisers::Prodigy::default())),
            std::slice::from_ref(&x),
            &dx(),
        );
        let first = trajectory(engine, Prodigy::default(), std::slice::from_ref(&x), &dx());
        let number = |snapshot: &[support::common::Snapshot], name: &str| {
            snapshot[0]
                .iter()
                .find(|(known, _)| known == name)
                .map(|(_, bits)| bits.clone())
                .expect("a number")
        };
        assert_eq!(number(&both, "0/0.d"), number(&first, "0/d"), "{engine:?}");
    }
}

hyper_parameters! {
    /// A rule whose parts do not fit, each time in another way.
    pub struct Part {
        /// Which way.
        way: u64 = 0 => range::any,
    }
}

/// Nothing.
#[derive(Clone, Copy)]
struct Stateless;

impl Arithmetic for Stateless {
    type Slots<T> = [T; 0];

    fn step<V: Value>(self, _x: V, dx: V, _: &mut [V; 0]) -> V {
        dx
    }
}

impl Rule for Part {
    fn init(&self, x: Parameter<'_>) -> Result<State> {
        State::for_slots(x, &[Slot::zeros("m"), Slot::zeros("v")])
    }

    fn apply<'a>(&'a self, state: &'a mut State, _x: Parameter<'a>, dx: Gradient<'a>) -> Result<Flow<'a>> {
        let Parts {
            slots,
            counters,
            numbers,
            ..
        } = state.parts();
        let (dx, t) = dx.next_step(counters)?;
        Ok(Flow::Step(match self.way {
            0 => dx.step_of(&optimisers::Adam::new(0.1), t, Slots::none()),
            1 => dx.step_of(&optimisers::Momentum::new(0.1), t, slots),
            2 => dx.map_with_sums(Sums::new(slots, numbers).sum(Way(1.0), 2..3), |_| {
                Resolved::new(Way(1.0), [])
            }),
            3 => dx.map_with_sums(Sums::new(slots, numbers).sum(Way(1.0), 0..1), |_| {
                Resolved::new(Way(1.0), [])
            }),
            // Arithmetic without state tensors fits an empty range, but not one of tensors that are not
            // there.
            way @ 5..9 => {
                let part = [3..3, usize::MAX..usize::MAX, Range { start: 2, end: 1 }, 3..4][way as usize - 5]
                    .clone();
                dx.map_with_sums(
                    Sums::new(slots, numbers).sum(Stateless, part).step_on(0..0),
                    |_| Resolved::new(Stateless, []),
                )
            }
            9 => dx.map_with_sums(
                Sums::new(slots, numbers).sum(Stateless, 2..2).step_on(3..3),
                |_| Resolved::new(Stateless, []),
            ),
            _ => dx.map_with_sums(
                Sums::new(slots, numbers).sum(Way(1.0), 0..1).step_on(1..2),
                |_| Resolved::new(Way(1.0), [1.0]),
            ),
        }))
    }
}

#[test]
fn parts_that_do_not_fit_are_refused_and_nothing_is_written() {
    for (engine, part) in engines()
        .into_iter()
        .flat_map(|engine| (0..10).map(move |part| (engine, part)))
    {
        let model = support::common::model(&[random(1, &[4], F32, &Device::Cpu)]);
        let mut state = setup(Part::new(part), &model).expect("a state");
        let before = support::common::snapshot(&model, &state);
        let dx = grads([Some(random(2, &[4], F32, &Device::Cpu))]);
        let error = optimisers::Update::new(&mut state)
            .engine(engine)
            .apply(&model, &dx)
            .expect_err("a step that does not fit");
        let expected = match part {
            0 => "the number of state tensors that Part gives its arithmetic is 0, expected 2",
            1 => "the number of state tensors that Part gives its arithmetic is 2 (m, v), expected 1",
            2 => "the range of state tensors that Part gives to `Sums` is 2..3, expected a part of 0..2",
            3 => {
                "`Gradient::map_with_sums` returns arithmetic for a different count of state tensors than \
                 the state has: 1, expected 2"
            }
            5 | 9 => "the range of state tensors that Part gives to `Sums` is 3..3, expected a part of 0..2",
            6 => "is 18446744073709551615..18446744073709551615, expected a part of 0..2",
            7 => "the range of state tensors that Part gives to `Sums` is 2..1, expected a part of 0..2",
            8 => "the range of state tensors that Part gives to `Sums` is 3..4, expected a part of 0..2",
            _ => {
                "`Gradient::map_with_sums` returns a different count of numbers than the state has: 1, \
                 expected 0"
            }
        };
        assert_eq!(
            (error.kind(), error.path()),
            (ErrorKind::Contract, Some("0")),
            "{part}, {engine:?}: {error}"
        );
        assert!(
            error.to_string().contains(expected),
            "{part}, {engine:?}: {error}"
        );
        assert!(
            !error.to_string().contains("defect of the library"),
            "{part}, {engine:?}: {error}"
        );
        if part == 3 || part == 4 {
            let expected = if part == 3 { "2" } else { "0" };
            assert_eq!(
                (error.expected(), error.got()),
                (Some(expected), Some("1")),
                "{part}, {engine:?}: {error}"
            );
        }
        assert_eq!(
            support::common::snapshot(&model, &state),
            before,
            "{part}, {engine:?}"
        );
    }
}

hyper_parameters! {
    /// Momentum, and Adam behind it, as one rule: each with its own part of the state.
    pub struct Both {
        /// η: the learning rate of both.
        eta: f64 = 0.1 => range::non_negative,
    }
}

impl Rule for Both {
    fn init(&self, x: Parameter<'_>) -> Result<State> {
        State::for_slots(x, &["velocity", "m", "v"].map(Slot::zeros))
    }

    fn apply<'a>(&'a self, state: &'a mut State, _x: Parameter<'a>, dx: Gradient<'a>) -> Result<Flow<'a>> {
        let Parts { slots, counters, .. } = state.parts();
        let (momentum, adam) = slots.split_at(1).expect("three slots");
        let (dx, t) = dx.next_step(counters)?;
        let dx = dx.step_of(&optimisers::Momentum::new(self.eta), t, momentum);
        Ok(Flow::Step(
            dx.step_of(&optimisers::Adam::new(self.eta), t, adam).scale(0.5),
        ))
    }
}

#[test]
fn rules_that_are_parts_of_another_make_the_steps_of_a_chain() {
    let chain = OptimiserChain::new((
        optimisers::Momentum::new(0.1),
        optimisers::Adam::new(0.1),
        optimisers::Scale::new(0.5),
    ));
    for (engine, dtype) in engines()
        .into_iter()
        .flat_map(|engine| [F32, F64, BF16].map(|dtype| (engine, dtype)))
    {
        let parameters = [random(1, &[40, 25], dtype, &Device::Cpu)];
        let steps: Vec<Grads> = (2..6)
            .map(|seed| grads([Some(random(seed, &[40, 25], dtype, &Device::Cpu))]))
            .collect();
        let parameter = |snapshots: Vec<support::common::Snapshot>| {
            snapshots
                .into_iter()
                .map(|mut names| names.swap_remove(0))
                .collect::<Vec<_>>()
        };
        let own = parameter(trajectory(engine, Both::default(), &parameters, &steps));
        assert_eq!(
            own,
            parameter(trajectory(engine, chain.clone(), &parameters, &steps)),
            "{engine:?}, {dtype:?}"
        );
    }
}

/// As hyper-parameters of the crate are.
#[test]
fn choices_of_ones_own_are_adjusted_by_name() {
    let model = support::common::model(&[random(1, &[4], F32, &Device::Cpu)]);
    let mut state =
        setup(OptimiserChain::new((ClipNorm::new(1.0), LAMB::new(0.1))), &model).expect("a state");
    state
        .all()
        .adjust_field("non_finite", Answer::Pass)
        .expect("a choice");
    assert_eq!(
        state.leaf("0").and_then(|leaf| leaf.field("non_finite")),
        Some(Answer::Pass.into())
    );
    let error = state
        .all()
        .adjust_field("non_finite", true)
        .expect_err("no choice");
    assert!(
        error
            .to_string()
            .contains("non_finite is true, expected one of Error, Pass, Skip"),
        "{error}"
    );
    assert_eq!(optimisers::Adam::new(0.1).slots().len(), 2);
}
