//! The runs of `tests/python/torch_state.py`, here.

use std::collections::BTreeMap;
use std::path::Path;

use candle_core::{DType, Device, Tensor, Var};
use optimisers::{
    AMSGradW, AdaGrad, Adam, AdamW, ClipGlobalNorm, Descent, Ema, Lion, Momentum, Nesterov, Optimiser,
    OptimiserChain, Outcome, RMSProp, Scale, Schedule, StateTree, WeightDecay, update,
};
use serde_json::Value;

pub type Model = BTreeMap<&'static str, Var>;

/// Parameters by name.
pub type Parameters = BTreeMap<String, Vec<f64>>;

const SHAPES: [(&str, &[usize]); 3] = [("conv", &[2, 2, 2, 2]), ("fc.bias", &[3]), ("fc.weight", &[3, 2])];

fn numbers(shape: &[usize], [factor, modulus, shift, divisor]: [i64; 4]) -> Tensor {
    let count: usize = shape.iter().product();
    let values = (0..count as i64)
        .map(|i| ((i * factor) % modulus - shift) as f32 / divisor as f32)
        .collect();
    Tensor::from_vec::<_, f32>(values, shape, &Device::Cpu).expect("a tensor")
}

/// The optimisers by the names of the runs, with what torch does outside of an optimiser around some.
pub fn optimisers() -> Vec<(&'static str, Optimiser)> {
    let adamw = AdamW {
        beta: (0.8, 0.95),
        lambda: 0.1,
        ..AdamW::new(0.01)
    };
    let adam = (
        ClipGlobalNorm::new(1e6),
        WeightDecay::new(0.05),
        Adam {
            epsilon: 1e-6,
            ..Adam::new(0.02)
        },
    );
    let rmsprop = RMSProp {
        rho: 0.95,
        centred: true,
        ..RMSProp::new(1.0)
    };
    vec![
        (
            "adamw",
            Optimiser::new(OptimiserChain::new((ClipGlobalNorm::new(1e6), adamw))),
        ),
        (
            "adam",
            Optimiser::new(OptimiserChain::new((OptimiserChain::new(adam), Ema::new(0.9)))),
        ),
        (
            "amsgrad",
            Optimiser::new(AMSGradW {
                lambda: 0.1,
                ..AMSGradW::new(0.01)
            }),
        ),
        (
            "maximised",
            Optimiser::new(OptimiserChain::new((
                Scale::new(-1.0),
                AdamW {
                    lambda: 0.1,
                    ..AdamW::new(0.001)
                },
            ))),
        ),
        (
            "descent",
            Optimiser::new(OptimiserChain::new((WeightDecay::new(0.01), Descent::new(0.05)))),
        ),
        (
            "momentum",
            Optimiser::new(OptimiserChain::new((WeightDecay::new(0.01), Momentum::new(0.01)))),
        ),
        (
            "nesterov",
            Optimiser::new(OptimiserChain::new((
                Nesterov {
                    rho: 0.8,
                    ..Nesterov::new(1.0)
                },
                Descent::new(0.01),
            ))),
        ),
        (
            "rmsprop",
            Optimiser::new(OptimiserChain::new((WeightDecay::new(0.01), RMSProp::new(0.01)))),
        ),
        (
            "rmsprop_momentum",
            Optimiser::new(OptimiserChain::new((
                rmsprop,
                Momentum {
                    rho: 0.5,
                    ..Momentum::new(1.0)
                },
                Descent::new(0.005),
            ))),
        ),
        (
            "adagrad",
            Optimiser::new(AdaGrad {
                epsilon: 1e-10,
                ..AdaGrad::new(0.1)
            }),
        ),
        (
            "lion",
            Optimiser::new(Lion {
                lambda: 0.1,
                ..Lion::new(0.004)
            }),
        ),
    ]
}

/// The model before the first step.
pub fn start() -> Model {
    start_in(DType::F32)
}

/// The same in another dtype.
pub fn start_in(dtype: DType) -> Model {
    let variable = |shape| {
        numbers(shape, [5, 7, 3, 4])
            .to_dtype(dtype)
            .and_then(|x| Var::from_tensor(&x))
            .expect("a variable")
    };
    SHAPES
        .into_iter()
        .map(|(name, shape)| (name, variable(shape)))
        .collect()
}

/// The model with these parameters.
pub fn model(parameters: &Parameters) -> Model {
    model_in(DType::F32, parameters)
}

