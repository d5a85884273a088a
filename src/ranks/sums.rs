//! Memory for what gradients of ranks add up to.

use candle_core::{DType, Device, Tensor};

use crate::error::Result;

/// Sums that are kept from one call to the next, by leaf: to get as much memory anew from the system, page by page, takes longer than to add up.
#[derive(Debug, Default)]
pub(crate) struct KeptSums(Vec<Option<Tensor>>);

impl KeptSums {
    /// A vector for the sum of a leaf's gradients, with any numbers in it.
    pub(crate) fn of(&mut self, leaf: usize, length: usize, dtype: impl Into<DType>, device: &Device) -> Result<Tensor> {
        let dtype = dtype.into();
        // Devices keep memory themselves.
        if !device.is_cpu() {
            return Ok(Tensor::zeros(length, dtype, device)?);
        }
        if self.0.len() <= leaf {
            self.0.resize(leaf + 1, None);
        }
        match &self.0[leaf] {
            Some(known) if (known.elem_count(), known.dtype()) == (length, dtype) => Ok(known.clone()),
            _ => Ok(self.0[leaf].insert(Tensor::zeros(length, dtype, device)?).clone()),
        }
    }
}
