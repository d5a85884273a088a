//! Loss scaling, for gradients that would underflow in f16: the loss is multiplied, the update divides.
//!
//! `pending` has the scale from the scaled loss to the update, so that an update whose loss was not scaled is
//! refused. An iteration collects the findings of several updates, and moves the scale once, at its end.
//! [`DynamicScale`] says how the scale moves, [`OnOverflow`] what an overflow does to a window (the calls
//! that an `AccumGrad` collects).

#[cfg(feature = "candle")]
pub(crate) mod scaled;

use serde::{Deserialize, Serialize};

use super::outcome::Outcome;
use crate::error::{Error, ErrorKind, Result};
use crate::rule::field::FieldValue;
use crate::rule::out_of_range;

/// Multiplies losses by a scale, and divides their gradients by it.
///
/// ```text
/// loss' = s·loss                      scale
/// dx    = dx' / s                     update, in the same pass as the rules, in the compute type
/// any dx not finite: nothing moves;   dynamic: s = max(s·0.5, floor)
/// 2000 steps without overflow:        dynamic: s = s·2
/// ```
///
/// Gradients of f16 activations underflow below 6e-8, which the scale prevents. If a gradient overflows
/// instead, the step is skipped and the scale made smaller. bf16 has the range of f32 and needs no scale.
///
/// ```
/// use candle_core::{DType::{F16, F32}, Device, Var};
/// use optimisers::{AdamW, ClipGlobalNorm, LossScaler, MixedPrecision, OptimiserChain, Update, setup};
///
/// let x = Var::ones(3, F16, &Device::Cpu)?;
/// let rule = OptimiserChain::new((ClipGlobalNorm::new(1.0), AdamW::new(1e-3)));
/// let mut state = setup(MixedPrecision::new(F32, rule), &x)?;
/// let mut scaler = LossScaler::dynamic();
/// for _ in 0..3 {
///     let loss = (x.sqr()? * 1e-6)?.to_dtype(F32)?.mean_all()?;
///     let grads = scaler.scale(&loss)?.backward()?;
///     Update::new(&mut state).scaler(&mut scaler).apply(&x, &grads)?;
/// }
/// # assert_eq!(state.leaf("").map(|leaf| leaf.steps()), Some(3));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// # With accumulation
/// Scale and update each micro-batch as above. Its gradient is divided by its own scale before
/// [`AccumGrad`](crate::AccumGrad) adds it. The scale grows only with applied steps, at the end of a window.
/// A micro-batch that overflows does not count, so its window needs another micro-batch. The scale falls at
/// once, because otherwise the window might never end. [`OnOverflow::EndWindow`] gives up the window instead.
///
/// # With several losses or optimisers
/// One scaler serves all losses and optimisers. Run one iteration of the training in
/// [`LossScaler::iteration`], which moves the scale once at its end, as torch's `update` does. Losses that
/// are added up for one update need no iteration: scale each.
///
/// # Without scaling
/// [`LossScaler::enabled`] with `false` switches the scaler off, so that a loop written for f16 also runs in
/// f32 or bf16.
///
/// # From torch
/// serde reads and writes a scaler with its counts. The entries of `GradScaler.state_dict()`, which `convert`
/// of the module `torch` writes as `scaler` into `training.json`, go in by name:
/// `scale` is `scale`, `_growth_tracker` is `good_steps`, and the other three are fields of [`DynamicScale`].
///
/// ```
/// use optimisers::{DynamicScale, LossScaler};
///
/// let torch = r#"{"scale": 1024.0, "growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 2000, "_growth_tracker": 7}"#;
/// let torch: serde_json::Value = serde_json::from_str(torch)?;
/// let number = |key: &str| torch[key].as_f64().expect("a number");
/// let dynamic = DynamicScale {
///     growth_factor: number("growth_factor"),
///     backoff_factor: number("backoff_factor"),
///     growth_interval: number("growth_interval") as u64,
///     ..DynamicScale::default()
/// };
/// let mut scaler = serde_json::to_value(LossScaler::with(dynamic))?;
/// scaler["scale"] = torch["scale"].clone();
/// scaler["good_steps"] = torch["_growth_tracker"].clone();
/// let scaler: LossScaler = serde_json::from_value(scaler)?;
/// assert_eq!(scaler.current(), 1024.0);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// # Departures
/// The numbers are those of `torch.amp.GradScaler`. In torch, gradients are unscaled in a pass of their own,
/// once per window; a call of `step` without overflow counts as a good step even if nothing was applied; and
/// the scale can fall to 0. Hysteresis, floor and its error are those of DeepSpeed's `DynamicLossScaler`.
#[must_use = "a scaler does nothing by itself: call its `scale` and `update`"]
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct LossScaler {
    scale: f64,
    /// `None` for a fixed scale.
    dynamic: Option<DynamicScale>,
    on_overflow: OnOverflow,
    /// Applied steps since the scale last changed or a gradient overflowed.
    good_steps: u64,
    /// The number of further overflows that the scale tolerates before it falls.
    tolerance: u64,
    enabled: bool,
    /// The scale of the loss that was scaled last, until an update uses it up.
    #[serde(skip)]
    pending: Option<f64>,
    /// The findings of an iteration so far; `None` outside of an iteration.
    #[serde(skip)]
    iteration: Option<Findings>,
}

