//! Trajectories of other libraries and of written-out recurrences, from `tests/golden`.

use std::collections::BTreeMap;

use candle_core::{DType, Device, Tensor};
use half::{bf16, f16};
use optimisers::{
    AccumGrad, Adam, DecoupledDecay, Engine, FieldValue, Hyperball, IntoOptimiser, MixedPrecision,
    OptimiserChain, Rule, Update, rules, setup,
};
use optimisers_plain::golden::{Case, flat};
use serde::Deserialize;
use serde_json::Value;

use support::common::{Grads, bits, bits16, engines, nearest16, values, var};

#[derive(Deserialize)]
struct MixedCase {
    rule: String,
    args: BTreeMap<String, Value>,
    accum: u64,
    dtype: String,
    x0_bits: Vec<u16>,
    grads_bits: Vec<Vec<u16>>,
    x_bits: Vec<Vec<u16>>,
    master: Vec<Vec<f64>>,
}

#[derive(Deserialize)]
struct MixedFile {
    mixed: Vec<MixedCase>,
}

/// Numbers of a case.
fn tensor(case: &Case, numbers: &Value, dtype: DType) -> Tensor {
    let tensor = Tensor::from_vec(flat(numbers), case.shape.as_slice(), &Device::Cpu);
    tensor
        .and_then(|tensor| tensor.to_dtype(dtype))
        .expect("a tensor of the case's shape")
}

fn gradients(case: &Case, dtype: DType) -> Vec<Tensor> {
    case.grads
        .iter()
        .map(|gradient| tensor(case, gradient, dtype))
        .collect()
}

/// The rule of that name with these hyper-parameters.
fn rule(name: &str, args: &BTreeMap<String, Value>) -> Box<dyn Rule> {
    let listed = |name: &str| {
        let listing = rules::catalogue()
            .into_iter()
            .find(|listing| listing.name == name);
        listing.unwrap_or_else(|| panic!("there is no rule {name}")).rule
    };
    if let Some(inner) = name
        .strip_prefix("Hyperball(")
        .and_then(|rest| rest.strip_suffix(')'))
    {
        return Box::new(Hyperball::new(rule(inner, args)));
    }
    // The name says what it is made free of a schedule.
    let name = if name == "ScheduleFree(AdamW)" {
        "ScheduleFree"
    } else {
        name
    };
    let mut rule: Box<dyn Rule> = match name
        .strip_prefix("chain(")
        .and_then(|rest| rest.strip_suffix(')'))
    {
        Some(members) => Box::new(OptimiserChain::new(
            members.split(", ").map(listed).collect::<Vec<_>>(),
        )),
        None => listed(name),
    };
    // A decay that is corrected for a schedule stands around the rule.
    let is_corrected = args.contains_key("eta_max");
    if is_corrected {
        rule = Box::new(DecoupledDecay::new(0.0, Adam::default()));
    }
    for (field, value) in args {
        let field = match field.trim_end_matches('_') {
            "couple" if is_corrected => continue,
            "lambda" if is_corrected => "decay_lambda",
            "eta_max" => "decay_eta_max",
            "eta" if name == "Rprop" => "first_step_size",
            "estim_lr0" => "estimate",
            "estim_lr_coef" => "coefficient",
            "weight_decay" => "lambda",
            field => field,
        };
        let (_, default) = rule
            .fields()
            .into_iter()
            .find(|(known, _)| *known == field)
            .unwrap_or_else(|| panic!("{name} has no {field}"));
        let real = |value: &Value| value.as_f64().expect("a number");
        let value = match default {
            FieldValue::Real(_) => FieldValue::Real(real(value)),
            // Null is what the rule does by itself.
            FieldValue::Pair(first, _) if value[0].is_null() => FieldValue::Pair(first, real(&value[1])),
            FieldValue::Pair(..) => FieldValue::Pair(real(&value[0]), real(&value[1])),
            FieldValue::Triple(..) => FieldValue::Triple(real(&value[0]), real(&value[1]), real(&value[2])),
            FieldValue::Count(_) => FieldValue::Count(value.as_u64().expect("a count")),
            FieldValue::Flag(_) => FieldValue::Flag(value.as_bool().expect("a flag")),
            FieldValue::Choice(choice) => {
                let named = value.as_str().and_then(|name| choice.named(name));
                FieldValue::Choice(named.expect("one of the field's values"))
            }
            other => panic!("{name}.{field} is {other}"),
        };
        assert!(rule.set_field(field, value).expect("a value of the field's type"));
    }
    rule
}

