//! Norms and sums of what follows from other norms and sums.

use std::cell::Cell;

use candle_core::DType::{self, BF16, F32, F64};
use candle_core::{Device, Tensor};
use optimisers::__private::emulation::{take_answered, take_launches};
use optimisers::{
    AccumGrad, Adam, Adjust, Cautious, ClipGlobalNorm, ClipNorm, Engine, Error, Flow, GradNoise, Gradient,
    Kind, LAMB, LARS, LossScaler, MixedPrecision, Momentum, NonFinite, Norm, Optimiser, OptimiserChain,
    Outcome, Parameter, Prodigy, Result, Rule, Scale, SplitMaster, State, Status, Update, WeightDecay,
    hyper_parameters, range, setup, setup_with,
};

use crate::engine::emulated::can_run;
use crate::engine::engines::small_model;
use support::common::{
    Grads, Snapshot, assert_close, assert_same, bits, grads, model, muon, not_finite, random, snapshot,
    trajectory,
};

fn clip(omega: f64, p: f64) -> ClipNorm {
    ClipNorm {
        p,
        ..ClipNorm::new(omega)
    }
}

fn member(rule: impl Rule + 'static) -> Box<dyn Rule> {
    Box::new(rule)
}

/// Chains in which a norm or a sum is taken of what follows from another.
fn chains() -> Vec<Vec<Box<dyn Rule>>> {
    let global = || member(ClipGlobalNorm::new(1e-2));
    vec![
        vec![global(), member(LAMB::new(0.1))],
        vec![global(), member(Cautious::new(Adam::new(0.1)))],
        vec![global(), member(Prodigy::default())],
        vec![member(Prodigy::default()), member(ClipNorm::new(1e-7)), global()],
        vec![
            global(),
            member(Prodigy::default()),
            member(LAMB::new(0.1)),
            member(Prodigy {
                estimate: 1e-3,
                ..Prodigy::default()
            }),
        ],
        vec![global(), member(ClipNorm::new(3e-3)), member(LAMB::new(0.1))],
        vec![
            member(AccumGrad::new(1)),
            global(),
            member(LAMB {
                lambda: 0.1,
                ..LAMB::new(0.1)
            }),
        ],
        vec![member(ClipNorm::new(1e-2)), member(LARS::new(0.1))],
        vec![member(clip(1e-2, 1.0)), member(LARS::new(0.1))],
        vec![
            member(clip(1e-2, f64::INFINITY)),
            member(Momentum::new(0.1)),
            global(),
            member(WeightDecay::new(0.1)),
        ],
        vec![
            member(clip(1e-2, 3.0)),
            member(clip(1e-3, 3.0)),
            member(Momentum::new(0.1)),
        ],
        // A power of two, which is made up for after the norm.
        vec![
            member(Scale::new(0.5f64.powi(70))),
            member(clip(1e-22, 2.0)),
            member(clip(1e-23, 3.0)),
            member(LAMB::new(0.1)),
        ],
        // With functions of the whole tensor in between.
        vec![
            global(),
            member(WeightDecay::new(0.1)),
            member(muon()),
            member(ClipNorm::new(1e-3)),
        ],
        vec![
            global(),
            member(Prodigy::default()),
            member(muon()),
            member(LAMB::new(0.1)),
        ],
        vec![
            member(AccumGrad::new(1)),
            member(GradNoise::new(0.1)),
            global(),
            member(GradNoise::new(0.1)),
            member(LARS::new(0.1)),
        ],
    ]
}

/// How a rule becomes an optimiser.
type Wrapper = fn(Box<dyn Rule>) -> Optimiser;

/// How far results may be from the CPU's, whose norms differ in a last bit: a velocity can be the difference
/// of two close numbers.
const NORMS: f64 = 1e-8;

const BARE: Wrapper = |rule| Optimiser::new(rule);
const MIXED: Wrapper = |rule| Optimiser::new(MixedPrecision::new(F32, rule));

/// Longer than a chunk of a sum.
const CHUNKS: usize = 20_001;

