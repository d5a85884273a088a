//! The handwritten digits as numbers: 1797 images of 8 x 8 pixels.

use std::error::Error;

use crate::random::Random;

/// Pixels per image.
pub(crate) const PIXELS: usize = 64;
/// Digits to tell apart.
pub(crate) const CLASSES: usize = 10;
/// The largest pixel value in the file.
const WHITE: f32 = 16.0;
/// Every fifth image is kept for the test.
const TEST_EVERY: usize = 5;

/// An image and what it shows.
pub(crate) struct Digit {
    /// Each in 0..1, row by row.
    pub(crate) pixels: Vec<f32>,
    pub(crate) label: u32,
}

/// The embedded file: what to train on, and what to test with.
pub(crate) fn digits() -> Result<[Vec<Digit>; 2], Box<dyn Error>> {
    let (mut train, mut test) = (Vec::new(), Vec::new());
    for (i, line) in include_str!("../data/digits.csv").lines().enumerate() {
        let row = line.split(',').map(str::parse).collect::<Result<Vec<f32>, _>>()?;
        let Some((label, image)) = row.split_last().filter(|(_, image)| image.len() == PIXELS) else {
            return Err(format!(
                "a row of {} values, expected {PIXELS} pixels and a label",
                row.len()
            )
            .into());
        };
        let digit = Digit {
            pixels: image.iter().map(|pixel| pixel / WHITE).collect(),
            label: *label as u32,
        };
        if i % TEST_EVERY == 0 {
            test.push(digit)
        } else {
            train.push(digit)
        }
    }
    Ok([train, test])
}

/// Fisher and Yates' shuffle.
pub(crate) fn shuffle<T>(items: &mut [T], random: &mut Random) {
    for i in (1..items.len()).rev() {
        items.swap(i, random.below(i + 1));
    }
}
