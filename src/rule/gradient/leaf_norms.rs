//! Norms of a leaf that the caller of `update` has requested.

use std::sync::{Arc, OnceLock};

use crate::engine::Norms;

/// The norms of a leaf, which the reduce stage sets. Shared, because two closures of its job set them.
#[derive(Clone, Debug, Default)]
pub(crate) struct LeafNorms(Arc<NormCells>);

#[derive(Debug, Default)]
struct NormCells {
    gradient: OnceLock<f64>,
    step: OnceLock<Norms>,
}

/// The request for the norms of a gradient and of its step.
#[derive(Debug)]
pub(crate) struct NormRequest {
    pub(crate) norms: LeafNorms,
    /// The index of the step that takes the norm of the gradient, once it is planned.
    pub(crate) place: Option<usize>,
}

impl LeafNorms {
    pub(crate) fn set_gradient(&self, norm: f64) {
        // Planned once, so set once.
        let _ = self.0.gradient.set(norm);
    }

    pub(crate) fn set_step(&self, norms: Norms) {
        let _ = self.0.step.set(norms);
    }

    /// The norm of the gradient and those of its step; `None` for a leaf without a step.
    pub(crate) fn found(&self) -> Option<(f64, Norms)> {
        Some((*self.0.gradient.get()?, *self.0.step.get()?))
    }
}
