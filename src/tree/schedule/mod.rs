//! Hyper-parameters as functions of the step.

mod curve;

use crate::error::Result;
use crate::rule::RATE;
pub(crate) use curve::{Curve, Easing, saturating};

/// A learning rate, or another hyper-parameter, as a function of the applied steps, from 0 on.
///
/// ```
/// use optimisers::Schedule;
///
/// let schedule = Schedule::linear(0.25, 1.0, 3).then(4, Schedule::cosine(1.0, 0.5, 8));
/// assert_eq!([0, 3, 4, 12].map(|step| schedule.at(step)), [0.25, 1.0, 1.0, 0.5]);
/// ```
///
/// [`StateTree::schedule`](crate::StateTree::schedule) gives a schedule to all leaves of a state or to some,
/// which then have the schedule's value in each step. A checkpoint has the schedule and the count of steps,
/// so a restored run goes on by itself.
///
/// ```
/// use candle_core::{Device, Var};
/// use optimisers::{Descent, Schedule, setup, update};
///
/// let x = Var::new(&[1f32], &Device::Cpu)?;
/// let mut state = setup(Descent::new(0.4), &x)?;
/// state.schedule(Schedule::linear(0.4, 0.0, 4))?;
/// for rate in [0.4, 0.3, 0.2, 0.1] {
///     let outcome = update(&mut state, &x, &x.sqr()?.sum_all()?.backward()?)?;
///     assert!((outcome.learning_rate.unwrap() - rate).abs() < 1e-15);
/// }
/// assert_eq!((state.steps(), state.leaf("").and_then(|leaf| leaf.learning_rate())), (4, Some(0.0)));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// Without a schedule in the state, call `state.adjust(schedule.at(step))?` before each update.
///
/// # The driven field
/// A schedule drives the learning rate, or the hyper-parameter that [`field`](Schedule::field) chooses.
/// [`relative`](Schedule::relative) makes the values factors of each leaf's own value, so that different
/// rates stay different.
///
/// With the feature `config`, schedules are read from and written to JSON, TOML and the like: see the module
/// `config`.
///
/// All counts are accepted. A phase of `u64::MAX` steps lasts for ever. Values saturate at the largest
/// number.
#[must_use = "it does nothing by itself: pass it to `StateTree::schedule`"]
#[derive(Clone, Debug, PartialEq)]
pub struct Schedule {
    pub(crate) curve: Curve,
    /// The driven field; `None` for the learning rate.
    pub(crate) field: Option<String>,
    pub(crate) is_relative: bool,
}

impl Schedule {
    /// Always `eta`.
    pub fn constant(eta: f64) -> Self {
        Self::along(Curve::Constant(eta))
    }

    /// From `start` to `end` in `steps` equal steps, then `end`: a warm-up if `end` is higher than `start`.
    pub fn linear(start: f64, end: f64, steps: u64) -> Self {
        Self::polynomial(start, end, steps, 1.0)
    }

    /// `end + (start - end)·(1 - step/steps)^power`, then `end`.
    pub fn polynomial(start: f64, end: f64, steps: u64, power: f64) -> Self {
        Self::along(Curve::Between {
            start,
            end,
            steps,
            easing: Easing::Power(power),
        })
    }

    /// `end + (start - end)·(1 + cos(π·step/steps)) / 2`, then `end`: cosine annealing.
    ///
    /// Loshchilov and Hutter 2016, [arXiv 1608.03983](https://arxiv.org/abs/1608.03983). torch's
    /// `CosineAnnealingLR` goes up again after its end; for such a rise use `then` with a cosine back.
    pub fn cosine(start: f64, end: f64, steps: u64) -> Self {
        Self::along(Curve::Between {
            start,
            end,
            steps,
            easing: Easing::Cosine,
        })
    }

    /// `end + (start - end)·(1 - √(step/steps))`, then `end`: steep at first and flat at the end.
    ///
    /// In Hägele et al. 2024 ([arXiv 2405.18392](https://arxiv.org/abs/2405.18392), there "1-sqrt", with
    /// `end` 0) this curve is the best decay after a constant rate.
    ///
    /// ```
    /// use optimisers::Schedule;
    ///
    /// // The last fifth of the training.
    /// let schedule = Schedule::warmup_stable_then(1e-3, 100, 700, Schedule::one_minus_square_root(1e-3, 0.0, 200));
    /// assert_eq!([100, 799, 800, 850, 1000].map(|step| schedule.at(step)), [1e-3, 1e-3, 1e-3, 5e-4, 0.0]);
    /// ```
    pub fn one_minus_square_root(start: f64, end: f64, steps: u64) -> Self {
        Self::along(Curve::Between {
            start,
            end,
            steps,
            easing: Easing::OneMinusSquareRoot,
        })
    }

    /// Cosine annealing from `high` to `low` with warm restarts: torch's `CosineAnnealingWarmRestarts`.
    ///
    /// The first period has `steps` steps. Each later period is `factor` (1 or more) times as long as the one
    /// before (SGDR, same paper as [`cosine`](Schedule::cosine)).
    pub fn cosine_restarts(high: f64, low: f64, steps: u64, factor: f64) -> Self {
        Self::along(Curve::Restarts {
            high,
            low,
            steps,
            factor,
        })
    }