/// What one or more updates have found. The findings decide how the scale moves.
#[derive(Clone, Debug, Default, PartialEq)]
struct Findings {
    /// The first parameter whose gradient is not finite.
    overflow: Option<String>,
    has_stepped: bool,
}

impl LossScaler {
    /// A scaler with a fixed scale.
    pub fn fixed(scale: f64) -> Self {
        let on_overflow = OnOverflow::default();
        LossScaler {
            scale,
            dynamic: None,
            on_overflow,
            good_steps: 0,
            tolerance: 0,
            enabled: true,
            pending: None,
            iteration: None,
        }
    }

    /// A scaler that starts at 65536, doubles after 2000 steps without overflow and halves on overflow.
    pub fn dynamic() -> Self {
        Self::with(DynamicScale::default())
    }

    /// A scaler whose scale moves by these numbers.
    ///
    /// ```
    /// use optimisers::{DynamicScale, LossScaler};
    ///
    /// let like_deepspeed = LossScaler::with(DynamicScale { growth_interval: 1000, hysteresis: 2, floor: 1.0, ..DynamicScale::default() });
    /// assert_eq!(like_deepspeed.current(), 65536.0);
    /// ```
    pub fn with(dynamic: DynamicScale) -> Self {
        let tolerance = dynamic.hysteresis.saturating_sub(1);
        LossScaler {
            dynamic: Some(dynamic),
            tolerance,
            ..Self::fixed(dynamic.initial)
        }
    }

    /// The same scaler with another answer to overflows in a window of [`AccumGrad`](crate::AccumGrad).
    pub fn on_overflow(mut self, answer: OnOverflow) -> Self {
        self.on_overflow = answer;
        self
    }

    /// The same scaler, switched on or off; by default it is on.
    ///
    /// If the scaler is off, [`scale`](LossScaler::scale) returns the loss as it is, and the scale stays.
    /// Updates need no scaled loss and do not divide. They check that gradients are finite only under
    /// [`Update::finite_only`](crate::Update::finite_only).
    ///
    /// ```
    /// use candle_core::{DType, Device, Var};
    /// use optimisers::{Descent, LossScaler, Update, setup};
    ///
    /// let x = Var::ones(1, DType::BF16, &Device::Cpu)?;
    /// let mut scaler = LossScaler::dynamic().enabled(x.dtype() == DType::F16);
    /// let mut state = setup(Descent::new(0.5), &x)?;
    /// let grads = scaler.scale(&x.sum_all()?)?.backward()?;
    /// let outcome = Update::new(&mut state).scaler(&mut scaler).apply(&x, &grads)?;
    /// assert_eq!((outcome.applied, outcome.loss_scale, scaler.current()), (1, None, 1.0));
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn enabled(mut self, enabled: bool) -> Self {
        self.enabled = enabled;
        self
    }

