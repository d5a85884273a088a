//! Hyper-parameters as functions of the step.

use std::fmt;
use std::sync::Arc;

use super::curve::{Curve, Easing};
use crate::error::Error;
use crate::rule::RATE;
use crate::tree::{Leaf, StateTree, below, selected_path};

/// A learning rate, or another hyper-parameter, as a function of the applied steps, from 0 on.
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
/// A [`Scheduler`](crate::Scheduler) sets its values in a state, and counts applied steps only. By hand, call
/// `state.adjust(schedule.at(step))?`.
///
/// # What it drives
/// The learning rate of all leaves, which must have the same rate before: one schedule would make different
/// rates equal. [`relative`](Schedule::relative) makes it a factor of each leaf's own rate,
/// [`field`](Schedule::field) chooses another hyper-parameter, [`below`](Schedule::below) and
/// [`select_where`](Schedule::select_where) choose leaves. A scheduler takes one schedule or several. If
/// several select a leaf for the same field, the first drives it (`0.eta` and `eta` count as the same, in
/// either order). So a last one for all leaves drives the rest:
///
/// ```
/// use candle_core::{DType::F32, Device, Var};
/// use optimisers::{AdamW, Muon, Rule, Schedule, Scheduler, setup_with};
/// use std::collections::BTreeMap;
///
/// let model = BTreeMap::from([("bias", Var::zeros(2, F32, &Device::Cpu)?), ("weight", Var::zeros((2, 2), F32, &Device::Cpu)?)]);
/// let mut state = setup_with(&model, |_, x| -> Option<Box<dyn Rule>> {
///     Some(if x.rank() == 2 { Box::new(Muon::new(0.02)) } else { Box::new(AdamW::new(3e-4)) })
/// })?;
/// let scheduler = Scheduler::new(
///     [Schedule::linear(0.0, 0.02, 100).below("weight"), Schedule::cosine(3e-4, 0.0, 1000)],
///     &mut state,
/// )?;
/// assert_eq!(state.leaves().map(|leaf| leaf.learning_rate()).collect::<Vec<_>>(), [Some(3e-4), Some(0.0)]);
/// # let _ = scheduler;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// With the feature `config` schedules can be read from JSON, TOML and the like, and written: see the module
/// `config`.
///
/// Any counts are accepted: a phase of `u64::MAX` steps lasts for ever, and values saturate at the largest
/// number.
#[must_use = "it does nothing by itself: pass it to `Scheduler::new`"]
#[derive(Clone, Debug, PartialEq)]
pub struct Schedule {
    pub(crate) curve: Curve,
    /// `None` for the default, the learning rate.
    pub(crate) field: Option<String>,
    pub(crate) is_relative: bool,
    pub(crate) leaves: LeafChoice,
}

/// Which leaves are driven.
#[derive(Clone)]
pub(crate) enum LeafChoice {
    All,
    Below(String),
    Where(Arc<dyn Fn(&Leaf) -> bool + Send + Sync>),
}

impl Schedule {
    /// Always `eta`.
    pub fn constant(eta: f64) -> Self {
        Self::along(Curve::Constant(eta))
    }

    /// From `start` to `end` in `steps` equal steps, then `end`: a warm-up if it goes up.
    pub fn linear(start: f64, end: f64, steps: u64) -> Self {
        Self::polynomial(start, end, steps, 1.0)
    }

    /// `end + (start - end)·(1 - step/steps)^power`, then `end`.
    pub fn polynomial(start: f64, end: f64, steps: u64, power: f64) -> Self {
        Self::along(Curve::Between { start, end, steps, easing: Easing::Power(power) })
    }

    /// `end + (start - end)·(1 + cos(π·step/steps)) / 2`, then `end`: cosine annealing.
    ///
    /// Loshchilov and Hutter 2016, [arXiv 1608.03983](https://arxiv.org/abs/1608.03983). torch's
    /// `CosineAnnealingLR` goes up again after its end; for that use `then` with a cosine back.
    pub fn cosine(start: f64, end: f64, steps: u64) -> Self {
        Self::along(Curve::Between { start, end, steps, easing: Easing::Cosine })
    }

