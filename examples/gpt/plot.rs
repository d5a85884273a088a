//! The picture of the losses.

use std::error::Error;
use std::ffi::OsStr;
use std::ops::Range;
use std::path::Path;

use candle_core::DType;
use plotters::prelude::*;

use crate::Args;
use crate::chart::{Axes, Curve, draw, points};
use crate::history::{History, WINDOW};
use crate::picture::{canvas, titled};
use crate::settings::Settings;

/// The loss of each step, the mean of the last steps, and the validation.
const EACH: RGBColor = RGBColor(176, 206, 226);
const MEAN: RGBColor = RGBColor(0, 114, 178);
const VALIDATION: RGBColor = RGBColor(213, 94, 0);

/// Draws the losses of the run so far.
pub(crate) fn losses(history: &History, parameters: usize, args: &Args) -> Result<(), Box<dyn Error>> {
    let root = canvas(&args.out)?;
    let below_titles = titled(
        &root,
        "Losses of a character-level transformer",
        &what(parameters, args),
    )?;
    let axes = Axes {
        caption: None,
        x: 0..args.settings.steps,
        x_name: "step",
        y_name: Some("loss per character"),
        is_logarithmic: false,
        is_panel: false,
    };
    draw(&below_titles, &axes, range(history), curves(history))?;
    root.present()?;
    Ok(())
}

/// Those that have points.
fn curves(history: &History) -> Vec<Curve> {
    // Each mean stands in the middle of its steps.
    let mean =
        (WINDOW..=history.steps()).map(|step| (step - WINDOW / 2, f64::from(history.train_loss_after(step))));
    let validation: Vec<_> = history
        .validation
        .iter()
        .map(|(step, loss)| (*step, f64::from(*loss)))
        .collect();
    let last = validation.last().map(|(_, loss)| format!(": {loss:.3}"));
    let line = |points: Vec<_>, colour, width, label| Curve {
        discs: (points.len(), 0),
        points,
        colour,
        width,
        label: Some(label),
    };
    let curves = [
        line(points(&history.train), EACH, 2, "training, each step".to_string()),
        line(
            mean.collect(),
            MEAN,
            5,
            format!("training, mean of {WINDOW} steps: {:.3}", history.train_loss()),
        ),
        Curve {
            discs: (0, 8),
            ..line(
                validation,
                VALIDATION,
                5,
                format!("validation{}", last.unwrap_or_default()),
            )
        },
    ];
    curves
        .into_iter()
        .filter(|curve| !curve.points.is_empty())
        .collect()
}

/// What was trained, and on what.
fn what(parameters: usize, args: &Args) -> String {
    let Settings {
        layers, width, seed, ..
    } = args.settings;
    let eta = args.settings.eta();
    let text = args
        .text
        .as_deref()
        .and_then(Path::file_name)
        .map_or("this crate's sources".into(), OsStr::to_string_lossy);
    let dtype = match args.settings.dtype() {
        DType::F32 => "f32".to_string(),
        low => format!("{} with f32 masters", low.as_str()),
    };
    format!(
        "layers {layers}, width {width}, {parameters} parameters, {dtype}, learning rate {eta}, seed \
         {seed}, on {text}"
    )
}

/// From a little below the lowest loss to a little above the highest.
fn range(history: &History) -> Range<f64> {
    let losses = || {
        history
            .train
            .iter()
            .chain(history.validation.iter().map(|(_, loss)| loss))
            .copied()
            .map(f64::from)
    };
    let low = losses().fold(f64::INFINITY, f64::min);
    let high = losses().fold(f64::NEG_INFINITY, f64::max);
    if low > high {
        // No loss yet.
        return 0.0..1.0;
    }
    let space = 0.05 * (high - low) + f64::EPSILON;
    (low - space).max(0.0)..high + space
}