    /// Up to `peak` and down again, by cosines: the rate of torch's `OneCycleLR`.
    ///
    /// The rate goes from `peak / 25` to `peak` in the first three tenths of `steps`, and to `peak / 250 000`
    /// in the remaining steps (Smith and Topin 2017, [arXiv 1708.07120](https://arxiv.org/abs/1708.07120)).
    ///
    /// These are the defaults of torch, except that torch moves the momentum or β₁ as well, unless it has
    /// `cycle_momentum=False`. If 0.3·`steps` is a whole number, a second schedule moves β₁ in the same way:
    ///
    /// ```
    /// use optimisers::Schedule;
    ///
    /// let (steps, top) = (1000, 299); // the rate is highest in the step with the index 0.3·steps - 1
    /// let rate = Schedule::one_cycle(1e-3, steps);
    /// let fall = Schedule::cosine(0.95, 0.85, top);
    /// let momentum = fall.then(top, Schedule::cosine(0.85, 0.95, steps - 1 - top)).field("beta1");
    /// assert_eq!([0, top, steps - 1].map(|step| momentum.at(step)), [0.95, 0.85, 0.95]);
    /// assert_eq!(rate.at(top), 1e-3);
    /// ```
    pub fn one_cycle(peak: f64, steps: u64) -> Self {
        Self::along(Curve::OneCycle { peak, steps })
    }

    /// `start·rate^(step / steps)`.
    pub fn exponential(start: f64, rate: f64, steps: u64) -> Self {
        Self::along(Curve::Exponential {
            start,
            rate,
            steps,
            staircase: false,
        })
    }

    /// `start·rate^⌊step / steps⌋`: multiplied by `rate` after every `steps` steps, as by torch's `StepLR`.
    pub fn step(start: f64, rate: f64, steps: u64) -> Self {
        Self::along(Curve::Exponential {
            start,
            rate,
            steps,
            staircase: true,
        })
    }

    /// `peak·t / warmup` in the first `warmup` steps, then `peak·√(warmup / t)`, with t = step + 1.
    ///
    /// This is the schedule of the Transformer paper (Vaswani et al. 2017, [arXiv
    /// 1706.03762](https://arxiv.org/abs/1706.03762)), `peak·√warmup·min(1/√t, t·warmup^-1.5)`. There, too, t
    /// counts from 1, and the peak is `1/√(width·warmup)`.
    pub fn inverse_square_root(peak: f64, warmup: u64) -> Self {
        Self::along(Curve::InverseSquareRoot { peak, warmup })
    }

    /// Linearly up to `peak` in `warmup` steps, `peak` for `stable`, linearly down to `end` in `decay`.
    ///
    /// Warmup-stable-decay is by Hu et al. 2024 ([arXiv 2404.06395](https://arxiv.org/abs/2404.06395)). For a
    /// decay along another curve, and for the first step of the warm-up, see
    /// [`Schedule::warmup_stable_then`].
    pub fn warmup_stable_decay(peak: f64, end: f64, warmup: u64, stable: u64, decay: u64) -> Self {
        Self::warmup_stable_then(peak, warmup, stable, Self::linear(peak, end, decay))
    }

    /// Linearly up to `peak` in `warmup` steps, `peak` for `stable`, then `decay` from its step 0 on.
    ///
    /// The warm-up begins at `peak / warmup` and has `peak` in its last step, so no step has a rate of 0. The
    /// warm-ups of transformers and optax begin at 0, as `linear(0.0, peak, warmup)` does.
    ///
    /// `decay` is any curve from `peak` down, such as
    /// [`one_minus_square_root`](Schedule::one_minus_square_root), [`cosine`](Schedule::cosine) or
    /// [`exponential`](Schedule::exponential).
    pub fn warmup_stable_then(peak: f64, warmup: u64, stable: u64, decay: Schedule) -> Self {
        let rise = Self::along(Curve::warm_up(peak, warmup)).then(warmup, Self::constant(peak));
        rise.then(warmup.saturating_add(stable), decay)
    }

    /// This schedule for the first `steps`, then another, which counts from 0 again.
    ///
    /// The whole schedule is [relative](Schedule::relative) if one of the two is. Its
    /// [field](Schedule::field) is that of the first schedule, or of the second if the first has none.
    pub fn then(self, steps: u64, next: Schedule) -> Self {
        Schedule {
            curve: self.curve.then(steps, next.curve),
            field: self.field.or(next.field),
            is_relative: self.is_relative || next.is_relative,
        }
    }

    /// Makes the values factors of each leaf's own rate, as in torch's `LambdaLR`.
    ///
    /// `Schedule::cosine(1.0, 0.1, steps).relative()` ends with a tenth of each rate. The own rate is the one
    /// that the leaf was set up with, or that [`adjust`](crate::StateTree::adjust) has set since.
    pub fn relative(self) -> Self {
        Schedule {
            is_relative: true,
            ..self
        }
    }

    /// Drives another hyper-parameter than the learning rate.
    ///
    /// The field has to be a real number, or one number of a pair or of three, with an index from 1 on:
    /// `beta1`. In a chain the name may begin with a place, as in `0.lambda`. If several members have the
    /// field, a place is required, except for `eta`, which is their [product](crate::Adjust::adjust).
    pub fn field(self, field: impl Into<String>) -> Self {
        Schedule {
            field: Some(field.into()),
            ..self
        }
    }

    /// The value for the step with this index, from 0 on.
    pub fn at(&self, step: u64) -> f64 {
        self.curve.at(step)
    }

    fn along(curve: Curve) -> Self {
        Schedule {
            curve,
            field: None,
            is_relative: false,
        }
    }

    /// The name of the driven field, as the program gave it.
    pub(crate) fn driven_field(&self) -> &str {
        self.field.as_deref().unwrap_or(RATE)
    }

    /// Whether the schedule drives a learning rate.
    pub(crate) fn drives_rate(&self) -> bool {
        self.driven_field().rsplit('.').next() == Some(RATE)
    }

    /// Refuses a definition that is out of range.
    pub(crate) fn check(&self) -> Result<()> {
        self.curve.check(self.driven_field())
    }
}
