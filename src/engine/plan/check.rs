//! Whether what a plan works on fits its parameter. The loops over elements trust the lengths, and rules are the user's code.
//!
//! What is checked here cannot change afterwards: shapes, dtypes and devices of tensors and of what others lend, who
//! are asked once (`lent/known.rs`), the state, which nobody else can see, and the arithmetic. A storage can be
//! exchanged, and an owner lend something else, at any time; it is looked at here so that nothing is written where it is
//! wrong already, and again where a pointer is made of it (`lent/stored.rs`, `lent/lend.rs`).

use std::ops::Range;

use candle_core::{DType, DeviceLocation, Shape, Tensor};

use super::job::OwnStorages;
use super::{Epilogue, Job, Operand, Step, TermOf};
use crate::engine::kernel::Kernel;
use crate::engine::memory::{Addresses, Buffer};
use crate::error::{Error, Result, StateError};
use crate::lent::{Lend, expect_parameter};
use crate::numbers::is_supported;

/// Refuses a gradient of another shape or device than the parameter's, or of a dtype that the engines do not read.
///
/// What is no tensor of candle's may be a vector of as many elements.
pub(crate) fn expect_gradient(path: &str, x: &dyn Lend, gradient: &dyn Lend) -> Result<()> {
    let is_vector = || gradient.tensor().is_none() && gradient.shape().rank() == 1 && gradient.elem_count() == x.elem_count();
    if gradient.shape() != x.shape() && !is_vector() {
        return Err(Error::GradientShape { path: path.to_string(), expected: x.shape().clone(), got: gradient.shape().clone() });
    }
    let (expected, got) = (x.device().location(), gradient.device().location());
    if expected != got {
        return Err(Error::GradientDevice { path: path.to_string(), expected, got });
    }
    if !is_supported(gradient.dtype()) {
        return Err(Error::GradientDtype { path: path.to_string(), got: gradient.dtype() });
    }
    Ok(())
}

impl Job<'_> {
    /// Refuses state that does not fit the parameter: tensors of another shape, dtype or device, or another
    /// number of them than the arithmetic has, and storages that do not hold their tensors. Returns which
    /// storages the commit locks for writing.
    ///
    /// `rule` names the optimiser in errors.
    pub(crate) fn check(&self, parameter: &dyn Lend, rule: &dyn Fn() -> String) -> Result<OwnStorages> {
        let fits = Fits { job: self, rule };
        match &self.x {
            Operand::Lent(x) => fits.variable("x", *x, parameter)?,
            Operand::Own(master) => fits.master(master, parameter)?,
        }
        if let Some(low_bits) = self.low_bits.as_deref() {
            fits.buffer("low_bits", low_bits, |dtype| matches!(dtype, DType::I16 | DType::U8))?;
        }
        match &self.epilogue {
            Epilogue::Master(low) => fits.variable("parameter", *low, parameter)?,
            Epilogue::Kahan(compensation) => fits.buffer("compensation", compensation, is_supported)?,
            Epilogue::StateOnly | Epilogue::Subtract | Epilogue::Stochastic(_) => {}
        }
        self.steps.iter().try_for_each(|step| fits.step(step))?;
        let mut own = OwnStorages::new();
        for (name, lender) in self.written() {
            own.extend(fits.stored(name, lender)?);
        }
        Ok(own)
    }

    /// Refuses a function of the whole tensor, where each rank has a part of it.
    pub(crate) fn expect_divisible(&self, rule: &dyn Fn() -> String) -> Result<()> {
        if self.steps.iter().any(|step| matches!(step, Step::Tensor(_))) {
            return Err(StateError::DividedFunction { path: self.path.to_string(), rule: rule() }.into());
        }
        Ok(())
    }
}

struct Fits<'c, 'a> {
    job: &'c Job<'a>,
    rule: &'c dyn Fn() -> String,
}

impl Fits<'_, '_> {
    fn step(&self, step: &Step<'_>) -> Result<()> {
        match step {
            Step::Map { kernel, slots } => {
                self.count(&**kernel, slots, 0..slots.len())?;
                self.buffers(slots)
            }
            Step::Reduce(reduction) => {
                for term in &reduction.terms {
                    if let TermOf::Probe { kernel, slots } = &term.of {
                        self.count(&**kernel, reduction.slots, slots.clone())?;
                    }
                }
                self.buffers(reduction.slots)
            }
            // A function gets its slots as tensors, of whatever shape.
            Step::Tensor(_) | Step::Check | Step::Output(_) | Step::Identity => Ok(()),
        }
    }

    /// Refuses arithmetic on another number of slots than these.
    fn count(&self, kernel: &dyn Kernel, slots: &[(&'static str, Buffer)], range: Range<usize>) -> Result<()> {
        let slots = slots.get(range).unwrap_or_default();
        if slots.len() == kernel.slots() {
            return Ok(());
        }
        let (expected, got) = (kernel.slots(), slots.iter().map(|(name, _)| name.to_string()).collect());
        Err(StateError::Count { path: self.job.path.to_string(), rule: (self.rule)(), expected, got }.into())
    }

    fn buffers(&self, slots: &[(&'static str, Buffer)]) -> Result<()> {
        slots.iter().try_for_each(|(name, slot)| self.buffer(name, slot, is_supported))
    }

    fn buffer(&self, name: &str, buffer: &Buffer, is_right: impl FnOnce(DType) -> bool) -> Result<()> {
        if buffer.shape() == self.job.x.shape() && is_right(buffer.dtype()) && buffer.device().same_device(self.job.x.device()) {
            return Ok(());
        }
        let got = (buffer.shape().clone(), buffer.dtype(), buffer.device().location());
        Err(self.misfit(name, got))
    }

    fn stored(&self, name: &'static str, lender: &dyn Lend) -> Result<Option<usize>> {
        let addresses = || {
            if lender.tensor().is_some() {
                return Ok(Addresses::of(name, lender)?.memory);
            }
            // What an owner refuses is refused before anything is written.
            expect_parameter(name, lender, self.job.epilogue.writes_x())?;
            Ok(lender.memory())
        };
        addresses().map_err(|error: Error| error.at(self.job.path))
    }

    fn variable(&self, name: &str, x: &dyn Lend, parameter: &dyn Lend) -> Result<()> {
        let is_in_order = x.tensor().is_none_or(Tensor::is_contiguous);
        if x.shape() == parameter.shape() && is_supported(x.dtype()) && is_in_order {
            return Ok(());
        }
        let got = (x.shape().clone(), x.dtype(), x.device().location());
        Err(self.misfit(name, got))
    }

    fn master(&self, master: &Buffer, parameter: &dyn Lend) -> Result<()> {
        if master.shape() == parameter.shape() && is_supported(master.dtype()) && master.code().is_none() {
            return Ok(());
        }
        let got = (master.shape().clone(), master.dtype(), master.device().location());
        Err(self.misfit("x", got))
    }

    fn misfit(&self, slot: &str, got: (Shape, DType, DeviceLocation)) -> Error {
        let expected = Box::new((self.job.x.shape().clone(), self.job.x.device().location()));
        StateError::Misfit { path: self.job.path.to_string(), rule: (self.rule)(), slot: slot.to_string(), expected, got: Box::new(got) }
            .into()
    }
}