    /// The scale that the next loss is multiplied by; 1 if the scaler is off.
    pub fn current(&self) -> f64 {
        if self.enabled { self.scale } else { 1.0 }
    }

    /// The factor for a loss that is not a tensor, instead of [`LossScaler::scale`].
    ///
    /// The factor is the scale, or 1 if the scaler is not [enabled](LossScaler::enabled). The call counts as
    /// a scaled loss.
    ///
    /// # Errors
    /// As [`LossScaler::scale`].
    #[must_use = "the loss is to be multiplied by this number"]
    pub fn factor(&mut self) -> Result<f64> {
        self.check()?;
        if !self.enabled {
            return Ok(1.0);
        }
        self.pending = Some(self.scale);
        Ok(self.scale)
    }

    /// Runs one iteration with several losses, models or optimisers, such as those of a GAN.
    ///
    /// Inside `run` the scale does not move, so each gradient is divided by the scale of its loss, in any
    /// order. Any number of updates may follow a scaled loss. Only steps whose gradients are not finite are
    /// skipped. At the end the scale falls once if there was an overflow anywhere. Otherwise it counts one
    /// good step if any step was applied.
    ///
    /// If `run` fails, the scale does not move. An iteration inside another iteration is part of the outer
    /// iteration.
    ///
    /// # Errors
    /// The error of `run`; or if the scale would fall below its floor.
    ///
    /// ```
    /// use candle_core::{DType::F16, Device, Var};
    /// use optimisers::{Adam, DynamicScale, LossScaler, Update, setup};
    ///
    /// let (generator, discriminator) = (Var::ones(2, F16, &Device::Cpu)?, Var::ones(2, F16, &Device::Cpu)?);
    /// let (mut of_generator, mut of_discriminator) = (setup(Adam::new(1e-3), &generator)?, setup(Adam::new(1e-3), &discriminator)?);
    /// let mut scaler = LossScaler::with(DynamicScale { initial: 1024.0, growth_interval: 3, ..DynamicScale::default() });
    /// for _ in 0..3 {
    ///     scaler.iteration(|scaler| {
    ///         let judged = (&*generator * &*discriminator)?.sum_all()?;
    ///         let (grads, opposite) = (scaler.scale(&judged)?.backward()?, scaler.scale(&judged.neg()?)?.backward()?);
    ///         Update::new(&mut of_discriminator).scaler(scaler).apply(&discriminator, &grads)?;
    ///         Update::new(&mut of_generator).scaler(scaler).apply(&generator, &opposite)
    ///     })?;
    /// }
    /// assert_eq!(scaler.current(), 2048.0);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn iteration<T>(&mut self, run: impl FnOnce(&mut LossScaler) -> Result<T>) -> Result<T> {
        if self.iteration.is_some() {
            return run(self);
        }
        // `run` gets a copy, so that neither an error nor a panic leaves this scaler in the iteration. The
        // scaled loss goes to the copy, because an update inside may use the loss up before the failure.
        let mut inner = LossScaler {
            iteration: Some(Findings::default()),
            ..self.clone()
        };
        self.pending = None;
        let value = run(&mut inner)?;
        let findings = inner.iteration.take().unwrap_or_default();
        *self = LossScaler {
            pending: None,
            ..inner
        };
        self.move_scale(&findings)?;
        Ok(value)
    }

    /// The scale that an update divides by; `None` if the scaler is off. `reported_scale` is the scale that
    /// the gradients report for their loss. A rank without data needs no loss.
    pub(crate) fn divisor(&self, reported_scale: Option<f64>, has_data: bool) -> Result<Option<f64>> {
        self.check()?;
        if !self.enabled {
            return check_unscaled(reported_scale).map(|()| None);
        }
        let unscaled_error = || {
            Error::new(
                ErrorKind::LossScale,
                "the gradients are of a loss that was not scaled",
            )
            .with_remedy(
                "call `scale` on the loss before `backward`, once per update; several updates of one \
                 iteration go into `LossScaler::iteration`",
            )
        };
        let scale_without_loss = (!has_data).then_some(self.scale);
        let pending = self.pending.or(scale_without_loss).ok_or_else(unscaled_error)?;
        match reported_scale {
            Some(scale) if scale != pending => Err(other_scale_error(scale)
                .with_expected(format_args!(
                    "{pending}, the scale of the last loss that this scaler scaled"
                ))
                .with_remedy(
                    "use the gradients of the last scaled loss, and the scaler that scaled this loss",
                )),
            _ => Ok(Some(pending)),
        }
    }

    /// Accounts for the outcome of an update with this scale. Returns whether open windows are to end.
    pub(crate) fn account(&mut self, outcome: &mut Outcome, scale: f64) -> Result<bool> {
        let overflow = outcome.overflow().map(str::to_string);
        self.account_overflow(outcome, scale, overflow)
    }

    /// [`LossScaler::account`] for an outcome that does not show the overflow, because in a streamed step
    /// other parameters may have moved. `overflow` is the parameter whose gradient was not finite.
    pub(crate) fn account_overflow(
        &mut self,
        outcome: &mut Outcome,
        scale: f64,
        overflow: Option<String>,
    ) -> Result<bool> {
        if !self.enabled {
            return Ok(false);
        }
        outcome.loss_scale = Some(scale);
        let ends_window = overflow.is_some() && self.on_overflow == OnOverflow::EndWindow;
        if ends_window {
            outcome.open_calls = 0;
        }
        let update_findings = Findings {
            overflow,
            has_stepped: outcome.has_stepped(),
        };
        match &mut self.iteration {
            // The scale stays pending, because further updates of the iteration may divide by it.
            Some(findings) => {
                findings.overflow = findings.overflow.take().or(update_findings.overflow);
                findings.has_stepped |= update_findings.has_stepped;
            }
            None => {
                self.pending = None;
                self.move_scale(&update_findings)?;
            }
        }
        Ok(ends_window)
    }

    /// Moves the scale by the findings of an update or an iteration.
    fn move_scale(&mut self, findings: &Findings) -> Result<()> {
        match &findings.overflow {
            Some(path) => self.count_overflow(path, findings.has_stepped),
            None if findings.has_stepped => {
                self.count_step();
                Ok(())
            }
            None => Ok(()),
        }
    }

    fn count_overflow(&mut self, path: &str, has_stepped: bool) -> Result<()> {
        let Some(DynamicScale {
            backoff_factor,
            floor,
            ..
        }) = self.dynamic
        else {
            return Ok(());
        };
        self.good_steps = 0;
        if self.tolerance > 0 {
            // The tolerance is refilled only when the scale grows. Until then each overflow lowers the scale
            // once the tolerance is used up.
            self.tolerance -= 1;
            return Ok(());
        }
        if self.scale <= floor {
            let remedy = match has_stepped {
                true => {
                    "look for infinities in the model, or make the floor lower; other parameters have moved"
                }
                false => "look for infinities in the model, or make the floor lower",
            };
            return Err(Error::new(
                ErrorKind::LossScale,
                "its gradient is not finite although the loss scale is at its floor of",
            )
            .with_got(floor)
            .with_remedy(remedy)
            .at(path));
        }
        self.scale = (self.scale * backoff_factor).max(floor);
        Ok(())
    }

    fn count_step(&mut self) {
        let Some(DynamicScale {
            growth_factor,
            growth_interval,
            hysteresis,
            ..
        }) = self.dynamic
        else {
            return;
        };
        self.good_steps = self.good_steps.saturating_add(1);
        if self.good_steps >= growth_interval {
            self.good_steps = 0;
            self.tolerance = hysteresis.saturating_sub(1);
            let next_scale = self.scale * growth_factor;
            // The scale stays in the range of f32, because most losses are scaled in f32.
            if next_scale <= f64::from(f32::MAX) {
                self.scale = next_scale;
            }
        }
    }

    /// Forgets the scaled loss, if its gradients will not come or were applied already.
    pub(crate) fn forget_loss(&mut self) {
        self.pending = None;
    }

    /// Checks each number against its range, because serde and public fields accept any number.
    pub(crate) fn check(&self) -> Result<()> {
        // A smaller scale is subnormal in F32, and its inverse may be infinite there.
        let is_positive = |value: f64| value >= f32::MIN_POSITIVE.into() && value.is_finite();
        const POSITIVE: &str = "a finite number, at least 1.18e-38";
        let refuse = |field: &str, value: FieldValue, expected: &str| {
            Err(out_of_range("LossScaler", field, value, expected))
        };
        if !is_positive(self.scale) {
            return refuse("scale", self.scale.into(), POSITIVE);
        }
        let Some(DynamicScale {
            initial: _,
            growth_factor,
            backoff_factor,
            growth_interval,
            hysteresis,
            floor,
        }) = self.dynamic
        else {
            return Ok(());
        };
        if !(growth_factor >= 1.0 && growth_factor.is_finite()) {
            refuse(
                "growth_factor",
                growth_factor.into(),
                "a finite number of 1 or more",
            )
        } else if !(backoff_factor > 0.0 && backoff_factor <= 1.0) {
            refuse("backoff_factor", backoff_factor.into(), "a number in (0, 1]")
        } else if growth_interval == 0 {
            refuse("growth_interval", growth_interval.into(), "1 or more")
        } else if hysteresis == 0 {
            refuse("hysteresis", hysteresis.into(), "1 or more")
        } else if !is_positive(floor) {
            refuse("floor", floor.into(), POSITIVE)
        } else if self.good_steps >= growth_interval {
            refuse(
                "good_steps",
                self.good_steps.into(),
                "a count below growth_interval",
            )
        } else if self.tolerance >= hysteresis {
            refuse("tolerance", self.tolerance.into(), "a count below hysteresis")
        } else {
            Ok(())
        }
    }
}

