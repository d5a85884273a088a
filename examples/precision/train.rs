//! The training loop.

use std::error::Error;
use std::time::Duration;

use candle_core::{Result, Tensor};

use crate::digits::shuffle;
use crate::problem::Problem;
use crate::random::Random;
use crate::variant::Variant;

/// Samples per step.
const BATCH: usize = 32;

/// What came of a problem.
pub(crate) struct Study {
    pub(crate) name: &'static str,
    pub(crate) title: &'static str,
    pub(crate) eta: f64,
    pub(crate) runs: Vec<Run>,
}

/// What came of a variant.
pub(crate) struct Run {
    pub(crate) variant: &'static Variant,
    /// The mean loss of each epoch.
    pub(crate) losses: Vec<f32>,
    /// The weights before the first epoch, and after each.
    pub(crate) weights: Vec<Tensor>,
    pub(crate) accuracy: Option<f32>,
    /// Parameter and state.
    pub(crate) bytes_per_parameter: f64,
    /// The median of all steps; the optimiser alone.
    pub(crate) nanoseconds_per_parameter: f64,
}

impl Run {
    /// The mean loss of the last epoch.
    pub(crate) fn loss(&self) -> f32 {
        self.losses.last().copied().unwrap_or(f32::NAN)
    }

    /// How far the weights are from those of another run after each epoch, as a part of the way that the
    /// other has gone.
    pub(crate) fn distances(&self, other: &Run) -> Result<Vec<f32>> {
        let size = |a: &Tensor, b: &Tensor| (a - b)?.sqr()?.sum_all()?.sqrt()?.to_scalar::<f32>();
        let Some(start) = other.weights.first() else {
            return Ok(Vec::new());
        };
        let pairs = self.weights.iter().zip(&other.weights).skip(1);
        pairs
            .map(|(own, other)| Ok(size(own, other)? / size(other, start)?))
            .collect()
    }

    /// How far another run's weights are from these in the end.
    pub(crate) fn distance_to(&self, other: &Run) -> Result<f32> {
        Ok(other.distances(self)?.last().copied().unwrap_or(f32::NAN))
    }

    /// The accuracy, or a dash where there is none.
    pub(crate) fn told(&self) -> String {
        self.accuracy
            .map_or("-".to_string(), |accuracy| format!("{accuracy:.4}"))
    }
}

/// Trains one variant from the start.
pub(crate) fn train<P: Problem>(
    variant: &'static Variant,
    problem: &P,
    epochs: u32,
    seed: u64,
) -> std::result::Result<Run, Box<dyn Error>> {
    let problem = problem.to_dtype(variant.dtype())?;
    let mut trainer = variant.trainer(&problem, seed)?;

    // Seeded anew for each variant, so all see the same batches in the same order.
    let mut random = Random::new(!seed);
    let mut order: Vec<u32> = (0..problem.samples() as u32).collect();
    let (mut losses, mut times, mut weights) = (Vec::new(), Vec::new(), vec![trainer.weights()?]);
    for _ in 0..epochs {
        shuffle(&mut order, &mut random);
        let mut sum = 0.0;
        for numbers in order.chunks(BATCH) {
            let loss = problem.loss(&trainer.network, numbers)?;
            times.push(trainer.step(&loss)?);
            sum += loss.to_scalar::<f32>()? * numbers.len() as f32;
        }
        losses.push(sum / problem.samples() as f32);
        weights.push(trainer.weights()?);
    }
    let parameters = trainer.parameters() as f64;
    Ok(Run {
        variant,
        losses,
        weights,
        accuracy: problem.accuracy(&trainer.network)?,
        bytes_per_parameter: trainer.bytes() as f64 / parameters,
        nanoseconds_per_parameter: median(times).as_secs_f64() * 1e9 / parameters,
    })
}

fn median(mut times: Vec<Duration>) -> Duration {
    times.sort_unstable();
    times.get(times.len() / 2).copied().unwrap_or_default()
}