/// Odd sizes, none, and this one; the last gradient is missing in every second step.
fn leaves(parameter: DType, gradient: DType, longest: usize) -> (Vec<Tensor>, Vec<Grads>) {
    let lengths = [5, longest, 0, 300, 1, 7];
    let tensors = |seed: u64, dtype| {
        lengths
            .iter()
            .enumerate()
            .map(move |(i, &length)| random(seed + i as u64, &[length], dtype, &Device::Cpu))
    };
    let step = |step: u64| {
        grads(
            tensors(10 * step, gradient)
                .enumerate()
                .map(|(i, g)| (i < 5 || step.is_multiple_of(2)).then_some(g)),
        )
    };
    (tensors(0, parameter).collect(), (1..4).map(step).collect())
}

#[test]
fn norms_on_a_device_are_those_of_the_cpu() {
    if !can_run() {
        return;
    }
    for (parameter, gradient) in [(F32, BF16), (F64, F32), (BF16, F64)] {
        // Sums of several chunks are those of the chain, whatever is around it.
        let models = [
            (leaves(parameter, gradient, CHUNKS), parameter == BF16),
            (small_model(&Device::Cpu, parameter, gradient), true),
        ];
        for ((parameters, steps), with_wrappers) in models {
            for members in chains() {
                let chain = OptimiserChain::new(members);
                let mut wrapped = vec![BARE(member(chain.clone()))];
                wrapped.extend(with_wrappers.then(|| MIXED(member(chain.clone()))));
                wrapped.extend((parameter == BF16).then(|| Optimiser::new(SplitMaster::new(chain))));
                for optimiser in wrapped {
                    let run = |engine| trajectory(engine, optimiser.clone(), &parameters, &steps);
                    assert_close(
                        &run(Engine::Emulated),
                        &run(Engine::Fused),
                        NORMS,
                        optimiser.name(),
                    );
                }
            }
        }
    }
}

/// One update on an engine: what came of it, and what is there then.
fn stepped(
    engine: Engine,
    rule: Box<dyn Rule>,
    parameters: &[Tensor],
    steps: &[Grads],
    checked: bool,
) -> (String, Snapshot) {
    let model = model(parameters);
    let mut state = setup(rule, &model).expect("a state");
    let mut said = Vec::new();
    for grads in steps {
        let update = Update::new(&mut state).engine(engine);
        let update = if checked { update.finite_only() } else { update };
        said.push(match update.apply(&model, grads) {
            Ok(Outcome { status, .. }) => format!("{status:?}"),
            Err(error) => error.to_string(),
        });
    }
    (said.join("; "), snapshot(&model, &state))
}

#[test]
fn what_is_not_finite_has_the_same_outcome() {
    if !can_run() {
        return;
    }
    let spoilt = |value: f64, gradient: DType| {
        let (_, mut steps) = leaves(gradient, gradient, 2001);
        let one = Tensor::full(value, 1, &Device::Cpu)
            .and_then(|tensor| tensor.to_dtype(gradient))
            .expect("a tensor");
        steps[1].insert("4".to_string(), one);
        steps
    };
    for (value, dtype) in [(f64::NAN, F32), (f64::INFINITY, BF16), (1e300, F64)] {
        let (parameters, steps) = (leaves(dtype, dtype, 2001).0, spoilt(value, dtype));
        for non_finite in [NonFinite::Error, NonFinite::Skip, NonFinite::Pass] {
            for members in chains() {
                let mut chain = OptimiserChain::new(members);
                chain.set_field("non_finite", non_finite.into()).expect("a field");
                for checked in [false, true] {
                    let what = format!(
                        "{} with {value:e} in {dtype:?}, {non_finite:?}, {checked}",
                        chain.name()
                    );
                    let run = |engine| stepped(engine, member(chain.clone()), &parameters, &steps, checked);
                    let ((said, got), (expected_said, expected)) =
                        (run(Engine::Emulated), run(Engine::Fused));
                    assert_eq!(said, expected_said, "{what}");
                    assert_close(&[got], &[expected], NORMS, what);
                }
            }
        }
    }
}

