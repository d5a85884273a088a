//! A linear regression that takes thousands of small steps.
//!
//! The weights to find are up to 1 large and AdamW moves a weight by the learning rate at most. Above 0.25
//! neighbouring bf16 numbers are at least 0.002 apart, so each such step alone is rounded away.

use candle_core::{DType, Device, Result, Tensor};
use candle_nn::{Linear, Module, loss::mse};

use crate::problem::Problem;
use crate::random::Random;

const SAMPLES: usize = 2048;
const FEATURES: usize = 256;
/// Each with weights of its own; together enough that state in 8 bits is worth it.
const TARGETS: usize = 16;
/// The targets are off by up to this, so no weights have a mean loss much below its square / 3, 0.0083.
const NOISE: f32 = 0.158;
/// The samples must not be drawn from the numbers that the initial weights are drawn from.
const SAMPLE_STREAM: u64 = 0x5eed;

/// Samples of a noisy linear function.
pub(crate) struct Regression {
    /// `(n, 256)`, each in -1..1.
    inputs: Tensor,
    /// `(n, 16)`, in F32 always.
    targets: Tensor,
}

impl Regression {
    /// Draws the weights to find, and samples. They are computed on the CPU, so that they are the same on
    /// every device.
    pub(crate) fn new(seed: u64, device: &Device) -> Result<Self> {
        let mut random = Random::new(seed ^ SAMPLE_STREAM);
        let weights = random
            .variable((FEATURES, TARGETS), 1.0, DType::F32, &Device::Cpu)?
            .detach();
        let inputs = random
            .variable((SAMPLES, FEATURES), 1.0, DType::F32, &Device::Cpu)?
            .detach();
        let noise: Vec<f32> = (0..SAMPLES * TARGETS).map(|_| NOISE * random.uniform()).collect();
        let targets =
            (inputs.matmul(&weights)? + Tensor::from_vec(noise, (SAMPLES, TARGETS), &Device::Cpu)?)?;
        Ok(Regression {
            inputs: inputs.to_device(device)?,
            targets: targets.to_device(device)?,
        })
    }
}

impl Problem for Regression {
    type Network = Linear;

    const NAME: &'static str = "regression";
    const TITLE: &'static str = "linear regression";
    const ETA: f64 = 5e-4;

    fn network(&self, seed: u64, dtype: DType) -> Result<Linear> {
        let bound = 1.0 / (FEATURES as f32).sqrt();
        Ok(Linear::new(
            Random::new(seed).variable((TARGETS, FEATURES), bound, dtype, self.inputs.device())?,
            None,
        ))
    }

    fn to_dtype(&self, dtype: DType) -> Result<Self> {
        Ok(Regression {
            inputs: self.inputs.to_dtype(dtype)?,
            targets: self.targets.clone(),
        })
    }

    fn samples(&self) -> usize {
        SAMPLES
    }

    fn loss(&self, linear: &Linear, numbers: &[u32]) -> Result<Tensor> {
        let numbers = Tensor::new(numbers, self.inputs.device())?;
        let outputs = linear
            .forward(&self.inputs.index_select(&numbers, 0)?)?
            .to_dtype(DType::F32)?;
        mse(&outputs, &self.targets.index_select(&numbers, 0)?)
    }

    fn accuracy(&self, _: &Linear) -> Result<Option<f32>> {
        Ok(None)
    }
}
