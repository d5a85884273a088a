//! Learning rates that fall when a metric stops improving.

use serde::{Deserialize, Serialize};

use crate::error::{Error, Result};
use crate::rule::field::{FieldValue, Number};
use crate::rule::{RATE, out_of_range, range};
use crate::tree::{
    Adjustment, DrivenNumber, Leaf, OptimiserEdit, Selection, SetField, available_fields, driven_numbers,
};

/// Whether a metric is to fall or to rise.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
enum Mode {
    Min,
    Max,
}

/// The margin by which an observation has to be better than the best earlier observation.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
enum Threshold {
    Relative(f64),
    Absolute(f64),
}

/// Reduces learning rates when a metric stops improving: torch's `ReduceLROnPlateau`.
///
/// The metric is, for example, the loss of the evaluation. Each observation runs:
///
/// ```text
/// if better:          best = metric,  bad = 0;   else  bad = bad + 1
/// if cooling > 0:     cooling = cooling - 1,  bad = 0
/// if bad > patience:  η = max(η·factor, min_eta), unless that reduces η by ε or less;
///                     cooling = cooldown,  bad = 0
/// ```
///
/// The settings are torch's, with its defaults:
///
/// | | default | |
/// | --- | --- | --- |
/// | [`rising`](ReduceOnPlateau::rising) | | for a metric that should rise, such as an accuracy |
/// | [`factor`](ReduceOnPlateau::factor) | 0.1 | the factor of a reduction |
/// | [`patience`](ReduceOnPlateau::patience) | 10 | observations in a row that may lack improvement |
/// | [`relative_threshold`](ReduceOnPlateau::relative_threshold), [`absolute_threshold`](ReduceOnPlateau::absolute_threshold) | 1e-4, relative | the least improvement |
/// | [`cooldown`](ReduceOnPlateau::cooldown) | 0 | observations after a reduction that do not count as bad |
/// | [`min_eta`](ReduceOnPlateau::min_eta) | 0 | the lowest rate |
/// | [`epsilon`](ReduceOnPlateau::epsilon) | 1e-8 | a reduction by this or less is left out |
///
/// ```
/// use candle_core::{Device, Var};
/// use optimisers::{Descent, ReduceOnPlateau, setup};
///
/// let x = Var::new(1f32, &Device::Cpu)?;
/// let mut state = setup(Descent::new(0.5), &x)?;
/// let mut plateau = ReduceOnPlateau::new().factor(0.5).patience(1);
/// for (loss, eta) in [(3.0, 0.5), (2.0, 0.5), (2.1, 0.5), (2.0, 0.25), (1.9, 0.25)] {
///     plateau.observe(loss, &mut state)?;
///     assert_eq!(state.leaf("").and_then(|leaf| leaf.learning_rate()), Some(eta));
/// }
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// # Which leaves
/// [`observe`](ReduceOnPlateau::observe) reduces the rates of the leaves (parameters) that it gets: all
/// leaves of a state, or a part of them as in `plateau.observe(loss, state.at("encoder")?)`. Each leaf's own
/// rate is reduced, so rates keep their ratios (down to `min_eta`). The rates of frozen leaves are reduced as
/// well. Leaves without a rate are passed over. A leaf that is added later starts from its own rate.
///
/// # With a schedule
/// A [relative](crate::Schedule::relative) schedule multiplies the leaf's own rate, so warm-up or decay go on
/// from the reduced rate. If any other schedule decides the rate, a reduction would have no effect, so the
/// first observation is refused.
///
/// # Checkpoints
/// The state has the reduced rates, and this object has the best metric and the counts.
/// [`Checkpoint::plateau`](crate::Checkpoint::plateau) saves one object, and
/// [`CheckpointFile::plateau`](crate::CheckpointFile::plateau) reads it. Save several objects as
/// [bytes](crate::Checkpoint::bytes), by serde's traits.
///
/// ```
/// use candle_core::{Device, Var};
/// use optimisers::{Checkpoint, CheckpointFile, Descent, ReduceOnPlateau, setup};
///
/// # let folder = tempfile::tempdir()?;
/// # let path = folder.path().join("run.safetensors");
/// let x = Var::new(1f32, &Device::Cpu)?;
/// let mut state = setup(Descent::new(0.5), &x)?;
/// let mut plateau = ReduceOnPlateau::default();
/// plateau.observe(3.0, &mut state)?;
/// Checkpoint::new(&state).plateau(&plateau).save(&path)?;
///
/// // In another process:
/// let file = CheckpointFile::open(&path)?;
/// file.restore(&mut state)?;
/// let plateau = file.plateau()?.unwrap_or_default();
/// assert_eq!(plateau.best(), Some(3.0));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// # From torch
/// serde reads and writes this object with its counts. A program takes over the counts of
/// `ReduceLROnPlateau.state_dict()` by name:
///
/// ```
/// use optimisers::ReduceOnPlateau;
///
/// let mut plateau = serde_json::to_value(ReduceOnPlateau::new().factor(0.5).patience(2))?;
/// plateau["best"] = 0.25.into(); // `best`
/// plateau["bad"] = 1.into(); // `num_bad_epochs`
/// plateau["cooling"] = 0.into(); // `cooldown_counter`
/// let plateau: ReduceOnPlateau = serde_json::from_value(plateau)?;
/// assert_eq!(plateau.best(), Some(0.25));
/// # Ok::<(), serde_json::Error>(())
/// ```
///
/// The settings are those of the program. If torch has observed nothing yet, its `best` is infinite: then do
/// not set `plateau["best"]`.
///
/// # Over ranks
/// Let every rank observe the same metric, such as the mean of all ranks, because the next
/// [`update`](crate::update) refuses ranks with different rates.
///
/// # Departures
/// Rates are those of torch's code bit for bit, except in the first of these cases:
/// - In torch, a best metric below 0 with a relative threshold has its margin on the wrong side: a loss that
///   does not change counts as better in each observation, and rates are never reduced.
/// - torch accepts a relative threshold of 1 or more, with which no loss ever improves.
/// - torch's `min_lr` can be a list. Here use one object for each part of the model.
/// - In torch, a schedule that is a factor undoes reductions.
#[must_use = "it changes nothing until it is given losses by `observe`"]
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ReduceOnPlateau {
    mode: Mode,
    factor: f64,
    patience: u64,
    threshold: Threshold,
    cooldown: u64,
    min_eta: f64,
    epsilon: f64,
    /// The hyper-parameter that is reduced.
    field: String,
    best: Option<Number>,
    /// The number of observations in a row without improvement.
    bad: u64,
    /// The number of remaining observations of the cooldown.
    cooling: u64,
}

