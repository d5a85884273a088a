//! Learning rates as functions of the step.

use std::f64::consts::PI;

use crate::error::{Error, Result};
use crate::outcome::{Outcome, Status};
use crate::tree::StateTree;

/// A learning rate as a function of the number of steps that were applied before, from 0 on.
///
/// ```
/// use optimisers::Schedule;
///
/// let schedule = Schedule::linear(0.0, 1e-3, 100).then(100, Schedule::cosine(1e-3, 1e-5, 900));
/// assert_eq!(schedule.at(0), 0.0);
/// assert_eq!(schedule.at(50), 5e-4);
/// assert_eq!(schedule.at(100), 1e-3);
/// assert!((schedule.at(1000) - 1e-5).abs() < 1e-12);
/// ```
///
/// With `adjust`: `state.adjust(schedule.at(step))?`. Or leave it to a [`Scheduler`], which counts applied steps only.
#[derive(Clone, Debug, PartialEq)]
pub struct Schedule(Shape);

#[derive(Clone, Debug, PartialEq)]
enum Shape {
    Constant(f64),
    /// From `start` to `end` in `steps`, then `end`, along a curve.
    Between {
        start: f64,
        end: f64,
        steps: u64,
        curve: Curve,
    },
    /// The first schedule until `at`, then the second with its own count.
    Joined {
        first: Box<Shape>,
        at: u64,
        second: Box<Shape>,
    },
    /// Up and down again.
    OneCycle {
        peak: f64,
        steps: u64,
    },
    /// A cosine that starts anew, each time `factor` times as long.
    Restarts {
        high: f64,
        low: f64,
        steps: u64,
        factor: f64,
    },
    /// `start·rate^(step / steps)`
    Exponential {
        start: f64,
        rate: f64,
        steps: u64,
        staircase: bool,
    },
    /// `start·√(warmup / max(step, warmup))`
    InverseSquareRoot {
        start: f64,
        warmup: u64,
    },
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Curve {
    Cosine,
    Power(f64),
}

impl Schedule {
    /// Always `eta`.
    pub fn constant(eta: f64) -> Self {
        Schedule(Shape::Constant(eta))
    }

    /// From `start` to `end` in `steps` equal steps, then `end`: a warm-up if it goes up.
    pub fn linear(start: f64, end: f64, steps: u64) -> Self {
        Self::polynomial(start, end, steps, 1.0)
    }

    /// `end + (start - end)·(1 - step/steps)^power`, then `end`.
    pub fn polynomial(start: f64, end: f64, steps: u64, power: f64) -> Self {
        Schedule(Shape::Between { start, end, steps, curve: Curve::Power(power) })
    }

    /// `end + (start - end)·(1 + cos(π·step/steps)) / 2`, then `end`: cosine annealing (Loshchilov and Hutter 2016,
    /// [arXiv 1608.03983](https://arxiv.org/abs/1608.03983)).
    pub fn cosine(start: f64, end: f64, steps: u64) -> Self {
        Schedule(Shape::Between { start, end, steps, curve: Curve::Cosine })
    }

    /// Cosine annealing from `high` to `low` that starts anew after `steps`, and then each time after `factor` (1 or more) times as many (SGDR, same
    /// paper). torch's `CosineAnnealingWarmRestarts`.
    pub fn cosine_restarts(high: f64, low: f64, steps: u64, factor: f64) -> Self {
        Schedule(Shape::Restarts { high, low, steps, factor })
    }

    /// From `peak / 25` up to `peak` in the first three tenths of `steps` and down to `peak / 250 000` in the others, by cosines: torch's `OneCycleLR`
    /// with its defaults (Smith and Topin 2017, [arXiv 1708.07120](https://arxiv.org/abs/1708.07120)).
    pub fn one_cycle(peak: f64, steps: u64) -> Self {
        Schedule(Shape::OneCycle { peak, steps })
    }

    /// `start·rate^(step / steps)`.
    pub fn exponential(start: f64, rate: f64, steps: u64) -> Self {
        Schedule(Shape::Exponential { start, rate, steps, staircase: false })
    }

    /// `start·rate^⌊step / steps⌋`: times `rate` every `steps`. torch's `StepLR`.
    pub fn step(start: f64, rate: f64, steps: u64) -> Self {
        Schedule(Shape::Exponential { start, rate, steps, staircase: true })
    }

    /// Up linearly to `peak` in `warmup` steps, then `peak·√(warmup / step)`, as in the Transformer paper (Vaswani et al. 2017,
    /// [arXiv 1706.03762](https://arxiv.org/abs/1706.03762)).
    pub fn inverse_square_root(peak: f64, warmup: u64) -> Self {
        let start = if warmup == 0 { peak } else { 0.0 };
        let rise = Self::linear(start, peak, warmup);
        Schedule(Shape::Joined {
            first: Box::new(rise.0),
            at: warmup,
            second: Box::new(Shape::InverseSquareRoot { start: peak, warmup: warmup.max(1) }),
        })
    }

    /// Up linearly to `peak` in `warmup` steps, `peak` for `stable`, then down linearly to `end` in `decay`: warmup-stable-decay (Hu et al. 2024,
    /// [arXiv 2404.06395](https://arxiv.org/abs/2404.06395)).
    pub fn warmup_stable_decay(peak: f64, end: f64, warmup: u64, stable: u64, decay: u64) -> Self {
        let rise = Self::linear(0.0, peak, warmup).then(warmup, Self::constant(peak));
        rise.then(warmup + stable, Self::linear(peak, end, decay))
    }

