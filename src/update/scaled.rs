//! An update with a loss scaler in short.

use super::Update;
use crate::error::Result;
use crate::gradients::Gradients;
use crate::loss_scaler::LossScaler;
use crate::model::Model;
use crate::outcome::Outcome;
use crate::tree::StateTree;

impl LossScaler {
    /// [`update`](crate::update) with the gradients of a loss that this scaler has scaled.
    ///
    /// One call finds out whether all gradients are finite, divides them, and applies the step. If one is not finite nothing moves, and the
    /// outcome is skipped and names the parameter.
    ///
    /// With more to say about how it is done there is [`Update::scaler`], which the functional form has too:
    ///
    /// ```
    /// use candle_core::{Device, Var};
    /// use optimisers::{Descent, LossScaler, Update, setup, trainables};
    ///
    /// let model = vec![Var::new(&[1f32, 2.0], &Device::Cpu)?];
    /// let mut scaler = LossScaler::dynamic();
    /// let (mut state, parameters) = (setup(Descent::new(0.25), &model)?, trainables(&model)?);
    /// let grads = scaler.scale(&parameters["0"].sqr()?.sum_all()?)?.backward()?;
    /// let (_, next, _) = Update::functional(&state).scaler(&mut scaler).apply(&parameters, &grads)?;
    /// assert_eq!(next["0"].to_vec1::<f32>()?, [0.5, 1.0]);
    ///
    /// let grads = scaler.scale(&model[0].sqr()?.sum_all()?)?.backward()?;
    /// Update::new(&mut state).scaler(&mut scaler).with_figures().apply(&model, &grads)?;
    /// assert_eq!(model[0].to_vec1::<f32>()?, [0.5, 1.0]);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// As [`update`](crate::update); also if no loss was scaled since the last update, or the scale would fall below its floor.
    pub fn update<M, G>(&mut self, state: &mut StateTree, model: &M, grads: &G) -> Result<Outcome>
    where
        M: Model + ?Sized,
        G: Gradients + ?Sized,
    {
        Update::new(state).scaler(self).apply(model, grads)
    }
}
