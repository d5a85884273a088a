//! Helpers that more than one test file needs.

#![allow(unreachable_pub)]

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::sync::Once;

use candle_core::{DType, Device, Tensor, Var};
use half::{bf16, f16};
use optimisers::{
    APOLLO, AccumGrad, Adafactor, Adam, AdamW, Cautious, ClipGlobalNorm, ClipGrad, ClipNorm, Descent, Ema,
    Engine, Error, ErrorKind, Fallback, GaLore, Gradients, Hyperball, IntoOptimiser, Isa, Kahan, Lion,
    LossScaler, MixedPrecision, Model, Momentum, Muon, Nesterov, Offload, Optimiser, OptimiserChain,
    Parameter, Q8, RMSProp, Rule, SOAP, Sam, Shampoo, SignDecay, SkipReason, SplitMaster, StateTree, Status,
    StochasticRounding, StoreAs, Update, WeightDecay, rules, setup,
};

/// Gradients by path.
pub type Grads = BTreeMap<String, Tensor>;

/// What [`snapshot`] returns.
pub type Snapshot = Vec<(String, Vec<u64>)>;

/// A model of named variables.
pub type Vars = BTreeMap<String, Var>;

/// Every kind of engine. That of CUDA devices takes part, emulated, where there is a C++ compiler; where
/// there is none, the tests of `emulated` fail.
pub fn engines() -> Vec<Engine> {
    if cfg!(miri) {
        // It cannot start a compiler, and candle's operations take it minutes.
        return vec![Engine::Fused];
    }
    let mut engines = vec![Engine::Fused, Engine::Tensors];
    if optimisers::__private::emulation::is_available() {
        engines.push(Engine::Emulated);
    }
    engines
}

/// The fused CPU engine with every instruction set that this processor has, by name.
pub fn instruction_sets() -> Vec<Engine> {
    let sets = [Some(Isa::PORTABLE), Isa::avx2(), Isa::avx512()];
    sets.into_iter().flatten().map(Engine::FusedWith).collect()
}

/// Every device that tests run on: the CPU, and a GPU where the build and the machine have one.
pub fn devices() -> Vec<Device> {
    [Device::Cpu].into_iter().chain(first_gpu()).collect()
}

/// The first GPU, where this build and this machine have one.
pub fn first_gpu() -> Option<Device> {
    Device::new_cuda(0).ok()
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
    (0..count)
        .map(|_| (0..6).map(|_| uniform()).sum::<f64>() - 3.0)
        .collect()
}

/// A tensor of [`numbers`].
pub fn random(seed: u64, shape: &[usize], dtype: DType, device: &Device) -> Tensor {
    let count = shape.iter().product();
    Tensor::from_vec(numbers(seed, count), shape, &Device::Cpu)
        .and_then(|tensor| tensor.to_dtype(dtype)?.to_device(device))
        .expect("a random tensor")
}

/// [`random`] on the CPU.
pub fn tensor(seed: u64, shape: &[usize], dtype: DType) -> Tensor {
    random(seed, shape, dtype, &Device::Cpu)
}

/// A tensor of one number.
pub fn constant(value: f64, count: usize, dtype: DType) -> Tensor {
    Tensor::full(value, count, &Device::Cpu)
        .and_then(|tensor| tensor.to_dtype(dtype))
        .expect("a tensor")
}

/// A variable with the values of a tensor.
pub fn var(values: &Tensor) -> Var {
    Var::from_tensor(&values.copy().expect("a copy")).expect("a variable")
}

/// The values as f64, on the host; exact for every float dtype.
pub fn values(tensor: &Tensor) -> Vec<f64> {
    let host = tensor
        .to_device(&Device::Cpu)
        .and_then(|tensor| tensor.flatten_all());
    host.and_then(|tensor| tensor.to_dtype(DType::F64)?.to_vec1())
        .expect("values")
}

/// The bits of the values as f64, with one pattern for every NaN.
pub fn bits(tensor: &Tensor) -> Vec<u64> {
    values(tensor).into_iter().map(number_bits).collect()
}

