//! A network, the state of its optimiser, and how to move them.

use std::error::Error;

use candle_core::{DType, Device, Result, Tensor};
use candle_nn::loss::cross_entropy;
use optimisers::{AdamW, ClipGlobalNorm, LossScaler, MixedPrecision, Model, OptimiserChain, Scheduler, StateTree, Visitor, setup_with};

use crate::history::History;
use crate::model::Gpt;
use crate::settings::Settings;
use crate::text::{Batch, Text};

/// The decays of AdamW's moments. The second is quicker than usual, for short runs with small batches.
const BETA: (f64, f64) = (0.9, 0.99);
/// The largest norm of all gradients together.
const OMEGA: f64 = 1.0;

/// A run between two steps. All that later steps depend on is in here, so this is what a checkpoint keeps.
pub(crate) struct Trainer {
    pub(crate) gpt: Gpt,
    pub(crate) state: StateTree,
    pub(crate) scaler: LossScaler,
    pub(crate) scheduler: Scheduler,
    pub(crate) history: History,
}

impl Trainer {
    /// A run before its first step.
    pub(crate) fn new(settings: &Settings, text: &Text, device: &Device) -> optimisers::Result<Self> {
        let gpt = Gpt::new(settings.size(text.characters()), settings.dtype(), settings.seed, device)?;
        let mut state = setup_with(&gpt, |_path, x| {
            // Weight decay is for matrices; it would pull the norms' factors to zero.
            let lambda = if x.rank() >= 2 { settings.lambda } else { 0.0 };
            let adamw = AdamW { beta: BETA, lambda, ..AdamW::new(settings.eta) };
            Some(MixedPrecision::new(DType::F32, OptimiserChain::new((ClipGlobalNorm::new(OMEGA), adamw))))
        })?;
        // A parameter without a gradient is an error, and not one that is never trained: several of candle's operations cut the graph.
        state.require_all();
        // The gradients of f16 activations vanish below 6e-8; the other dtypes need no scale.
        let scaler = if settings.dtype() == DType::F16 { LossScaler::dynamic() } else { LossScaler::fixed(1.0) };
        let scheduler = Scheduler::new(settings.schedule(), &mut state)?;
        Ok(Trainer { gpt, state, scaler, scheduler, history: History::default() })
    }

    /// Trains on one batch.
    pub(crate) fn step(&mut self, settings: &Settings, text: &Text) -> std::result::Result<(), Box<dyn Error>> {
        let step = self.history.steps();
        let batch = text.train_batch(settings.seed, step, settings.batch, settings.context)?;
        let loss = self.loss(&batch)?;
        let value = expect_finite(loss.to_scalar()?, "training", step)?;
        // Where a gradient is infinite or NaN nothing moves, and the next batch is scaled by less.
        let grads = self.scaler.scale(&loss)?.backward()?;
        let outcome = self.scaler.update(&mut self.state, &self.gpt, &grads)?;
        self.scheduler.advance(&outcome, &mut self.state)?;
        self.history.train.push(value);
        Ok(())
    }

    /// The mean loss over the validation part of the text.
    pub(crate) fn validation_loss(&self, settings: &Settings, text: &Text) -> std::result::Result<f32, Box<dyn Error>> {
        let (mut sum, mut count) = (0.0, 0);
        for batch in text.validation_batches(settings.batch, settings.context) {
            let batch = batch?;
            let characters = batch.targets.elem_count();
            sum += f64::from(self.loss(&batch)?.to_scalar::<f32>()?) * characters as f64;
            count += characters;
        }
        expect_finite((sum / count as f64) as f32, "validation", self.history.steps())
    }

    /// The mean loss per character, in F32.
    fn loss(&self, Batch { inputs, targets }: &Batch) -> Result<Tensor> {
        let device = self.gpt.device();
        cross_entropy(&self.gpt.forward(&inputs.to_device(device)?)?, &targets.flatten_all()?.to_device(device)?)
    }

    /// A checksum over the bits of all parameters.
    pub(crate) fn parameters_crc(&self) -> Result<u32> {
        let mut tensors = Vec::new();
        self.gpt.visit(&mut Visitor::new(&mut |_path, tensor| tensors.push(tensor.clone())));
        let mut hasher = crc32fast::Hasher::new();
        for tensor in tensors {
            // F32 holds the numbers of the other dtypes exactly.
            for number in tensor.flatten_all()?.to_dtype(DType::F32)?.to_vec1::<f32>()? {
                hasher.update(&number.to_le_bytes());
            }
        }
        Ok(hasher.finalize())
    }
}

fn expect_finite(loss: f32, what: &str, step: usize) -> std::result::Result<f32, Box<dyn Error>> {
    if loss.is_finite() {
        return Ok(loss);
    }
    Err(format!("the {what} loss is {loss} after {step} steps: lower --eta, and prefer --dtype bf16 to f16").into())
}
