use super::shown::errors;

errors! {
/// Why running statistics cannot be estimated. They are what they were then.
#[derive(thiserror::Error)]
#[non_exhaustive]
pub enum StatisticsError {
    /// Nothing whose statistics could be estimated.
    #[error("there is no BatchNorm layer, and no variable called `running_mean`; there are: {}", available.join(", "))]
    NoLayers {
        /// Some variables that there are.
        available: Vec<String>,
    },

    /// A mean without a variance.
    #[error("no variable {path:?} beside the mean")]
    Missing {
        /// The variance's path.
        path: String,
    },

    /// A momentum with which a training pass does not show what it has seen.
    #[error("the BatchNorm layer {layer:?} has momentum {momentum}, expected a number above 0 and at most 1; build it with another")]
    Momentum {
        /// The layer.
        layer: String,
        /// Its momentum.
        momentum: f64,
    },

    /// No batch to estimate from.
    #[error("no batches to estimate the running statistics from")]
    NoBatches,

    /// A layer that the batch did not reach in training mode.
    #[error(
        "the BatchNorm layer {layer:?} has not run in training mode in batch {batch}: the closure should run the whole model, with `forward_t(.., true)`; for a layer of another model choose the layers anew"
    )]
    NotRun {
        /// The layer.
        layer: String,
        /// Which batch, 1 for the first.
        batch: usize,
    },

    /// Statistics that are infinite or NaN.
    #[error(
        "the statistics of the BatchNorm layer {layer:?} are not finite in batch {batch}: look at its inputs; each feature needs two numbers at least"
    )]
    NonFinite {
        /// The layer.
        layer: String,
        /// Which batch, 1 for the first.
        batch: usize,
    },
}
}
