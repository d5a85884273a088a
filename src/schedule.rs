//! Learning rates as functions of the step.

use std::f64::consts::PI;

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
/// With `adjust`: `state.adjust(schedule.at(step))?`. Or leave it to a [`Scheduler`](crate::Scheduler), which counts applied steps only.
///
/// Counts may be as large as they can: a phase of `u64::MAX` steps lasts for ever, and what would grow beyond the largest number stays there.
#[must_use = "it does nothing by itself: pass it to `Scheduler::new`"]
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
    OneMinusSquareRoot,
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
    /// [arXiv 1608.03983](https://arxiv.org/abs/1608.03983)). torch's `CosineAnnealingLR` goes up again behind its end; that is `then` with a cosine back.
    pub fn cosine(start: f64, end: f64, steps: u64) -> Self {
        Schedule(Shape::Between { start, end, steps, curve: Curve::Cosine })
    }

    /// `end + (start - end)·(1 - √(step/steps))`, then `end`: steep at first and flat at the end. Of the decays that follow a constant rate this one
    /// does best in Hägele et al. 2024 ([arXiv 2405.18392](https://arxiv.org/abs/2405.18392), there "1-sqrt", with `end` 0).
    ///
    /// ```
    /// use optimisers::Schedule;
    ///
    /// // The last fifth of the training.
    /// let schedule = Schedule::warmup_stable_then(1e-3, 100, 700, Schedule::one_minus_square_root(1e-3, 0.0, 200));
    /// assert_eq!([100, 799, 800, 850, 1000].map(|step| schedule.at(step)), [1e-3, 1e-3, 1e-3, 5e-4, 0.0]);
    /// ```
    pub fn one_minus_square_root(start: f64, end: f64, steps: u64) -> Self {
        Schedule(Shape::Between { start, end, steps, curve: Curve::OneMinusSquareRoot })
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
    /// [arXiv 1706.03762](https://arxiv.org/abs/1706.03762)): `peak·√warmup·min(1/√step, step·warmup^-1.5)`, and with their peak `1/√(width·warmup)`.
    ///
    /// The paper's first step is 1. Here the first rate is that of step 0, which is 0 where there is a
    /// warm-up: under a [`Scheduler`](crate::Scheduler) the first update moves nothing.
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
    /// [arXiv 2404.06395](https://arxiv.org/abs/2404.06395)). For a decay along another curve see [`Schedule::warmup_stable_then`].
    pub fn warmup_stable_decay(peak: f64, end: f64, warmup: u64, stable: u64, decay: u64) -> Self {
        Self::warmup_stable_then(peak, warmup, stable, Self::linear(peak, end, decay))
    }

    /// Up linearly to `peak` in `warmup` steps, `peak` for `stable`, then `decay`, which counts from 0 again: the curve of one's choice from `peak`
    /// down, such as [`one_minus_square_root`](Schedule::one_minus_square_root), [`cosine`](Schedule::cosine) or
    /// [`exponential`](Schedule::exponential).
    pub fn warmup_stable_then(peak: f64, warmup: u64, stable: u64, decay: Schedule) -> Self {
        let rise = Self::linear(0.0, peak, warmup).then(warmup, Self::constant(peak));
        rise.then(warmup.saturating_add(stable), decay)
    }

    /// This schedule for the first `steps`, then another, which counts from 0 again.
    pub fn then(self, steps: u64, next: Schedule) -> Self {
        Schedule(Shape::Joined { first: Box::new(self.0), at: steps, second: Box::new(next.0) })
    }

    /// The learning rate of the step with this index, from 0 on.
    pub fn at(&self, step: u64) -> f64 {
        self.0.at(step)
    }

    /// Whether the value is the same in all steps from this one on.
    pub(crate) fn rests_from(&self, step: u64) -> bool {
        self.0.rests_from(step)
    }

    /// Steps with the lowest and the highest values of the schedule, among others. What grows without end has
    /// its highest nowhere.
    pub(crate) fn corners(&self) -> Vec<u64> {
        self.0.corners()
    }
}

impl Shape {
    fn rests_from(&self, step: u64) -> bool {
        match *self {
            Shape::Constant(_) => true,
            Shape::Between { start, end, steps, .. } => step >= steps || start == end,
            Shape::Joined { at, ref second, .. } => step >= at && second.rests_from(step - at),
            Shape::OneCycle { steps, .. } => step.saturating_add(1) >= steps,
            Shape::Restarts { high, low, .. } => high == low,
            Shape::Exponential { start, rate, .. } => start == 0.0 || rate == 1.0,
            Shape::InverseSquareRoot { start, .. } => start == 0.0,
        }
    }

