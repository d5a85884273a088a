//! Models of plain numbers, and all optimisers that work without candle.

pub mod bits;
pub mod golden;

use std::hash::{DefaultHasher, Hash, Hasher};
use std::ops::Range;
use std::path::Path;

use half::{bf16, f16};
use optimisers::{
    AccumGrad, AdamW, Checkpoint, ClipGlobalNorm, ClipNorm, Communicator, DType, DecoupledDecay, Ema,
    GradientSlices, Kahan, Lookahead, MemoryMut, MemoryRef, MixedPrecision, Offload, Optimiser,
    OptimiserChain, ParameterSlices, Q8, Rule, Setup, SplitMaster, StateTree, StochasticRounding, StoreAs,
    rules, setup, update,
};

/// Numbers of any dtype that parameters have.
#[derive(Clone, Debug, PartialEq)]
pub enum Vector {
    F16(Vec<f16>),
    BF16(Vec<bf16>),
    F32(Vec<f32>),
    F64(Vec<f64>),
}

impl Vector {
    /// These numbers, rounded.
    pub fn new(dtype: DType, numbers: &[f64]) -> Self {
        match dtype {
            DType::F16 => Vector::F16(numbers.iter().map(|&x| f16::from_f32(x as f32)).collect()),
            DType::BF16 => Vector::BF16(numbers.iter().map(|&x| bf16::from_f32(x as f32)).collect()),
            DType::F32 => Vector::F32(numbers.iter().map(|&x| x as f32).collect()),
            DType::F64 => Vector::F64(numbers.to_vec()),
            other => panic!("no vectors of {other}"),
        }
    }

    pub fn lend(&mut self) -> MemoryMut<'_> {
        match self {
            Vector::F16(values) => values.into(),
            Vector::BF16(values) => values.into(),
            Vector::F32(values) => values.into(),
            Vector::F64(values) => values.into(),
        }
    }

    pub fn show(&self) -> MemoryRef<'_> {
        match self {
            Vector::F16(values) => values.into(),
            Vector::BF16(values) => values.into(),
            Vector::F32(values) => values.into(),
            Vector::F64(values) => values.into(),
        }
    }

    /// Some of the numbers, as [`Vector::lend`].
    pub fn lend_part(&mut self, range: Range<usize>) -> MemoryMut<'_> {
        match self {
            Vector::F16(values) => (&mut values[range]).into(),
            Vector::BF16(values) => (&mut values[range]).into(),
            Vector::F32(values) => (&mut values[range]).into(),
            Vector::F64(values) => (&mut values[range]).into(),
        }
    }

    /// Some of the numbers, as [`Vector::show`].
    pub fn show_part(&self, range: Range<usize>) -> MemoryRef<'_> {
        match self {
            Vector::F16(values) => (&values[range]).into(),
            Vector::BF16(values) => (&values[range]).into(),
            Vector::F32(values) => (&values[range]).into(),
            Vector::F64(values) => (&values[range]).into(),
        }
    }

    pub fn bytes(&self) -> &[u8] {
        match self {
            Vector::F16(values) => bytemuck::cast_slice(values),
            Vector::BF16(values) => bytemuck::cast_slice(values),
            Vector::F32(values) => bytemuck::cast_slice(values),
            Vector::F64(values) => bytemuck::cast_slice(values),
        }
    }

    pub fn numbers(&self) -> Vec<f64> {
        match self {
            Vector::F16(values) => values.iter().map(|x| x.to_f64()).collect(),
            Vector::BF16(values) => values.iter().map(|x| x.to_f64()).collect(),
            Vector::F32(values) => values.iter().map(|&x| x.into()).collect(),
            Vector::F64(values) => values.clone(),
        }
    }
}

/// A parameter and its path.
#[derive(Clone, Debug, PartialEq)]
pub struct Named {
    pub path: String,
    pub shape: Vec<usize>,
    pub dtype: DType,
    pub values: Vector,
}

/// A model of vectors.
#[derive(Clone, Debug, PartialEq)]
pub struct Plain(pub Vec<Named>);

/// Numbers between -1 and 1.
pub fn numbers(seed: u64, count: usize) -> Vec<f64> {
    let mut state = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
    let mut next = || {
        state = state
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        (state >> 40) as f64 / f64::from(1u32 << 23) - 1.0
    };
    (0..count).map(|_| next()).collect()
}

impl Plain {
    /// A matrix with several chunks of elements, a vector, a stack of matrices and a number alone, the first
    /// in this dtype.
    pub fn new(seed: u64, dtype: DType) -> Self {
        let sorts = [
            ("matrix", vec![70, 130], dtype),
            ("bias", vec![33], DType::F32),
            ("stack", vec![2, 3, 5], dtype),
        ];
        let named = |(index, (path, shape, dtype)): (usize, (&str, Vec<usize>, DType))| Named {
            path: path.to_string(),
            dtype,
            values: Vector::new(dtype, &numbers(seed + index as u64, shape.iter().product())),
            shape,
        };
        Plain(
            sorts
                .into_iter()
                .chain([("scale", vec![], DType::F64)])
                .enumerate()
                .map(named)
                .collect(),
        )
    }

    /// Gradients of its parameters, in their dtypes.
    pub fn gradients(&self, seed: u64) -> Self {
        let other = |(index, named): (usize, &Named)| Named {
            values: Vector::new(
                named.dtype,
                &numbers(1000 * (seed + 1) + index as u64, named.shape.iter().product()),
            ),
            ..named.clone()
        };
        Plain(self.0.iter().enumerate().map(other).collect())
    }

