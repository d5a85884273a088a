//! A scaled loss and its gradients, which carry their scale: an update without the scaler refuses such
//! gradients.

use std::ops::Deref;

use candle_core::backprop::GradStore;
use candle_core::{DType, Tensor};

use super::LossScaler;
use crate::error::Result;
use crate::model::gradients::Gradients;
use crate::model::lent::Lend;

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
/// A scaled loss derefs to a tensor. Its own [`backward`](ScaledLoss::backward) returns gradients that carry
/// the scale. Losses computed from scaled losses, such as a sum of two, are plain tensors, and their
/// gradients carry no scale.
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
    pub fn backward(&self) -> candle_core::Result<ScaledGradients> {
        Ok(ScaledGradients {
            store: self.loss.backward()?,
            scale: self.scale,
        })
    }
}

impl Deref for ScaledLoss {
    type Target = Tensor;

    fn deref(&self) -> &Tensor {
        &self.loss
    }
}

/// The gradients of a [`ScaledLoss`], which an update accepts only with the scaler.
///
/// [`update`](crate::update) refuses these gradients, because without the scaler it would not divide them by
/// the scale.
///
/// ```
/// use candle_core::{Device, Var};
/// use optimisers::{ErrorKind, Descent, LossScaler, Update, setup, update};
///
/// let x = Var::new(1f32, &Device::Cpu)?;
/// let mut state = setup(Descent::new(0.5), &x)?;
/// let mut scaler = LossScaler::fixed(1024.0);
/// let grads = scaler.scale(&x.sqr()?)?.backward()?;
/// let refused = update(&mut state, &x, &grads).unwrap_err();
/// assert_eq!((refused.kind(), refused.got()), (ErrorKind::LossScale, Some("1024")));
///
/// Update::new(&mut state).scaler(&mut scaler).apply(&x, &grads)?;
/// assert_eq!(x.to_vec0::<f32>()?, 0.0);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct ScaledGradients {
    store: GradStore,
    scale: Option<f64>,
}

impl ScaledGradients {
    /// The gradient of the scaled loss with respect to a variable.
    pub fn get(&self, x: &Tensor) -> Option<&Tensor> {
        self.store.get(x)
    }

    /// The store of candle, which carries no scale.
    pub fn into_store(self) -> GradStore {
        self.store
    }
}

impl Gradients for ScaledGradients {
    fn gradient(&self, path: &str, x: &dyn Lend) -> Option<&dyn Lend> {
        self.store.gradient(path, x)
    }

    fn paths(&self) -> impl Iterator<Item = &str> {
        self.store.paths()
    }

    fn by_path(&self) -> bool {
        self.store.by_path()
    }

    fn loss_scale(&self) -> Option<f64> {
        self.scale
    }
}