    fn corners(&self) -> Vec<u64> {
        /// How many periods of warm restarts to look at. Each ends at its lowest value, a longer one at a
        /// lower value, and after so many they get no longer.
        const PERIODS: u32 = 64;
        match *self {
            Shape::Constant(_) | Shape::InverseSquareRoot { .. } => vec![0, 1],
            // Monotone; some curves have no number in their first step, or a large one in their last.
            Shape::Between { steps, .. } => vec![0, 1, steps.saturating_sub(1), steps],
            Shape::Joined { ref first, at, ref second } => {
                let before = first.corners().into_iter().chain(at.checked_sub(1)).filter(|step| *step < at);
                before.chain(second.corners().into_iter().map(|step| at.saturating_add(step))).collect()
            }
            Shape::OneCycle { steps, .. } => {
                let top = (0.3 * steps as f64 - 1.0).max(0.0) as u64;
                vec![0, top, top.saturating_add(1), steps.saturating_sub(1)]
            }
            Shape::Restarts { steps, factor, .. } => {
                let starts = (1..=PERIODS).map(|terms| steps.max(1) as f64 * geometric(f64::from(terms), factor.max(1.0)));
                starts.flat_map(|start| [(start as u64).saturating_sub(1), start as u64]).chain([0]).collect()
            }
            // A negative rate changes the sign, or makes no number of it.
            Shape::Exponential { steps, .. } => vec![0, 1, steps, steps.saturating_add(1)],
        }
    }

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
                    Curve::Power(power) => end + saturating(start - end, (1.0 - part).powf(power)),
                    Curve::OneMinusSquareRoot => end + saturating(start - end, 1.0 - part.sqrt()),
                }
            }
            Shape::Joined { ref first, at, ref second } => {
                if step < at {
                    first.at(step)
                } else {
                    second.at(step - at)
                }
            }
            Shape::Restarts { high, low, steps, factor } => along_cosine(high, low, part_of_period(step, steps.max(1), factor)),
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
                saturating(start, rate.powf(if staircase { times.floor() } else { times }))
            }
            Shape::InverseSquareRoot { start, warmup } => start * (warmup as f64 / (warmup as f64 + step as f64)).sqrt(),
        }
    }
}

/// From `start` to `end` as `part` goes from 0 to 1, along half a period of a cosine.
fn along_cosine(start: f64, end: f64, part: f64) -> f64 {
    end + (start - end) * 0.5 * (1.0 + (PI * part).cos())
}

/// The product, or the largest number where that would be infinite.
fn saturating(value: f64, factor: f64) -> f64 {
    let product = value * factor.clamp(f64::MIN, f64::MAX);
    if value.is_finite() { product.clamp(f64::MIN, f64::MAX) } else { product }
}

/// How far into its period a step is, from 0 to 1. The first period has `steps`, each other one `factor` times as many as the one before.
fn part_of_period(step: u64, steps: u64, factor: f64) -> f64 {
    /// What a factor such as 1.1, rounded to an f64, may delay the start of a period by: it starts at step 331 of 100, 110 and 121.
    const DELAY: f64 = 1e-6;
    if factor <= 1.0 {
        return (step % steps) as f64 / steps as f64;
    }
    let factor = factor.clamp(1.0, f64::MAX);
    let (step, steps, growth) = (step as f64, steps as f64, factor - 1.0);
    let start = |period| steps * geometric(period, factor);
    let has_begun = |period| start(period) <= step + DELAY;
    let mut period = ((step / steps * growth).min(f64::MAX).ln_1p() / growth.ln_1p()).floor();
    // The logarithms are rounded.
    if !has_begun(period) {
        period -= 1.0;
    } else if has_begun(period + 1.0) {
        period += 1.0;
    }
    let length = steps * (1.0 + growth * geometric(period, factor));
    ((step - start(period)) / length).clamp(0.0, 1.0)
}

/// `1 + factor + factor² + ...`, so many terms.
fn geometric(terms: f64, factor: f64) -> f64 {
    /// Added up they are exact where that is possible: 65 of them are more than a u64 holds, if the factor is a whole number, and have more digits than an
    /// f64, if it is none.
    const FEW: f64 = 64.0;
    if terms <= FEW {
        return (0..terms as u32).fold(0.0, |sum, _| sum * factor + 1.0);
    }
    let growth = factor - 1.0;
    (terms * growth.ln_1p()).exp_m1() / growth
}
