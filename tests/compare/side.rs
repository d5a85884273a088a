//! The adapter of this commit: a case through the crate as it is. A comparison uses the adapter that each
//! commit has itself.

use std::collections::BTreeMap;

use candle_core::{DType, Device, Tensor, Var};
use case::{Around, Call, Case, Format, Moments, Parameter, Run, Store};
use half::{bf16, f16};
use optimisers::{
    AccumGrad, AdamW, Cautious, ClipGlobalNorm, ClipNorm, Engine, Fallback, GradientSlices, Kahan, Lion,
    LossScaler, MemoryMut, MemoryRef, MixedPrecision, Offload, Optimiser, OptimiserChain, ParameterSlices,
    Q8, Rule, SplitMaster, StateTree, StochasticRounding, StoreAs, Update, rules, setup,
};

type Failure = Box<dyn std::error::Error>;

/// The names of all rules.
pub fn names() -> Vec<String> {
    rules::catalogue().iter().map(|listing| listing.name.to_string()).collect()
}

/// Runs a case.
pub fn run(case: &Case) -> Run {
    // Each state would print its own.
    optimisers::Warning::silence();
    let mut numbers: Vec<Numbers> =
        case.parameters.iter().map(|x| Numbers::new(x.format, &x.values)).collect();
    let model = case.parameters.iter().zip(&numbers).enumerate();
    let model: BTreeMap<String, Var> = model
        .map(|(i, (x, numbers))| {
            (i.to_string(), Var::from_tensor(&numbers.tensor(&x.shape)).expect("a variable"))
        })
        .collect();
    let paths: Vec<String> = model.keys().cloned().collect();
    let made = match case.slices {
        true => setup(optimiser(case)?, &lent(&paths, case, &mut numbers)),
        false => setup(optimiser(case)?, &model),
    };
    let mut state = made.ok()?;
    // So that a rule whose defaults have changed is the same.
    let _ = state.adjust_field("lambda", 0.01);
    let run = |call: &Call| {
        let taken = step(case, call, &mut state, &model, &paths, &mut numbers).is_ok();
        let parameters = |i: usize| {
            if case.slices {
                numbers[i].tensor(&case.parameters[i].shape)
            } else {
                model[&i.to_string()].as_detached_tensor()
            }
        };
        (taken, everything((0..numbers.len()).map(parameters), &state))
    };
    Some(case.calls.iter().map(run).collect())
}

fn step(
    case: &Case,
    call: &Call,
    state: &mut StateTree,
    model: &BTreeMap<String, Var>,
    paths: &[String],
    numbers: &mut [Numbers],
) -> Result<(), Failure> {
    let gradients: Vec<Option<Numbers>> = call
        .gradients
        .iter()
        .map(|gradient| gradient.as_ref().map(|(format, values)| Numbers::new(*format, values)))
        .collect();
    let mut update = Update::new(state)
        .engine(if case.tensors { Engine::Tensors } else { Engine::Fused })
        .weight(call.weight);
    if call.finite_only {
        update = update.finite_only();
    }
    let mut scaler = call.loss_scale.map(LossScaler::fixed);
    if let Some(scaler) = &mut scaler {
        scaler.factor()?;
    }
    if case.slices {
        let mut slices = GradientSlices::new();
        for (path, gradient) in paths.iter().zip(&gradients) {
            if let Some(gradient) = gradient {
                slices = slices.with(path, gradient.show())?;
            }
        }
        let parameters = lent(paths, case, numbers);
        match &mut scaler {
            Some(scaler) => update.scaler(scaler).apply(&parameters, &slices)?,
            None => update.apply(&parameters, &slices)?,
        };
    } else {
        let tensors = gradients.iter().zip(&case.parameters).zip(paths);
        let tensors: BTreeMap<String, Tensor> = tensors
            .filter_map(|((gradient, x), path)| Some((path.clone(), gradient.as_ref()?.tensor(&x.shape))))
            .collect();
        match &mut scaler {
            Some(scaler) => update.scaler(scaler).apply(model, &tensors)?,
            None => update.apply(model, &tensors)?,
        };
    }
    Ok(())
}

fn rule(name: &str) -> Option<Box<dyn Rule>> {
    let rule = rules::catalogue().into_iter().find(|listing| listing.name == name)?.rule;
    // Rules of matrices have another for vectors.
    let takes_vectors = rule.init((&Tensor::zeros(1, DType::F32, &Device::Cpu).ok()?).into()).is_ok();
    Some(if takes_vectors { rule } else { Box::new(Fallback::new(rule, AdamW::new(1e-2))) })
}

