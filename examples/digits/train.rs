//! The training loop.

use std::time::Instant;

use candle_core::DType;
use candle_nn::{Module, loss::cross_entropy};
use indicatif::{ProgressBar, ProgressStyle};

use crate::Args;
use crate::data::{Digits, shuffle};
use crate::model::Mlp;
use crate::random::Random;
use crate::variant::{Variant, variables};

/// Images per step.
const BATCH: usize = 32;

/// What came of a variant.
pub(crate) struct Run {
    pub(crate) variant: &'static Variant,
    /// The mean loss of each epoch.
    pub(crate) losses: Vec<f32>,
    /// The part of the test images that is told right.
    pub(crate) accuracy: f32,
    pub(crate) state_bytes_per_parameter: f64,
    pub(crate) seconds: f64,
}

impl Run {
    /// The mean loss of the last epoch.
    pub(crate) fn loss(&self) -> f32 {
        self.losses.last().copied().unwrap_or(f32::NAN)
    }
}

/// Trains one variant from the start.
pub(crate) fn train(variant: &'static Variant, digits: &Digits, args: &Args) -> std::result::Result<Run, Box<dyn std::error::Error>> {
    let digits = digits.to_dtype(variant.dtype)?;
    let mlp = Mlp::new(args.seed, variant.dtype, digits.device())?;
    let mut optimiser = variant.optimiser(&mlp, args.rule, args.eta)?;

    // Seeded anew for each variant, so all see the same batches in the same order.
    let mut random = Random::new(!args.seed);
    let mut order: Vec<u32> = (0..digits.train.len() as u32).collect();
    let mut losses = Vec::new();
    let bar = progress_bar(variant.name, args.epochs);
    let start = Instant::now();
    for _ in 0..args.epochs {
        shuffle(&mut order, &mut random);
        let mut sum = 0.0;
        for numbers in order.chunks(BATCH) {
            let batch = digits.train.batch(numbers)?;
            // The loss is computed in f32: a mean of exponentials is no place for 8 bits of precision.
            let logits = mlp.forward(&batch.pixels)?.to_dtype(DType::F32)?;
            let loss = cross_entropy(&logits, &batch.labels)?;
            let grads = loss.backward()?;
            optimiser.step(&mlp, &grads)?;
            sum += loss.to_scalar::<f32>()? * batch.len() as f32;
        }
        let loss = sum / digits.train.len() as f32;
        losses.push(loss);
        bar.set_message(format!("loss {loss:.5}"));
        bar.inc(1);
    }
    let seconds = start.elapsed().as_secs_f64();
    bar.finish();

    let parameters: usize = variables(&mlp)?.iter().map(|x| x.elem_count()).sum();
    Ok(Run {
        variant,
        losses,
        accuracy: mlp.accuracy(&digits.test)?,
        state_bytes_per_parameter: optimiser.bytes(&mlp)? as f64 / parameters as f64,
        seconds,
    })
}

/// A bar on stderr; it stays hidden where stderr is not a terminal.
fn progress_bar(name: &'static str, epochs: u32) -> ProgressBar {
    let bar = ProgressBar::new(epochs.into());
    if let Ok(style) = ProgressStyle::with_template("{prefix:>11} {bar:40.cyan/blue} epoch {pos}/{len}  {msg}") {
        bar.set_style(style);
    }
    bar.set_prefix(name);
    bar
}
