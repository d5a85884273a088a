//! The picture of the loss curves.

use std::error::Error;
use std::ops::Range;

use optimisers::Rule;
use plotters::prelude::*;

use crate::Args;
use crate::chart::{Axes, Curve, draw, points};
use crate::picture::{canvas, titled};
use crate::train::Run;

/// Colour and width per variant: where curves coincide, the earlier shows on both sides of the later.
const STROKES: [(RGBColor, u32); 4] = [
    (RGBColor(195, 195, 195), 16),
    (RGBColor(0, 114, 178), 9),
    (RGBColor(240, 170, 20), 3),
    (RGBColor(204, 51, 51), 5),
];

/// Draws the loss of each epoch, one curve per run.
pub(crate) fn loss_curves(runs: &[Run], rule: &dyn Rule, args: &Args) -> Result<(), Box<dyn Error>> {
    let root = canvas(&args.out)?;
    let below_titles = titled(&root, "The same training in four precisions", &what(rule, args))?;
    let axes = Axes {
        caption: None,
        x: 1..args.epochs.max(2) as usize,
        x_name: "epoch",
        y_name: Some("mean training loss of the epoch"),
        is_logarithmic: true,
        is_panel: false,
    };
    let curve = |(run, (colour, width)): (&Run, (RGBColor, u32))| {
        let points = points(&run.losses);
        let label = Some(format!(
            "{}: test accuracy {:.3}",
            run.variant.title, run.accuracy
        ));
        Curve {
            discs: (points.len().saturating_sub(1), width / 2 + 5),
            points,
            colour,
            width,
            label,
        }
    };
    draw(
        &below_titles,
        &axes,
        range(runs).log_scale(),
        runs.iter().zip(STROKES).map(curve).collect(),
    )?;
    root.present()?;
    Ok(())
}

/// What was trained.
fn what(rule: &dyn Rule, args: &Args) -> String {
    let eta = rule
        .fields()
        .into_iter()
        .find(|(name, _)| *name == "eta")
        .map(|(_, eta)| format!(", learning rate {eta}"));
    format!(
        "{}{} on handwritten digits, seed {}",
        rule.name(),
        eta.unwrap_or_default(),
        args.seed
    )
}

/// From a power of ten below all losses to a little above them.
fn range(runs: &[Run]) -> Range<f64> {
    let losses = || {
        runs.iter()
            .flat_map(|run| points(&run.losses))
            .map(|(_, loss)| loss)
    };
    let low = 10f64.powf(losses().fold(1.0, f64::min).log10().floor());
    let high = losses().fold(10.0 * low, f64::max);
    // A bit more on both sides, so that rounding does not cost the labels at the ends.
    0.999 * low..1.2 * high
}
