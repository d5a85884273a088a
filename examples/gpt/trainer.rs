//! A network, the state of its optimiser, and how to move them.

use std::error::Error;
use std::time::{Duration, Instant};

use candle_core::backprop::GradStore;
use candle_core::{DType, Device, Result, Tensor};
use candle_nn::loss::cross_entropy;
use optimisers::{
    AccumGrad, ClipGlobalNorm, LeafFigures, LossScaler, MixedPrecision, Model, OnOverflow, Optimiser,
    OptimiserChain, Parameter, Q8, Rule, SplitMaster, StateTree, StoreAs, Update, Visitor, trainables,
};

use crate::history::{History, mean};
use crate::model::Gpt;
use crate::ranks::World;
use crate::settings::{Keep, Settings};
use crate::text::{Batch, Text};

/// The largest norm of all gradients together.
const OMEGA: f64 = 1.0;

/// A rank's run between two steps. All that later steps depend on is in here, so this is what a checkpoint
/// keeps.
pub(crate) struct Trainer {
    pub(crate) world: World,
    pub(crate) gpt: Gpt,
    pub(crate) state: StateTree,
    pub(crate) scaler: LossScaler,
    pub(crate) history: History,
    /// The time that updates took.
    pub(crate) updating: Duration,
}

/// What trains a parameter, with so many micro-batches per step on each rank.
fn optimiser(settings: &Settings, micro_batches: usize, x: Parameter<'_>) -> Optimiser {
    let collect = (micro_batches > 1).then(|| AccumGrad::new(micro_batches as u64));
    // Weight decay is for matrices; it would pull the norms' factors to zero.
    let lambda = if x.rank() >= 2 { settings.lambda } else { 0.0 };
    let rule: Box<dyn Rule> = match settings.keep {
        Keep::F32 => settings.rule(lambda),
        Keep::Q8 | Keep::Split24Q8 => Box::new(StoreAs::all(Q8, settings.rule(lambda))),
    };
    let chain = OptimiserChain::new((collect, ClipGlobalNorm::new(OMEGA), rule));
    match settings.keep {
        Keep::F32 | Keep::Q8 => Optimiser::new(MixedPrecision::new(DType::F32, chain)),
        Keep::Split24Q8 => Optimiser::new(SplitMaster::of_24_bits(chain)),
    }
}

impl Trainer {
    /// A run before its first step.
    pub(crate) fn new(
        settings: &Settings,
        text: &Text,
        device: &Device,
        world: World,
    ) -> optimisers::Result<Self> {
        let gpt = Gpt::new(
            settings.size(text.characters()),
            settings.dtype(),
            settings.seed,
            device,
        )?;
        let micro_batches = settings.micro_batches / world.size();
        let mut state = world
            .setup()
            .build_with(&gpt, |_path, x| Some(optimiser(settings, micro_batches, x)))?;
        // A parameter without a gradient is an error, and not one that is never trained: several of candle's
        // operations cut the graph.
        state.require_all();
        // The gradients of f16 activations vanish below 6e-8; the other dtypes need no scale.
        let scaler = if settings.dtype() == DType::F16 {
            LossScaler::dynamic()
        } else {
            LossScaler::fixed(1.0)
        };
        let scaler = scaler.on_overflow(OnOverflow::EndWindow);
        state.schedule(settings.schedule())?;
        Ok(Trainer {
            world,
            gpt,
            state,
            scaler,
            history: History::default(),
            updating: Duration::ZERO,
        })
    }

    /// Goes on with as many micro-batches per step on each rank as so many ranks have, between two steps.
    pub(crate) fn share_micro_batches(
        &mut self,
        settings: &Settings,
        ranks: usize,
    ) -> optimisers::Result<()> {
        for (path, x) in trainables(&self.gpt)? {
            self.state.at(&path)?.replace(
                optimiser(settings, settings.micro_batches / ranks, Parameter::from(&x)),
                &self.gpt,
            )?;
        }
        Ok(())
    }

    /// Whether this holds on any rank.
    pub(crate) fn is_any(&self, own: bool) -> std::result::Result<bool, Box<dyn Error>> {
        Ok(self
            .world
            .of_all([u8::from(own)])?
            .into_iter()
            .any(|[own]| own != 0))
    }