/// The bits of a number, where all NaN are one: which of them arithmetic gives is not defined.
pub fn number_bits(number: f64) -> u64 {
    if number.is_nan() {
        u64::MAX
    } else {
        number.to_bits()
    }
}

/// All there is to compare of a model and its state: every bit of parameters and state tensors, counters,
/// hyper-parameters.
pub fn snapshot(model: &Vars, state: &StateTree) -> Snapshot {
    let mut snapshot: Vec<(String, Vec<u64>)> = model
        .iter()
        .map(|(path, var)| (path.clone(), bits(var)))
        .collect();
    for leaf in state.leaves() {
        for name in leaf.tensor_names() {
            let tensor = leaf.tensor(&name).expect("a state tensor");
            snapshot.push((format!("{}/{name}", leaf.path()), bits(&tensor)));
        }
        let counters = leaf
            .counters()
            .into_iter()
            .chain([("steps".to_string(), leaf.steps())]);
        snapshot.extend(counters.map(|(name, count)| (format!("{}/{name}", leaf.path()), vec![count])));
        snapshot.extend(
            leaf.numbers()
                .into_iter()
                .map(|(name, number)| (format!("{}/{name}", leaf.path()), vec![number_bits(number)])),
        );
        snapshot.push((
            format!("{}/{:?}/{}", leaf.path(), leaf.optimiser(), leaf.is_frozen()),
            Vec::new(),
        ));
    }
    snapshot
}

/// Leaves other weights in the model: the guard that brings its parameters back is forgotten.
pub fn forget_ascent(state: &mut StateTree, model: &impl Model, grads: &impl Gradients) {
    std::mem::forget(
        Sam::new(3.0)
            .ascend(Update::new(state), model, grads)
            .expect("an ascent"),
    );
}

/// A function of each whole tensor, Muon's where that is a matrix.
pub fn muon() -> Fallback<Muon, Adafactor> {
    Muon::new(0.1).with_fallback(Adafactor::new(0.1))
}

/// A rule that takes matrices only, with another for vectors; any other as it is.
pub fn for_any_shape(rule: Box<dyn Rule>) -> Box<dyn Rule> {
    match Rule::init(&rule, Parameter::from(&constant(0.0, 1, DType::F32))) {
        Err(error) if needs_matrices(&error) => Box::new(Fallback::new(rule, Momentum::new(0.1))),
        _ => rule,
    }
}

/// The refusal of a rule that takes matrices only.
pub fn needs_matrices(error: &Error) -> bool {
    error.kind() == ErrorKind::Unsupported && error.to_string().contains("works on matrices")
}

