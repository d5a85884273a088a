//! The handwritten digits: 1797 images of 8 x 8 pixels.

use std::error::Error;

use candle_core::{DType, Device, Tensor};

use crate::random::Random;

/// Pixels per image.
pub(crate) const PIXELS: usize = 64;
/// Digits to tell apart.
pub(crate) const CLASSES: usize = 10;
/// The largest pixel value in the file.
const WHITE: f32 = 16.0;
/// Every fifth image is kept for the test.
const TEST_EVERY: usize = 5;

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
        let (mut train, mut test) = (Vec::new(), Vec::new());
        for (i, line) in include_str!("../data/digits.csv").lines().enumerate() {
            let row = line.split(',').map(str::parse).collect::<Result<Vec<f32>, _>>()?;
            if i % TEST_EVERY == 0 { test.push(row) } else { train.push(row) }
        }
        Ok(Digits { train: Images::from_rows(&train, device)?, test: Images::from_rows(&test, device)? })
    }

    /// Where the images are.
    pub(crate) fn device(&self) -> &Device {
        self.train.labels.device()
    }

    /// The same digits with pixels of another dtype.
    pub(crate) fn to_dtype(&self, dtype: DType) -> candle_core::Result<Self> {
        Ok(Digits { train: self.train.to_dtype(dtype)?, test: self.test.to_dtype(dtype)? })
    }
}

impl Images {
    /// From rows of 64 pixel values and the label.
    fn from_rows(rows: &[Vec<f32>], device: &Device) -> Result<Self, Box<dyn Error>> {
        let mut pixels = Vec::new();
        let mut labels = Vec::new();
        for row in rows {
            let Some((label, image)) = row.split_last().filter(|(_, image)| image.len() == PIXELS) else {
                return Err(format!("a row of {} values, expected {PIXELS} pixels and a label", row.len()).into());
            };
            pixels.extend(image.iter().map(|pixel| pixel / WHITE));
            labels.push(*label as u32);
        }
        let pixels = Tensor::from_vec(pixels, (rows.len(), PIXELS), device)?;
        Ok(Images { pixels, labels: Tensor::from_vec(labels, rows.len(), device)? })
    }

    pub(crate) fn len(&self) -> usize {
        self.labels.elem_count()
    }

    fn to_dtype(&self, dtype: DType) -> candle_core::Result<Self> {
        Ok(Images { pixels: self.pixels.to_dtype(dtype)?, labels: self.labels.clone() })
    }

    /// The images of the given numbers.
    pub(crate) fn batch(&self, numbers: &[u32]) -> candle_core::Result<Self> {
        let numbers = Tensor::new(numbers, self.labels.device())?;
        Ok(Images { pixels: self.pixels.index_select(&numbers, 0)?, labels: self.labels.index_select(&numbers, 0)? })
    }
}

/// Fisher and Yates' shuffle.
pub(crate) fn shuffle(numbers: &mut [u32], random: &mut Random) {
    for i in (1..numbers.len()).rev() {
        numbers.swap(i, random.below(i + 1));
    }
}
