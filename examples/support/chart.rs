//! Charts of losses.

use std::error::Error;
use std::ops::Range;

use plotters::coord::Shift;
use plotters::coord::ranged1d::{AsRangedCoord, ValueFormatter};
use plotters::prelude::*;

use crate::picture::INK;

pub(crate) type Area<'p> = DrawingArea<BitMapBackend<'p>, Shift>;

/// What a chart shows but its curves.
pub(crate) struct Axes<'t> {
    /// A line above it.
    pub(crate) caption: Option<String>,
    pub(crate) x: Range<usize>,
    pub(crate) x_name: &'t str,
    pub(crate) y_name: Option<&'t str>,
    pub(crate) is_logarithmic: bool,
    /// Whether there are several in one picture.
    pub(crate) is_panel: bool,
}

/// One line in a chart.
pub(crate) struct Curve {
    pub(crate) points: Vec<(usize, f64)>,
    pub(crate) colour: RGBColor,
    pub(crate) width: u32,
    /// The points from this one on have discs of this radius.
    pub(crate) discs: (usize, u32),
    /// Its text in the legend. There is none if no curve has a text.
    pub(crate) label: Option<String>,
}

/// Draws the curves one over the other; `y` is a range or the logarithmic scale of one.
pub(crate) fn draw<Y>(
    area: &Area<'_>,
    axes: &Axes<'_>,
    y: Y,
    curves: Vec<Curve>,
) -> Result<(), Box<dyn Error>>
where
    Y: AsRangedCoord<Value = f64>,
    Y::CoordDescType: ValueFormatter<f64>,
{
    let mut builder = ChartBuilder::on(area);
    if let Some(caption) = &axes.caption {
        builder.caption(caption, ("sans-serif", 32, &INK));
    }
    let (labels, names) = if axes.is_panel {
        builder
            .margin(20)
            .margin_right(30)
            .x_label_area_size(80)
            .y_label_area_size(100);
        (28, 30)
    } else {
        builder
            .margin(30)
            .margin_top(10)
            .margin_right(50)
            .x_label_area_size(90)
            .y_label_area_size(130);
        (30, 34)
    };
    let mut chart = builder.build_cartesian_2d(axes.x.clone(), y)?;

    let decimal = |loss: &f64| format!("{loss:.*}", (-loss.log10().floor()).max(0.0) as usize);
    let mut mesh = chart.configure_mesh();
    mesh.bold_line_style(BLACK.mix(0.18))
        .light_line_style(BLACK.mix(0.06))
        .axis_style(INK);
    mesh.max_light_lines(if axes.is_logarithmic { 10 } else { 5 });
    if axes.is_logarithmic {
        mesh.y_labels(8).y_label_formatter(&decimal);
    }
    if axes.is_panel {
        mesh.x_labels(6);
    }
    if let Some(name) = axes.y_name {
        mesh.y_desc(name);
    }
    mesh.x_desc(axes.x_name)
        .label_style(("sans-serif", labels, &INK))
        .axis_desc_style(("sans-serif", names, &INK))
        .draw()?;

    let has_legend = curves.iter().any(|curve| curve.label.is_some());
    for Curve {
        points,
        colour,
        width,
        discs: (from, radius),
        label,
    } in curves
    {
        let stroke = colour.stroke_width(width);
        // Piece by piece: plotters gives the sharp corners of a thick line long spikes. Discs fill the gaps
        // between the pieces.
        let series = chart.draw_series(
            points
                .windows(2)
                .map(|piece| PathElement::new(piece.to_vec(), stroke)),
        )?;
        if let Some(label) = label {
            series
                .label(label)
                .legend(move |(x, y)| PathElement::new([(x, y), (x + 50, y)], stroke));
        }
        chart.draw_series(
            points
                .into_iter()
                .skip(from)
                .map(|point| Circle::new(point, radius, colour.filled())),
        )?;
    }
    if has_legend {
        chart
            .configure_series_labels()
            .position(SeriesLabelPosition::UpperRight)
            .margin(30)
            .legend_area_size(70)
            .label_font(("sans-serif", 32, &INK))
            .background_style(WHITE.mix(0.9))
            .border_style(BLACK.mix(0.3))
            .draw()?;
    }
    Ok(())
}

/// Numbers from 1 on and losses, without what a logarithmic axis cannot show.
pub(crate) fn points(losses: &[f32]) -> Vec<(usize, f64)> {
    let points = (1..).zip(losses).map(|(number, loss)| (number, f64::from(*loss)));
    points
        .filter(|(_, loss)| loss.is_finite() && *loss > 0.0)
        .collect()
}