/// A function of the whole tensor in one leaf holds up a norm that another leaf shares with it, and nothing
/// else.
#[test]
fn functions_between_norms() {
    if !can_run() {
        return;
    }
    let parameters = [[4, 3], [5, 7], [2, 2]].map(|shape| random(shape[0] as u64, &shape, F32, &Device::Cpu));
    let grads = grads(parameters.iter().map(|x| Some((x * 3.0).expect("a gradient"))));
    let other = || ClipGlobalNorm {
        group: 1,
        ..ClipGlobalNorm::new(1e-3)
    };
    let run = |engine| {
        let model = model(&parameters);
        let choose = |path: &str, _: Parameter<'_>| {
            let mut members = vec![member(ClipGlobalNorm::new(1e-2))];
            members.push(if path == "1" {
                member(muon())
            } else {
                member(LAMB::new(0.1))
            });
            members.extend((path != "0").then(|| member(other())));
            Some(member(OptimiserChain::new(members)))
        };
        let mut state = setup_with(&model, choose).expect("a state");
        take_answered();
        Update::new(&mut state)
            .engine(engine)
            .finite_only()
            .apply(&model, &grads)
            .expect("an update");
        (snapshot(&model, &state), take_answered())
    };
    let ((got, waited), (expected, _)) = (run(Engine::Emulated), run(Engine::Fused));
    // The first norm with the check; LAMB's; the second norm.
    assert_eq!(waited, 3);
    assert_close(&[got], &[expected], NORMS, "functions");
}

/// Leaves that wait for each other are taken in the same order on every engine.
#[test]
fn an_empty_leaf_among_leaves_that_wait_for_each_other() {
    if !can_run() {
        return;
    }
    let parameters = [0, 5, 7].map(|length| random(length as u64, &[length], F32, &Device::Cpu));
    let grads = grads(parameters.iter().map(|x| Some((x * 3.0).expect("a gradient"))));
    let run = |engine| {
        let model = model(&parameters);
        let group = |group| {
            member(ClipGlobalNorm {
                group,
                ..ClipGlobalNorm::new(1e-2)
            })
        };
        let choose = |path: &str, _: Parameter<'_>| {
            let members = match path {
                "0" => vec![group(1), group(0)],
                "1" => vec![group(0), group(1)],
                _ => vec![group(1), member(muon())],
            };
            Some(member(OptimiserChain::new(members)))
        };
        let mut state = setup_with(&model, choose).expect("a state");
        Update::new(&mut state)
            .engine(engine)
            .apply(&model, &grads)
            .expect("an update");
        snapshot(&model, &state)
    };
    assert_close(
        &[run(Engine::Emulated)],
        &[run(Engine::Fused)],
        NORMS,
        "leaves that wait",
    );
}

/// The square of a finite f64 can be infinite, which says nothing about the leaves whose norm stands for
/// their check.
#[test]
fn a_leaf_that_is_not_finite_beside_one_that_overflows() {
    let (double, single) = (
        random(1, &[3], F64, &Device::Cpu),
        random(2, &[3], F32, &Device::Cpu),
    );
    let spoilt = |number: f32| {
        let large = Tensor::full(1e300, 3, &Device::Cpu).expect("a gradient");
        [grads([
            Some(large),
            Some(Tensor::full(number, 3, &Device::Cpu).expect("a gradient")),
        ])]
    };
    for non_finite in [NonFinite::Error, NonFinite::Skip, NonFinite::Pass] {
        let chain = OptimiserChain::new((
            ClipGlobalNorm {
                non_finite,
                ..ClipGlobalNorm::new(1.0)
            },
            LAMB::new(0.1),
        ));
        for engine in [Engine::Fused, Engine::Tensors, Engine::Emulated] {
            if engine == Engine::Emulated && !can_run() {
                continue;
            }
            let run = |number| {
                stepped(
                    engine,
                    member(chain.clone()),
                    &[double.clone(), single.clone()],
                    &spoilt(number),
                    true,
                )
                .0
            };
            assert_eq!(
                run(f32::NAN),
                format!("{:?}", not_finite("1")),
                "{non_finite:?} {engine:?}"
            );
            let expected = match non_finite {
                NonFinite::Error => "parameter \"0\": the 2-norm of its gradient is inf".to_string(),
                NonFinite::Skip => format!("{:?}", not_finite("0")),
                NonFinite::Pass => format!("{:?}", Status::Stepped),
            };
            assert!(
                run(1.0).starts_with(&expected),
                "{} {non_finite:?} {engine:?}",
                run(1.0)
            );
        }
    }
}