impl Default for ReduceOnPlateau {
    fn default() -> Self {
        Self::new()
    }
}

impl ReduceOnPlateau {
    /// A plateau with torch's defaults, before the first observation.
    pub fn new() -> Self {
        ReduceOnPlateau {
            mode: Mode::Min,
            factor: 0.1,
            patience: 10,
            threshold: Threshold::Relative(1e-4),
            cooldown: 0,
            min_eta: 0.0,
            epsilon: 1e-8,
            field: RATE.to_string(),
            best: None,
            bad: 0,
            cooling: 0,
        }
    }

    /// For a metric that should rise, such as an accuracy: torch's `mode="max"`.
    pub fn rising(self) -> Self {
        ReduceOnPlateau {
            mode: Mode::Max,
            ..self
        }
    }

    /// The factor of a reduction, in (0, 1).
    pub fn factor(self, factor: f64) -> Self {
        ReduceOnPlateau { factor, ..self }
    }

    /// The number of observations in a row that may lack improvement. The next such observation reduces.
    pub fn patience(self, patience: u64) -> Self {
        ReduceOnPlateau { patience, ..self }
    }

    /// Sets the least improvement as a part of the best metric, in [0, 1).
    ///
    /// A metric that should fall is better below `best - part·|best|`. A metric that should rise is better
    /// above `best + part·|best|`.
    pub fn relative_threshold(self, part: f64) -> Self {
        ReduceOnPlateau {
            threshold: Threshold::Relative(part),
            ..self
        }
    }

    /// Sets the least improvement as a number, 0 or more: torch's `threshold_mode="abs"`.
    ///
    /// A metric that should fall is better below `best - by`, and a metric that should rise above `best +
    /// by`.
    pub fn absolute_threshold(self, by: f64) -> Self {
        ReduceOnPlateau {
            threshold: Threshold::Absolute(by),
            ..self
        }
    }

    /// The number of observations after a reduction that do not count if they lack improvement.
    pub fn cooldown(self, cooldown: u64) -> Self {
        ReduceOnPlateau { cooldown, ..self }
    }

    /// The lowest learning rate that a reduction leaves.
    pub fn min_eta(self, min_eta: f64) -> Self {
        ReduceOnPlateau { min_eta, ..self }
    }

    /// Leaves out a reduction by `epsilon` or less.
    pub fn epsilon(self, epsilon: f64) -> Self {
        ReduceOnPlateau { epsilon, ..self }
    }

    /// Reduces another hyper-parameter instead of the learning rate.
    ///
    /// The hyper-parameter is named as in [`Schedule::field`](crate::Schedule::field).
    pub fn field(self, field: impl Into<String>) -> Self {
        ReduceOnPlateau {
            field: field.into(),
            ..self
        }
    }