fn optimiser(case: &Case) -> Option<Box<dyn Optimiser>> {
    let mut members: Vec<Box<dyn Rule>> = match case.around {
        Around::Window(calls) => vec![Box::new(AccumGrad::new(calls))],
        Around::ClipAll(limit) => vec![Box::new(ClipGlobalNorm::new(limit))],
        Around::ClipEach(limit) => vec![Box::new(ClipNorm::new(limit))],
        Around::Cautious => vec![Box::new(Cautious::new(Lion::new(1e-2)))],
        Around::Nothing => vec![],
    };
    for name in &case.rules {
        members.push(rule(name)?);
    }
    let rule: Box<dyn Rule> = Box::new(OptimiserChain::new(members));
    let rule = match case.moments {
        Moments::AsTheyAre => rule,
        Moments::InBF16 => Box::new(StoreAs::all(DType::BF16, rule)),
        Moments::In8Bits => Box::new(StoreAs::all(Q8, rule)),
    };
    Some(match case.store {
        Store::Bare => Box::new(rule),
        Store::MasterF32 => Box::new(MixedPrecision::new(DType::F32, rule)),
        Store::MasterF64 => Box::new(MixedPrecision::new(DType::F64, rule)),
        Store::Kahan => Box::new(Kahan::new(rule)),
        Store::Split => Box::new(SplitMaster::new(rule)),
        Store::Split24 => Box::new(SplitMaster::of_24_bits(rule)),
        Store::Stochastic => Box::new(StochasticRounding::new(7, rule)),
        Store::Offload => Box::new(Offload::new(rule).everywhere()),
        Store::OffloadMaster => Box::new(Offload::new(MixedPrecision::new(DType::F32, rule)).everywhere()),
    })
}

/// Every bit that is there; all NaN are one.
fn everything(parameters: impl Iterator<Item = Tensor>, state: &StateTree) -> Vec<(String, Vec<u64>)> {
    let mut all: Vec<_> = parameters.enumerate().map(|(i, x)| (i.to_string(), bits(&x))).collect();
    for leaf in state.leaves() {
        let mut push = |name: &str, bits| all.push((format!("{}/{name}", leaf.path()), bits));
        for name in leaf.tensor_names() {
            push(&name, bits(&leaf.tensor(&name).expect("a copy").expect("a listed name")));
        }
        leaf.counters().into_iter().for_each(|(name, count)| push(&name, vec![count]));
        leaf.numbers().into_iter().for_each(|(name, number)| push(&name, vec![number_bits(number)]));
        push("steps", vec![leaf.steps()]);
    }
    all
}

fn bits(tensor: &Tensor) -> Vec<u64> {
    let values =
        tensor.flatten_all().and_then(|flat| flat.to_dtype(DType::F64)?.to_vec1::<f64>()).expect("values");
    values.into_iter().map(number_bits).collect()
}

fn number_bits(number: f64) -> u64 {
    if number.is_nan() { u64::MAX } else { number.to_bits() }
}

/// Numbers of any format.
enum Numbers {
    F16(Vec<f16>),
    BF16(Vec<bf16>),
    F32(Vec<f32>),
    F64(Vec<f64>),
}

impl Numbers {
    fn new(format: Format, values: &[f64]) -> Self {
        let values = values.iter().copied();
        match format {
            Format::F16 => Numbers::F16(values.map(f16::from_f64).collect()),
            Format::BF16 => Numbers::BF16(values.map(bf16::from_f64).collect()),
            Format::F32 => Numbers::F32(values.map(|value| value as f32).collect()),
            Format::F64 => Numbers::F64(values.collect()),
        }
    }

    fn tensor(&self, shape: &[usize]) -> Tensor {
        let cpu = &Device::Cpu;
        match self {
            Numbers::F16(values) => Tensor::from_slice(values, shape, cpu),
            Numbers::BF16(values) => Tensor::from_slice(values, shape, cpu),
            Numbers::F32(values) => Tensor::from_slice(values, shape, cpu),
            Numbers::F64(values) => Tensor::from_slice(values, shape, cpu),
        }
        .expect("a tensor")
    }

    fn lend(&mut self) -> MemoryMut<'_> {
        match self {
            Numbers::F16(values) => values.into(),
            Numbers::BF16(values) => values.into(),
            Numbers::F32(values) => values.into(),
            Numbers::F64(values) => values.into(),
        }
    }

    fn show(&self) -> MemoryRef<'_> {
        match self {
            Numbers::F16(values) => values.into(),
            Numbers::BF16(values) => values.into(),
            Numbers::F32(values) => values.into(),
            Numbers::F64(values) => values.into(),
        }
    }
}

fn lent<'a>(paths: &'a [String], case: &Case, numbers: &'a mut [Numbers]) -> ParameterSlices<'a> {
    let mut parameters = ParameterSlices::new();
    for ((path, Parameter { shape, .. }), numbers) in paths.iter().zip(&case.parameters).zip(numbers) {
        parameters =
            parameters.with(path, shape.as_slice(), numbers.lend()).expect("slices as long as their shapes");
    }
    parameters
}
