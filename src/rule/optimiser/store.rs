//! The ways to store a parameter: the contents of the store's state, and the rounding of a step.
//!
//! ```text
//! store          in the store's state          precise value          x of the rule
//! Rounded        nothing                       the parameter          the parameter
//! Master         `master`                      the master             the master
//! Split          `rest`: low bits              both joined            both joined
//! Compensated    `compensation`: lost digits   the sum of both        the parameter
//! Stochastic     `rounded`: a counter          the parameter          the parameter
//! ```
//!
//! [`Store::for_dtype`] replaces a store by `Rounded` for parameters that are precise enough without the
//! store, such as F32 parameters with an F32 master.

use std::fmt;

use crate::engine::{
    Buffer, Epilogue, Job, Operand, Progress, compensated, joined, rounded, rounded_to, set_lent,
    set_lent_and, set_low_bits, split,
};
use crate::error::{Error, ErrorKind, Result};
use crate::model::lent::Lend;
use crate::numbers::low_bits::LowBits;
use crate::numbers::{DType, Records, counts, is_wider, random_key};
use crate::rule::description::record::{StorageKind, StorageRecord};
use crate::rule::state::another_rule_error;
use crate::rule::{Describer, Gradient, Parameter, Rule, State, range};
use crate::tensors::{Tensor, allocate, difference, dtype_of, in_dtype, sum};

/// How an optimiser stores parameters.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Store {
    /// In the parameter's own dtype, to which each step is rounded.
    Rounded,
    /// With a master in this dtype.
    Master(DType),
    /// With the low bits of an f32 master that a bf16 lacks.
    Split(LowBits),
    /// With a tensor of the digits that the last rounding lost.
    Compensated,
    /// With random rounding, whose bits follow from the seed and a counter of steps.
    Stochastic { seed: u64 },
}

