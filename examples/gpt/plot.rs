//! The picture of the losses.

use std::error::Error;
use std::ffi::OsStr;
use std::ops::Range;
use std::path::Path;

use candle_core::DType;
use plotters::prelude::*;

use crate::Args;
use crate::history::{History, WINDOW};
use crate::picture::{INK, canvas, titled};
use crate::settings::Settings;

/// The loss of each step, the mean of the last steps, and the validation.
const EACH: RGBColor = RGBColor(176, 206, 226);
const MEAN: RGBColor = RGBColor(0, 114, 178);
const VALIDATION: RGBColor = RGBColor(213, 94, 0);

/// Draws the losses of the run so far.
pub(crate) fn losses(history: &History, parameters: usize, args: &Args) -> Result<(), Box<dyn Error>> {
    let root = canvas(&args.out)?;
    let below_titles = titled(&root, "Losses of a character-level transformer", &what(parameters, args))?;
    let mut chart = ChartBuilder::on(&below_titles)
        .margin(30)
        .margin_top(10)
        .margin_right(50)
        .x_label_area_size(90)
        .y_label_area_size(130)
        .build_cartesian_2d(0..args.settings.steps, range(history))?;
    chart
        .configure_mesh()
        .bold_line_style(BLACK.mix(0.18))
        .light_line_style(BLACK.mix(0.06))
        .axis_style(INK)
        .max_light_lines(5)
        .label_style(("sans-serif", 30, &INK))
        .x_desc("step")
        .y_desc("loss per character")
        .axis_desc_style(("sans-serif", 34, &INK))
        .draw()?;

    let each = (1..).zip(&history.train).map(|(step, loss)| (step, f64::from(*loss)));
    // Each mean stands in the middle of its steps.
    let mean = (WINDOW..=history.steps()).map(|step| (step - WINDOW / 2, f64::from(history.train_loss_after(step))));
    let validation: Vec<_> = history.validation.iter().map(|(step, loss)| (*step, f64::from(*loss))).collect();
    let mut curve = |points: Vec<(usize, f64)>, colour: RGBColor, width, label: String| -> Result<(), Box<dyn Error>> {
        if points.is_empty() {
            return Ok(());
        }
        let stroke = colour.stroke_width(width);
        // Piece by piece: plotters gives the sharp corners of a thick line long spikes.
        let series = chart.draw_series(points.windows(2).map(|piece| PathElement::new(piece.to_vec(), stroke)))?;
        series.label(label).legend(move |(x, y)| PathElement::new([(x, y), (x + 50, y)], stroke));
        Ok(())
    };
    curve(each.collect(), EACH, 2, "training, each step".to_string())?;
    curve(mean.collect(), MEAN, 5, format!("training, mean of {WINDOW} steps: {:.3}", history.train_loss()))?;
    let last = validation.last().map(|(_, loss)| format!(": {loss:.3}"));
    curve(validation.clone(), VALIDATION, 5, format!("validation{}", last.unwrap_or_default()))?;
    chart.draw_series(validation.into_iter().map(|point| Circle::new(point, 8, VALIDATION.filled())))?;
    chart
        .configure_series_labels()
        .position(SeriesLabelPosition::UpperRight)
        .margin(30)
        .legend_area_size(70)
        .label_font(("sans-serif", 32, &INK))
        .background_style(WHITE.mix(0.9))
        .border_style(BLACK.mix(0.3))
        .draw()?;
    drop(chart);
    root.present()?;
    Ok(())
}

/// What was trained, and on what.
fn what(parameters: usize, args: &Args) -> String {
    let Settings { layers, width, eta, seed, .. } = args.settings;
    let text = args.text.as_deref().and_then(Path::file_name).map_or("this crate's sources".into(), OsStr::to_string_lossy);
    let dtype = match args.settings.dtype() {
        DType::F32 => "f32".to_string(),
        low => format!("{} with f32 masters", low.as_str()),
    };
    format!("layers {layers}, width {width}, {parameters} parameters, {dtype}, learning rate {eta}, seed {seed}, on {text}")
}

/// From a little below the lowest loss to a little above the highest.
fn range(history: &History) -> Range<f64> {
    let losses = || history.train.iter().chain(history.validation.iter().map(|(_, loss)| loss)).copied().map(f64::from);
    let low = losses().fold(f64::INFINITY, f64::min);
    let high = losses().fold(f64::NEG_INFINITY, f64::max);
    if low > high {
        // No loss yet.
        return 0.0..1.0;
    }
    let space = 0.05 * (high - low) + f64::EPSILON;
    (low - space).max(0.0)..high + space
}