    /// Counts a metric, and reduces the learning rates of the leaves if a reduction is due.
    ///
    /// The leaves are a [`StateTree`](crate::StateTree) or a [`Selection`]. Returns whether a rate has
    /// changed. NaN is no improvement.
    ///
    /// # Errors
    /// If a setting is out of range, if no leaf has the field, or if a schedule that is not relative decides
    /// the field. Also if several members of a chain have the field, unless it is the learning rate. After an
    /// error nothing has changed, and the metric does not count.
    pub fn observe<'t>(&mut self, metric: f64, leaves: impl Into<Selection<'t>>) -> Result<bool> {
        self.check()?;
        let mut leaves = leaves.into();
        leaves.check_leaves()?;
        let reductions = self.reductions(&leaves)?;
        // The metric is counted in a copy, so that an error below leaves the counts as they are.
        let mut next = self.clone();
        let has_changed = next.count(metric) && reductions.iter().any(|fields| !fields.is_empty());
        // The adjustment is prepared in each observation, so that the first observation is refused if a
        // reduction would have no effect.
        let adjustment = Adjustment::per_leaf(leaves.leaves(), leaves.steps, reductions)?;
        if has_changed {
            leaves.commit(adjustment);
        }
        *self = next;
        Ok(has_changed)
    }

    /// Counts an observation, and returns whether a reduction is due.
    fn count(&mut self, metric: f64) -> bool {
        if self.is_better(metric) {
            self.best = Some(Number(metric));
            self.bad = 0;
        } else {
            self.bad = self.bad.saturating_add(1);
        }
        if self.cooling > 0 {
            self.cooling -= 1;
            self.bad = 0;
        }
        let is_due = self.bad > self.patience;
        if is_due {
            self.cooling = self.cooldown;
            self.bad = 0;
        }
        is_due
    }

    fn is_better(&self, metric: f64) -> bool {
        match (self.mode, self.best, self.threshold) {
            (Mode::Min, None, _) => metric < f64::INFINITY,
            (Mode::Max, None, _) => metric > f64::NEG_INFINITY,
            // `copysign` puts the margin on the right side of a best metric below 0, too.
            (Mode::Min, Some(Number(best)), Threshold::Relative(part)) => {
                metric < best * (1.0 - part.copysign(best))
            }
            (Mode::Min, Some(Number(best)), Threshold::Absolute(by)) => metric < best - by,
            (Mode::Max, Some(Number(best)), Threshold::Relative(part)) => {
                metric > best * (1.0 + part.copysign(best))
            }
            (Mode::Max, Some(Number(best)), Threshold::Absolute(by)) => metric > best + by,
        }
    }

    /// For each leaf, the fields that a reduction would set.
    fn reductions(&self, leaves: &Selection<'_>) -> Result<Vec<OptimiserEdit<'static>>> {
        let mut has_field = false;
        let leaf_reductions = |leaf: &Leaf| {
            let numbers = driven_numbers(&self.field, leaf.optimiser().description());
            let Some(numbers) = numbers.map_err(|error| error.at(leaf.path()))? else {
                return Ok(Vec::new());
            };
            has_field = true;
            Ok(numbers
                .iter()
                .filter_map(|number| self.reduction(number))
                .collect())
        };
        let reductions = leaves.leaves().map(leaf_reductions).collect::<Result<_>>()?;
        match has_field {
            true => Ok(reductions),
            false => Err(Error::unknown(
                "field",
                &self.field,
                &available_fields(leaves.leaves(), &self.field),
            )),
        }
    }

    /// The field of a number, and the value that a reduction would give it. `None` if the reduction would be
    /// `epsilon` or less.
    fn reduction(&self, number: &DrivenNumber) -> Option<(SetField<'static>, FieldValue)> {
        let rate = number.field.rate();
        let next = (rate * self.factor).max(self.min_eta);
        let is_due = rate - next > self.epsilon;
        let value = number.field.value_for(next).filter(|_| is_due)?;
        Some((SetField::Number(number.place()), value.into()))
    }

    /// The best metric so far; `None` before the first observation, or if all were NaN or the worst infinity.
    pub fn best(&self) -> Option<f64> {
        self.best.map(|Number(best)| best)
    }

    /// Checks every number against its range, also the counts, because a file can have any numbers.
    pub(crate) fn check(&self) -> Result<()> {
        let Self {
            factor,
            threshold,
            min_eta,
            epsilon,
            patience,
            cooldown,
            best,
            ..
        } = *self;
        let refuse = |field: &str, value: FieldValue, expected: &str| {
            Err(out_of_range("ReduceOnPlateau", field, value, expected))
        };
        if let Some(Number(best)) = best.filter(|Number(best)| best.is_nan()) {
            return refuse("best", best.into(), "a number");
        }
        let check_size = |field: &str, value: f64| {
            range::non_negative(value).map_or(Ok(()), |expected| refuse(field, value.into(), expected))
        };
        match threshold {
            Threshold::Relative(part) if !(0.0..1.0).contains(&part) => {
                return refuse("threshold", part.into(), "a number in [0, 1)");
            }
            Threshold::Absolute(by) => check_size("threshold", by)?,
            Threshold::Relative(_) => {}
        }
        check_size("min_eta", min_eta)?;
        check_size("epsilon", epsilon)?;
        if !(factor > 0.0 && factor < 1.0) {
            refuse("factor", factor.into(), "a number in (0, 1)")
        } else if self.bad > patience {
            refuse("bad", self.bad.into(), "a count of at most `patience`")
        } else if self.cooling > cooldown {
            refuse("cooling", self.cooling.into(), "a count of at most `cooldown`")
        } else {
            Ok(())
        }
    }
}
