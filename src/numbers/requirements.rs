//! May these values be written to this tensor? One answer for all values that come from outside: checkpoints,
//! files of weights, torch's files, and the values that a program sets.
//!
//! A tensor may be larger than the free memory, and may be in a file or on a device. So shape and dtype are
//! checked first, and then the bytes of the numbers, which the caller passes on piece by piece.

use std::borrow::Cow;
use std::fmt::Debug;

use super::codes::BLOCK;
use super::{Code, DType, Encoding, Watch, is_supported};
use crate::error::{Error, ErrorKind, FLOATS, Result};

/// What the new values of a tensor have to be, and the remedies of errors.
pub(crate) struct Requirements<'r> {
    /// The name of the values in errors.
    pub(crate) label: &'r str,
    /// `None` if only another rank has the shape.
    pub(crate) shape: Option<&'r [usize]>,
    /// The dtype in which the values are stored.
    pub(crate) dtype: DType,
    /// The code, if the values are records of numbers in 8 bits.
    pub(crate) code: Option<Code>,
    /// Whether no number may be below 0.
    pub(crate) is_of_squares: bool,
    /// The remedy for another shape.
    pub(crate) on_other_shape: &'static str,
    /// The remedy for another dtype. `None` if floats of another dtype are accepted, and rounded.
    pub(crate) on_other_dtype: Option<&'static str>,
    /// How to accept infinities and NaN, as the end of a remedy. `None` if they are accepted.
    pub(crate) on_non_finite: Option<&'static str>,
}

impl Requirements<'_> {
    /// Refuses values of another shape or dtype. `dtype` is `None` if tensors cannot have the dtype, and
    /// `dtype_name` is its name in errors.
    pub(crate) fn check_form(
        &self,
        shape: &[usize],
        dtype: Option<DType>,
        dtype_name: impl Debug,
    ) -> Result<()> {
        if let Some(expected) = self.shape.filter(|expected| *expected != shape) {
            return Err(Error::shape(self.label, shape, expected).with_remedy(self.on_other_shape));
        }
        let is_convertible = is_supported(self.dtype) && dtype.is_some_and(is_supported);
        let remedy: Cow<'static, str> = match self.on_other_dtype {
            _ if dtype == Some(self.dtype) => return Ok(()),
            None if is_convertible => return Ok(()),
            Some(remedy) if is_convertible => remedy.into(),
            _ => format!("convert the values first, because only values in {FLOATS} are converted").into(),
        };
        Err(Error::dtype(self.label, dtype_name, self.dtype).with_remedy(remedy))
    }

    /// Refuses numbers that the tensor cannot store. `send` passes the bytes of the numbers to a watch. The
    /// numbers are of `dtype`, unless they are records, and the first has the index `first`.
    pub(crate) fn check_numbers(
        &self,
        dtype: DType,
        first: usize,
        send: impl FnOnce(&mut Watch) -> Result<()>,
    ) -> Result<()> {
        let encoding = self.code.map_or(Encoding::Numbers(dtype), Encoding::Records);
        if self.code.is_none() && !is_supported(dtype) {
            return Ok(());
        }
        let mut watch = Watch::new(encoding, first).before_rounding(self.dtype, self.is_of_squares);
        send(&mut watch)?;
        if let (Some(remedy), Some((index, value))) = (self.on_non_finite, watch.first_non_finite) {
            return Err(if value.is_finite() {
                // The number is finite where it comes from, but rounds to infinity in the dtype.
                Error::too_large(self.label, value, index, self.dtype).with_remedy(format!(
                    "give the tensor another dtype; to round the number to infinity, {remedy}"
                ))
            } else {
                Error::not_finite(self.label, value, index).with_remedy(accept_remedy(remedy))
            });
        }
        match (watch.first_negative, self.code) {
            (None, _) => Ok(()),
            (Some((index, scale)), Some(_)) => {
                let block = index / BLOCK;
                let damage = "is damaged or was not written by this crate: the scale of block";
                let problem = format!("{} {damage} {block} is", self.label);
                Err(Error::new(ErrorKind::File, problem)
                    .with_got(scale)
                    .with_expected("0 or more"))
            }
            (Some((index, value)), None) => Err(Error::new(ErrorKind::Tensor, format!("{} is", self.label))
                .with_got(value)
                .at_element(index)
                .with_expected("a number that is not negative, because squares are not")),
        }
    }
}

/// Refuses an infinite or NaN number that belongs to no element. If `on_non_finite` is `None`, the number is
/// accepted. Otherwise it is the end of the remedy, as in [`Requirements`].
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