/// The same in another dtype.
pub fn model_in(dtype: DType, parameters: &Parameters) -> Model {
    let model = start_in(dtype);
    for (name, variable) in &model {
        let values = Tensor::from_vec(parameters[*name].clone(), variable.shape(), &Device::Cpu);
        values
            .and_then(|values| variable.set(&values.to_dtype(variable.dtype())?))
            .expect("values");
    }
    model
}

pub fn steps(state: &mut StateTree, model: &Model, count: usize) {
    for _ in 0..count {
        step(state, model);
    }
}

fn step(state: &mut StateTree, model: &Model) -> Outcome {
    let gradient = |(name, x): (&&'static str, &Var)| {
        let numbers = |how| numbers(x.dims(), how).to_dtype(x.dtype());
        let gradient = x
            .as_detached_tensor()
            .mul(&numbers([1, 3, -2, 2]).expect("a slope"));
        (
            *name,
            gradient
                .and_then(|product| product - numbers([7, 5, 2, 4])?)
                .expect("a gradient"),
        )
    };
    update(
        state,
        model,
        &model.iter().map(gradient).collect::<BTreeMap<_, _>>(),
    )
    .expect("an update")
}

/// A run of the script's under a schedule of torch's.
pub struct ScheduledRun {
    pub name: &'static str,
    pub optimiser: Optimiser,
    pub schedule: Schedule,
}

/// The runs under schedules. Of their two groups, what is below `fc` has the first rate.
pub fn scheduled() -> Vec<ScheduledRun> {
    let adamw = || {
        Optimiser::new(AdamW {
            lambda: 0.1,
            ..AdamW::new(0.01)
        })
    };
    let momentum = OptimiserChain::new((Momentum::new(1.0), Descent::new(0.01)));
    let halves = || Schedule::exponential(1.0, 0.5, 10).relative();
    vec![
        ScheduledRun {
            name: "adamw_lambda",
            optimiser: adamw(),
            schedule: halves(),
        },
        ScheduledRun {
            name: "adamw_cosine",
            optimiser: adamw(),
            schedule: Schedule::cosine(1.0, 0.0, 50).relative(),
        },
        ScheduledRun {
            name: "momentum_lambda",
            optimiser: Optimiser::new(momentum),
            schedule: halves().field("1.eta"),
        },
    ]
}

/// The rates of torch's two groups: those below `fc`, and the others.
pub const GROUP_RATES: [f64; 2] = [0.02, 0.005];

/// Refuses numbers that differ in their first 15 digits.
pub fn assert_exact(got: &Parameters, expected: &Parameters, what: &str) {
    assert_eq!(
        got.keys().collect::<Vec<_>>(),
        expected.keys().collect::<Vec<_>>(),
        "{what}"
    );
    for (name, expected) in expected {
        assert_eq!(got[name].len(), expected.len(), "{what}, {name}");
        for (got, expected) in got[name].iter().zip(expected) {
            assert!(
                (got - expected).abs() <= 1e-15 * expected.abs().max(1.0),
                "{what}, {name}: {got} for {expected}"
            );
        }
    }
}

pub fn parameters(model: &Model) -> Parameters {
    let values = |x: &Var| {
        x.flatten_all()
            .and_then(|flat| flat.to_dtype(candle_core::DType::F64)?.to_vec1())
            .expect("numbers")
    };
    model
        .iter()
        .map(|(name, x)| (name.to_string(), values(x)))
        .collect()
}

pub fn assert_close(got: &Parameters, expected: &Parameters, what: &str) {
    assert_eq!(
        got.keys().collect::<Vec<_>>(),
        expected.keys().collect::<Vec<_>>(),
        "{what}"
    );
    for (name, expected) in expected {
        assert_eq!(got[name].len(), expected.len(), "{what}, {name}");
        for (got, expected) in got[name].iter().zip(expected) {
            assert!(
                (got - expected).abs() <= 1e-6 * expected.abs().max(1.0),
                "{what}, {name}: {got} for {expected}"
            );
        }
    }
}

/// A file of the script's.
pub fn json(path: &Path) -> Value {
    serde_json::from_str(&std::fs::read_to_string(path).expect("a file")).expect("JSON")
}

pub fn read_parameters(value: &Value) -> Parameters {
    serde_json::from_value(value.clone()).expect("parameters")
}