    /// The vectors as a model.
    pub fn lend(&mut self) -> ParameterSlices<'_> {
        self.0.iter_mut().fold(
            ParameterSlices::new(),
            |slices,
             Named {
                 path, shape, values, ..
             }| { slices.with(path, &*shape, values.lend()).expect("a parameter") },
        )
    }

    /// The vectors as gradients.
    pub fn show(&self) -> GradientSlices<'_> {
        self.0.iter().fold(GradientSlices::new(), |slices, named| {
            slices.with(&named.path, named.values.show()).expect("a gradient")
        })
    }

    /// A number that two models share if all their bits are the same.
    pub fn hash(&self) -> u64 {
        let mut hasher = DefaultHasher::new();
        self.0
            .iter()
            .for_each(|named| named.values.bytes().hash(&mut hasher));
        hasher.finish()
    }
}

/// The bytes of a checkpoint of both.
pub fn saved(state: &StateTree, model: &mut Plain) -> Vec<u8> {
    Checkpoint::new(state)
        .model(&model.lend())
        .to_bytes()
        .expect("a checkpoint")
        .0
}

/// The hash of bytes.
pub fn hash(bytes: &[u8]) -> u64 {
    let mut hasher = DefaultHasher::new();
    bytes.hash(&mut hasher);
    hasher.finish()
}

/// Trains a model with its own gradients.
pub fn train(state: &mut StateTree, model: &mut Plain, steps: Range<u64>) {
    for step in steps {
        let gradients = model.gradients(step);
        update(state, &model.lend(), &gradients.show()).expect("an update");
    }
}

/// How many steps [`alone`] and [`of_rank`] make.
const STEPS: u64 = 3;

/// The hashes of parameters and checkpoint after a short training by one process.
pub fn alone(optimiser: Optimiser) -> (u64, u64) {
    let mut model = Plain::new(1, DType::BF16);
    let mut state = setup(optimiser, &model.lend()).expect("a state");
    train(&mut state, &mut model, 0..STEPS);
    (model.hash(), hash(&saved(&state, &mut model)))
}

/// The hash of the parameters after that training as a rank of several, each with the same gradients. The
/// ranks save to `path`.
pub fn of_rank(world: &(impl Communicator + Clone + 'static), optimiser: Optimiser, path: &Path) -> u64 {
    let mut model = Plain::new(1, DType::BF16);
    let mut state = Setup::over(world)
        .build(optimiser, &model.lend())
        .expect("a state");
    train(&mut state, &mut model, 0..STEPS);
    Checkpoint::new(&state)
        .model(&model.lend())
        .save(path)
        .expect("a checkpoint");
    model.hash()
}

/// Whether ranks can divide what is [stored](stored) so.
pub fn is_divided(store: &str) -> bool {
    !["offloaded", "stochastic"].contains(&store)
}

/// The rules that need candle.
pub const OF_CANDLE: [&str; 11] = [
    "AdaMuon",
    "AdaptiveClip",
    "Adafactor",
    "APOLLO",
    "Centralise",
    "GaLore",
    "GradNoise",
    "Muon",
    "NorMuon",
    "SOAP",
    "Shampoo",
];

/// Every rule that works without candle, by name, and some chains and wrappers.
pub fn all_rules() -> Vec<(String, Box<dyn Rule>)> {
    let listed = rules::catalogue()
        .into_iter()
        .filter(|listing| !OF_CANDLE.contains(&listing.name));
    let mut all: Vec<(String, Box<dyn Rule>)> = listed
        .map(|listing| (listing.name.to_string(), listing.rule))
        .collect();
    let chains: [Box<dyn Rule>; 5] = [
        Box::new(OptimiserChain::new((
            ClipGlobalNorm::new(1.0),
            AdamW::new(0.01),
            Ema::new(0.9),
        ))),
        Box::new(OptimiserChain::new((
            AccumGrad::new(2),
            ClipNorm::new(0.5),
            AdamW::new(0.01),
            Lookahead::new(2),
        ))),
        Box::new(DecoupledDecay::new(
            0.1,
            optimisers::Cautious::new(AdamW::new(0.01)),
        )),
        Box::new(optimisers::Hyperball::new(AdamW {
            lambda: 0.0,
            ..AdamW::new(0.01)
        })),
        Box::new(optimisers::Fallback::new(
            AdamW::new(0.01),
            optimisers::Lion::new(0.001),
        )),
    ];
    all.extend(chains.into_iter().map(|rule| (rule.name(), rule)));
    all
}

/// A rule stored in every way that there is.
pub fn stored(rule: &dyn Fn() -> Box<dyn Rule>) -> Vec<(&'static str, Optimiser)> {
    vec![
        ("bare", Optimiser::new(rule())),
        (
            "master in F32",
            Optimiser::new(MixedPrecision::new(DType::F32, rule())),
        ),
        (
            "master in F64",
            Optimiser::new(MixedPrecision::new(DType::F64, rule())),
        ),
        ("split", Optimiser::new(SplitMaster::new(rule()))),
        ("compensated", Optimiser::new(Kahan::new(rule()))),
        ("stochastic", Optimiser::new(StochasticRounding::new(7, rule()))),
        ("state in BF16", Optimiser::new(StoreAs::all(DType::BF16, rule()))),
        (
            "state in 8 bits",
            Optimiser::new(MixedPrecision::new(DType::F32, StoreAs::all(Q8, rule()))),
        ),
        (
            "offloaded",
            Optimiser::new(Offload::new(MixedPrecision::new(DType::F32, rule())).everywhere()),
        ),
    ]
}
