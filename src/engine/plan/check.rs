//! The check that a plan fits its parameter. The loops over elements trust the lengths, and rules are code of
//! users.
//!
//! 1. After this check, these cannot change: shapes, dtypes and devices of tensors and of lent memory (a call
//!    reads them from the owner once, `model/lent/handle.rs`), the arithmetic, and the state, which nobody
//!    else can see.
//! 2. These can change at any time: the storage of a tensor, and the memory that an owner lends. Storage and
//!    memory are checked here, so that nothing is written if one is wrong already, and again whenever a
//!    pointer is made (`model/lent/stored.rs`, `model/lent/lend.rs`).

use std::ops::Range;

use super::{Epilogue, Job, Step, TermOf, Then};
use crate::engine::kernel::Kernel;
use crate::engine::memory::Buffer;
use crate::error::{Error, ErrorKind, FLOATS, Result};
use crate::model::lent::{Lend, check_parameter};
use crate::numbers::{DType, is_supported};
use crate::tensors::{Device, Tensor};

/// Refuses a gradient of another shape or device than x, or of a dtype that the engines do not read.
///
/// Memory that is no tensor of candle's may also be a vector that has x's number of elements.
pub(crate) fn check_gradient(path: &str, x: &dyn Lend, gradient: &dyn Lend) -> Result<()> {
    let is_vector = || {
        gradient.tensor().is_none() && gradient.shape().len() == 1 && gradient.elem_count() == x.elem_count()
    };
    if gradient.shape() != x.shape() && !is_vector() {
        return Err(Error::shape("the gradient", gradient.shape(), x.shape())
            .with_remedy("pass the gradient of the loss for this parameter, with a number for each element")
            .at(path));
    }
    let (expected, got) = (x.device().location(), gradient.device().location());
    if expected != got {
        return Err(Error::device("the gradient", got, expected)
            .with_remedy("move it with `to_device`")
            .at(path));
    }
    if !is_supported(gradient.dtype()) {
        return Err(Error::dtype("the gradient", gradient.dtype(), FLOATS)
            .with_remedy("convert it with `to_dtype`")
            .at(path));
    }
    Ok(())
}

impl Job<'_> {
    /// Refuses a job that does not fit its parameter.
    ///
    /// `rule` names the optimiser in errors. The check refuses state tensors of another shape, dtype or
    /// device, a number of state tensors for which the arithmetic is not made, and storages that do not hold
    /// their tensors.
    pub(crate) fn check(&self, parameter: &dyn Lend, rule: &dyn Fn() -> String) -> Result<()> {
        let fit = FitCheck { job: self, rule };
        fit.check_variable("x", &*self.x, parameter)?;
        if let Some(low_bits) = self.low_bits.as_deref() {
            fit.check_buffer("low_bits", low_bits, |_| {
                low_bits.stored_dtype() == DType::U8 && low_bits.code().is_none()
            })?;
        }
        match &self.epilogue {
            Epilogue::Master(target) => fit.check_variable("parameter", *target, parameter)?,
            Epilogue::Kahan(compensation) => fit.check_buffer("compensation", compensation, is_supported)?,
            Epilogue::StateOnly | Epilogue::Subtract | Epilogue::Stochastic(_) => {}
        }
        self.steps.iter().try_for_each(|step| fit.check_step(step))?;
        // The owner is asked here, so that it can refuse before anything is written.
        self.write_targets().try_for_each(|(name, lender)| {
            check_parameter(name, lender, self.epilogue.writes_x()).map_err(|error| error.at(self.path))
        })
    }

    /// Refuses a function of the whole tensor if each rank has only a part of it.
    pub(crate) fn check_divisible(&self, rule: &dyn Fn() -> String) -> Result<()> {
        if self.steps.iter().any(|step| matches!(step, Step::Tensor(_))) {
            let problem = "is declared divisible, but plans a function of the whole tensor, and each rank \
                           has only a part of the tensor";
            return Err(Error::new(ErrorKind::Contract, format!("{} {problem}", rule()))
                .with_remedy("return `false` from its `is_divisible`")
                .at(self.path));
        }
        Ok(())
    }
}

/// A job that is compared with its parameter.
struct FitCheck<'c, 'a> {
    job: &'c Job<'a>,
    rule: &'c dyn Fn() -> String,
}