    /// Trains on one batch. Rank r of N has the micro-batches r, N + r, 2 N + r, ... The figures are of all
    /// ranks together, where they are wanted.
    pub(crate) fn step(
        &mut self,
        settings: &Settings,
        text: &Text,
        wants_figures: bool,
    ) -> std::result::Result<Vec<LeafFigures>, Box<dyn Error>> {
        let step = self.history.steps();
        let mut losses = Vec::with_capacity(settings.micro_batches);
        let (mut is_given_up, mut figures) = (false, Vec::new());
        for batch in text
            .train_batches(settings, step)
            .skip(self.world.rank())
            .step_by(self.world.size())
        {
            let batch = batch?;
            let (loss, grads) = match is_given_up {
                true => (self.loss(&batch)?, None),
                false => self
                    .gradients(settings, &batch)
                    .map(|(loss, grads)| (loss, Some(grads)))?,
            };
            losses.extend(
                self.world
                    .of_all(loss.to_scalar::<f32>()?.to_le_bytes())?
                    .into_iter()
                    .map(f32::from_le_bytes),
            );
            check_finite(mean(&losses), "training", step)?;
            let Some(grads) = grads else { continue };
            // Where a gradient is infinite or NaN nothing moves, and the next batch is scaled by less.
            let update = Update::new(&mut self.state);
            let update = if wants_figures {
                update.with_figures()
            } else {
                update
            };
            let start = Instant::now();
            let update = update.scaler(&mut self.scaler);
            let outcome = if settings.stream {
                update.apply_owned(&self.gpt, grads)?
            } else {
                update.apply(&self.gpt, &grads)?
            };
            self.updating += start.elapsed();
            is_given_up = outcome.skipped().is_some();
            figures = outcome.figures;
        }
        self.history.train.push(mean(&losses));
        Ok(figures)
    }

    /// The loss of a batch, and the gradients of the scaled loss.
    fn gradients(&mut self, settings: &Settings, batch: &Batch) -> optimisers::Result<(Tensor, GradStore)> {
        let scale = self.scaler.factor()?;
        if !settings.segments {
            let loss = self.loss(batch)?;
            let grads = (&loss * scale)?.backward()?;
            return Ok((loss, grads));
        }
        let segments = self.gpt.segments(&batch.inputs.to_device(self.gpt.device())?)?;
        let (loss, grads) = segments.gradients(|logits| self.loss_of(logits, batch)? * scale)?;
        Ok(((loss / scale)?, grads))
    }

    /// The mean loss over the validation part of the text, of which each rank has a share.
    pub(crate) fn validation_loss(
        &self,
        settings: &Settings,
        text: &Text,
    ) -> std::result::Result<f32, Box<dyn Error>> {
        let (mut sum, mut count) = (0.0, 0);
        let mut batches = text.validation_batches(settings.batch, settings.context);
        loop {
            let batches: Vec<Batch> = batches.by_ref().take(self.world.size()).collect::<Result<_>>()?;
            if batches.is_empty() {
                return check_finite((sum / count as f64) as f32, "validation", self.history.steps());
            }
            let own = batches
                .get(self.world.rank())
                .map_or(Ok(0.0), |own| self.loss(own)?.to_scalar::<f32>())?;
            for (batch, loss) in batches.iter().zip(self.world.of_all(own.to_le_bytes())?) {
                let characters = batch.targets.elem_count();
                sum += f64::from(f32::from_le_bytes(loss)) * characters as f64;
                count += characters;
            }
        }
    }

    /// The mean loss per character, in F32.
    fn loss(&self, batch: &Batch) -> Result<Tensor> {
        self.loss_of(
            &self.gpt.forward(&batch.inputs.to_device(self.gpt.device())?)?,
            batch,
        )
    }

    fn loss_of(&self, logits: &Tensor, batch: &Batch) -> Result<Tensor> {
        cross_entropy(
            logits,
            &batch.targets.flatten_all()?.to_device(self.gpt.device())?,
        )
    }

    /// The bytes of all parameters.
    pub(crate) fn parameter_bytes(&self) -> usize {
        let mut bytes = 0;
        self.gpt.visit(&mut Visitor::new(&mut |_path, tensor| {
            bytes += tensor.elem_count() * tensor.dtype().size_in_bytes()
        }));
        bytes
    }

    /// A checksum over the bits of all parameters.
    pub(crate) fn parameters_crc(&self) -> Result<u32> {
        let mut tensors = Vec::new();
        self.gpt.visit(&mut Visitor::new(&mut |_path, tensor| {
            tensors.push(tensor.clone())
        }));
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

fn check_finite(loss: f32, what: &str, step: usize) -> std::result::Result<f32, Box<dyn Error>> {
    if loss.is_finite() {
        return Ok(loss);
    }
    Err(
        format!("the {what} loss is {loss} after {step} steps: lower --eta, and prefer --dtype bf16 to f16")
            .into(),
    )
}
