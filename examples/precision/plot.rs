//! The picture of the loss curves: a panel for each problem, and the legend below both.

use std::error::Error;
use std::ops::Range;

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
    (RGBColor(86, 180, 233), 17),
    (RGBColor(0, 158, 115), 14),
    (RGBColor(240, 228, 66), 11),
    (RGBColor(230, 159, 0), 8),
    (RGBColor(20, 20, 20), 5),
    (RGBColor(204, 121, 167), 2),
    (RGBColor(204, 40, 40), 5),
];
const LEGEND_HEIGHT: u32 = 170;
const LEGEND_COLUMNS: usize = 3;

/// Draws the loss of each epoch, one curve per run.
pub(crate) fn loss_curves(studies: &[Study], args: &Args) -> Result<(), Box<dyn Error>> {
    let root = canvas(&args.out)?;
    let what = format!("mean training loss of each epoch, the same AdamW for all, seed {}", args.seed);
    let below_titles = titled(&root, "Ways to keep low-precision parameters", &what)?;
    let (_, height) = below_titles.dim_in_pixel();
    let (panels, legend_area) = below_titles.split_vertically(height.saturating_sub(LEGEND_HEIGHT));
    for (area, study) in panels.split_evenly((1, studies.len())).iter().zip(studies) {
        panel(area, study)?;
    }
    legend(&legend_area)?;
    root.present()?;
    Ok(())
}

fn panel(area: &Area<'_>, study: &Study) -> Result<(), Box<dyn Error>> {
    let epochs = study.runs.iter().map(|run| run.losses.len()).max().unwrap_or(0);
    let axes = Axes {
        caption: Some(format!("{}, learning rate {}", study.title, study.eta)),
        x: 1..epochs.max(2),
        x_name: "epoch",
        y_name: None,
        is_logarithmic: true,
        is_panel: true,
    };
    let curve = |(run, (colour, width)): (&Run, (RGBColor, u32))| Curve {
        points: points(&run.losses),
        colour,
        width,
        discs: (0, width / 2),
        label: None,
    };
    draw(area, &axes, range(&study.runs).log_scale(), study.runs.iter().zip(STROKES).map(curve).collect())
}

/// The strokes with their variants, column by column.
fn legend(area: &Area<'_>) -> Result<(), Box<dyn Error>> {
    let rows = VARIANTS.len().div_ceil(LEGEND_COLUMNS);
    let cells = area.margin(10, 20, 60, 20).split_evenly((rows, LEGEND_COLUMNS));
    for (i, (variant, (colour, width))) in VARIANTS.iter().zip(STROKES).enumerate() {
        let Some(cell) = cells.get(i % rows * LEGEND_COLUMNS + i / rows) else { continue };
        let middle = (cell.dim_in_pixel().1 / 2) as i32;
        cell.draw(&PathElement::new([(0, middle), (50, middle)], colour.stroke_width(width)))?;
        cell.draw(&Text::new(variant.title, (65, middle - 8), ("sans-serif", 28).into_font().color(&INK)))?;
    }
    Ok(())
}

/// From a little below all losses to a little above them.
fn range(runs: &[Run]) -> Range<f64> {
    let losses = || runs.iter().flat_map(|run| points(&run.losses)).map(|(_, loss)| loss);
    let low = losses().fold(1.0, f64::min);
    let high = losses().fold(10.0 * low, f64::max);
    0.7 * low..1.3 * high
}