/// The files of cases.
const FILES: [&str; 3] = [
    include_str!("../../golden/rules.json"),
    include_str!("../../golden/modern.json"),
    include_str!("../../golden/matrices.json"),
];

/// Rules without a case, whose recurrences other tests write out.
const WRITTEN_OUT: [&str; 11] = [
    "Adan",
    "AdaMuon",
    "Scale",
    "ClipGlobalNorm",
    "SkipOutliers",
    "AdaptiveClip",
    "Centralise",
    "GradNoise",
    "Lookahead",
    "Ema",
    "UniformAverage",
];

/// The cases of all files with their rules.
fn cases() -> Vec<(Case, Box<dyn Rule>)> {
    let of_file = |text| serde_json::from_str::<Vec<Case>>(text).expect("golden cases");
    let with_rule = |case: Case| {
        let rule = rule(&case.rule, &case.args);
        (case, rule)
    };
    FILES.into_iter().flat_map(of_file).map(with_rule).collect()
}

/// A rule that is added needs a case, and no rule can lose all of its cases.
#[test]
fn every_rule_has_a_case_or_is_written_out() {
    let cases = cases();
    let has_case = |name: &str| {
        let names = |case: &Case| case.rule.split(['(', ')', ',', ' ']).any(|word| word == name);
        cases.iter().any(|(case, _)| names(case))
    };
    let without = rules::catalogue()
        .into_iter()
        .map(|listing| listing.name)
        .filter(|name| !has_case(name));
    assert_eq!(without.collect::<Vec<_>>(), WRITTEN_OUT);
}

/// The parameter, and its master if it has one, after each step.
fn run(
    engine: Engine,
    optimiser: impl IntoOptimiser,
    x0: &Tensor,
    grads: &[Tensor],
) -> Vec<(Tensor, Option<Tensor>)> {
    let x = var(x0);
    let mut state = setup(optimiser, &x).expect("a state");
    let step = |gradient: &Tensor| {
        Update::new(&mut state)
            .engine(engine)
            .apply(&x, &Grads::from([(String::new(), gradient.clone())]))
            .expect("an update");
        let master = state.leaf("").expect("the leaf").tensor("master").ok();
        (x.as_tensor().copy().expect("a copy"), master)
    };
    grads.iter().map(step).collect()
}

fn largest(numbers: &[f64]) -> f64 {
    numbers.iter().fold(0.0, |largest, x| largest.max(x.abs()))
}

/// Asserts an error of at most `tolerance` relative to each number, or to `floor` times the tensor's largest.
fn assert_close(got: &[f64], expected: &[f64], (tolerance, floor): (f64, f64), what: &str) {
    assert_eq!(got.len(), expected.len(), "{what}");
    let floor = floor * largest(expected);
    for (got, expected) in got.iter().zip(expected) {
        let error = (got - expected).abs() / expected.abs().max(floor);
        assert!(error <= tolerance, "{what}: {got:e} for {expected:e}, {error:e}");
    }
}

const F64_ACCURACY: (f64, f64) = (1e-10, 1e-3);
const F32_ACCURACY: (f64, f64) = (1e-5, 0.1);