hyper_parameters! {
    /// Fails where the gradient has a NaN.
    struct Numbers {
        /// What a gradient is multiplied by.
        factor: f64 = 1.0 => range::any,
    }
}

impl Rule for Numbers {
    fn apply<'a>(&'a self, state: &'a mut State, _x: Parameter<'a>, dx: Gradient<'a>) -> Result<Flow<'a>> {
        Ok(Flow::Step(dx.with_tensors(state, |_, _, dx, _| {
            CALLS.set(CALLS.get() + 1);
            let sum = dx.sum_all()?.to_dtype(F64)?.to_scalar::<f64>()?;
            if sum.is_nan() {
                Err(Error::other("not a number"))
            } else {
                Ok((dx * self.factor)?)
            }
        })))
    }
}

thread_local! {
    static CALLS: Cell<usize> = const { Cell::new(0) };
}

/// What a check skips is not computed.
#[test]
fn a_function_behind_a_check_that_skips_does_not_run() {
    if !can_run() {
        return;
    }
    let x = random(1, &[40], F32, &Device::Cpu);
    let chain = OptimiserChain::new((Numbers::default(), LAMB::new(0.1)));
    let bad = [grads([Some(
        Tensor::full(f32::NAN, 40, &Device::Cpu).expect("a gradient"),
    )])];
    for checked in [true, false] {
        let run = |engine| {
            CALLS.set(0);
            (
                stepped(
                    engine,
                    member(chain.clone()),
                    std::slice::from_ref(&x),
                    &bad,
                    checked,
                ),
                CALLS.get(),
            )
        };
        let (((said, got), calls), ((expected_said, expected), expected_calls)) =
            (run(Engine::Emulated), run(Engine::Fused));
        assert_eq!(
            (calls, expected_calls),
            (usize::from(!checked), usize::from(!checked))
        );
        assert_eq!(said, expected_said);
        assert!(
            said.contains(if checked { "Skipped" } else { "not a number" }),
            "{said}"
        );
        assert_same(&[got], &[expected], checked);
    }
}

#[test]
fn frozen_leaves_and_scaled_losses() {
    if !can_run() {
        return;
    }
    let (parameters, steps) = leaves(BF16, BF16, 2001);
    let run = |engine| {
        let model = model(&parameters);
        let chain = OptimiserChain::new((ClipGlobalNorm::new(1e-2), LAMB::new(0.1)));
        let mut state = setup(MixedPrecision::new(F32, chain), &model).expect("a state");
        state.at("1").expect("a leaf").freeze();
        let mut scaler = LossScaler::fixed(1024.0);
        take_answered();
        for grads in &steps {
            let _ = scaler
                .scale(&Tensor::new(1f32, &Device::Cpu).expect("a loss"))
                .expect("a scaled loss");
            Update::new(&mut state)
                .engine(engine)
                .scaler(&mut scaler)
                .apply(&model, grads)
                .expect("an update");
        }
        (snapshot(&model, &state), take_answered())
    };
    let ((got, waited), (expected, _)) = (run(Engine::Emulated), run(Engine::Fused));
    // The global norm, then LAMB's.
    assert_eq!(waited, 2 * steps.len());
    assert_close(&[got], &[expected], NORMS, "a frozen leaf");
}

/// A call that is skipped or refused writes nothing.
#[test]
fn a_skipped_call_launches_no_step() {
    if !can_run() {
        return;
    }
    let x = random(1, &[40], F32, &Device::Cpu);
    let model = model(std::slice::from_ref(&x));
    let clip = ClipGlobalNorm {
        non_finite: NonFinite::Skip,
        ..ClipGlobalNorm::new(1.0)
    };
    let mut state = setup(OptimiserChain::new((clip, LAMB::new(0.1))), &model).expect("a state");
    take_launches();
    let gradient = Tensor::full(f32::NAN, 40, &Device::Cpu).expect("a gradient");
    let outcome = Update::new(&mut state)
        .engine(Engine::Emulated)
        .apply(&model, &grads([Some(gradient)]))
        .expect("an outcome");
    assert_eq!(outcome.status, not_finite("0"));
    assert!(
        take_launches()
            .iter()
            .all(|launch| launch.source.contains("double* results"))
    );
    assert_eq!(bits(&model["0"]), bits(&x));
}