/// Every rule of the catalogue, and chains that put them together.
pub fn rules_and_chains() -> Vec<Box<dyn Rule>> {
    let mut all: Vec<Box<dyn Rule>> = rules::catalogue()
        .into_iter()
        .map(|listing| for_any_shape(listing.rule))
        .collect();
    let chains: Vec<Box<dyn Rule>> = vec![
        Box::new(OptimiserChain::new(())),
        Box::new(OptimiserChain::new((
            ClipGrad::new(0.5),
            WeightDecay::new(0.1),
            Adam::new(0.01),
        ))),
        Box::new(OptimiserChain::new((
            ClipGlobalNorm::new(0.3),
            WeightDecay::new(0.1),
            AdamW::new(0.01),
        ))),
        Box::new(OptimiserChain::new((
            Momentum::new(0.1),
            ClipNorm {
                p: 1.0,
                ..ClipNorm::new(0.01)
            },
            SignDecay::new(0.01),
        ))),
        Box::new(OptimiserChain::new((
            AccumGrad::new(3),
            ClipGlobalNorm::new(0.3),
            Adam::new(0.01),
        ))),
        Box::new(OptimiserChain::new((
            ClipNorm {
                p: f64::INFINITY,
                ..ClipNorm::new(0.2)
            },
            AccumGrad::new(2),
            Nesterov::new(0.01),
        ))),
        Box::new(OptimiserChain::new((
            AccumGrad::new(6),
            ClipGlobalNorm::new(0.3),
            AdamW::new(0.01),
        ))),
        Box::new(OptimiserChain::new((
            ClipNorm {
                p: 3.0,
                ..ClipNorm::new(0.2)
            },
            Descent::new(0.1),
        ))),
        Box::new(OptimiserChain::new((
            Some(ClipGrad::new(0.4)),
            None::<Descent>,
            OptimiserChain::new((Adam::new(0.01), WeightDecay::new(0.01))),
        ))),
        Box::new(Cautious::new(AdamW::new(0.01))),
        Box::new(OptimiserChain::new((
            AccumGrad::new(2),
            Cautious::new(Lion::new(0.01)),
            WeightDecay::new(0.01),
        ))),
        Box::new(RMSProp {
            centred: true,
            ..RMSProp::new(0.01)
        }),
        Box::new(Hyperball::new(Adam::new(0.01))),
        Box::new(OptimiserChain::new((
            AccumGrad::new(2),
            Hyperball::new(muon()),
            Ema::new(0.9),
        ))),
        Box::new(OptimiserChain::new(vec![
            Box::new(WeightDecay::new(0.1)) as Box<dyn Rule>,
            Box::new(Momentum::new(0.1)),
        ])),
    ];
    all.extend(chains);
    // Their defaults are for larger matrices than those of the tests.
    let for_small_matrices: Vec<Box<dyn Rule>> = vec![
        Box::new(SOAP {
            interval: 2,
            ..SOAP::new(0.01)
        }),
        Box::new(Shampoo {
            interval: 2,
            ..Shampoo::new(0.01)
        }),
        Box::new(GaLore {
            rank: 2,
            interval: 2,
            ..GaLore::new(0.01)
        }),
        Box::new(APOLLO {
            interval: 2,
            ..APOLLO::mini(0.01)
        }),
    ];
    all.extend(for_small_matrices);
    all
}

/// [`rules_and_chains`] as optimisers, bare and inside `MixedPrecision`.
pub fn optimisers() -> Vec<Optimiser> {
    let mut all: Vec<Optimiser> = Vec::new();
    for rule in rules_and_chains() {
        all.push(Optimiser::new(rule.clone()));
        all.push(Optimiser::new(MixedPrecision::new(DType::F32, rule.clone())));
        all.push(Optimiser::new(MixedPrecision::new(DType::F64, rule)));
    }
    all
}

/// [`optimisers`], and those that suit parameters of this dtype only.
pub fn optimisers_for(parameter: DType) -> Vec<Optimiser> {
    let rules: [Box<dyn Rule>; 5] = [
        Box::new(AdamW::new(0.1)),
        Box::new(OptimiserChain::new((
            AccumGrad::new(3),
            ClipGlobalNorm::new(0.3),
            Momentum::new(0.1),
        ))),
        Box::new(OptimiserChain::new((
            WeightDecay::new(0.1),
            ClipNorm::new(0.5),
            Descent::new(0.1),
        ))),
        Box::new(StoreAs::new(
            [("m", DType::BF16), ("acc", DType::BF16)],
            OptimiserChain::new((AccumGrad::new(2), Adam::new(0.1))),
        )),
        Box::new(StoreAs::all(
            Q8,
            OptimiserChain::new((AccumGrad::new(2), ClipGlobalNorm::new(0.3), Adam::new(0.1))),
        )),
    ];
    let mut all = optimisers();
    for rule in rules {
        all.push(Optimiser::new(StochasticRounding::new(7, rule.clone())));
        all.extend(rounding_to_nearest(parameter, rule));
    }
    all
}

