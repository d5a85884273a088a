//! What limits a step, from the records of all machines: `cargo bench --bench limits` draws bytes against time
//! and prints the table of each record.
//!
//! A record is what `benches/record` has printed on a machine where nothing else ran.

#[allow(dead_code, reason = "the examples have more use for it")]
#[path = "../../examples/support/picture.rs"]
mod picture;

use std::collections::BTreeMap;
use std::error::Error;
use std::fs;
use std::path::{Path, PathBuf};

use clap::Parser;
use plotters::prelude::*;

use picture::{INK, canvas, png_path, titled};

/// Draws the records of all machines, and prints their tables.
#[derive(Parser)]
struct Options {
    /// The folder of the records.
    #[arg(long, default_value = concat!(env!("CARGO_MANIFEST_DIR"), "/benches/records"))]
    records: PathBuf,
    /// The picture.
    #[arg(long, default_value = "limits.png", value_parser = png_path)]
    out: PathBuf,
    /// Passed by cargo.
    #[arg(long, hide = true)]
    bench: bool,
}

/// What one machine measured with one instruction set.
#[derive(Default)]
struct Record {
    cases: BTreeMap<String, Case>,
    /// What Adam's root and quotient take for the elements of a vector, in nanoseconds.
    divider: f64,
    /// How many such vectors the threads compute at once, times the elements of one.
    at_once: f64,
}

/// A case from memory and in the cache, all in nanoseconds per parameter but the bytes.
#[derive(Default)]
struct Case {
    bytes: f64,
    ours: f64,
    floor: f64,
    cached: f64,
    cycles: f64,
}

/// The number behind `name=` in a line, and 0 without one.
fn number(line: &str, name: &str) -> f64 {
    let behind = line.split_whitespace().find_map(|word| word.strip_prefix(name)?.strip_prefix('='));
    behind.and_then(|number| number.parse().ok()).unwrap_or(0.0)
}

/// The records of a file by machine and instruction set.
fn read(path: &Path) -> Result<BTreeMap<String, Record>, Box<dyn Error>> {
    let machine = path.file_stem().unwrap_or_default().to_string_lossy().into_owned();
    let (mut records, mut name, mut gigahertz) = (BTreeMap::<String, Record>::new(), machine.clone(), 1.0);
    for line in fs::read_to_string(path)?.lines() {
        if let Some(isa) = line.split_whitespace().find_map(|word| word.strip_prefix("isa=")) {
            name = format!("{machine}, {isa}");
        }
        let record = records.entry(name.clone()).or_default();
        if !line.contains("threads=1 ") && line.starts_with("threads=") {
            // The processors that are known divide no more than eight numbers at once.
            record.at_once = number(line, "threads") * if name.ends_with("portable") { 4.0 } else { 8.0 };
        }
        match line.split_whitespace().collect::<Vec<_>>()[..] {
            ["bench", case, ..] => {
                let case = record.cases.entry(case.to_string()).or_default();
                case.bytes = number(line, "bytes");
                case.ours = number(line, "ns_per_element");
                case.floor = number(line, "floor_ns");
            }
            ["cached", case, ..] => {
                let case = record.cases.entry(case.to_string()).or_default();
                case.cached = number(line, "ns_per_element");
                case.cycles = number(line, "cycles_per_element");
            }
            ["cycles", "are", .., clock, "GHz,", "as", "a", "chain", "of", "additions", "says"] => gigahertz = clock.parse()?,
            ["divider", ..] => record.divider = number(line, "root_and_quotient") / gigahertz,
            _ => {}
        }
    }
    records.retain(|_, record| !record.cases.is_empty());
    Ok(records)
}

fn print(name: &str, record: &Record) {
    println!("\n| {name} | bytes | ns | of the floor | ns in the cache, one thread | cycles |\n| --- | --- | --- | --- | --- | --- |");
    let written = |number: f64, digits: usize| if number > 0.0 { format!("{number:.digits$}") } else { "–".to_string() };
    for (case, Case { bytes, ours, floor, cached, cycles }) in &record.cases {
        let of_floor = if *floor > 0.0 { ours / floor } else { 0.0 };
        println!(
            "| `{case}` | {bytes} | {} | {} | {} | {} |",
            written(*ours, 2),
            written(of_floor, 2),
            written(*cached, 2),
            written(*cycles, 1)
        );
    }
}

fn main() -> Result<(), Box<dyn Error>> {
    let options = Options::parse();
    let mut files: Vec<PathBuf> = fs::read_dir(&options.records)?.map(|entry| Ok(entry?.path())).collect::<std::io::Result<_>>()?;
    files.sort();
    let mut records = BTreeMap::new();
    for file in files.iter().filter(|file| file.extension().is_some_and(|extension| extension == "txt")) {
        records.append(&mut read(file).map_err(|error| format!("{}: {error}", file.display()))?);
    }
    let all = || records.values().flat_map(|record| record.cases.values()).filter(|case| case.bytes > 0.0);
    let most = |of: fn(&Case) -> f64| all().map(of).fold(0.0, f64::max) * 1.1;
    let root = canvas(&options.out)?;
    let area = titled(
        &root,
        "What limits a step",
        "lines: a loop that moves the bytes and computes nothing; dashes: Adam's root and quotient and nothing else",
    )?;
    let mut chart = ChartBuilder::on(&area)
        .margin(30)
        .x_label_area_size(90)
        .y_label_area_size(130)
        .build_cartesian_2d(0.0..most(|case| case.bytes), 0.0..most(|case| case.ours))?;
    chart.configure_mesh().x_desc("bytes per parameter").y_desc("ns per parameter").label_style(("sans-serif", 30, &INK)).draw()?;
    for (place, (name, record)) in records.iter().enumerate() {
        print(name, record);
        let colour = Palette99::pick(place).to_rgba();
        let cases: Vec<&Case> = record.cases.values().filter(|case| case.bytes > 0.0).collect();
        let mut slopes: Vec<f64> = cases.iter().map(|case| case.floor / case.bytes).collect();
        slopes.sort_by(f64::total_cmp);
        let slope = slopes.get(slopes.len() / 2).copied().unwrap_or_default();
        let end = most(|case| case.bytes);
        let line = chart.draw_series([PathElement::new([(0.0, 0.0), (end, slope * end)], colour.stroke_width(2))])?;
        line.label(name).legend(move |(x, y)| PathElement::new([(x, y), (x + 50, y)], colour.stroke_width(6)));
        if record.divider > 0.0 && record.at_once > 0.0 {
            let least = record.divider / record.at_once;
            let dashes = (0..40).map(|dash| f64::from(dash) * end / 40.0);
            let dash = |start: f64| PathElement::new([(start, least), (start + end / 80.0, least)], colour.stroke_width(2));
            chart.draw_series(dashes.map(dash))?;
        }
        chart.draw_series(cases.iter().map(|case| Circle::new((case.bytes, case.ours), 8, colour.filled())))?;
    }
    chart
        .configure_series_labels()
        .position(SeriesLabelPosition::UpperLeft)
        .margin(30)
        .legend_area_size(70)
        .label_font(("sans-serif", 30, &INK))
        .background_style(WHITE.mix(0.9))
        .border_style(BLACK.mix(0.3))
        .draw()?;
    root.present()?;
    println!("\nwrote {}", options.out.display());
    Ok(())
}
