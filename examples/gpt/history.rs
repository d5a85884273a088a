//! The losses of a run so far.

use serde::{Deserialize, Serialize};

/// Steps that the smoothed training loss runs over.
pub(crate) const WINDOW: usize = 50;

/// The losses from the first step on, also those before an interruption.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(crate) struct History {
    /// The loss of each step.
    pub(crate) train: Vec<f32>,
    /// Some steps, and the validation loss after each.
    pub(crate) validation: Vec<(usize, f32)>,
}

impl History {
    /// The steps that are done.
    pub(crate) fn steps(&self) -> usize {
        self.train.len()
    }

    /// The mean training loss of the last steps; NaN before the first.
    pub(crate) fn train_loss(&self) -> f32 {
        self.train_loss_after(self.steps())
    }

    /// The mean training loss of the last of so many steps.
    pub(crate) fn train_loss_after(&self, steps: usize) -> f32 {
        mean(&self.train[steps.saturating_sub(WINDOW)..steps])
    }
}

/// The mean of losses; NaN of none.
pub(crate) fn mean(losses: &[f32]) -> f32 {
    let sum: f64 = losses.iter().copied().map(f64::from).sum();
    (sum / losses.len() as f64) as f32
}
