//! The cases: a model, gradients, an optimiser and the bytes that a step has to move.

use std::collections::BTreeMap;
use std::rc::Rc;

use candle_core::backprop::GradStore;
use candle_core::{DType, Device, Result, Tensor, Var};
use candle_nn::Optimizer;
use half::bf16;
use optimisers::{
    Adam, AdamW, Cautious, ClipGlobalNorm, ClipGrad, DecoupledDecay, Kahan, LossScaler, MixedPrecision,
    Momentum, Offload, Optimiser, OptimiserChain, Q8, Rule, SplitMaster, StochasticRounding, StoreAs, Update,
    WeightDecay, rules, setup,
};
use optimisers::{Engine, GradientSlices, Kind, ParameterSlices, rules::Listing};

use crate::divider::Terms;
use crate::floor::{Traffic, floor};
#[cfg(feature = "cuda")]
use crate::gpu;
use crate::sizes::Sizes;
use crate::timed::Timed;

/// One line of the benchmark.
pub struct Case {
    pub name: String,
    device: Device,
    engine: Engine,
    sizes: Vec<usize>,
    dtype: DType,
    optimiser: Rc<dyn Fn() -> Optimiser>,
    traffic: Traffic,
    /// Whether candle-nn has the same to offer.
    candle_nn: bool,
    /// What the loss was multiplied by.
    loss_scale: Option<f64>,
    /// How many models take steps in turn.
    models: usize,
    /// Whether parameters and gradients are in vectors of the program, in BF16.
    in_slices: bool,
}

/// The models of a case that take turns have this many bytes together, so that each finds its data in memory
/// and not in a cache, as after a backward pass.
const BEYOND_CACHES: usize = 1 << 28;

/// The sizes of many small tensors.
const SMALL: [usize; 2000] = [4096; 2000];

const LAMBDA: f64 = 0.01;
const OFFLOADED: &str = "offload_mixed_bf16_adamw";

fn adamw() -> AdamW {
    AdamW {
        lambda: LAMBDA,
        ..AdamW::new(1e-3)
    }
}

