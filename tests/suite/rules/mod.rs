//! The rules of the catalogue, against references, recurrences and laws.

mod accum_grad;
mod accum_grad_weights;
mod clip_norm;
mod goldens;
pub(crate) mod laws;
mod matrices;
mod micro_batches;
mod outliers;
mod preconditioned;
mod recent_papers;
pub(crate) mod recurrences;
mod vanishing_gradients;
mod whole_model_numbers;
pub(crate) mod zero_gradients;
