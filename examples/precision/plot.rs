//! The picture of the loss curves: a panel for each problem, and the legend below both.

use std::error::Error;
use std::ops::Range;

use plotters::coord::Shift;
use plotters::prelude::*;

use crate::Args;
use crate::picture::{INK, canvas, titled};
use crate::train::{Run, Study};
use crate::variant::VARIANTS;

type Area<'p> = DrawingArea<BitMapBackend<'p>, Shift>;

/// Colour and width per variant: where curves coincide, the earlier shows on both sides of the later.
const STROKES: [(RGBColor, u32); VARIANTS.len()] = [
    (RGBColor(205, 205, 205), 24),
    (RGBColor(0, 114, 178), 18),
    (RGBColor(86, 180, 233), 14),
    (RGBColor(0, 158, 115), 11),
    (RGBColor(240, 228, 66), 8),
    (RGBColor(230, 159, 0), 5),
    (RGBColor(20, 20, 20), 2),
    (RGBColor(204, 121, 167), 5),
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
    let mut chart = ChartBuilder::on(area)
        .caption(format!("{}, learning rate {}", study.title, study.eta), ("sans-serif", 32, &INK))
        .margin(20)
        .margin_right(30)
        .x_label_area_size(80)
        .y_label_area_size(100)
        .build_cartesian_2d(1..epochs.max(2), range(&study.runs).log_scale())?;
    chart
        .configure_mesh()
        .bold_line_style(BLACK.mix(0.18))
        .light_line_style(BLACK.mix(0.06))
        .axis_style(INK)
        .max_light_lines(10)
        .x_labels(6)
        .y_labels(8)
        .y_label_formatter(&|loss| format!("{loss:.*}", (-loss.log10().floor()).max(0.0) as usize))
        .label_style(("sans-serif", 28, &INK))
        .x_desc("epoch")
        .axis_desc_style(("sans-serif", 30, &INK))
        .draw()?;
    for (run, (colour, width)) in study.runs.iter().zip(STROKES) {
        let points: Vec<_> = points(run).collect();
        // Piece by piece: plotters gives the sharp corners of a thick line long spikes. The discs fill the gaps between the pieces.
        chart.draw_series(points.windows(2).map(|piece| PathElement::new(piece.to_vec(), colour.stroke_width(width))))?;
        chart.draw_series(points.into_iter().map(|point| Circle::new(point, width / 2, colour.filled())))?;
    }
    Ok(())
}

/// The strokes with their variants, column by column.
fn legend(area: &Area<'_>) -> Result<(), Box<dyn Error>> {
    let rows = VARIANTS.len().div_ceil(LEGEND_COLUMNS);
    let cells = area.margin(10, 20, 60, 20).split_evenly((rows, LEGEND_COLUMNS));
    for (i, (variant, (colour, width))) in VARIANTS.iter().zip(STROKES).enumerate() {
        let Some(cell) = cells.get(i % rows * LEGEND_COLUMNS + i / rows) else { continue };
        let middle = (cell.dim_in_pixel().1 / 2) as i32;
        cell.draw(&PathElement::new([(0, middle), (50, middle)], colour.stroke_width(width)))?;
        cell.draw(&Text::new(variant.title, (65, middle - 14), ("sans-serif", 28, &INK)))?;
    }
    Ok(())
}

/// Epoch and loss, without what a logarithmic axis cannot show.
fn points(run: &Run) -> impl Iterator<Item = (usize, f64)> {
    let points = (1..).zip(&run.losses).map(|(epoch, loss)| (epoch, f64::from(*loss)));
    points.filter(|(_, loss)| loss.is_finite() && *loss > 0.0)
}

/// From a little below all losses to a little above them.
fn range(runs: &[Run]) -> Range<f64> {
    let losses = || runs.iter().flat_map(points).map(|(_, loss)| loss);
    let low = losses().fold(1.0, f64::min);
    let high = losses().fold(10.0 * low, f64::max);
    0.7 * low..1.3 * high
}
