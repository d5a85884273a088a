//! The network: 64 pixels, one hidden layer, 10 digits.

use candle_core::{D, DType, Device, Result, Tensor};
use candle_nn::{Linear, Module};
use optimisers::model;

use crate::data::{CLASSES, Images, PIXELS};
use crate::random::Random;

/// The width of the hidden layer.
const HIDDEN: usize = 64;

/// A multi-layer perceptron.
pub(crate) struct Mlp {
    hidden: Linear,
    output: Linear,
}

// All that the optimiser needs to know: which fields have parameters. Their paths are `hidden.weight`,
// `hidden.bias` and so on.
model!(Mlp { hidden, output });

impl Mlp {
    /// A network with random weights, the same in every dtype but for rounding.
    pub(crate) fn new(seed: u64, dtype: DType, device: &Device) -> Result<Self> {
        let mut random = Random::new(seed);
        let mut linear = |inputs, outputs| linear(inputs, outputs, dtype, device, &mut random);
        Ok(Mlp {
            hidden: linear(PIXELS, HIDDEN)?,
            output: linear(HIDDEN, CLASSES)?,
        })
    }

    /// The part of the images for which the digit's logit is the largest.
    pub(crate) fn accuracy(&self, images: &Images) -> Result<f32> {
        let told = self.forward(&images.pixels)?.argmax(D::Minus1)?;
        told.eq(&images.labels)?
            .to_dtype(DType::F32)?
            .mean_all()?
            .to_scalar()
    }
}

impl Module for Mlp {
    fn forward(&self, pixels: &Tensor) -> Result<Tensor> {
        self.output.forward(&self.hidden.forward(pixels)?.relu()?)
    }
}

/// A layer with weights and biases in ±1/√inputs.
fn linear(
    inputs: usize,
    outputs: usize,
    dtype: DType,
    device: &Device,
    random: &mut Random,
) -> Result<Linear> {
    let bound = 1.0 / (inputs as f32).sqrt();
    Ok(Linear::new(
        random.variable((outputs, inputs), bound, dtype, device)?,
        Some(random.variable(outputs, bound, dtype, device)?),
    ))
}
