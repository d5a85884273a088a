//! The handwritten digits: 1797 images of 8 x 8 pixels.

use std::error::Error;

use candle_core::{DType, Device, Tensor};

pub(crate) use crate::digits::{CLASSES, PIXELS};
use crate::digits::{Digit, digits};

/// Images with the digits they show.
#[derive(Clone)]
pub(crate) struct Images {
    /// `(n, 64)`, each pixel in 0..1.
    pub(crate) pixels: Tensor,
    /// `(n,)`
    pub(crate) labels: Tensor,
}

/// What to train on, and what to test with.
#[derive(Clone)]
pub(crate) struct Digits {
    pub(crate) train: Images,
    pub(crate) test: Images,
}

impl Digits {
    /// Reads the embedded file.
    pub(crate) fn load(device: &Device) -> Result<Self, Box<dyn Error>> {
        let [train, test] = digits()?;
        Ok(Digits {
            train: Images::from_rows(&train, device)?,
            test: Images::from_rows(&test, device)?,
        })
    }

    /// Where the images are.
    pub(crate) fn device(&self) -> &Device {
        self.train.labels.device()
    }

    /// The same digits with pixels of another dtype.
    pub(crate) fn to_dtype(&self, dtype: DType) -> candle_core::Result<Self> {
        Ok(Digits {
            train: self.train.to_dtype(dtype)?,
            test: self.test.to_dtype(dtype)?,
        })
    }
}

impl Images {
    fn from_rows(digits: &[Digit], device: &Device) -> candle_core::Result<Self> {
        let pixels: Vec<f32> = digits
            .iter()
            .flat_map(|digit| digit.pixels.iter().copied())
            .collect();
        let labels: Vec<u32> = digits.iter().map(|digit| digit.label).collect();
        let pixels = Tensor::from_vec(pixels, (digits.len(), PIXELS), device)?;
        Ok(Images {
            pixels,
            labels: Tensor::from_vec(labels, digits.len(), device)?,
        })
    }

    pub(crate) fn len(&self) -> usize {
        self.labels.elem_count()
    }

    fn to_dtype(&self, dtype: DType) -> candle_core::Result<Self> {
        Ok(Images {
            pixels: self.pixels.to_dtype(dtype)?,
            labels: self.labels.clone(),
        })
    }

    /// The images of the given numbers.
    pub(crate) fn batch(&self, numbers: &[u32]) -> candle_core::Result<Self> {
        let numbers = Tensor::new(numbers, self.labels.device())?;
        Ok(Images {
            pixels: self.pixels.index_select(&numbers, 0)?,
            labels: self.labels.index_select(&numbers, 0)?,
        })
    }
}
