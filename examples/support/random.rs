//! Seeded random numbers for the examples: candle's own generator cannot be seeded on the CPU, and a run must be repeatable.

use candle_core::{DType, Device, Result, Shape, Tensor, Var};

/// SplitMix64 (Steele, Lea and Flood 2014).
pub(crate) struct Random(u64);

impl Random {
    pub(crate) fn new(seed: u64) -> Self {
        Random(seed)
    }

    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// A number in 0..1.
    pub(crate) fn unit(&mut self) -> f32 {
        (self.next() >> 40) as f32 / (1u32 << 24) as f32
    }

    /// A number in -1..1.
    pub(crate) fn uniform(&mut self) -> f32 {
        2.0 * self.unit() - 1.0
    }

    /// A whole number in 0..n.
    pub(crate) fn below(&mut self, n: usize) -> usize {
        (self.next() % n as u64) as usize
    }

    /// A variable with numbers in ±`bound`. They are drawn in f32 and rounded to `dtype` on the CPU, so one seed gives the same start in every
    /// dtype and on every device.
    pub(crate) fn variable(&mut self, shape: impl Into<Shape>, bound: f32, dtype: DType, device: &Device) -> Result<Tensor> {
        let shape = shape.into();
        let numbers: Vec<f32> = (0..shape.elem_count()).map(|_| bound * self.uniform()).collect();
        let rounded = Tensor::from_vec(numbers, shape, &Device::Cpu)?.to_dtype(dtype)?;
        // A `Var` is what candle differentiates by and what `setup` makes a leaf of; its clone as a tensor is still the same variable.
        Ok(Var::from_tensor(&rounded.to_device(device)?)?.into_inner())
    }
}
