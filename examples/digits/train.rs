//! The training loop.

use std::error::Error;
use std::time::Instant;

use candle_core::DType;
use candle_nn::{Module, loss::cross_entropy};
use indicatif::{ProgressBar, ProgressStyle};

use crate::Args;
use crate::data::Digits;
use crate::digits::shuffle;
use crate::model::Mlp;
use crate::random::Random;
use crate::ranks::World;
use crate::variant::{Variant, variables};

/// Images per step, on all ranks together.
const BATCH: usize = 32;

/// The part of the test images that a good network tells right.
pub(crate) const GOAL: f32 = 0.97;

/// What came of a variant.
pub(crate) struct Run {
    pub(crate) variant: &'static Variant,
    /// The mean loss of each epoch.
    pub(crate) losses: Vec<f32>,
    /// The part of the test images that is told right.
    pub(crate) accuracy: f32,
    /// The first epoch after which it was [`GOAL`].
    pub(crate) epochs_to_goal: Option<usize>,
    /// On all ranks together.
    pub(crate) state_bytes_per_parameter: f64,
    pub(crate) seconds: f64,
}

impl Run {
    /// The mean loss of the last epoch.
    pub(crate) fn loss(&self) -> f32 {
        self.losses.last().copied().unwrap_or(f32::NAN)
    }
}

/// Fails where some ranks would have no image of the last batch of an epoch.
pub(crate) fn check_ranks(digits: &Digits, ranks: usize) -> Result<(), String> {
    let smallest = (digits.train.len() - 1) % BATCH + 1;
    if ranks <= smallest {
        Ok(())
    } else {
        Err(format!(
            "{ranks} ranks cannot share the smallest batch: start at most {smallest}"
        ))
    }
}

/// Trains one variant from the start.
pub(crate) fn train(
    variant: &'static Variant,
    digits: &Digits,
    args: &Args,
    world: &World,
) -> Result<Run, Box<dyn Error>> {
    let digits = digits.to_dtype(variant.dtype)?;
    let mlp = Mlp::new(args.seed, variant.dtype, digits.device())?;
    let mut optimiser = variant.optimiser(&mlp, args.rule, args.eta, world)?;

    // Seeded anew for each variant, so all see the same batches in the same order.
    let mut random = Random::new(!args.seed);
    let mut order: Vec<u32> = (0..digits.train.len() as u32).collect();
    let (mut losses, mut epochs_to_goal) = (Vec::new(), None);
    let bar = if world.is_first() {
        progress_bar(variant.name, args.epochs)
    } else {
        ProgressBar::hidden()
    };
    let start = Instant::now();
    for _ in 0..args.epochs {
        shuffle(&mut order, &mut random);
        let mut sum = 0.0;
        for numbers in order.chunks(BATCH) {
            // Each rank has its part of the batch.
            let own: Vec<u32> = numbers
                .iter()
                .skip(world.rank())
                .step_by(world.size())
                .copied()
                .collect();
            let batch = digits.train.batch(&own)?;
            // The loss is computed in f32: a mean of exponentials is no place for 8 bits of precision.
            let logits = mlp.forward(&batch.pixels)?.to_dtype(DType::F32)?;
            let loss = cross_entropy(&logits, &batch.labels)?;
            let grads = loss.backward()?;
            optimiser.step(&mlp, &grads, batch.len())?;
            sum += loss.to_scalar::<f32>()? * batch.len() as f32;
        }
        let sums = world
            .of_all(sum.to_le_bytes())?
            .into_iter()
            .map(f32::from_le_bytes);
        let loss = sums.sum::<f32>() / digits.train.len() as f32;
        losses.push(loss);
        if epochs_to_goal.is_none() && mlp.accuracy(&digits.test)? >= GOAL {
            epochs_to_goal = Some(losses.len());
        }
        bar.set_message(format!("loss {loss:.5}"));
        bar.inc(1);
    }
    let seconds = start.elapsed().as_secs_f64();
    bar.finish();

    let bytes = world
        .of_all(optimiser.bytes(&mlp)?.to_le_bytes())?
        .into_iter()
        .map(usize::from_le_bytes);
    let parameters: usize = variables(&mlp)?.iter().map(|x| x.elem_count()).sum();
    Ok(Run {
        variant,
        losses,
        accuracy: mlp.accuracy(&digits.test)?,
        epochs_to_goal,
        state_bytes_per_parameter: bytes.sum::<usize>() as f64 / parameters as f64,
        seconds,
    })
}

/// A bar on stderr; it stays hidden where stderr is not a terminal.
fn progress_bar(name: &'static str, epochs: u32) -> ProgressBar {
    let bar = ProgressBar::new(epochs.into());
    if let Ok(style) =
        ProgressStyle::with_template("{prefix:>11} {bar:40.cyan/blue} epoch {pos}/{len}  {msg}")
    {
        bar.set_style(style);
    }
    bar.set_prefix(name);
    bar
}
