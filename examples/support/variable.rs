//! Variables with seeded random values.

use candle_core::{DType, Device, Result, Shape, Tensor, Var};

use crate::random::Random;

impl Random {
    /// A variable with numbers in ±`bound`. They are drawn in f32 and rounded to `dtype` on the CPU, so one
    /// seed gives the same start in every dtype and on every device.
    pub(crate) fn variable(
        &mut self,
        shape: impl Into<Shape>,
        bound: f32,
        dtype: DType,
        device: &Device,
    ) -> Result<Tensor> {
        let shape = shape.into();
        let numbers: Vec<f32> = (0..shape.elem_count()).map(|_| bound * self.uniform()).collect();
        let rounded = Tensor::from_vec(numbers, shape, &Device::Cpu)?.to_dtype(dtype)?;
        // A `Var` is what candle differentiates by and what `setup` makes a leaf of; its clone as a tensor is
        // still the same variable.
        Ok(Var::from_tensor(&rounded.to_device(device)?)?.into_inner())
    }
}
