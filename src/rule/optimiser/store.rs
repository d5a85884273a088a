//! The ways in which an optimiser stores a parameter: what its state keeps, and how a step is rounded.
//!
//! ```text
//! store          kept in the state             precise value          x of the rule
//! Rounded        nothing                       the parameter          the parameter
//! Master         `master`                      the master             the master
//! Split          `rest`: low bits              both joined            both joined
//! Compensated    `compensation`: lost digits   the sum of both        the parameter
//! Stochastic     `rounded`: a counter          the parameter          the parameter
//! ```
//!
//! [`Store::of`] decides by dtype: a parameter as precise as its store would make it is `Rounded`.

use std::fmt;

use crate::engine::{
    Buffer, Epilogue, Job, Operand, Progress, compensated, joined, keep_low_bits, rounded, rounded_to,
    set_lent, set_lent_and, split,
};
use crate::error::{Error, ErrorKind, Result};
use crate::model::lent::Lend;
use crate::numbers::low_bits::LowBits;
use crate::numbers::{DType, Records, counts, is_wider, random_key};
use crate::rule::description::record::{StorageKind, StorageRecord};
use crate::rule::state::not_made_by;
use crate::rule::{Describer, Gradient, Parameter, Rule, State, range};
use crate::tensors::{Tensor, allocated, difference, dtype_of, in_dtype, sum};

/// How an optimiser stores parameters.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Store {
    /// In their own dtype, to which each step is rounded.
    Rounded,
    /// With a master in this dtype.
    Master(DType),
    /// With the low bits that a bf16 lacks of a master.
    Split(LowBits),
    /// With what the last rounding lost.
    Compensated,
    /// With random rounding, whose bits follow from the seed and a counter of steps.
    Stochastic { seed: u64 },
}

/// What the constructor of the public type takes besides the rule.
impl fmt::Debug for Store {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Store::Rounded => f.write_str("Rounded"),
            Store::Master(dtype) => write!(f, "{dtype:?}"),
            Store::Split(LowBits::All) => f.write_str("32 bits"),
            Store::Split(LowBits::Byte) => f.write_str("24 bits"),
            Store::Compensated => f.write_str("compensated"),
            Store::Stochastic { seed } => write!(f, "{seed}"),
        }
    }
}

impl Store {
    /// Describes this store around `rule`.
    pub(crate) fn describe(&mut self, rule: &mut dyn Rule, describer: &mut Describer<'_>) {
        if *self == Store::Rounded {
            return rule.describe(describer);
        }
        describer.kind(self.name());
        describer.stores(StorageRecord::with_parameter(self.kind()));
        match self {
            Store::Master(dtype) => {
                describer.setting("dtype", *dtype);
                describer.require(|| check_master_dtype(*dtype));
            }
            Store::Split(LowBits::Byte) => describer.setting("bits", 24),
            Store::Stochastic { seed } => {
                // `field` takes a default. A seed has none, so its own value is passed instead.
                let own = *seed;
                describer.field("seed", seed, own, range::any);
            }
            Store::Rounded | Store::Split(LowBits::All) | Store::Compensated => {}
        }
        describer.holds(rule);
    }