/// Every case, in the order of the report. Those come together that are compared with each other.
pub fn all(sizes: &Sizes) -> Vec<Vec<Case>> {
    let device = &sizes.device;
    let case = |name: &str, dtype, traffic, candle_nn, optimiser: fn() -> Optimiser| Case {
        name: name.to_string(),
        device: device.clone(),
        engine: Engine::FusedWith(sizes.isa),
        sizes: sizes.two(name),
        dtype,
        optimiser: Rc::new(optimiser),
        traffic,
        candle_nn,
        loss_scale: None,
        models: 1,
        in_slices: false,
    };
    let adam_f32 = Traffic {
        read: vec![4],
        update: vec![4; 3],
        write: vec![],
    };
    let adam_f64 = Traffic {
        read: vec![8],
        update: vec![8; 3],
        write: vec![],
    };
    let mixed = Traffic {
        read: vec![2],
        update: vec![4; 3],
        write: vec![2],
    };
    let mixed_clipped = Traffic {
        read: vec![2; 2],
        ..mixed.clone()
    };
    // Of split masters without the further bits, 16 bytes for each 128.
    let two_parts = Traffic {
        read: vec![2],
        update: vec![2, 2, 4, 4],
        write: vec![],
    };
    let narrow = Traffic {
        read: vec![2],
        update: vec![2, 4, 4],
        write: vec![],
    };
    // Without the scales, 4 bytes for each 128 codes.
    let adam_q8 = Traffic {
        read: vec![4],
        update: vec![4, 1, 1],
        write: vec![],
    };
    let mixed_q8 = Traffic {
        read: vec![2],
        update: vec![4, 1, 1],
        write: vec![2],
    };
    let split_q8 = Traffic {
        read: vec![2],
        update: vec![2, 1, 1, 1],
        write: vec![],
    };
    let momentum = Traffic {
        read: vec![4],
        update: vec![4; 2],
        write: vec![],
    };
    // The mean of the mask reads gradient and moments once more.
    let cautious = Traffic {
        read: vec![4; 4],
        ..adam_f32.clone()
    };
    let clipped = Traffic {
        read: vec![4; 2],
        ..adam_f32.clone()
    };

    let of_sizes = |name: &str, sizes: Vec<usize>, candle_nn: bool| Case {
        sizes,
        ..case(name, DType::F32, adam_f32.clone(), candle_nn, || {
            Optimiser::new(adamw())
        })
    };
    let by_size = vec![
        case("adamw_f32", DType::F32, adam_f32.clone(), true, || {
            Optimiser::new(adamw())
        }),
        case("cautious_adamw_f32", DType::F32, cautious, false, || {
            Optimiser::new(Cautious::new(adamw()))
        }),
        case(
            "cautious_unscaled_adamw_f32",
            DType::F32,
            adam_f32.clone(),
            false,
            || Optimiser::new(Cautious::new(adamw()).unscaled()),
        ),
        case(
            "cautious_decay_adamw_f32",
            DType::F32,
            adam_f32.clone(),
            false,
            || {
                Optimiser::new(
                    DecoupledDecay::new(
                        LAMBDA,
                        AdamW {
                            lambda: 0.0,
                            ..adamw()
                        },
                    )
                    .cautious(),
                )
            },
        ),
        case("adamw_f32_q8", DType::F32, adam_q8, false, || {
            Optimiser::new(StoreAs::all(Q8, adamw()))
        }),
        of_sizes("small_f32", SMALL.to_vec(), true),
    ];
    let exponents = if sizes.quick { 3..=7 } else { 3..=8 };
    let growth = exponents.map(|exponent| {
        let elements = 10usize.pow(exponent);
        let models = BEYOND_CACHES.div_ceil(elements * adam_f32.held());
        Case {
            models,
            ..of_sizes(&format!("growth_1e{exponent}"), vec![elements], false)
        }
    });
    let others = vec![
        case(
            "adamw_f64",
            DType::F64,
            adam_f64,
            true,
            || Optimiser::new(adamw()),
        ),
        // Leaves enough to overlap. On the CPU the transfers are copies, and the rest of the way is that of a
        // device.
        Case {
            sizes: sizes
                .two(OFFLOADED)
                .into_iter()
                .flat_map(|size| vec![size / 16; 16])
                .collect(),
            ..case(OFFLOADED, DType::BF16, mixed.clone(), false, || {
                Optimiser::new(Offload::new(MixedPrecision::new(DType::F32, adamw())).everywhere())
            })
        },
        case("mixed_bf16_adamw_q8", DType::BF16, mixed_q8, false, || {
            Optimiser::new(MixedPrecision::new(DType::F32, StoreAs::all(Q8, adamw())))
        }),
        case("mixed_f16_adamw", DType::F16, mixed.clone(), true, || {
            Optimiser::new(MixedPrecision::new(DType::F32, adamw()))
        }),
        Case {
            loss_scale: Some(1024.0),
            ..case(
                "mixed_bf16_adamw_scaled_clipped",
                DType::BF16,
                mixed_clipped,
                false,
                || {
                    Optimiser::new(MixedPrecision::new(
                        DType::F32,
                        OptimiserChain::new((ClipGlobalNorm::new(1.0), adamw())),
                    ))
                },
            )
        },
        case("split_bf16_adamw", DType::BF16, two_parts.clone(), false, || {
            Optimiser::new(SplitMaster::new(adamw()))
        }),
        case("split8_bf16_adamw_q8", DType::BF16, split_q8, false, || {
            Optimiser::new(SplitMaster::of_24_bits(StoreAs::all(Q8, adamw())))
        }),
        case("kahan_bf16_adamw", DType::BF16, two_parts, false, || {
            Optimiser::new(Kahan::new(adamw()))
        }),
        case(
            "stochastic_bf16_adamw",
            DType::BF16,
            narrow.clone(),
            false,
            || Optimiser::new(StochasticRounding::new(0, adamw())),
        ),
        case("bf16_adamw", DType::BF16, narrow, false, || {
            Optimiser::new(adamw())
        }),
        case("chain3_f32", DType::F32, adam_f32.clone(), false, || {
            Optimiser::new(OptimiserChain::new((
                ClipGrad::new(1.0),
                WeightDecay::new(LAMBDA),
                Adam::new(1e-3),
            )))
        }),
        case("chain3_boxed_f32", DType::F32, adam_f32.clone(), false, || {
            let members: Vec<Box<dyn Rule>> = vec![
                Box::new(ClipGrad::new(1.0)),
                Box::new(WeightDecay::new(LAMBDA)),
                Box::new(Adam::new(1e-3)),
            ];
            Optimiser::new(OptimiserChain::new(members))
        }),
        case("chain3_clipnorm_f32", DType::F32, clipped, false, || {
            Optimiser::new(OptimiserChain::new((
                ClipGlobalNorm::new(1.0),
                WeightDecay::new(LAMBDA),
                Adam::new(1e-3),
            )))
        }),
        case("momentum_f32", DType::F32, momentum, false, || {
            Optimiser::new(Momentum::new(1e-3))
        }),
    ];
    let growth: Vec<Case> = growth.collect();
    let of_masters = |name, candle_nn| {
        case(name, DType::BF16, mixed.clone(), candle_nn, || {
            Optimiser::new(MixedPrecision::new(DType::F32, adamw()))
        })
    };
    let by_memory = vec![
        of_masters("mixed_bf16_adamw", true),
        Case {
            sizes: SMALL.to_vec(),
            ..of_masters("small_mixed_bf16_adamw", false)
        },
        Case {
            sizes: sizes.two("mixed_bf16_adamw"),
            in_slices: true,
            ..of_masters("slices_mixed_bf16_adamw", false)
        },
    ];
    let mut all = vec![by_size, by_memory];
    all.extend(others.into_iter().map(|case| vec![case]));
    all.push(growth);
    // A vector of the program is in the CPU's memory.
    all.iter_mut()
        .for_each(|together| together.retain(|case| device.is_cpu() || !case.in_slices));
    all
}