    /// `end + (start - end)·(1 - √(step/steps))`, then `end`: steep at first and flat at the end.
    ///
    /// In Hägele et al. 2024 ([arXiv 2405.18392](https://arxiv.org/abs/2405.18392), there "1-sqrt", with
    /// `end` 0) it is the best decay after a constant rate.
    ///
    /// ```
    /// use optimisers::Schedule;
    ///
    /// // The last fifth of the training.
    /// let schedule = Schedule::warmup_stable_then(1e-3, 100, 700, Schedule::one_minus_square_root(1e-3, 0.0, 200));
    /// assert_eq!([100, 799, 800, 850, 1000].map(|step| schedule.at(step)), [1e-3, 1e-3, 1e-3, 5e-4, 0.0]);
    /// ```
    pub fn one_minus_square_root(start: f64, end: f64, steps: u64) -> Self {
        Self::along(Curve::Between { start, end, steps, easing: Easing::OneMinusSquareRoot })
    }

    /// Cosine annealing from `high` to `low` with warm restarts: torch's `CosineAnnealingWarmRestarts`.
    ///
    /// The first period has `steps`, each later one `factor` (1 or more) times as many (SGDR, same paper as
    /// [`cosine`](Schedule::cosine)).
    pub fn cosine_restarts(high: f64, low: f64, steps: u64, factor: f64) -> Self {
        Self::along(Curve::Restarts { high, low, steps, factor })
    }

    /// Up to `peak` and down again, by cosines: the rate of torch's `OneCycleLR`.
    ///
    /// It goes from `peak / 25` to `peak` in the first three tenths of `steps`, and to `peak / 250 000` in
    /// the others (Smith and Topin 2017, [arXiv 1708.07120](https://arxiv.org/abs/1708.07120)).
    ///
    /// These are the defaults of torch, where the schedule moves the momentum or β₁ as well, unless it has
    /// `cycle_momentum=False`. This one moves the rate alone.
    pub fn one_cycle(peak: f64, steps: u64) -> Self {
        Self::along(Curve::OneCycle { peak, steps })
    }

    /// `start·rate^(step / steps)`.
    pub fn exponential(start: f64, rate: f64, steps: u64) -> Self {
        Self::along(Curve::Exponential { start, rate, steps, staircase: false })
    }

    /// `start·rate^⌊step / steps⌋`: times `rate` every `steps`. torch's `StepLR`.
    pub fn step(start: f64, rate: f64, steps: u64) -> Self {
        Self::along(Curve::Exponential { start, rate, steps, staircase: true })
    }

    /// Up linearly to `peak` in `warmup` steps, then `peak·√(warmup / step)`.
    ///
    /// It is the schedule of the Transformer paper (Vaswani et al. 2017, [arXiv
    /// 1706.03762](https://arxiv.org/abs/1706.03762)), `peak·√warmup·min(1/√step, step·warmup^-1.5)`, whose
    /// peak is `1/√(width·warmup)`.
    ///
    /// The paper's first step is 1. Here the first rate is that of step 0, which is 0 with a warm-up: under a
    /// [`Scheduler`](crate::Scheduler) the first update moves nothing.
    pub fn inverse_square_root(peak: f64, warmup: u64) -> Self {
        Self::along(Curve::InverseSquareRoot { peak, warmup })
    }

    /// Linearly up to `peak` in `warmup` steps, `peak` for `stable`, linearly down to `end` in `decay`.
    ///
    /// Warmup-stable-decay is by Hu et al. 2024 ([arXiv 2404.06395](https://arxiv.org/abs/2404.06395)). For a
    /// decay along another curve see [`Schedule::warmup_stable_then`]. With a warm-up the first rate is 0, so
    /// the first update moves nothing.
    pub fn warmup_stable_decay(peak: f64, end: f64, warmup: u64, stable: u64, decay: u64) -> Self {
        Self::warmup_stable_then(peak, warmup, stable, Self::linear(peak, end, decay))
    }

    /// Linearly up to `peak` in `warmup` steps, `peak` for `stable`, then `decay` from its step 0 on.
    ///
    /// `decay` is any curve from `peak` down, such as
    /// [`one_minus_square_root`](Schedule::one_minus_square_root), [`cosine`](Schedule::cosine) or
    /// [`exponential`](Schedule::exponential). With a warm-up the first rate is 0, so the first update moves
    /// nothing.
    pub fn warmup_stable_then(peak: f64, warmup: u64, stable: u64, decay: Schedule) -> Self {
        let rise = Self::linear(0.0, peak, warmup).then(warmup, Self::constant(peak));
        rise.then(warmup.saturating_add(stable), decay)
    }

