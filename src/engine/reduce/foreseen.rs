//! What a device has answered ahead, until its turn comes.

use std::collections::HashMap;

use candle_core::DType;

use crate::engine::Ticket;

/// Answers, each with the factors that it depends on.
#[derive(Default)]
pub(super) struct Foreseen {
    answers: HashMap<Key, Totals>,
    factors: HashMap<Key, f64>,
}

/// A job, and how many of its steps there are from an open one to the end, which stays as the steps before it are resolved.
pub(super) type Key = (usize, usize);

/// The fold over the gradient, or over what a step adds up, and that over the parameter, if the step asks for it.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) struct Totals {
    pub(super) total: f64,
    pub(super) of_parameter: f64,
}

/// The key of the open step at `place`.
pub(super) fn key(jobs: &[&mut Ticket<'_>], job: usize, place: usize) -> Key {
    (job, jobs[job].job.steps.len() - place)
}

impl Foreseen {
    pub(super) fn is_empty(&self) -> bool {
        self.answers.is_empty()
    }

    pub(super) fn add_answer(&mut self, key: Key, totals: Totals) {
        self.answers.insert(key, totals);
    }

    pub(super) fn add_factor(&mut self, key: Key, factor: f64) {
        self.factors.insert(key, factor);
    }

    pub(super) fn take(&mut self, key: Key) -> Option<Totals> {
        if self.is_empty() { None } else { self.answers.remove(&key) }
    }

    /// Forgets what has been answered with another factor than the one that a norm has led to: one that the arithmetic cannot tell from it
    /// will do.
    pub(super) fn follow(&mut self, key: Key, factor: f64, compute: DType) {
        if self.is_empty() {
            return;
        }
        let Some(ahead) = self.factors.remove(&key) else { return };
        let is_same = ahead.is_nan() && factor.is_nan()
            || match compute {
                DType::F64 => ahead.to_bits() == factor.to_bits(),
                _ => (ahead as f32).to_bits() == (factor as f32).to_bits(),
            };
        if !is_same {
            self.answers.retain(|&(job, _), _| job != key.0);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_answer_with_another_factor_is_forgotten() {
        let after = |ahead: f64, factor: f64, compute| {
            let mut foreseen = Foreseen::default();
            foreseen.add_factor((0, 2), ahead);
            foreseen.add_answer((0, 1), Totals::default());
            foreseen.add_answer((1, 1), Totals::default());
            foreseen.follow((1, 2), 7.0, compute);
            foreseen.follow((0, 2), factor, compute);
            assert!(foreseen.take((1, 1)).is_some());
            foreseen.take((0, 1)).is_some()
        };
        assert!(after(0.1, 0.1, DType::F64) && after(f64::NAN, -f64::NAN, DType::F64));
        assert!(after(0.1, 0.1f64.next_up(), DType::F32) && !after(0.1, 0.1f64.next_up(), DType::F64));
        assert!(!after(0.0, 1.0, DType::F32));
    }
}
