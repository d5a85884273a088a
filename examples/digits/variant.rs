//! The four ways to train that are compared, and the rules to train with.

use candle_core::backprop::GradStore;
use candle_core::{DType, Device, Tensor, Var};
use candle_nn::Optimizer;
use clap::ValueEnum;
use optimisers::{
    Adam, AdamW, Adjust, Descent, MixedPrecision, Model, Momentum, Muon, Nesterov, Result, Rule, StateTree,
    Update, Visitor,
};

use crate::model::Mlp;
use crate::ranks::World;

/// The weight decay of AdamW, torch's default.
const LAMBDA: f64 = 0.01;

/// The learning rate of AdamW for what Muon leaves to it: the best for it alone.
const BESIDE_MUON: f64 = 1e-2;

/// A rule by its name on the command line.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum RuleName {
    Adamw,
    Adam,
    Momentum,
    Nesterov,
    Descent,
    /// For the matrix of the hidden layer, with AdamW at 0.01 for all others
    Muon,
}

impl RuleName {
    /// The rule, with its usual learning rate where `eta` is not given.
    ///
    /// # Errors
    /// If `eta` is out of range.
    pub(crate) fn rule(self, eta: Option<f64>) -> Result<Box<dyn Rule>> {
        let mut rule: Box<dyn Rule> = match self {
            RuleName::Adamw => Box::new(adamw()),
            RuleName::Adam => Box::new(Adam::default()),
            RuleName::Momentum => Box::new(Momentum::default()),
            RuleName::Nesterov => Box::new(Nesterov::default()),
            RuleName::Descent => Box::new(Descent::default()),
            RuleName::Muon => Box::new(
                Muon::default()
                    .with_fallback(AdamW {
                        eta: BESIDE_MUON,
                        ..adamw()
                    })
                    .except(["output.weight"]),
            ),
        };
        if let Some(eta) = eta {
            rule.adjust(eta)?;
        }
        Ok(rule)
    }
}

fn adamw() -> AdamW {
    AdamW {
        lambda: LAMBDA,
        ..AdamW::default()
    }
}

/// A dtype to train in and a way to do it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Variant {
    pub(crate) name: &'static str,
    /// The name in words, for the legend.
    pub(crate) title: &'static str,
    /// The dtype of parameters, activations and gradients.
    pub(crate) dtype: DType,
    method: Method,
}

#[derive(Clone, Copy, Debug)]
enum Method {
    /// A rule of this crate on the parameters themselves.
    Plain,
    /// The rule on f32 masters of the parameters.
    Master,
    /// candle-nn's AdamW on the parameters themselves.
    Candle,
}

pub(crate) const VARIANTS: [Variant; 4] = [
    Variant {
        name: "f32",
        title: "f32",
        dtype: DType::F32,
        method: Method::Plain,
    },
    Variant {
        name: "bf16+master",
        title: "bf16 with f32 master",
        dtype: DType::BF16,
        method: Method::Master,
    },
    Variant {
        name: "f16+master",
        title: "f16 with f32 master",
        dtype: DType::F16,
        method: Method::Master,
    },
    Variant {
        name: "bf16",
        title: "bf16 with candle-nn's AdamW",
        dtype: DType::BF16,
        method: Method::Candle,
    },
];

impl Variant {
    /// The optimiser of this variant for a network of its dtype, on each of these ranks.
    pub(crate) fn optimiser(
        &self,
        mlp: &Mlp,
        rule: RuleName,
        eta: Option<f64>,
        world: &World,
    ) -> Result<Trainer> {
        let setup = world.setup();
        Ok(match self.method {
            Method::Plain => Trainer::new(setup.build(rule.rule(eta)?, mlp)?),
            Method::Master => {
                Trainer::new(setup.build(MixedPrecision::new(DType::F32, rule.rule(eta)?), mlp)?)
            }
            Method::Candle => {
                let mut parameters = candle_nn::ParamsAdamW {
                    weight_decay: LAMBDA,
                    ..Default::default()
                };
                if let (RuleName::Adamw, Some(eta)) = (rule, eta) {
                    parameters.lr = eta;
                }
                Trainer::Candle(candle_nn::AdamW::new(variables(mlp)?, parameters)?, world.clone())
            }
        })
    }
}

/// An optimiser of this crate, or candle-nn's.
pub(crate) enum Trainer {
    Optimisers(Box<StateTree>),
    Candle(candle_nn::AdamW, World),
}

impl Trainer {
    /// Where a parameter without a gradient is an error, and not one that is never trained.
    fn new(mut state: StateTree) -> Self {
        state.require_all();
        Trainer::Optimisers(Box::new(state))
    }

    /// Moves the network's parameters by one step along the mean gradient of all ranks' images, of which this
    /// rank has so many.
    pub(crate) fn step(&mut self, mlp: &Mlp, grads: &GradStore, images: usize) -> Result<()> {
        match self {
            Trainer::Optimisers(state) => Update::new(state)
                .weight(images as u64)
                .apply(mlp, grads)
                .map(|_outcome| ()),
            Trainer::Candle(optimiser, world) if world.size() > 1 => {
                Ok(optimiser.step(&mean_of_all(world, mlp, grads, images)?)?)
            }
            Trainer::Candle(optimiser, _) => Ok(optimiser.step(grads)?),
        }
    }

    /// The bytes of all state tensors.
    pub(crate) fn bytes(&self, mlp: &Mlp) -> Result<usize> {
        match self {
            Trainer::Optimisers(state) => Ok(state.bytes()),
            // Two moments in the dtype of the parameter.
            Trainer::Candle(..) => Ok(variables(mlp)?
                .iter()
                .map(|x| 2 * x.elem_count() * x.dtype().size_in_bytes())
                .sum()),
        }
    }
}

/// The mean of all ranks' gradients, in which each counts for so many images: what `update` does by itself.
fn mean_of_all(world: &World, mlp: &Mlp, grads: &GradStore, images: usize) -> Result<GradStore> {
    let counts = world
        .of_all(images.to_le_bytes())?
        .into_iter()
        .map(usize::from_le_bytes);
    let all = counts.sum::<usize>() as f64;
    // candle makes an empty one in no other way.
    let mut means = Tensor::zeros((), DType::F32, &Device::Cpu)?.backward()?;
    for x in variables(mlp)? {
        let Some(dx) = grads.get(&x) else { continue };
        let share = (dx.to_dtype(DType::F32)? * (images as f64 / all))?
            .flatten_all()?
            .to_vec1::<f32>()?;
        let shares = world.bytes_of_all(bytemuck::cast_slice(&share))?;
        let mut sum = vec![0f32; share.len()];
        for bytes in &shares {
            sum.iter_mut()
                .zip(bytemuck::pod_collect_to_vec::<u8, f32>(bytes))
                .for_each(|(sum, share)| *sum += share);
        }
        means.insert(
            &x,
            Tensor::from_vec(sum, x.shape(), x.device())?.to_dtype(x.dtype())?,
        );
    }
    Ok(means)
}

/// All variables, for optimisers that want a list.
pub(crate) fn variables(mlp: &Mlp) -> candle_core::Result<Vec<Var>> {
    let mut variables = Vec::new();
    mlp.visit(&mut Visitor::new(&mut |_path, tensor| {
        variables.push(Var::from_tensor(tensor))
    }));
    variables.into_iter().collect()
}