impl FitCheck<'_, '_> {
    fn check_step(&self, step: &Step<'_>) -> Result<()> {
        match step {
            Step::Map { kernel, slots } => {
                self.check_slot_count(&**kernel, slots)?;
                self.check_buffers(slots)
            }
            Step::Reduce(reduction) => {
                for term in &reduction.terms {
                    if let TermOf::Probe { kernel, slots } = &term.of {
                        self.check_slot_count(&**kernel, self.slots_at(reduction.slots, slots)?)?;
                    }
                }
                if let Then::Map { slots, .. } = &reduction.then {
                    self.slots_at(reduction.slots, slots)?;
                }
                self.check_buffers(reduction.slots)
            }
            // A function gets its slots as tensors, of whatever shape.
            Step::Tensor(_) | Step::Check | Step::Output(_) | Step::Identity => Ok(()),
        }
    }

    /// The slots with these indices, which a sum or the step after the sum names.
    fn slots_at<'s>(
        &self,
        slots: &'s [(&'static str, Buffer)],
        range: &Range<usize>,
    ) -> Result<&'s [(&'static str, Buffer)]> {
        slots.get(range.clone()).ok_or_else(|| {
            let problem = format!(
                "the range of state tensors that {} gives to `Sums` is",
                (self.rule)()
            );
            Error::new(ErrorKind::Contract, problem)
                .with_got(format_args!("{range:?}"))
                .with_expected(format_args!(
                    "a part of 0..{}, the state tensors in `Sums::new`",
                    slots.len()
                ))
                .with_remedy("name state tensors by their indices in `Sums::new`")
                .at(self.job.path)
        })
    }

    /// Refuses arithmetic for another number of slots.
    fn check_slot_count(&self, kernel: &dyn Kernel, slots: &[(&'static str, Buffer)]) -> Result<()> {
        if slots.len() == kernel.slots() {
            return Ok(());
        }
        let names: Vec<&str> = slots.iter().map(|(name, _)| *name).collect();
        let got = if names.is_empty() {
            "0".to_string()
        } else {
            format!("{} ({})", names.len(), names.join(", "))
        };
        Err(Error::new(
            ErrorKind::Contract,
            format!(
                "the number of state tensors that {} gives its arithmetic is",
                (self.rule)()
            ),
        )
        .with_got(got)
        .with_expected(kernel.slots())
        .with_remedy(
            "give the arithmetic the state tensors that it works on, and keep the state that the `init` of \
             each rule made, also of each held rule",
        )
        .at(self.job.path))
    }

    fn check_buffers(&self, slots: &[(&'static str, Buffer)]) -> Result<()> {
        slots
            .iter()
            .try_for_each(|(name, slot)| self.check_buffer(name, slot, is_supported))
    }

    fn check_buffer(
        &self,
        name: &str,
        buffer: &Buffer,
        is_allowed: impl FnOnce(DType) -> bool,
    ) -> Result<()> {
        if buffer.shape() == self.job.x.shape()
            && is_allowed(buffer.dtype())
            && buffer.device().same_device(self.job.x.device())
        {
            return Ok(());
        }
        Err(self.misfit(name, &kind_of(buffer.shape(), buffer.dtype(), buffer.device())))
    }

    fn check_variable(&self, name: &str, x: &dyn Lend, parameter: &dyn Lend) -> Result<()> {
        let is_contiguous = x.tensor().is_none_or(Tensor::is_contiguous);
        if x.shape() == parameter.shape() && is_supported(x.dtype()) && is_contiguous {
            return Ok(());
        }
        Err(self.misfit(name, &kind_of(x.shape(), x.dtype(), x.device())))
    }

    fn misfit(&self, slot: &str, got: &str) -> Error {
        let (rule, x) = ((self.rule)(), &self.job.x);
        Error::new(
            ErrorKind::Contract,
            format!("{rule} works element by element on its state tensor {slot:?}, which is"),
        )
        .with_got(got)
        .with_expected(format_args!(
            "F16, BF16, F32 or F64 with the shape {:?} on {:?}",
            x.shape(),
            x.device().location()
        ))
        .with_remedy(
            "make the state of each rule, also of each held rule, for the parameter that the rule works on",
        )
        .at(self.job.path)
    }
}

/// Dtype, shape and device of a tensor in words, for errors.
pub(in crate::engine) fn kind_of(shape: &[usize], dtype: DType, device: &Device) -> String {
    format!("{dtype:?} with the shape {shape:?} on {:?}", device.location())
}
