//! What the examples' pictures have in common.

use std::error::Error;
use std::fs::OpenOptions;
use std::path::{Path, PathBuf};

use plotters::coord::Shift;
use plotters::prelude::*;
use plotters::style::register_font;

const SIZE: (u32, u32) = (1600, 1000);
/// The colour of axes and texts.
pub(crate) const INK: RGBColor = RGBColor(40, 40, 40);

/// A path for the picture, from the command line.
pub(crate) fn png_path(path: &str) -> Result<PathBuf, String> {
    let path = PathBuf::from(path);
    let is_png = path
        .extension()
        .is_some_and(|extension| extension.eq_ignore_ascii_case("png"));
    if is_png {
        Ok(path)
    } else {
        Err("expected the name of a .png file".to_string())
    }
}

/// Fails where the picture could not be written later. An existing one is left as it is.
pub(crate) fn check_writable(path: &Path) -> Result<(), String> {
    let opened = OpenOptions::new().append(true).create(true).open(path);
    opened
        .map(|_| ())
        .map_err(|error| format!("cannot write the picture {}: {error}", path.display()))
}

/// An empty picture.
pub(crate) fn canvas(path: &Path) -> Result<DrawingArea<BitMapBackend<'_>, Shift>, Box<dyn Error>> {
    // A font of our own: the picture looks the same on each system, and on those that have no fonts.
    let font = include_bytes!("../data/DejaVuSans-latin.ttf");
    register_font("sans-serif", FontStyle::Normal, font).map_err(|_| "the embedded font is damaged")?;
    let root = BitMapBackend::new(path, SIZE).into_drawing_area();
    root.fill(&WHITE)?;
    Ok(root)
}

/// Writes a title and a line below it, and returns the area under them.
pub(crate) fn titled<'p>(
    root: &DrawingArea<BitMapBackend<'p>, Shift>,
    title: &str,
    subtitle: &str,
) -> Result<DrawingArea<BitMapBackend<'p>, Shift>, Box<dyn Error>> {
    let below = root
        .margin(20, 0, 0, 0)
        .titled(title, ("sans-serif", 50).into_font().color(&INK))?;
    Ok(below.titled(subtitle, ("sans-serif", 30).into_font().color(&INK.mix(0.8)))?)
}
