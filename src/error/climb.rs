use super::shown::errors;

errors! {
/// Why [`Sam`](crate::Sam) does not move a model. Nothing has changed then.
#[derive(thiserror::Error)]
#[non_exhaustive]
pub enum ClimbError {
    /// Gradients that show no direction.
    #[error(
        "the gradients have the norm {norm} together, so there is no direction to move in ({path:?} is the first that is not finite): leave this call out; with a loss scaler give them to `LossScaler::update`, which skips the call and lowers the scale"
    )]
    NonFinite {
        /// The first offending parameter.
        path: String,
        /// The norm.
        norm: f64,
    },
}
}
