//! The picture of the loss curves.

use std::error::Error;
use std::ops::Range;

use optimisers::Rule;
use plotters::prelude::*;

use crate::Args;
use crate::picture::{INK, canvas, titled};
use crate::train::Run;

/// Colour and width per variant: where curves coincide, the earlier shows on both sides of the later.
const STROKES: [(RGBColor, u32); 4] =
    [(RGBColor(195, 195, 195), 16), (RGBColor(0, 114, 178), 9), (RGBColor(240, 170, 20), 3), (RGBColor(204, 51, 51), 5)];

/// Draws the loss of each epoch, one curve per run.
pub(crate) fn loss_curves(runs: &[Run], rule: &dyn Rule, args: &Args) -> Result<(), Box<dyn Error>> {
    let root = canvas(&args.out)?;
    let below_titles = titled(&root, "The same training in four precisions", &what(rule, args))?;
    let mut chart = ChartBuilder::on(&below_titles)
        .margin(30)
        .margin_top(10)
        .x_label_area_size(90)
        .y_label_area_size(130)
        .build_cartesian_2d(1..args.epochs.max(2), range(runs).log_scale())?;
    chart
        .configure_mesh()
        .bold_line_style(BLACK.mix(0.18))
        .light_line_style(BLACK.mix(0.06))
        .axis_style(INK)
        .max_light_lines(10)
        .y_labels(8)
        .y_label_formatter(&|loss| format!("{loss:.*}", (-loss.log10().floor()).max(0.0) as usize))
        .label_style(("sans-serif", 30, &INK))
        .x_desc("epoch")
        .y_desc("mean training loss of the epoch")
        .axis_desc_style(("sans-serif", 34, &INK))
        .draw()?;
    for (run, (colour, width)) in runs.iter().zip(STROKES) {
        let stroke = colour.stroke_width(width);
        let points: Vec<_> = points(run).collect();
        let end = points.last().copied();
        chart
            .draw_series(LineSeries::new(points, stroke))?
            .label(format!("{}: test accuracy {:.3}", run.variant.title, run.accuracy))
            .legend(move |(x, y)| PathElement::new([(x, y), (x + 50, y)], stroke));
        chart.draw_series(end.map(|end| Circle::new(end, width / 2 + 5, colour.filled())))?;
    }
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

/// What was trained.
fn what(rule: &dyn Rule, args: &Args) -> String {
    let eta = rule.fields().into_iter().find(|(name, _)| *name == "eta").map(|(_, eta)| format!(", learning rate {eta}"));
    format!("{}{} on handwritten digits, seed {}", rule.name(), eta.unwrap_or_default(), args.seed)
}

/// Epoch and loss, without what a logarithmic axis cannot show.
fn points(run: &Run) -> impl Iterator<Item = (u32, f64)> {
    let points = (1..).zip(&run.losses).map(|(epoch, loss)| (epoch, f64::from(*loss)));
    points.filter(|(_, loss)| loss.is_finite() && *loss > 0.0)
}

/// From a power of ten below all losses to a little above them.
fn range(runs: &[Run]) -> Range<f64> {
    let losses = || runs.iter().flat_map(points).map(|(_, loss)| loss);
    let low = 10f64.powf(losses().fold(1.0, f64::min).log10().floor());
    let high = losses().fold(10.0 * low, f64::max);
    // A bit more on both sides, so that rounding does not cost the labels at the ends.
    0.999 * low..1.2 * high
}
