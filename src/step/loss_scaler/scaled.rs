//! A loss that is multiplied by the scale, and whose gradients carry the scale.

use candle_core::backprop::GradStore;
use candle_core::{DType, Tensor};

use super::LossScaler;
use crate::error::Result;
use crate::model::gradients::ScaledGradients;

impl LossScaler {
    /// Multiplies a loss by the scale, in F32 at least, because 65536 itself is no f16 number.
    ///
    /// If a network ends in f16, convert its output to F32 before the loss is computed. Otherwise the
    /// backward pass converts the scale itself to f16, instead of the scale times the (smaller) gradient of
    /// the loss.
    ///
    /// # Errors
    /// If the scale or a number of its [`DynamicScale`](crate::DynamicScale) is out of range.
    pub fn scale(&mut self, loss: &Tensor) -> Result<ScaledLoss> {
        self.check()?;
        if !self.enabled {
            return Ok(ScaledLoss {
                loss: loss.clone(),
                scale: None,
            });
        }
        let scaled_loss = scale_loss(loss, self.scale)?;
        self.pending = Some(self.scale);
        Ok(ScaledLoss {
            loss: scaled_loss,
            scale: self.pending,
        })
    }

    /// Whether the scale falls if a gradient is not finite.
    pub(crate) fn is_dynamic(&self) -> bool {
        self.enabled && self.dynamic.is_some()
    }
}

/// The loss times the scale, in F32 at least.
pub(crate) fn scale_loss(loss: &Tensor, scale: f64) -> candle_core::Result<Tensor> {
    if matches!(loss.dtype(), DType::F16 | DType::BF16) {
        loss.to_dtype(DType::F32)? * scale
    } else {
        loss * scale
    }
}

/// A loss that [`LossScaler::scale`](crate::LossScaler::scale) has multiplied by the scale.
///
/// [`backward`](ScaledLoss::backward) returns gradients that carry the scale. Losses computed from scaled
/// losses, such as a sum of two, are plain [tensors](ScaledLoss::tensor), and their gradients carry no scale.
#[must_use = "`backward` is to be called on this loss, not on the loss that was passed to `scale`"]
#[derive(Clone, Debug)]
pub struct ScaledLoss {
    loss: Tensor,
    /// `None` if the scaler is off.
    scale: Option<f64>,
}

impl ScaledLoss {
    /// The gradients of this loss, for [`Update::scaler`](crate::Update::scaler).
    ///
    /// # Errors
    /// As candle's `Tensor::backward`.
    pub fn backward(&self) -> candle_core::Result<ScaledGradients<GradStore>> {
        Ok(ScaledGradients::new(self.loss.backward()?, self.scale))
    }

    /// The scaled loss as a tensor, whose own `backward` returns gradients that carry no scale.
    pub fn tensor(&self) -> &Tensor {
        &self.loss
    }
}
