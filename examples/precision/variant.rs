//! The ways to keep parameters that are compared.

use std::time::{Duration, Instant};

use candle_core::{DType, Device, Tensor};
use optimisers::{
    AdamW, Kahan, LossScaler, MixedPrecision, Model, Q8, Result, SplitMaster, StateTree, StochasticRounding,
    StoreAs, Update, Visitor, setup,
};

use crate::problem::Problem;

/// The weight decay of AdamW, torch's default.
const LAMBDA: f64 = 0.01;

/// A dtype to train in and a way to keep the parameters.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Variant {
    /// The name in result lines.
    pub(crate) name: &'static str,
    /// The name in words.
    pub(crate) title: &'static str,
    /// The dtype of parameters, activations and gradients.
    dtype: DType,
    keep: Keep,
}

#[derive(Clone, Copy, Debug)]
enum Keep {
    /// The rule on the parameters themselves.
    Plain,
    /// The rule on f32 masters.
    Masters,
    /// The same, with the first moment in bf16.
    MastersNarrowMoment,
    /// The same, with losses that are scaled.
    MastersScaledLoss,
    /// 16 more bits for each bf16.
    Split,
    /// The rule on the parameters, with both moments in 8 bits.
    EightBits,
    /// The same on f32 masters.
    MastersEightBits,
    /// The same with 8 more bits for each bf16.
    SplitEightBits,
    Kahan,
    Stochastic,
}

pub(crate) const VARIANTS: [Variant; 11] = [
    Variant {
        name: "f32",
        title: "f32",
        dtype: DType::F32,
        keep: Keep::Plain,
    },
    Variant {
        name: "bf16+master",
        title: "bf16, f32 masters",
        dtype: DType::BF16,
        keep: Keep::Masters,
    },
    Variant {
        name: "bf16+split",
        title: "bf16, split masters",
        dtype: DType::BF16,
        keep: Keep::Split,
    },
    Variant {
        name: "bf16+master+bf16-m",
        title: "bf16, f32 masters, m in bf16",
        dtype: DType::BF16,
        keep: Keep::MastersNarrowMoment,
    },
    Variant {
        name: "f16+master+scaler",
        title: "f16, f32 masters, scaled loss",
        dtype: DType::F16,
        keep: Keep::MastersScaledLoss,
    },
    Variant {
        name: "f32+q8",
        title: "f32, 8-bit moments",
        dtype: DType::F32,
        keep: Keep::EightBits,
    },
    Variant {
        name: "bf16+master+q8",
        title: "bf16, f32 masters, 8-bit moments",
        dtype: DType::BF16,
        keep: Keep::MastersEightBits,
    },
    Variant {
        name: "bf16+split24+q8",
        title: "bf16, 24-bit masters, 8-bit moments",
        dtype: DType::BF16,
        keep: Keep::SplitEightBits,
    },
    Variant {
        name: "bf16+kahan",
        title: "bf16, Kahan's summation",
        dtype: DType::BF16,
        keep: Keep::Kahan,
    },
    Variant {
        name: "bf16+stochastic",
        title: "bf16, stochastic rounding",
        dtype: DType::BF16,
        keep: Keep::Stochastic,
    },
    Variant {
        name: "bf16",
        title: "bf16 alone",
        dtype: DType::BF16,
        keep: Keep::Plain,
    },
];

impl Variant {
    pub(crate) fn dtype(&self) -> DType {
        self.dtype
    }

    /// The network of a problem with its optimiser.
    pub(crate) fn trainer<P: Problem>(&self, problem: &P, seed: u64) -> Result<Trainer<P::Network>> {
        let network = problem.network(seed, self.dtype)?;
        let rule = AdamW {
            lambda: LAMBDA,
            ..AdamW::new(P::ETA)
        };
        let mut scaler = None;
        let mut state = match self.keep {
            Keep::Plain => setup(rule, &network),
            Keep::Masters => setup(MixedPrecision::new(DType::F32, rule), &network),
            Keep::MastersNarrowMoment => setup(
                MixedPrecision::new(DType::F32, StoreAs::new([("m", DType::BF16)], rule)),
                &network,
            ),
            Keep::MastersScaledLoss => {
                scaler = Some(LossScaler::dynamic());
                setup(MixedPrecision::new(DType::F32, rule), &network)
            }
            Keep::Split => setup(SplitMaster::new(rule), &network),
            Keep::EightBits => setup(StoreAs::all(Q8, rule), &network),
            Keep::MastersEightBits => {
                setup(MixedPrecision::new(DType::F32, StoreAs::all(Q8, rule)), &network)
            }
            Keep::SplitEightBits => setup(SplitMaster::of_24_bits(StoreAs::all(Q8, rule)), &network),
            Keep::Kahan => setup(Kahan::new(rule), &network),
            Keep::Stochastic => setup(StochasticRounding::new(seed, rule), &network),
        }?;
        // bf16 alone is there to be compared.
        state.all().allow_low_precision();
        // A parameter without a gradient is an error, and not one that is never trained.
        state.require_all();
        Ok(Trainer {
            network,
            state,
            scaler,
        })
    }
}

/// A network that is trained.
pub(crate) struct Trainer<N> {
    pub(crate) network: N,
    state: StateTree,
    scaler: Option<LossScaler>,
}

impl<N: Model> Trainer<N> {
    /// Moves the parameters by one step against the gradient of the loss, and returns how long the optimiser
    /// took.
    pub(crate) fn step(&mut self, loss: &Tensor) -> Result<Duration> {
        let Trainer {
            network,
            state,
            scaler,
        } = self;
        let grads = match scaler {
            Some(scaler) => scaler.scale(loss)?.backward()?.into_inner(),
            None => loss.backward()?,
        };
        // A GPU is still at work when the calls have returned.
        loss.device().synchronize()?;
        let start = Instant::now();
        let update = Update::new(state);
        match scaler {
            Some(scaler) => update.scaler(scaler),
            None => update,
        }
        .apply(network, &grads)?;
        loss.device().synchronize()?;
        Ok(start.elapsed())
    }

    /// The most precise copies of all parameters in a row, on the CPU.
    pub(crate) fn weights(&self) -> Result<Tensor> {
        let masters = self.state.masters(&self.network)?;
        let flat = |master: Tensor| {
            master
                .to_device(&Device::Cpu)?
                .to_dtype(DType::F32)?
                .flatten_all()
        };
        Ok(Tensor::cat(
            &masters
                .into_values()
                .map(flat)
                .collect::<candle_core::Result<Vec<_>>>()?,
            0,
        )?)
    }

    /// How many numbers are trained.
    pub(crate) fn parameters(&self) -> usize {
        self.state.elements()
    }

    /// The bytes of all parameters and of all state tensors.
    pub(crate) fn bytes(&self) -> usize {
        bytes(&self.network) + self.state.bytes()
    }
}

/// The bytes of a model's tensors.
fn bytes<M: Model>(model: &M) -> usize {
    let mut bytes = 0;
    model.visit(&mut Visitor::new(&mut |_path, tensor| {
        bytes += tensor.elem_count() * tensor.dtype().size_in_bytes()
    }));
    bytes
}
