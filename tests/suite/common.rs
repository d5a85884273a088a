//! Helpers that more than one test file needs.

use std::collections::BTreeMap;

use candle_core::{DType, Device, Tensor, Var};
use optimisers::{
    AccumGrad, Adam, AdamW, ClipGlobalNorm, ClipGrad, ClipNorm, Descent, Either, MixedPrecision, Momentum, Nesterov, Optimiser,
    OptimiserChain, Rule, SignDecay, StateTree, WeightDecay, rules,
};

/// Gradients by path.
pub type Grads = BTreeMap<String, Tensor>;

/// A model of named variables.
pub type Vars = BTreeMap<String, Var>;

/// Every device that tests run on: the CPU, and a GPU where the build and the machine have one.
pub fn devices() -> Vec<Device> {
    let mut devices = vec![Device::Cpu];
    if candle_core::utils::cuda_is_available() {
        devices.extend(Device::new_cuda(0));
    }
    devices
}

/// Deterministic numbers, roughly normal around 0, from a seed.
pub fn numbers(seed: u64, count: usize) -> Vec<f64> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15).wrapping_add(1);
    let mut uniform = move || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 11) as f64 / (1u64 << 53) as f64
    };
    (0..count).map(|_| (0..6).map(|_| uniform()).sum::<f64>() - 3.0).collect()
}

/// A tensor of [`numbers`].
pub fn random(seed: u64, shape: &[usize], dtype: DType, device: &Device) -> Tensor {
    let count = shape.iter().product();
    Tensor::from_vec(numbers(seed, count), shape, &Device::Cpu)
        .and_then(|tensor| tensor.to_dtype(dtype)?.to_device(device))
        .expect("a random tensor")
}

/// A variable with the values of a tensor.
pub fn var(values: &Tensor) -> Var {
    Var::from_tensor(&values.copy().expect("a copy")).expect("a variable")
}

/// The values as f64, on the host; exact for every float dtype.
pub fn values(tensor: &Tensor) -> Vec<f64> {
    let host = tensor.to_device(&Device::Cpu).and_then(|tensor| tensor.flatten_all());
    host.and_then(|tensor| tensor.to_dtype(DType::F64)?.to_vec1()).expect("values")
}

/// The bits of the values as f64, with one pattern for every NaN.
pub fn bits(tensor: &Tensor) -> Vec<u64> {
    values(tensor).into_iter().map(|value| if value.is_nan() { u64::MAX } else { value.to_bits() }).collect()
}

/// All there is to compare of a model and its state: every bit of parameters and state tensors, counters, hyper-parameters.
pub fn snapshot(model: &Vars, state: &StateTree) -> Vec<(String, Vec<u64>)> {
    let mut snapshot: Vec<(String, Vec<u64>)> = model.iter().map(|(path, var)| (path.clone(), bits(var))).collect();
    for leaf in state.leaves() {
        for name in leaf.tensor_names() {
            let tensor = leaf.tensor(&name).expect("a state tensor").expect("a listed name");
            snapshot.push((format!("{}/{name}", leaf.path()), bits(&tensor)));
        }
        let counters = leaf.counters().into_iter().chain([("steps".to_string(), leaf.steps())]);
        snapshot.extend(counters.map(|(name, count)| (format!("{}/{name}", leaf.path()), vec![count])));
        snapshot.push((format!("{}/{:?}/{}", leaf.path(), leaf.optimiser(), leaf.is_frozen()), Vec::new()));
    }
    snapshot
}

/// Every rule of the catalogue, and chains that put them together.
pub fn rules_and_chains() -> Vec<Box<dyn Rule>> {
    let mut all: Vec<Box<dyn Rule>> = rules::catalogue().into_iter().map(|listing| listing.rule).collect();
    all.extend::<[Box<dyn Rule>; 9]>([
        Box::new(OptimiserChain::new(())),
        Box::new(OptimiserChain::new((ClipGrad::new(0.5), WeightDecay::new(0.1), Adam::new(0.01)))),
        Box::new(OptimiserChain::new((ClipGlobalNorm::new(0.3), WeightDecay::new(0.1), AdamW::new(0.01)))),
        Box::new(OptimiserChain::new((Momentum::new(0.1), ClipNorm { p: 1.0, ..ClipNorm::new(0.01) }, SignDecay::new(0.01)))),
        Box::new(OptimiserChain::new((AccumGrad::new(3), ClipGlobalNorm::new(0.3), Adam::new(0.01)))),
        Box::new(OptimiserChain::new((ClipNorm { p: f64::INFINITY, ..ClipNorm::new(0.2) }, AccumGrad::new(2), Nesterov::new(0.01)))),
        Box::new(OptimiserChain::new((ClipNorm { p: 3.0, ..ClipNorm::new(0.2) }, Descent::new(0.1)))),
        Box::new(OptimiserChain::new((
            Some(ClipGrad::new(0.4)),
            None::<Descent>,
            OptimiserChain::new((Either::<Adam, Descent>::Left(Adam::new(0.01)), WeightDecay::new(0.01))),
        ))),
        Box::new(OptimiserChain::new(vec![Box::new(WeightDecay::new(0.1)) as Box<dyn Rule>, Box::new(Momentum::new(0.1))])),
    ]);
    all
}

/// [`rules_and_chains`] as optimisers, bare and inside `MixedPrecision`.
pub fn optimisers() -> Vec<Box<dyn Optimiser>> {
    let mut all: Vec<Box<dyn Optimiser>> = Vec::new();
    for rule in rules_and_chains() {
        all.push(Box::new(rule.clone()));
        all.push(Box::new(MixedPrecision::new(DType::F32, rule.clone())));
        all.push(Box::new(MixedPrecision::new(DType::F64, rule)));
    }
    all
}
