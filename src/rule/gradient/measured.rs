//! Norms that the caller of `update` has requested, in addition to those of rules.
//!
//! They are reductions like those of rules, so the engine needs no code for them. They change no bit of a
//! step, because their factor is 1, which is no step.

use super::leaf_norms::{LeafNorms, NormRequest};
use crate::engine::Step;
use crate::rule::{Gradient, Norm};

impl Gradient<'_> {
    /// Requests the norm of the gradient here, and those of step and parameter at the end of the chain.
    pub(crate) fn measured(mut self, norms: &LeafNorms) -> Self {
        self.wanted = Some(NormRequest { norms: norms.clone(), place: None });
        self.measured_here()
    }

    /// Takes the norm of the gradient after `release`, which ends a window, instead of before the chain.
    pub(crate) fn measured_behind(self, release: impl FnOnce(Self) -> Self) -> Self {
        release(self.unmeasured()).measured_here()
    }

    /// Takes the norms of the finished step and of the parameter, if they are requested.
    pub(crate) fn measured_at_the_end(self) -> Self {
        let Some(NormRequest { norms, .. }) = &self.wanted else { return self };
        let norms = norms.clone();
        self.scale_by_norm(Norm::new(2.0).with_parameter(), move |found| {
            norms.set_step(found);
            1.0
        })
    }

    /// Removes the step that takes the norm of the gradient.
    pub(crate) fn unmeasured(mut self) -> Self {
        if let Some(place) = self.wanted.as_mut().and_then(|wanted| wanted.place.take()) {
            self.steps.remove(place);
        }
        self
    }

    fn measured_here(mut self) -> Self {
        let Some(NormRequest { norms, .. }) = self.wanted.as_ref().filter(|_| !self.missing) else {
            return self;
        };
        let norms = norms.clone();
        // Before a trailing `Check`, so that `merge_check` can still fold that into a later norm.
        let check = matches!(self.steps.last(), Some(Step::Check)).then(|| self.steps.pop()).flatten();
        let place = self.steps.len();
        self = self.scale_by_norm(Norm::new(2.0), move |found| {
            norms.set_gradient(found.gradient);
            1.0
        });
        self.steps.extend(check);
        self.wanted = self.wanted.map(|wanted| NormRequest { place: Some(place), ..wanted });
        self
    }
}
