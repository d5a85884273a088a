//! The check of values from outside before they are written to a tensor. The values come from checkpoints,
//! files of weights, torch's files, or the program.
//!
//! The values may be in a file, in lent memory or on a device, and a file may be larger than the free memory.
//! So shape and dtype are checked first, and then the numbers, whose bytes the caller sends.

use std::borrow::Cow;
use std::fmt::Debug;

use super::codes::BLOCK;
use super::{Code, DType, Encoding, Watch, is_supported};
use crate::error::{Error, ErrorKind, FLOATS, Result};

/// What the new values of a tensor have to be, and the remedies of errors.
pub(crate) struct Requirements<'r> {
    /// The name of the values in errors.
    pub(crate) label: &'r str,
    /// `None` if the shape is not checked: only another rank has it, or the values are bytes.
    pub(crate) shape: Option<&'r [usize]>,
    /// The dtype to which numbers are rounded; the dtype of bytes for records.
    pub(crate) dtype: DType,
    /// The code, if the values are records of numbers in 8 bits.
    pub(crate) code: Option<Code>,
    pub(crate) is_non_negative: bool,
    /// The remedy for another shape.
    pub(crate) on_other_shape: &'static str,
    /// The remedy for another dtype. `None` if floats of another dtype are accepted, and rounded.
    pub(crate) on_other_dtype: Option<&'static str>,
    /// How to accept infinities and NaN, as the end of a remedy. `None` if they are accepted.
    pub(crate) on_non_finite: Option<&'static str>,
}

impl<'r> Requirements<'r> {
    /// The requirements on new weights of a variable.
    pub(crate) fn of_weights(
        label: &'r str,
        shape: &'r [usize],
        dtype: DType,
        on_non_finite: Option<&'static str>,
    ) -> Self {
        Requirements {
            label,
            shape: Some(shape),
            dtype,
            code: None,
            is_non_negative: false,
            on_other_shape: "pass the weights of this model",
            on_other_dtype: None,
            on_non_finite,
        }
    }

    /// Refuses values of another shape or dtype, and returns the dtype. `dtype` is `None` if tensors cannot
    /// have the dtype, and `dtype_name` is its name in errors.
    pub(crate) fn check_form(
        &self,
        shape: &[usize],
        dtype: Option<DType>,
        dtype_name: impl Debug,
    ) -> Result<DType> {
        if let Some(expected) = self.shape.filter(|expected| *expected != shape) {
            return Err(Error::shape(self.label, shape, expected).with_remedy(self.on_other_shape));
        }
        let is_convertible = |dtype| is_supported(self.dtype) && is_supported(dtype);
        let remedy: Cow<'static, str> = match (dtype, self.on_other_dtype) {
            (Some(dtype), _) if dtype == self.dtype => return Ok(dtype),
            (Some(dtype), None) if is_convertible(dtype) => return Ok(dtype),
            (Some(dtype), Some(remedy)) if is_convertible(dtype) => remedy.into(),
            (_, None) if is_supported(self.dtype) => format!("pass values in {FLOATS}").into(),
            _ => format!("pass values in {:?}", self.dtype).into(),
        };
        Err(Error::dtype(self.label, dtype_name, self.dtype).with_remedy(remedy))
    }

    /// Refuses numbers that may not be written. `send` passes the bytes of the numbers to a watch. The
    /// numbers are of `dtype`, unless they are records. `first` is the index of the first element in the
    /// tensor; the elements of records are bytes.
    ///
    /// The numbers of integers, and of candle's other dtypes, are not read.
    pub(crate) fn check_numbers(
        &self,
        dtype: DType,
        first: usize,
        send: impl FnOnce(&mut Watch) -> Result<()>,
    ) -> Result<()> {
        let encoding = self.code.map_or(Encoding::Numbers(dtype), Encoding::Records);
        let rounds_to = self.on_non_finite.map(|_| self.dtype);
        let finds_negative = self.is_non_negative || self.code.is_some();
        let is_read = self.code.is_some() || is_supported(dtype);
        if !is_read || (rounds_to.is_none() && !finds_negative) {
            return Ok(());
        }
        let mut watch = Watch::new(encoding, first).look_for(rounds_to, finds_negative);
        send(&mut watch)?;
        let Some((index, value)) = watch.first_unfit else {
            return Ok(());
        };
        let remedy = self.on_non_finite.unwrap_or_default();
        Err(if self.code.is_some() && value.is_finite() {
            let damage = "is damaged or was not written by this crate: the scale of block";
            let problem = format!("{} {damage} {} is", self.label, index / BLOCK);
            Error::new(ErrorKind::File, problem)
                .with_got(value)
                .with_expected("0 or more")
        } else if self.code.is_none() && self.is_non_negative && value < 0.0 {
            Error::new(ErrorKind::Tensor, format!("{} is", self.label))
                .with_got(value)
                .at_element(index)
                .with_expected("0 or more")
        } else if value.is_finite() {
            // The number is finite where it comes from, but rounds to infinity in the dtype.
            Error::too_large(self.label, value, index, self.dtype).with_remedy(format!(
                "give the parameter or state a wider dtype; to round the number to infinity, {remedy}"
            ))
        } else {
            Error::not_finite(self.label, value, index).with_remedy(accept_remedy(remedy))
        })
    }
}

/// Refuses an infinite or NaN number that belongs to no element. `on_non_finite` is that of [`Requirements`].
pub(crate) fn check_finite(label: &str, value: f64, on_non_finite: Option<&'static str>) -> Result<()> {
    match on_non_finite {
        Some(remedy) if !value.is_finite() => Err(Error::new(ErrorKind::NotFinite, format!("{label} is"))
            .with_got(value)
            .with_expected("a finite number")
            .with_remedy(accept_remedy(remedy))),
        _ => Ok(()),
    }
}

fn accept_remedy(remedy: &str) -> String {
    format!("to accept infinities and NaN, {remedy}")
}