fn lent<'v>(names: &'v [String], vectors: &'v mut [Vec<bf16>]) -> ParameterSlices<'v> {
    let mut parameters = ParameterSlices::new();
    for (name, values) in names.iter().zip(vectors) {
        parameters = parameters
            .with(name, values.len(), values)
            .expect("a name and a length of its own");
    }
    parameters
}

/// Every elementwise rule of the crate on parameters in f32, with the bytes of its own state.
pub fn rules(sizes: &Sizes) -> Vec<Vec<Case>> {
    let listings = rules::catalogue()
        .into_iter()
        .filter(|listing| listing.rule.kind() == Kind::Elementwise);
    listings
        .filter_map(|Listing { name, rule, .. }| Some(vec![of_rule(sizes, name, rule)?]))
        .collect()
}

/// What bounds the arithmetic of Adam: root and quotient, multiplications, and both.
pub fn bounds(sizes: &Sizes) -> Option<[Case; 3]> {
    Some([
        of_rule(sizes, "root_and_quotient", Terms::<true, false>)?,
        of_rule(sizes, "products", Terms::<false, true>)?,
        of_rule(sizes, "together", Terms::<true, true>)?,
    ])
}

/// A rule by itself, in f32.
fn of_rule(sizes: &Sizes, name: &str, rule: impl Rule + Clone + 'static) -> Option<Case> {
    let state = setup(
        rule.clone(),
        &Tensor::zeros(1, DType::F32, &Device::Cpu)
            .and_then(|x| Var::from_tensor(&x))
            .ok()?,
    )
    .ok()?;
    let slots = state.bytes() / size_of::<f32>();
    Some(Case {
        name: name.to_string(),
        device: sizes.device.clone(),
        engine: Engine::FusedWith(sizes.isa),
        sizes: sizes.one(),
        dtype: DType::F32,
        optimiser: Rc::new(move || Optimiser::new(rule.clone())),
        traffic: Traffic {
            read: vec![4],
            update: vec![4; 1 + slots],
            write: vec![],
        },
        candle_nn: false,
        loss_scale: None,
        models: 1,
        in_slices: false,
    })
}

impl Case {
    pub fn elements(&self) -> usize {
        self.sizes.iter().sum()
    }

    /// The bytes that a step reads and writes for each element.
    pub fn moved(&self) -> usize {
        self.traffic.moved()
    }

    /// The same case on one tensor.
    pub fn of_length(&self, length: usize) -> Case {
        Case {
            sizes: vec![length],
            name: self.name.clone(),
            device: self.device.clone(),
            optimiser: self.optimiser.clone(),
            traffic: self.traffic.clone(),
            ..*self
        }
    }

    /// Makes the tensors smaller where the device has too little memory.
    pub fn fit(&mut self) -> Result<()> {
        #[cfg(feature = "cuda")]
        if let Device::Cuda(gpu) = &self.device {
            // candle-nn has parameter, gradient and two moments, and makes about eight tensors for each of
            // two parameters at a time.
            let candle_nn = if self.candle_nn {
                8 * self.dtype.size_in_bytes()
            } else {
                0
            };
            let most = gpu::free_memory(gpu)? / 10 * 8 / (self.models * self.traffic.held() + candle_nn);
            let each = most / self.sizes.len();
            self.sizes.iter_mut().for_each(|size| *size = each.min(*size));
        }
        Ok(())
    }