/// Refuses gradients that report a scale, in an update that would not divide by this scale.
pub(crate) fn check_unscaled(reported_scale: Option<f64>) -> Result<()> {
    match reported_scale {
        None => Ok(()),
        Some(scale) => Err(other_scale_error(scale).with_remedy(
            "pass the scaler to the update with `Update::scaler`, which divides the gradients by the scale",
        )),
    }
}

/// The error for gradients whose loss was multiplied by a scale that the update does not divide by.
fn other_scale_error(scale: f64) -> Error {
    Error::new(
        ErrorKind::LossScale,
        "the gradients are of a loss that was multiplied by",
    )
    .with_got(scale)
}

/// How a dynamic scale moves.
#[must_use]
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct DynamicScale {
    /// The scale at the start, at least 1.18e-38.
    pub initial: f64,
    /// The factor by which the scale grows after `growth_interval` steps without overflow; at least 1.
    pub growth_factor: f64,
    /// The factor by which the scale falls on overflow; in (0, 1].
    pub backoff_factor: f64,
    /// The number of steps in a row without overflow after which the scale grows; at least 1.
    pub growth_interval: u64,
    /// The scale falls on the overflow with this number; 1 is the first. The count starts anew when the scale
    /// grows.
    pub hysteresis: u64,
    /// The smallest scale, at least 1.18e-38. An overflow at this scale is an error.
    pub floor: f64,
}

impl Default for DynamicScale {
    fn default() -> Self {
        DynamicScale {
            initial: 65536.0,
            growth_factor: 2.0,
            backoff_factor: 0.5,
            growth_interval: 2000,
            hysteresis: 1,
            floor: f64::from(f32::MIN_POSITIVE),
        }
    }
}

/// What an overflow does to a window of [`AccumGrad`](crate::AccumGrad).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum OnOverflow {
    /// The micro-batch does not count; the window needs another micro-batch.
    #[default]
    SkipMicroBatch,
    /// The window is given up: its sum is forgotten, and the next micro-batch is the first of a new window.
    EndWindow,
}
