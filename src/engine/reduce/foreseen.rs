//! What a device has answered ahead, until its turn comes.

use std::collections::HashMap;

use super::Totals;
use crate::engine::{Job, Ticket};
use crate::error::{Error, Result};

/// Answers, and the numbers that the device has made of them for later ones.
#[derive(Default)]
pub(super) struct Foreseen {
    answers: HashMap<Key, Totals>,
    numbers: HashMap<Key, f64>,
}

/// A job, and how many of its steps there are from an open one to the end, which stays as the steps before it are resolved.
pub(super) type Key = (usize, usize);

/// The key of the open step at `place`.
pub(super) fn key(jobs: &[&mut Ticket<'_>], job: usize, place: usize) -> Key {
    (job, jobs[job].job.steps.len() - place)
}

/// How far the number of a device may be from the host's: both do the same, but for a device's `pow`.
const ROUNDINGS: f64 = 1e-12;

impl Foreseen {
    pub(super) fn is_empty(&self) -> bool {
        self.answers.is_empty()
    }

    pub(super) fn add_answer(&mut self, key: Key, totals: Totals) {
        self.answers.insert(key, totals);
    }

    pub(super) fn add_number(&mut self, key: Key, number: f64) {
        self.numbers.insert(key, number);
    }

    pub(super) fn take(&mut self, key: Key) -> Option<Totals> {
        if self.is_empty() { None } else { self.answers.remove(&key) }
    }

    /// The number that goes into the step: the device's, which later answers are about, where it went on with one. Should that be another than
    /// the host's, what has been answered with it is forgotten.
    ///
    /// # Errors
    /// If a function of the job has run with that other number.
    pub(super) fn agreed(&mut self, job: &Job<'_>, key: Key, number: f64) -> Result<f64> {
        let Some(ahead) = self.numbers.remove(&key) else { return Ok(number) };
        let is_close = number.is_finite() && (ahead - number).abs() <= ROUNDINGS * number.abs();
        if is_close || ahead == number || ahead.is_nan() && number.is_nan() {
            return Ok(ahead);
        }
        if job.steps.iter().any(|step| step.output().is_some()) {
            return Err(Error::other(format!("{:?}: the device went on with {ahead} in place of {number}; nothing was changed", job.path)));
        }
        self.answers.retain(|&(job, _), _| job != key.0);
        Ok(number)
    }
}

#[cfg(test)]
mod tests {
    use candle_core::{DType, Device, Tensor};

    use super::*;
    use crate::engine::{Output, Source, Step, TensorStep};

    #[test]
    fn an_answer_with_another_number_is_forgotten() {
        let x = Tensor::zeros(1, DType::F32, &Device::Cpu).expect("a tensor");
        let job = || Job::new("x", &x, Source::new());
        let after = |ahead: f64, number: f64| {
            let mut foreseen = Foreseen::default();
            foreseen.add_number((0, 2), ahead);
            foreseen.add_answer((0, 1), Totals::default());
            foreseen.add_answer((1, 1), Totals::default());
            assert_eq!(foreseen.agreed(&job(), (1, 2), 7.0).expect("a number"), 7.0);
            let agreed = foreseen.agreed(&job(), (0, 2), number).expect("a number");
            assert!(foreseen.take((1, 1)).is_some());
            (agreed, foreseen.take((0, 1)).is_some())
        };
        assert_eq!(after(0.1, 0.1), (0.1, true));
        assert_eq!(after(0.1f64.next_up(), 0.1), (0.1f64.next_up(), true));
        assert_eq!(after(f64::INFINITY, f64::INFINITY), (f64::INFINITY, true));
        assert!(after(f64::NAN, -f64::NAN).1);
        for (ahead, number) in [(0.1, 0.1 + 1e-9), (0.0, 1.0), (f64::NAN, 1.0), (1.0, f64::NAN), (f64::INFINITY, 1.0), (1.0, f64::INFINITY)]
        {
            let (agreed, known) = after(ahead, number);
            assert!(agreed.to_bits() == number.to_bits() && !known, "{ahead} {number}");
        }
    }

    #[test]
    fn a_function_cannot_run_again() {
        let x = Tensor::zeros(1, DType::F32, &Device::Cpu).expect("a tensor");
        let step = TensorStep::new(Box::new(|_, dx, _| Ok(dx)), &mut []);
        step.run(|_, _| Ok(Output { gradient: x.clone(), slots: Vec::new() }));
        let job = Job { steps: smallvec::smallvec![Step::Tensor(Box::new(step))], ..Job::new("x", &x, Source::new()) };
        let mut foreseen = Foreseen::default();
        foreseen.add_number((0, 2), 0.1);
        foreseen.add_number((1, 2), 0.1);
        assert_eq!(foreseen.agreed(&job, (0, 2), 0.1).expect("a number"), 0.1);
        assert!(foreseen.agreed(&job, (1, 2), 0.2).is_err());
    }
}