/// A rule in every way to store parameters of this dtype that rounds each element alike, wherever it is.
pub fn rounding_to_nearest(parameter: DType, rule: Box<dyn Rule>) -> Vec<Optimiser> {
    let mut all: Vec<Optimiser> = vec![
        Optimiser::new(rule.clone()),
        Optimiser::new(MixedPrecision::new(DType::F32, rule.clone())),
        Optimiser::new(MixedPrecision::new(DType::F64, rule.clone())),
        Optimiser::new(Kahan::new(rule.clone())),
        Optimiser::new(Offload::new(rule.clone()).everywhere()),
        Optimiser::new(Offload::new(MixedPrecision::new(DType::F32, rule.clone())).everywhere()),
        Optimiser::new(Offload::new(Kahan::new(rule.clone())).everywhere()),
    ];
    if parameter != DType::F16 {
        all.push(Optimiser::new(SplitMaster::new(rule.clone())));
        all.push(Optimiser::new(SplitMaster::of_24_bits(rule)));
    }
    all
}

/// A model of copies of these tensors, under the paths 0, 1, ...
pub fn model(tensors: &[Tensor]) -> Vars {
    tensors
        .iter()
        .enumerate()
        .map(|(i, tensor)| (i.to_string(), var(tensor)))
        .collect()
}

/// Gradients for a [`model`]; `None` is missing.
pub fn grads(tensors: impl IntoIterator<Item = Option<Tensor>>) -> Grads {
    tensors
        .into_iter()
        .enumerate()
        .filter_map(|(i, tensor)| Some((i.to_string(), tensor?)))
        .collect()
}

/// How many steps a scaler has counted since its scale last moved.
pub fn good_steps(scaler: &LossScaler) -> u64 {
    serde_json::to_value(scaler).expect("a text")["good_steps"]
        .as_u64()
        .expect("a count")
}

/// The snapshots after each update of a fresh [`model`].
pub fn trajectory(
    engine: Engine,
    optimiser: impl IntoOptimiser,
    parameters: &[Tensor],
    grads: &[Grads],
) -> Vec<Snapshot> {
    let model = model(parameters);
    let mut state = setup(optimiser, &model).expect("a state");
    let mut step = |grads| {
        Update::new(&mut state)
            .engine(engine)
            .apply(&model, grads)
            .expect("an update");
        snapshot(&model, &state)
    };
    grads.iter().map(&mut step).collect()
}

/// The numbers of a snapshot without their names, to compare optimisers whose states are named differently.
pub fn unnamed(snapshot: Snapshot) -> Snapshot {
    snapshot
        .into_iter()
        .map(|(_, bits)| (String::new(), bits))
        .collect()
}

/// Asserts that two trajectories are the same, and names the first difference.
pub fn assert_same(got: &[Snapshot], expected: &[Snapshot], what: impl std::fmt::Debug) {
    assert_close(got, expected, 0.0, what);
}

/// Asserts that the numbers of two trajectories differ by this much at most, relative to the larger, and
/// names the first that does not.
pub fn assert_close(got: &[Snapshot], expected: &[Snapshot], tolerance: f64, what: impl std::fmt::Debug) {
    assert_eq!(got.len(), expected.len(), "{what:?}");
    for (step, (got, expected)) in got.iter().zip(expected).enumerate() {
        assert_eq!(got.len(), expected.len(), "{what:?}, step {step}");
        for ((name, got), (expected_name, expected)) in got.iter().zip(expected) {
            assert_eq!(
                (name, got.len()),
                (expected_name, expected.len()),
                "{what:?}, step {step}"
            );
            if got == expected {
                continue;
            }
            for (i, (got, expected)) in got.iter().zip(expected).enumerate() {
                let (a, b) = (f64::from_bits(*got), f64::from_bits(*expected));
                let is_close = (a - b).abs() <= tolerance * a.abs().max(b.abs());
                assert!(
                    got == expected || tolerance > 0.0 && is_close,
                    "{what:?}, step {step}, {name}[{i}]: {a:e} ({got:x}) for {b:e} ({expected:x})"
                );
            }
        }
    }
}

/// What a call is that was skipped for the gradient of this parameter, which is not finite.
pub fn not_finite(path: &str) -> Status {
    Status::Skipped(SkipReason::NotFinite {
        path: path.to_string(),
    })
}