hyper_parameters! {
    /// dx' = ‖x‖ₚ/‖dx‖ₚ·dx, where ‖dx‖ₚ is that of one parameter or of all with this rule.
    pub struct Trust {
        /// p: the exponent of the norms.
        p: f64 = 2.0 => range::positive,
        /// Whether parameters share ‖dx‖ₚ.
        shares: bool = false => range::any,
        /// Whether ‖x‖ₚ is taken; otherwise 1.
        trusts: bool = true => range::any,
    }
}

impl Rule for Trust {
    fn init(&self, _: Parameter<'_>) -> Result<State> {
        Ok(State::empty())
    }

    fn apply<'a>(&'a self, _: &'a mut State, _: Parameter<'a>, dx: Gradient<'a>) -> Result<Flow<'a>> {
        let mut norm = Norm::new(self.p);
        if self.shares {
            norm = norm.of_group(7);
        }
        let trusts = self.trusts;
        if trusts {
            norm = norm.with_parameter();
        }
        Ok(Flow::Step(dx.scale_by_norm(norm, move |norms| {
            if trusts {
                norms.parameter / norms.gradient
            } else {
                1.0 / norms.gradient
            }
        })))
    }

    fn kind(&self) -> Kind {
        Kind::WholeModel
    }
}

/// The norm of a parameter has the exponent of the norm of the gradient. Leaves that share the norm of their
/// gradients may differ in whether they take the norm of their parameter.
#[test]
fn a_norm_of_a_parameter_has_the_exponent_of_the_norm_of_its_gradient() {
    let p_norm = |numbers: &[f64], p: f64| {
        numbers
            .iter()
            .map(|number| number.abs().powf(p))
            .sum::<f64>()
            .powf(1.0 / p)
    };
    let x = [vec![1.0; 1000], vec![2.0, -1.0, 0.5]];
    let dx = [vec![0.25; 1000], vec![1.0, 3.0, -2.0]];
    let tensor = |numbers: &Vec<f64>| Tensor::new(&numbers[..], &Device::Cpu).expect("a tensor");
    for engine in support::common::engines() {
        for (p, shares, trusts) in [
            (2.0, false, true),
            (3.0, false, true),
            (3.0, true, true),
            (3.0, true, false),
            (2.0, true, false),
        ] {
            let variables = model(&x.each_ref().map(tensor));
            // The second leaf is always without the norm of its parameter.
            let rule = |path: &str| Trust {
                p,
                shares,
                trusts: trusts && path == "0",
            };
            let chain = |path: &str| OptimiserChain::new((rule(path), optimisers::Descent::new(1.0)));
            let mut state = setup_with(&variables, |path, _| Some(chain(path))).expect("a state");
            Update::new(&mut state)
                .engine(engine)
                .apply(&variables, &grads(dx.each_ref().map(|dx| Some(tensor(dx)))))
                .expect("an update");
            for (leaf, path) in ["0", "1"].into_iter().enumerate() {
                let gradient = if shares {
                    p_norm(&dx.concat(), p)
                } else {
                    p_norm(&dx[leaf], p)
                };
                let parameter = if rule(path).trusts {
                    p_norm(&x[leaf], p)
                } else {
                    1.0
                };
                let expected = x[leaf]
                    .iter()
                    .zip(&dx[leaf])
                    .map(|(x, dx)| x - dx * parameter / gradient);
                for (actual, expected) in support::common::values(&variables[path])
                    .into_iter()
                    .zip(expected)
                {
                    assert!(
                        (actual - expected).abs() < 1e-12,
                        "{engine:?}, p = {p}, {shares}, {trusts}: {actual} for {expected}"
                    );
                }
            }
        }
        // The largest element of the gradient is 0, so only the norm of the parameter needs powers.
        let variables = model(&[tensor(&x[1])]);
        let rule = Trust {
            p: 3.0,
            ..Trust::default()
        };
        let mut state = setup(rule, &variables).expect("a state");
        Update::new(&mut state)
            .engine(engine)
            .apply(&variables, &grads([Some(tensor(&vec![0.0; 3]))]))
            .expect("an update");
        assert_eq!(support::common::values(&variables["0"]), x[1], "{engine:?}");
    }
}
