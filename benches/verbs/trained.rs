//! A model of many small parameters, and its state after a step.

use std::collections::BTreeMap;

use candle_core::{DType, Device, Result, Tensor, Var};
use optimisers::{AdamW, Checkpoint, MixedPrecision, Optimiser, OptimiserChain, Rule, Schedule};
use optimisers::{StateTree, UniformAverage, setup, setup_with, update};

/// Numbers of a parameter, in rows of 4.
const ROWS: usize = 2;

/// How a state begins.
#[derive(Clone, Copy, PartialEq)]
pub enum Start {
    /// Nothing: the verb makes all that it needs.
    Nothing,
    /// All leaves share one rule.
    OneRule,
    /// The same, with f32 masters of bf16.
    Masters,
    /// The same, with averages.
    Averages,
    /// Each leaf has a rate of its own, and all follow one relative schedule.
    OwnRates,
}

/// A model and its state.
pub struct Trained {
    pub model: BTreeMap<String, Var>,
    pub gradients: Vec<(String, Tensor)>,
    pub state: StateTree,
    /// The names of the model in order.
    pub names: Vec<String>,
    /// A checkpoint with the model, where a verb needs one.
    pub file: Vec<u8>,
}

pub fn variable(dtype: DType) -> Result<Var> {
    Var::ones((ROWS, 4), dtype, &Device::Cpu)
}

/// The rate of a leaf that has its own.
fn own_rate(path: &str) -> f64 {
    path.bytes()
        .fold(1e-3, |rate, byte| rate * (1.0 + f64::from(byte) / 4096.0))
}

impl Trained {
    pub fn new(start: Start, n: usize) -> std::result::Result<Self, Box<dyn std::error::Error>> {
        let dtype = if start == Start::Masters {
            DType::BF16
        } else {
            DType::F32
        };
        let names: Vec<String> = (0..n).map(|i| format!("layers.{i}.weight")).collect();
        let named = |name: &String| Ok((name.clone(), variable(dtype)?));
        let model: BTreeMap<String, Var> = names.iter().map(named).collect::<Result<_>>()?;
        let gradients = names
            .iter()
            .map(|name| Ok((name.clone(), Tensor::ones((ROWS, 4), dtype, &Device::Cpu)?)));
        let gradients: Vec<_> = gradients.collect::<Result<_>>()?;
        let adam = AdamW::new(1e-3);
        let mut state = match start {
            Start::Nothing => setup(adam, &BTreeMap::from([("only", variable(dtype)?)]))?,
            Start::OneRule => setup(adam, &model)?,
            Start::Masters => setup(MixedPrecision::new(DType::F32, adam), &model)?,
            Start::Averages => setup(OptimiserChain::new((adam, UniformAverage::default())), &model)?,
            Start::OwnRates => {
                let mut state = setup_with(&model, |path, _| Some(AdamW::new(own_rate(path))))?;
                state.schedule(Schedule::linear(1.0, 0.5, 1_000_000).relative())?;
                state
            }
        };
        if start != Start::Nothing {
            update(&mut state, &model, &gradients)?;
        }
        let file = Checkpoint::new(&state).model(&model);
        let file = if start == Start::Nothing {
            Vec::new()
        } else {
            file.to_bytes()?.0
        };
        Ok(Trained {
            model,
            gradients,
            state,
            names,
            file,
        })
    }
}

/// A chain of `n` members, each with a rate of its own.
pub fn chain(n: usize) -> Optimiser {
    let member = |_| Box::new(optimisers::WeightDecay::new(1e-3)) as Box<dyn Rule>;
    Optimiser::new(OptimiserChain::new((0..n).map(member).collect::<Vec<_>>()))
}