#[test]
fn every_rule_follows_its_oracle() {
    for (case, rule) in cases() {
        for (dtype, accuracy) in [(DType::F64, F64_ACCURACY), (DType::F32, F32_ACCURACY)] {
            for engine in engines() {
                let got = run(
                    engine,
                    rule.clone(),
                    &tensor(&case, &case.x0, dtype),
                    &gradients(&case, dtype),
                );
                assert_eq!(got.len(), case.x.len());
                for (t, ((x, _), expected)) in got.iter().zip(&case.x).enumerate() {
                    let what = format!(
                        "{} {:?} in {dtype:?} on {engine:?}, step {t}",
                        case.rule, case.args
                    );
                    assert_close(&values(x), &flat(expected), accuracy, &what);
                }
            }
        }
    }
}

/// Masters of f32 parameters are a bare f64 run that starts at the rounded parameter, and stay near the
/// oracle.
#[test]
fn f64_masters_of_f32_parameters_follow_the_oracle() {
    for (case, rule) in cases() {
        let (start, grads) = (tensor(&case, &case.x0, DType::F32), gradients(&case, DType::F64));
        for engine in engines() {
            let bare = run(
                engine,
                rule.clone(),
                &start.to_dtype(DType::F64).expect("f64"),
                &grads,
            );
            let got = run(
                engine,
                MixedPrecision::new(DType::F64, rule.clone()),
                &start,
                &grads,
            );
            for (((x, master), (bare, _)), expected) in got.iter().zip(&bare).zip(&case.x) {
                let master = master.as_ref().expect("a master");
                assert_eq!(bits(master), bits(bare), "{}", case.rule);
                assert_eq!(
                    bits(x),
                    bits(&master.to_dtype(DType::F32).expect("f32")),
                    "{}",
                    case.rule
                );
                assert_close(&values(master), &flat(expected), (1e-6, 0.1), &case.rule);
            }
        }
    }
}

/// The recorded master has fused multiply-adds, so it can differ in the last bits; the parameter must be our
/// master's rounding.
#[test]
fn mixed_precision_follows_torch() {
    let file: MixedFile = serde_json::from_str(include_str!("../../golden/mixed.json")).expect("golden runs");
    assert_eq!(file.mixed.len(), 16);
    for case in &file.mixed {
        let dtype = if case.dtype == "f16" {
            DType::F16
        } else {
            DType::BF16
        };
        let tensor = |bits: &[u16]| match dtype {
            DType::F16 => Tensor::new(
                bits.iter().map(|&bits| f16::from_bits(bits)).collect::<Vec<_>>(),
                &Device::Cpu,
            ),
            _ => Tensor::new(
                bits.iter().map(|&bits| bf16::from_bits(bits)).collect::<Vec<_>>(),
                &Device::Cpu,
            ),
        };
        let tensor = |bits: &[u16]| tensor(bits).expect("a tensor");
        let member = rule(&case.rule, &case.args);
        let optimiser = MixedPrecision::new(
            DType::F32,
            OptimiserChain::new((AccumGrad::new(case.accum), member)),
        );
        let grads: Vec<Tensor> = case.grads_bits.iter().map(|bits| tensor(bits)).collect();
        for engine in engines() {
            let got = run(engine, optimiser.clone(), &tensor(&case.x0_bits), &grads);
            assert_eq!(got.len(), case.master.len());
            for (t, ((x, master), expected)) in got.iter().zip(&case.master).enumerate() {
                let what = format!(
                    "{} in {}, accum {}, call {t} on {engine:?}",
                    case.rule, case.dtype, case.accum
                );
                let master = values(master.as_ref().expect("a master"));
                assert_close(&master, expected, (2e-6, 1.0), &what);
                let rounded: Vec<u16> = master.iter().map(|&value| nearest16(dtype, value)).collect();
                assert_eq!(bits16(x), rounded, "{what}");
                // Where both masters round alike, and that is nearly everywhere, the parameters are torch's.
                let near = bits16(x)
                    .iter()
                    .zip(&case.x_bits[t])
                    .filter(|(got, expected)| got == expected)
                    .count();
                assert!(
                    near + 1 >= rounded.len(),
                    "{what}: {near} of {} parameters",
                    rounded.len()
                );
            }
        }
    }
}
