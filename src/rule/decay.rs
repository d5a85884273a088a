//! How much of a parameter a decoupled decay takes away.

/// η·λ; or λ·η² / η_max where η_max is not 0, so that what decays in a step falls off as fast as the square of the step's length.
pub(crate) fn decay_rate(eta: f64, lambda: f64, eta_max: f64) -> f64 {
    let rate = eta * lambda;
    if eta_max > 0.0 { rate * (eta / eta_max) } else { rate }
}
