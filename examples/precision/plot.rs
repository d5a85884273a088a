//! The picture of the loss curves: a panel for each problem, and the legend below both.

use std::error::Error;
use std::ops::Range;
use std::path::Path;

use plotters::prelude::*;

use crate::Args;
use crate::chart::{Area, Axes, Curve, draw, points};
use crate::picture::{INK, canvas, titled};
use crate::train::{Run, Study};
use crate::variant::VARIANTS;

/// Colour and width per variant: where curves coincide, the earlier shows on both sides of the later.
const STROKES: [(RGBColor, u32); VARIANTS.len()] = [
    (RGBColor(205, 205, 205), 26),
    (RGBColor(0, 114, 178), 21),
    (RGBColor(0, 158, 115), 14),
    (RGBColor(240, 228, 66), 11),
    (RGBColor(230, 159, 0), 8),
    (RGBColor(120, 60, 20), 7),
    (RGBColor(100, 100, 220), 6),
    (RGBColor(0, 200, 200), 4),
    (RGBColor(20, 20, 20), 5),
    (RGBColor(204, 121, 167), 2),
    (RGBColor(204, 40, 40), 5),
];
const LEGEND_HEIGHT: u32 = 170;
const LEGEND_COLUMNS: usize = 3;

/// Draws the loss of each epoch, one curve per run.
pub(crate) fn loss_curves(studies: [&Study; 2], args: &Args) -> Result<(), Box<dyn Error>> {
    let what = format!(
        "mean training loss of each epoch, the same AdamW for all, seed {}",
        args.seed
    );
    draw_all(
        studies,
        &args.out,
        "Ways to keep low-precision parameters",
        &what,
        |run, _| Ok(run.losses.clone()),
    )
}

/// Draws how far the weights are from those of f32, one curve per run.
pub(crate) fn distances(studies: [&Study; 2], args: &Args) -> Result<(), Box<dyn Error>> {
    let what = format!(
        "distance from the weights of f32, as a part of the way that those have gone, seed {}",
        args.seed
    );
    draw_all(
        studies,
        &args.distance_out,
        "How far low precision leads away",
        &what,
        |run, exact| Ok(run.distances(exact)?),
    )
}

/// Draws a panel for each problem, with what `values` makes of each run and the first.
fn draw_all(
    studies: [&Study; 2],
    path: &Path,
    title: &str,
    what: &str,
    values: impl Fn(&Run, &Run) -> Result<Vec<f32>, Box<dyn Error>>,
) -> Result<(), Box<dyn Error>> {
    let root = canvas(path)?;
    let below_titles = titled(&root, title, what)?;
    let (_, height) = below_titles.dim_in_pixel();
    let (panels, legend_area) = below_titles.split_vertically(height.saturating_sub(LEGEND_HEIGHT));
    for (area, study) in panels.split_evenly((1, studies.len())).iter().zip(studies) {
        let values = study
            .runs
            .iter()
            .map(|run| values(run, &study.runs[0]))
            .collect::<Result<Vec<_>, _>>()?;
        panel(area, study, &values)?;
    }
    legend(&legend_area)?;
    root.present()?;
    Ok(())
}

fn panel(area: &Area<'_>, study: &Study, values: &[Vec<f32>]) -> Result<(), Box<dyn Error>> {
    let epochs = values.iter().map(Vec::len).max().unwrap_or(0);
    let axes = Axes {
        caption: Some(format!("{}, learning rate {}", study.title, study.eta)),
        x: 1..epochs.max(2),
        x_name: "epoch",
        y_name: None,
        is_logarithmic: true,
        is_panel: true,
    };
    let curve = |(values, (colour, width)): (&Vec<f32>, (RGBColor, u32))| Curve {
        points: points(values),
        colour,
        width,
        discs: (0, width / 2),
        label: None,
    };
    draw(
        area,
        &axes,
        range(values).log_scale(),
        values.iter().zip(STROKES).map(curve).collect(),
    )
}

/// The strokes with their variants, column by column.
fn legend(area: &Area<'_>) -> Result<(), Box<dyn Error>> {
    let rows = VARIANTS.len().div_ceil(LEGEND_COLUMNS);
    let cells = area.margin(10, 20, 60, 20).split_evenly((rows, LEGEND_COLUMNS));
    for (i, (variant, (colour, width))) in VARIANTS.iter().zip(STROKES).enumerate() {
        let Some(cell) = cells.get(i % rows * LEGEND_COLUMNS + i / rows) else {
            continue;
        };
        let middle = (cell.dim_in_pixel().1 / 2) as i32;
        cell.draw(&PathElement::new(
            [(0, middle), (50, middle)],
            colour.stroke_width(width),
        ))?;
        cell.draw(&Text::new(
            variant.title,
            (65, middle - 8),
            ("sans-serif", 28).into_font().color(&INK),
        ))?;
    }
    Ok(())
}

/// From a little below all values to a little above them. What is 0, as the distance of f32 from itself, is
/// on no logarithmic scale.
fn range(all: &[Vec<f32>]) -> Range<f64> {
    let values = || {
        all.iter()
            .flat_map(|values| points(values))
            .map(|(_, value)| value)
            .filter(|value| *value > 0.0)
    };
    let low = values().fold(1.0, f64::min);
    let high = values().fold(10.0 * low, f64::max);
    0.7 * low..1.3 * high
}