    /// The kind of an optimiser with this store.
    pub(super) fn name(self) -> &'static str {
        match self {
            Store::Rounded => "a rule",
            Store::Master(_) => "MixedPrecision",
            Store::Split(_) => "SplitMaster",
            Store::Compensated => "Kahan",
            Store::Stochastic { .. } => "StochasticRounding",
        }
    }

    /// Whether the state makes the parameter more precise.
    pub(crate) fn keeps_precise(self) -> bool {
        match self {
            Store::Rounded | Store::Stochastic { .. } => false,
            Store::Master(_) | Store::Split(_) | Store::Compensated => true,
        }
    }

    /// Whether a part of a parameter can be stored without the rest. Random bits depend on the place of an
    /// element in the whole.
    pub(super) fn is_divisible(self) -> bool {
        match self {
            Store::Rounded | Store::Master(_) | Store::Split(_) | Store::Compensated => true,
            Store::Stochastic { .. } => false,
        }
    }

    /// The kind in files.
    pub(super) fn kind(self) -> StorageKind {
        match self {
            Store::Rounded => StorageKind::Rounded,
            Store::Master(_) => StorageKind::Master,
            Store::Split(_) => StorageKind::Split,
            Store::Compensated => StorageKind::Compensated,
            Store::Stochastic { .. } => StorageKind::Stochastic,
        }
    }

    /// How parameters of this dtype are stored: by this store if it makes a difference, else `Rounded`.
    ///
    /// # Errors
    /// For `Split` of F16, which is not the upper part of an F32.
    fn of(self, dtype: DType) -> Result<Self> {
        let is_special = match self {
            Store::Rounded => false,
            Store::Master(wide) => is_wider(wide, dtype),
            Store::Split(_) if dtype == DType::F16 => {
                return Err(Error::dtype("it", dtype, "BF16 (F32 and F64 are left alone)")
                    .with_remedy("use MixedPrecision or Kahan instead of SplitMaster"));
            }
            Store::Split(_) => dtype == DType::BF16,
            Store::Compensated | Store::Stochastic { .. } => matches!(dtype, DType::F16 | DType::BF16),
        };
        Ok(if is_special { self } else { Store::Rounded })
    }

    /// Makes the state for the parameter `x`, around that of the rule.
    pub(super) fn state(self, rule: &dyn Rule, x: &dyn Lend) -> Result<State> {
        let of_rule = |x: &dyn Lend| rule.init(Parameter::new(x));
        match self.of(x.dtype())? {
            Store::Rounded => of_rule(x),
            Store::Master(dtype) => {
                let x = x.tensor_or_copy()?;
                let master = allocated(x.elem_count(), dtype, x.device(), || rounded(&x, dtype))?;
                State::with_master(&master, of_rule(&master)?)
            }
            Store::Split(low_bits) => {
                // All 0, so that each f32 is equal to its bf16.
                let records = (low_bits == LowBits::All).then_some(Records::LowBits);
                let rest = Buffer::of_zeros(x.shape().into(), DType::U8, records, x.device())?;
                Ok(State::empty().with_buffer("rest", rest).stored_with(of_rule(x)?))
            }
            Store::Compensated => {
                let lost = Buffer::of_zeros(x.shape().into(), x.dtype(), None, x.device())?;
                Ok(State::empty().with_lost("compensation", lost).stored_with(of_rule(x)?))
            }
            Store::Stochastic { .. } => Ok(State::empty().with_counter("rounded").stored_with(of_rule(x)?)),
        }
    }

    /// The precise value. It may share memory with the parameter or the state.
    pub(super) fn precise(self, state: &State, x: &dyn Lend) -> Result<Tensor> {
        match self.of(x.dtype())? {
            Store::Rounded | Store::Stochastic { .. } => x.tensor_or_copy(),
            Store::Master(_) => Ok(self.kept(state)?.tensor()?),
            Store::Split(_) => Ok(joined(&x.tensor_or_copy()?, self.kept(state)?)?),
            Store::Compensated => {
                let [x, lost] = [x.tensor_or_copy()?, self.kept(state)?.tensor()?]
                    .map(|tensor| in_dtype(&tensor, DType::F32));
                Ok(sum(&x?, &lost?)?)
            }
        }
    }

    /// The x of the rule.
    pub(super) fn seen_by_rule(self, state: &State, x: &dyn Lend) -> Result<Tensor> {
        match self {
            Store::Compensated => x.tensor_or_copy(),
            Store::Rounded | Store::Master(_) | Store::Split(_) | Store::Stochastic { .. } => {
                self.precise(state, x)
            }
        }
    }

    /// Sets parameter and state to a precise value.
    pub(super) fn set_precise(self, state: &mut State, x: &dyn Lend, values: &Tensor) -> Result<()> {
        // State is written after `x`, because the owner of `x` may refuse to lend it: then both stay.
        match self.of(x.dtype())? {
            Store::Rounded | Store::Stochastic { .. } => set_lent(x, values),
            Store::Master(_) => {
                let master = self.kept_mut(state)?;
                let values = rounded(values, master.dtype())?;
                set_lent_and(x, &values, &mut || Ok(master.set(&values)?))
            }
            Store::Split(_) => {
                let rest = self.kept_mut(state)?;
                let (high, low) = split(rest, values)?;
                set_lent_and(x, &high, &mut || Ok(rest.set(&low)?))
            }
            Store::Compensated => {
                let compensation = self.kept_mut(state)?;
                let (next, lost) = compensated(&x.tensor_or_copy()?, compensation, values)?;
                set_lent_and(x, &next, &mut || Ok(compensation.set(&lost)?))
            }
        }
    }

    /// Sets the state alone, so that the precise value is the nearest to `values` of those that round to `x`.
    /// Returns whether the state keeps anything.
    pub(super) fn keep_precise(self, state: &mut State, x: &dyn Lend, values: &Tensor) -> Result<bool> {
        let store = self.of(x.dtype())?;
        match store {
            Store::Rounded | Store::Stochastic { .. } => {}
            Store::Master(dtype) => {
                self.kept_mut(state)?.set(&rounded_to(&x.tensor_or_copy()?, values, dtype)?)?
            }
            Store::Split(_) => keep_low_bits(self.kept_mut(state)?, &x.tensor_or_copy()?, values)?,
            Store::Compensated => {
                let lost = difference(values, &in_dtype(&x.tensor_or_copy()?, dtype_of(values))?)?;
                self.kept_mut(state)?.set(&lost)?;
            }
        }
        Ok(store.keeps_precise())
    }

    /// The job of a step of `rule` for the parameter `x`.
    pub(super) fn job<'a>(
        self,
        rule: &'a dyn Rule,
        state: &'a mut State,
        x: &'a dyn Lend,
        dx: Gradient<'a>,
    ) -> Result<Job<'a>> {
        let (store, path, seen) = (self.of(x.dtype())?, dx.path(), Parameter::new(x));
        let (of_rule, kept, roundings) = store.parts(state)?;
        let lacks = || store.other_state();
        Ok(match store {
            Store::Rounded => rule.apply(of_rule, seen, dx)?.into_job(Operand::Lent(x), Epilogue::Subtract),
            Store::Master(_) => {
                let master = kept.ok_or_else(lacks)?;
                let seen = seen.as_master(master.dtype(), master.device().is_cpu());
                rule.apply(of_rule, seen, dx)?.into_job(Operand::master(master), Epilogue::Master(x))
            }
            Store::Split(_) => {
                let flow = rule.apply(of_rule, seen, dx)?;
                let low_bits = Some(kept.ok_or_else(lacks)?);
                Job { low_bits, ..flow.into_job(Operand::Lent(x), Epilogue::Subtract) }
            }
            Store::Compensated => {
                let flow = rule.apply(of_rule, seen, dx)?;
                flow.into_job(Operand::Lent(x), Epilogue::Kahan(kept.ok_or_else(lacks)?))
            }
            Store::Stochastic { seed } => {
                let flow = rule.apply(of_rule, seen, dx)?;
                let step = roundings.ok_or_else(lacks)?;
                let key = random_key(seed, *step, path);
                let mut job = flow.into_job(Operand::Lent(x), Epilogue::Stochastic(key));
                // Only a step is rounded, so a call without a step does not move the counter.
                if job.progress == Progress::Applied {
                    let next = counts::after(*step, 1);
                    job.counters.push((step, next));
                }
                job
            }
        })
    }

    /// The state of the rule, and the tensor and the counter that this store keeps.
    fn parts(self, state: &mut State) -> Result<(&mut State, Option<&mut Buffer>, Option<&mut u64>)> {
        if self == Store::Rounded {
            return Ok((state, None, None));
        }
        let State { master, tensors, counters, children, .. } = state;
        let [inner] = &mut children[..] else { return Err(self.other_state()) };
        let kept = if let Store::Master(_) = self { master.as_mut() } else { only(tensors) };
        Ok((&mut inner.state, kept, only(counters)))
    }

    /// The tensor that this store keeps.
    fn kept(self, state: &State) -> Result<&Buffer> {
        let own = if let [(_, own)] = &state.tensors[..] { Some(own) } else { None };
        let kept = if let Store::Master(_) = self { state.master.as_ref() } else { own };
        kept.ok_or_else(|| self.other_state())
    }

    fn kept_mut(self, state: &mut State) -> Result<&mut Buffer> {
        self.parts(state)?.1.ok_or_else(|| self.other_state())
    }

    fn other_state(self) -> Error {
        not_made_by(self.name())
    }
}

/// The value of the only entry.
fn only<'s, T>(named: &'s mut [(&'static str, T)]) -> Option<&'s mut T> {
    if let [(_, value)] = named { Some(value) } else { None }
}

/// Refuses masters in a dtype other than F32 and F64.
fn check_master_dtype(dtype: DType) -> Result<()> {
    if matches!(dtype, DType::F32 | DType::F64) {
        return Ok(());
    }
    Err(Error::new(ErrorKind::Argument, "the dtype of the copy that MixedPrecision keeps is")
        .with_got(format_args!("{dtype:?}"))
        .with_expected("F32 or F64"))
}
