//! The picture of the image and of what was painted.

use std::error::Error;
use std::path::Path;

use plotters::coord::Shift;
use plotters::prelude::*;

use crate::picture::{INK, canvas, titled};
use crate::scene::{SIDE, Splats};

/// The width of a panel, and the space around it.
const PANEL: i32 = 480;
const SPACE: i32 = 40;
const TOP: i32 = 120;
const CIRCLE: RGBColor = RGBColor(240, 170, 20);

/// Draws the image, what the Gaussians make of it, and circles where they are.
pub(crate) fn paintings(
    image: &[f32],
    splats: &Splats,
    decibels: f32,
    path: &Path,
) -> Result<(), Box<dyn Error>> {
    let root = canvas(path)?;
    let what = format!("{} round Gaussians, {decibels:.1} dB", splats.len());
    let area = titled(
        &root,
        "An image, painted with Gaussians whose number changes",
        &what,
    )?;
    let panel = |number: i32| (SPACE / 2 + number * (PANEL + SPACE), TOP);
    let painted = splats.painted();
    for (number, (name, pixels)) in [
        ("the image", image),
        ("painted", &painted),
        ("and with what", &painted),
    ]
    .into_iter()
    .enumerate()
    {
        let (x, y) = panel(number as i32);
        area.draw(&Text::new(
            name,
            (x, y - 45),
            ("sans-serif", 32).into_font().color(&INK),
        ))?;
        draw(&area, pixels, (x, y))?;
    }
    let (left, top) = panel(2);
    let pixels = |length: f32| (length * PANEL as f32).round() as i32;
    for (mean, radius) in splats.means.chunks_exact(2).zip(&splats.radii) {
        let middle = (
            left + pixels(mean[0].clamp(0.0, 1.0)),
            top + pixels(mean[1].clamp(0.0, 1.0)),
        );
        area.draw(&Circle::new(
            middle,
            pixels(radius.exp()).clamp(2, PANEL / 8),
            CIRCLE.stroke_width(2),
        ))?;
    }
    root.present()?;
    Ok(())
}

/// Draws each pixel as a square.
fn draw(
    area: &DrawingArea<BitMapBackend<'_>, Shift>,
    pixels: &[f32],
    (left, top): (i32, i32),
) -> Result<(), Box<dyn Error>> {
    let size = PANEL / SIDE as i32;
    for (i, light) in pixels.iter().enumerate() {
        let (x, y) = (left + (i % SIDE) as i32 * size, top + (i / SIDE) as i32 * size);
        let grey = (light.clamp(0.0, 1.0) * 255.0) as u8;
        area.draw(&Rectangle::new(
            [(x, y), (x + size, y + size)],
            RGBColor(grey, grey, grey).filled(),
        ))?;
    }
    Ok(())
}