/// What a call is that gave all windows up for that of this parameter.
pub fn given_up(path: &str) -> Status {
    Status::Skipped(SkipReason::WindowsGivenUp {
        path: path.to_string(),
    })
}

/// The error is of this kind, and its text contains each word.
pub fn is_kind(error: &Error, kind: ErrorKind, words: &[&str]) {
    let text = error.to_string();
    assert_eq!(error.kind(), kind, "{text}");
    words
        .iter()
        .for_each(|word| assert!(text.contains(word), "no {word:?} in {text}"));
    is_punctuated(&text);
}

/// No part of a text that is made of parts is empty.
fn is_punctuated(text: &str) {
    for stray in ["; .", "; ;", ";;", ": :", ": ;", ", ;", ". .", " ,", " ;"] {
        assert!(!text.contains(stray), "{stray:?} in {text}");
    }
    assert!(!text.ends_with([' ', ';', ':', ',']), "{text:?}");
}

/// The error's text, or the list of its facts, contains each word.
pub fn says(error: &Error, words: &[&str]) {
    let structure = format!("{error:#?}");
    let in_a_line: String = structure.split_whitespace().collect();
    let text = format!("{error}\n{structure}\n{in_a_line}");
    for word in words {
        assert!(text.contains(word), "no {word:?} in {text}");
    }
    is_punctuated(&error.to_string());
}

thread_local! {
    /// The lines of a thread that listens.
    static LINES: RefCell<Option<Vec<String>>> = const { RefCell::new(None) };
}

/// The binary's only logger: each thread has lines of its own.
struct Log;

impl log::Log for Log {
    fn enabled(&self, _: &log::Metadata) -> bool {
        true
    }

    fn log(&self, record: &log::Record) {
        if record.target().starts_with("optimisers") {
            LINES.with_borrow_mut(|lines| lines.as_mut().map(|lines| lines.push(record.args().to_string())));
        }
    }

    fn flush(&self) {}
}

/// What `run` returns, and what this crate logs meanwhile in this thread.
pub fn logged<T>(run: impl FnOnce() -> T) -> (T, Vec<String>) {
    static SET: Once = Once::new();
    SET.call_once(|| {
        log::set_logger(&Log).expect("the only logger");
        log::set_max_level(log::LevelFilter::Warn);
    });
    LINES.set(Some(Vec::new()));
    let result = run();
    (result, LINES.take().unwrap_or_default())
}

/// The bits of a 16-bit tensor.
pub fn bits16(tensor: &Tensor) -> Vec<u16> {
    let flat = tensor.flatten_all().expect("a flat tensor");
    match tensor.dtype() {
        DType::F16 => flat
            .to_vec1::<f16>()
            .expect("f16")
            .into_iter()
            .map(f16::to_bits)
            .collect(),
        _ => flat
            .to_vec1::<bf16>()
            .expect("bf16")
            .into_iter()
            .map(bf16::to_bits)
            .collect(),
    }
}

/// The bits of the f16 or bf16 number that is nearest to `value`, the one with even bits of two: searched for
/// among all of them, so that it shares no code with what it checks. NaN is not for here.
pub fn nearest16(dtype: DType, value: f64) -> u16 {
    let (infinity, beyond) = if dtype == DType::F16 {
        (0x7c00u16, 65536.0)
    } else {
        (0x7f80, 2f64.powi(128))
    };
    let number = |bits: u16| match dtype {
        _ if bits >= infinity => beyond,
        DType::F16 => f16::from_bits(bits).to_f64(),
        _ => bf16::from_bits(bits).to_f64(),
    };
    let magnitude = value.abs();
    let (mut below, mut above) = (0, infinity);
    while above - below > 1 {
        let middle = below + (above - below) / 2;
        if number(middle) <= magnitude {
            below = middle
        } else {
            above = middle
        }
    }
    let (down, up) = (magnitude - number(below), number(above) - magnitude);
    let bits = if down < up || (down == up && below % 2 == 0) {
        below
    } else {
        above
    };
    if value.is_sign_negative() {
        bits | 0x8000
    } else {
        bits
    }
}