    /// This schedule for the first `steps`, then another, which counts from 0 again.
    ///
    /// [`relative`](Schedule::relative), [`field`](Schedule::field) and the like apply to the whole,
    /// whichever of the two they are called for; if both say it, this one decides.
    pub fn then(self, steps: u64, next: Schedule) -> Self {
        Schedule {
            curve: Curve::Joined { first: Box::new(self.curve), at: steps, second: Box::new(next.curve) },
            field: self.field.or(next.field),
            is_relative: self.is_relative || next.is_relative,
            leaves: if matches!(self.leaves, LeafChoice::All) { next.leaves } else { self.leaves },
        }
    }

    /// Makes it a factor of each leaf's own rate when the [`Scheduler`](crate::Scheduler) is made.
    ///
    /// torch's `LambdaLR`: `Schedule::cosine(1.0, 0.1, steps).relative()` ends with a tenth of each rate.
    pub fn relative(self) -> Self {
        Schedule { is_relative: true, ..self }
    }

    /// Drives another hyper-parameter in place of the learning rate.
    ///
    /// It has to be a real number. Give its name, or its place in a chain too, as in `0.lambda`. A name that
    /// several members of a chain have needs a place, except `eta`, which is their
    /// [product](crate::Adjust::adjust).
    pub fn field(self, field: impl Into<String>) -> Self {
        Schedule { field: Some(field.into()), ..self }
    }

    /// Drives only the leaf at `path` and those below it, in place of an earlier selection.
    pub fn below(self, path: impl Into<String>) -> Self {
        Schedule { leaves: LeafChoice::Below(path.into()), ..self }
    }

    /// Drives only the leaves for which `choose` holds, in place of an earlier selection.
    ///
    /// `choose` is asked again in every step.
    pub fn select_where(self, choose: impl Fn(&Leaf) -> bool + Send + Sync + 'static) -> Self {
        Schedule { leaves: LeafChoice::Where(Arc::new(choose)), ..self }
    }

    /// The value for the step with this index, from 0 on.
    pub fn at(&self, step: u64) -> f64 {
        self.curve.at(step)
    }

    fn along(curve: Curve) -> Self {
        Schedule { curve, field: None, is_relative: false, leaves: LeafChoice::All }
    }

    /// The field that it drives, as it was given.
    pub(super) fn driven_field(&self) -> &str {
        self.field.as_deref().unwrap_or(RATE)
    }

    /// The name of the field without its place.
    pub(super) fn name(&self) -> &str {
        self.driven_field().rsplit('.').next().unwrap_or_default()
    }

    /// Whether it drives this leaf, if the leaf has the field.
    pub(super) fn selects(&self, leaf: &Leaf) -> bool {
        match &self.leaves {
            LeafChoice::All => true,
            LeafChoice::Below(path) => leaf.paths().any(|name| below(name, path).is_some()),
            LeafChoice::Where(choose) => choose(leaf),
        }
    }

    /// The error if it selects no leaf.
    pub(super) fn empty(&self, state: &StateTree) -> Error {
        let selection = match &self.leaves {
            LeafChoice::Below(path) => selected_path(path),
            LeafChoice::All | LeafChoice::Where(_) => "the predicate".to_string(),
        };
        state.no_leaf(&selection)
    }
}

impl From<Schedule> for Vec<Schedule> {
    fn from(schedule: Schedule) -> Self {
        vec![schedule]
    }
}

impl fmt::Debug for LeafChoice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            LeafChoice::All => f.write_str("All"),
            LeafChoice::Below(path) => f.debug_tuple("Below").field(path).finish(),
            LeafChoice::Where(_) => f.write_str("Where(..)"),
        }
    }
}

impl PartialEq for LeafChoice {
    fn eq(&self, other: &Self) -> bool {
        match (self, other) {
            (LeafChoice::All, LeafChoice::All) => true,
            (LeafChoice::Below(path), LeafChoice::Below(other)) => path == other,
            (LeafChoice::Where(choose), LeafChoice::Where(other)) => Arc::ptr_eq(choose, other),
            _ => false,
        }
    }
}