    /// This schedule for the first `steps`, then another, which counts from 0 again.
    pub fn then(self, steps: u64, next: Schedule) -> Self {
        Schedule(Shape::Joined { first: Box::new(self.0), at: steps, second: Box::new(next.0) })
    }

    /// The learning rate of the step with this number, the first is 0.
    pub fn at(&self, step: u64) -> f64 {
        self.0.at(step)
    }
}

impl Shape {
    fn at(&self, step: u64) -> f64 {
        match *self {
            Shape::Constant(eta) => eta,
            Shape::Between { start, end, steps, curve } => {
                if step >= steps {
                    return end;
                }
                let part = step as f64 / steps as f64;
                match curve {
                    Curve::Cosine => along_cosine(start, end, part),
                    Curve::Power(power) => end + (start - end) * (1.0 - part).powf(power),
                }
            }
            Shape::Joined { ref first, at, ref second } => {
                if step < at {
                    first.at(step)
                } else {
                    second.at(step - at)
                }
            }
            Shape::Restarts { high, low, steps, factor } => {
                let (mut step, mut steps) = (step as f64, steps.max(1) as f64);
                if factor <= 1.0 {
                    step %= steps;
                }
                while step >= steps {
                    step -= steps;
                    steps *= factor;
                }
                along_cosine(high, low, step / steps)
            }
            Shape::OneCycle { peak, steps } => {
                let (first, lowest) = (peak / 25.0, peak / 250_000.0);
                // As torch counts: the top is step 0.3·steps - 1, which need not be a whole number, and the end is the last step.
                let (step, top, last) = (step as f64, 0.3 * steps as f64 - 1.0, steps as f64 - 1.0);
                match () {
                    () if step <= top => along_cosine(first, peak, step / top),
                    () if step < last => along_cosine(peak, lowest, (step - top) / (last - top)),
                    () => lowest,
                }
            }
            Shape::Exponential { start, rate, steps, staircase } => {
                let times = step as f64 / steps.max(1) as f64;
                start * rate.powf(if staircase { times.floor() } else { times })
            }
            Shape::InverseSquareRoot { start, warmup } => start * (warmup as f64 / (warmup + step) as f64).sqrt(),
        }
    }
}

/// From `start` to `end` as `part` goes from 0 to 1, along half a period of a cosine.
fn along_cosine(start: f64, end: f64, part: f64) -> f64 {
    end + (start - end) * 0.5 * (1.0 + (PI * part).cos())
}

/// Sets the learning rate of a state by a [`Schedule`], and advances with applied steps only: not with skipped calls, nor with micro-batches that
/// are collected.
///
/// ```
/// use candle_core::{Device, Var};
/// use optimisers::{Descent, Schedule, Scheduler, setup, update};
///
/// let x = Var::new(&[1f32], &Device::Cpu)?;
/// let mut state = setup(Descent::default(), &x)?;
/// let mut scheduler = Scheduler::new(Schedule::linear(0.4, 0.0, 4), &mut state)?;
/// for _ in 0..2 {
///     let outcome = update(&mut state, &x, &x.sqr()?.sum_all()?.backward()?)?;
///     scheduler.advance(&outcome, &mut state)?;
/// }
/// assert_eq!((scheduler.steps(), state.leaf("").and_then(|leaf| leaf.learning_rate())), (2, Some(0.2)));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Debug, PartialEq)]
pub struct Scheduler {
    schedule: Schedule,
    steps: u64,
}

impl Scheduler {
    /// A scheduler at the start; sets the first learning rate.
    ///
    /// # Errors
    /// If no rule of the state has a learning rate, or the schedule's is out of range.
    pub fn new(schedule: Schedule, state: &mut StateTree) -> Result<Self> {
        Self::resume(schedule, 0, state)
    }

    /// A scheduler after so many applied steps: for a training that goes on from a checkpoint.
    ///
    /// # Errors
    /// As [`Scheduler::new`].
    pub fn resume(schedule: Schedule, steps: u64, state: &mut StateTree) -> Result<Self> {
        let scheduler = Scheduler { schedule, steps };
        scheduler.set(state)?;
        Ok(scheduler)
    }

    /// Counts the call if it moved a parameter, and sets the learning rate of the next step.
    ///
    /// # Errors
    /// As [`Scheduler::new`].
    pub fn advance(&mut self, outcome: &Outcome, state: &mut StateTree) -> Result<()> {
        if outcome.status == Status::Stepped {
            self.steps += 1;
            self.set(state)?;
        }
        Ok(())
    }

    /// How many steps were applied.
    pub fn steps(&self) -> u64 {
        self.steps
    }

    /// The learning rate of the next step.
    pub fn current(&self) -> f64 {
        self.schedule.at(self.steps)
    }

    fn set(&self, state: &mut StateTree) -> Result<()> {
        let eta = self.current();
        if eta.is_nan() {
            return Err(Error::HyperParameter {
                rule: "Schedule".to_string(),
                field: "eta".to_string(),
                value: eta.into(),
                expected: "a number".to_string(),
            });
        }
        state.adjust(eta)
    }
}