    fn model(&self) -> Result<BTreeMap<String, Var>> {
        let variable = |size: usize| {
            Var::from_tensor(
                &Tensor::full(0.5f32, size, &self.device)?
                    .to_dtype(self.dtype)?
                    .contiguous()?,
            )
        };
        self.sizes
            .iter()
            .enumerate()
            .map(|(i, &size)| Ok((format!("w{i:04}"), variable(size)?)))
            .collect()
    }

    fn gradients(&self, model: &BTreeMap<String, Var>) -> Result<GradStore> {
        let mut grads = GradStore::default();
        for variable in model.values() {
            let gradient = Tensor::full(1e-3f32, variable.shape(), &self.device)?.to_dtype(self.dtype)?;
            grads.insert(variable, gradient.contiguous()?);
        }
        Ok(grads)
    }

    /// A step of this crate.
    pub fn ours(&self) -> Result<Timed> {
        if self.in_slices {
            return self.of_slices();
        }
        let made = || {
            let model = self.model()?;
            let grads = self.gradients(&model)?;
            let mut state = setup((self.optimiser)(), &model).map_err(candle_core::Error::wrap)?;
            state.all().allow_low_precision();
            Ok((model, grads, state))
        };
        let mut models: Vec<_> = (0..self.models).map(|_| made()).collect::<Result<_>>()?;
        let (mut turn, engine) = ((0..self.models).cycle(), self.engine);
        let Some(scale) = self.loss_scale else {
            return Ok(self.timed(move || {
                let (model, grads, state) = &mut models[turn.next().unwrap_or(0)];
                Update::new(state)
                    .engine(engine)
                    .apply(model, grads)
                    .expect("the step of a benchmark");
            }));
        };
        let (mut scaler, loss) = (LossScaler::fixed(scale), Tensor::new(0f32, &self.device)?);
        Ok(self.timed(move || {
            let (model, grads, state) = &mut models[turn.next().unwrap_or(0)];
            let _ = scaler.scale(&loss).expect("the loss of a benchmark");
            Update::new(state)
                .engine(engine)
                .scaler(&mut scaler)
                .apply(model, grads)
                .expect("the step of a benchmark");
        }))
    }

    /// The same step of vectors.
    fn of_slices(&self) -> Result<Timed> {
        let vectors = |value: f32| {
            self.sizes
                .iter()
                .map(|&size| vec![bf16::from_f32(value); size])
                .collect::<Vec<_>>()
        };
        let (mut parameters, gradients) = (vectors(0.5), vectors(1e-3));
        let names: Vec<String> = (0..self.sizes.len()).map(|i| format!("w{i:04}")).collect();
        let mut state =
            setup((self.optimiser)(), &lent(&names, &mut parameters)).map_err(candle_core::Error::wrap)?;
        let engine = self.engine;
        Ok(self.timed(move || {
            let mut shown = GradientSlices::new();
            for (name, values) in names.iter().zip(&gradients) {
                shown = shown.with(name, values).expect("a name of its own");
            }
            Update::new(&mut state)
                .engine(engine)
                .apply(&lent(&names, &mut parameters), &shown)
                .expect("the step of a benchmark");
        }))
    }

    /// The memory traffic alone.
    pub fn floor(&self) -> Result<Timed> {
        match &self.device {
            #[cfg(feature = "cuda")]
            Device::Cuda(gpu) => gpu::copy(gpu, self.elements(), self.elements() * self.moved(), self.models),
            _ => Ok(floor(self.sizes.clone(), self.traffic.clone(), self.models)),
        }
    }

    /// A step of candle-nn's AdamW on parameters of the same dtype.
    pub fn candle_nn(&self) -> Result<Option<Timed>> {
        if !self.candle_nn {
            return Ok(None);
        }
        let model = self.model()?;
        let grads = self.gradients(&model)?;
        let params = candle_nn::ParamsAdamW {
            lr: 1e-3,
            weight_decay: LAMBDA,
            ..Default::default()
        };
        let mut optimiser = candle_nn::AdamW::new(model.values().cloned().collect(), params)?;
        Ok(Some(self.timed(move || {
            optimiser.step(&grads).expect("the step of a benchmark")
        })))
    }

    fn timed(&self, mut step: impl FnMut() + 'static) -> Timed {
        let run = move |go_on: &mut dyn FnMut() -> bool| {
            while go_on() {
                step();
            }
        };
        Timed {
            elements: self.elements(),
            device: self.device.clone(),
            run: Box::new(run),
        }
    }
}