/// Writes the argument that the constructor of the public type takes besides the rule.
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
        describer.storage(StorageRecord::with_parameter(self.kind()));
        match self {
            Store::Master(dtype) => {
                describer.setting("dtype", *dtype);
                describer.require(|| check_master_dtype(*dtype));
            }
            Store::Split(LowBits::Byte) => describer.setting("bits", 24),
            Store::Stochastic { seed } => {
                // A seed has no default, so `field` gets the seed's value as the default.
                let default = *seed;
                describer.field("seed", seed, default, range::any);
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

    /// Whether the store's state makes the parameter more precise.
    pub(crate) fn adds_precision(self) -> bool {
        match self {
            Store::Rounded | Store::Stochastic { .. } => false,
            Store::Master(_) | Store::Split(_) | Store::Compensated => true,
        }
    }

    /// Whether a part of a parameter can be stored without the rest. Random rounding needs the whole
    /// parameter, because its bits depend on the place of an element in the whole.
    pub(super) fn is_divisible(self) -> bool {
        match self {
            Store::Rounded | Store::Master(_) | Store::Split(_) | Store::Compensated => true,
            Store::Stochastic { .. } => false,
        }
    }

    /// The kind of this store in files.
    pub(super) fn kind(self) -> StorageKind {
        match self {
            Store::Rounded => StorageKind::Rounded,
            Store::Master(_) => StorageKind::Master,
            Store::Split(_) => StorageKind::Split,
            Store::Compensated => StorageKind::Compensated,
            Store::Stochastic { .. } => StorageKind::Stochastic,
        }
    }

    /// The store for parameters of this dtype: this store if it makes a difference, else `Rounded`.
    ///
    /// # Errors
    /// For `Split` of F16, which is not the upper part of an F32.
    fn for_dtype(self, dtype: DType) -> Result<Self> {
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

    /// Makes the state for the parameter `x`, around the state of the rule.
    pub(super) fn state(self, rule: &dyn Rule, x: &dyn Lend) -> Result<State> {
        let init_rule = |x: &dyn Lend| rule.init(Parameter::new(x));
        match self.for_dtype(x.dtype())? {
            Store::Rounded => init_rule(x),
            Store::Master(dtype) => {
                let x = x.tensor_or_copy()?;
                let master = allocate(x.elem_count(), dtype, x.device(), || rounded(&x, dtype))?;
                State::with_master(&master, init_rule(&master)?)
            }
            Store::Split(low_bits) => {
                // All low bits are 0, so that each f32 is equal to its bf16.
                let records = (low_bits == LowBits::All).then_some(Records::LowBits);
                let rest = Buffer::of_zeros(x.shape().into(), DType::U8, records, x.device())?;
                Ok(State::empty()
                    .with_buffer("rest", rest)
                    .with_rule_state(init_rule(x)?))
            }
            Store::Compensated => {
                let compensation = Buffer::of_zeros(x.shape().into(), x.dtype(), None, x.device())?;
                Ok(State::empty()
                    .with_rounding_loss("compensation", compensation)
                    .with_rule_state(init_rule(x)?))
            }
            Store::Stochastic { .. } => Ok(State::empty()
                .with_counter("rounded")
                .with_rule_state(init_rule(x)?)),
        }
    }

    /// The precise value, which may share memory with the parameter or the state.
    pub(super) fn precise(self, state: &State, x: &dyn Lend) -> Result<Tensor> {
        match self.for_dtype(x.dtype())? {
            Store::Rounded | Store::Stochastic { .. } => x.tensor_or_copy(),
            Store::Master(_) => Ok(self.store_tensor(state)?.tensor()?),
            Store::Split(_) => Ok(joined(&x.tensor_or_copy()?, self.store_tensor(state)?)?),
            Store::Compensated => {
                let [x, compensation] = [x.tensor_or_copy()?, self.store_tensor(state)?.tensor()?]
                    .map(|tensor| in_dtype(&tensor, DType::F32));
                Ok(sum(&x?, &compensation?)?)
            }
        }
    }

    /// The x of the rule; see the table at the top of this file.
    pub(super) fn x_of_rule(self, state: &State, x: &dyn Lend) -> Result<Tensor> {
        match self {
            Store::Compensated => x.tensor_or_copy(),
            Store::Rounded | Store::Master(_) | Store::Split(_) | Store::Stochastic { .. } => {
                self.precise(state, x)
            }
        }
    }

    /// Sets parameter and state to a precise value.
    pub(super) fn set_precise(self, state: &mut State, x: &dyn Lend, values: &Tensor) -> Result<()> {
        // `x` is written first: if the owner of `x` refuses to lend it, `x` and the state stay as they are.
        match self.for_dtype(x.dtype())? {
            Store::Rounded | Store::Stochastic { .. } => set_lent(x, values),
            Store::Master(_) => {
                let master = self.store_tensor_mut(state)?;
                let values = rounded(values, master.dtype())?;
                set_lent_and(x, &values, &mut || Ok(master.set(&values)?))
            }
            Store::Split(_) => {
                let rest = self.store_tensor_mut(state)?;
                let (high, low) = split(rest, values)?;
                set_lent_and(x, &high, &mut || Ok(rest.set(&low)?))
            }
            Store::Compensated => {
                let compensation = self.store_tensor_mut(state)?;
                let (next, next_compensation) = compensated(&x.tensor_or_copy()?, compensation, values)?;
                set_lent_and(x, &next, &mut || Ok(compensation.set(&next_compensation)?))
            }
        }
    }

    /// Sets only the state. The new precise value is the nearest to `values` of all values that round to `x`.
    /// Returns whether the state makes the parameter more precise.
    pub(super) fn keep_precise(self, state: &mut State, x: &dyn Lend, values: &Tensor) -> Result<bool> {
        let store = self.for_dtype(x.dtype())?;
        match store {
            Store::Rounded | Store::Stochastic { .. } => {}
            Store::Master(dtype) => {
                self.store_tensor_mut(state)?
                    .set(&rounded_to(&x.tensor_or_copy()?, values, dtype)?)?
            }
            Store::Split(_) => set_low_bits(self.store_tensor_mut(state)?, &x.tensor_or_copy()?, values)?,
            Store::Compensated => {
                let compensation = difference(values, &in_dtype(&x.tensor_or_copy()?, dtype_of(values))?)?;
                self.store_tensor_mut(state)?.set(&compensation)?;
            }
        }
        Ok(store.adds_precision())
    }

    /// The job of a step of `rule` for the parameter `x`.
    pub(super) fn job<'a>(
        self,
        rule: &'a dyn Rule,
        state: &'a mut State,
        x: &'a dyn Lend,
        dx: Gradient<'a>,
    ) -> Result<Job<'a>> {
        let (store, path, parameter) = (self.for_dtype(x.dtype())?, dx.path(), Parameter::new(x));
        let (rule_state, tensor, counter) = store.parts(state)?;
        let wrong_state_error = || store.another_store_error();
        Ok(match store {
            Store::Rounded => rule
                .apply(rule_state, parameter, dx)?
                .into_job(Operand::Lent(x), Epilogue::Subtract),
            Store::Master(_) => {
                let master = tensor.ok_or_else(wrong_state_error)?;
                let rule_x = parameter.as_master(master.dtype(), master.device().is_cpu());
                rule.apply(rule_state, rule_x, dx)?
                    .into_job(Operand::master(master), Epilogue::Master(x))
            }
            Store::Split(_) => {
                let flow = rule.apply(rule_state, parameter, dx)?;
                let low_bits = Some(tensor.ok_or_else(wrong_state_error)?);
                Job {
                    low_bits,
                    ..flow.into_job(Operand::Lent(x), Epilogue::Subtract)
                }
            }
            Store::Compensated => {
                let flow = rule.apply(rule_state, parameter, dx)?;
                flow.into_job(
                    Operand::Lent(x),
                    Epilogue::Kahan(tensor.ok_or_else(wrong_state_error)?),
                )
            }
            Store::Stochastic { seed } => {
                let flow = rule.apply(rule_state, parameter, dx)?;
                let count = counter.ok_or_else(wrong_state_error)?;
                let key = random_key(seed, *count, path);
                let mut job = flow.into_job(Operand::Lent(x), Epilogue::Stochastic(key));
                // Only a step is rounded, so a call without a step does not move the counter.
                if job.progress == Progress::Applied {
                    let next = counts::add(*count, 1);
                    job.counters.push((count, next));
                }
                job
            }
        })
    }

    /// The state of the rule, and the tensor and the counter of this store.
    fn parts(self, state: &mut State) -> Result<(&mut State, Option<&mut Buffer>, Option<&mut u64>)> {
        if self == Store::Rounded {
            return Ok((state, None, None));
        }
        let State {
            master,
            tensors,
            counters,
            children,
            ..
        } = state;
        let [inner] = &mut children[..] else {
            return Err(self.another_store_error());
        };
        let tensor = if let Store::Master(_) = self {
            master.as_mut()
        } else {
            only_value(tensors)
        };
        Ok((&mut inner.state, tensor, only_value(counters)))
    }

    /// The tensor of this store.
    fn store_tensor(self, state: &State) -> Result<&Buffer> {
        let only_tensor = if let [(_, tensor)] = &state.tensors[..] {
            Some(tensor)
        } else {
            None
        };
        let tensor = if let Store::Master(_) = self {
            state.master.as_ref()
        } else {
            only_tensor
        };
        tensor.ok_or_else(|| self.another_store_error())
    }

    fn store_tensor_mut(self, state: &mut State) -> Result<&mut Buffer> {
        self.parts(state)?.1.ok_or_else(|| self.another_store_error())
    }

    fn another_store_error(self) -> Error {
        another_rule_error(self.name())
    }
}

/// The value of the only entry. `None` if there are more entries, or none.
fn only_value<'s, T>(entries: &'s mut [(&'static str, T)]) -> Option<&'s mut T> {
    if let [(_, value)] = entries {
        Some(value)
    } else {
        None
    }
}

/// Refuses masters in a dtype other than F32 and F64.
fn check_master_dtype(dtype: DType) -> Result<()> {
    if matches!(dtype, DType::F32 | DType::F64) {
        return Ok(());
    }
    Err(Error::new(
        ErrorKind::Argument,
        "the dtype of the copy that MixedPrecision keeps is",
    )
    .with_got(format_args!("{dtype:?}"))
    .with_expected("F32 or F64"))
}
