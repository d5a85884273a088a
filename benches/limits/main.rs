//! What limits a step, from the records of all machines: `cargo bench --bench limits` draws bytes against
//! time and prints the table of each record.
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
    /// What Adam's root and quotient take on one thread, in nanoseconds per parameter.
    divider: f64,
    threads: f64,
    /// By case and who measured it, in nanoseconds per parameter of each turn. Of peers alone.
    turns: BTreeMap<String, BTreeMap<String, Vec<f64>>>,
    /// The versions of peers.
    versions: BTreeMap<String, String>,
}

/// A case from memory, in nanoseconds per parameter of each run, and in the cache.
#[derive(Default)]
struct Case {
    bytes: f64,
    ours: Vec<f64>,
    floor: Vec<f64>,
    cached: f64,
    cycles: f64,
}

impl Case {
    fn ours(&self) -> f64 {
        median(self.ours.iter().copied())
    }

    /// Of what stands in one line, as memory can be slower at one time than at another.
    fn of_floor(&self) -> f64 {
        median(
            self.ours
                .iter()
                .zip(&self.floor)
                .map(|(ours, floor)| ours / floor),
        )
    }
}

/// 0 without numbers.
fn median(numbers: impl Iterator<Item = f64>) -> f64 {
    let mut numbers: Vec<f64> = numbers.collect();
    numbers.sort_by(f64::total_cmp);
    numbers.get(numbers.len() / 2).copied().unwrap_or_default()
}

/// What stands behind `name=` in a line.
fn behind<'l>(line: &'l str, name: &str) -> Option<&'l str> {
    line.split_whitespace()
        .find_map(|word| word.strip_prefix(name)?.strip_prefix('='))
}

/// The number behind `name=` in a line, and 0 without one.
fn number(line: &str, name: &str) -> f64 {
    behind(line, name)
        .and_then(|number| number.parse().ok())
        .unwrap_or(0.0)
}

/// The peers that are measured in turns with this crate.
const PEERS: [&str; 2] = ["torch", "deepspeed"];

/// The cases of a number of parameters begin so.
const GROWTH: &str = "growth_";

/// The records of a file by machine and instruction set.
fn read(path: &Path) -> Result<BTreeMap<String, Record>, Box<dyn Error>> {
    let machine = path
        .file_stem()
        .unwrap_or_default()
        .to_string_lossy()
        .into_owned();
    let (mut records, mut name, mut gigahertz) = (BTreeMap::<String, Record>::new(), machine.clone(), 1.0);
    // From their heading on, to the end of the file.
    let mut is_of_peers = false;
    for line in fs::read_to_string(path)?.lines() {
        if line.starts_with("peers") {
            (name, is_of_peers) = (format!("{machine}, peers"), true);
        } else if let Some(isa) = behind(line, "isa").filter(|_| !is_of_peers) {
            name = format!("{machine}, {isa}");
        }
        let record = records.entry(name.clone()).or_default();
        if line.starts_with("threads=") && !line.contains("threads=1 ") {
            record.threads = number(line, "threads");
        }
        for peer in PEERS {
            record
                .versions
                .extend(behind(line, peer).map(|version| (peer.to_string(), version.to_string())));
        }
        match line.split_whitespace().collect::<Vec<_>>()[..] {
            [who, case, ..] if is_of_peers && (who == "bench" || PEERS.contains(&who)) => {
                let turns = record.turns.entry(case.to_string()).or_default();
                let mut note = |who: &str, field| {
                    turns
                        .entry(who.to_string())
                        .or_default()
                        .push(number(line, field))
                };
                note(who, "ns_per_element");
                if who == "bench" {
                    note("floor", "floor_ns");
                    note("candle-nn", "candle_nn_ns");
                }
            }
            ["bench", case, ..] => {
                let case = record.cases.entry(case.to_string()).or_default();
                case.bytes = number(line, "bytes");
                case.ours.push(number(line, "ns_per_element"));
                case.floor.push(number(line, "floor_ns"));
            }
            ["cached", case, ..] => {
                let case = record.cases.entry(case.to_string()).or_default();
                case.cached = number(line, "ns_per_element");
                case.cycles = number(line, "cycles_per_element");
            }
            [
                "cycles",
                "are",
                ..,
                clock,
                "GHz,",
                "as",
                "a",
                "chain",
                "of",
                "additions",
                "says",
            ] => gigahertz = clock.parse()?,
            ["divider", ..] => record.divider = number(line, "root_and_quotient") / gigahertz,
            _ => {}
        }
    }
    records.retain(|_, record| !record.cases.is_empty() || !record.turns.is_empty());
    Ok(records)
}

/// The median of all turns and the least, of the cases that peers have.
fn print_peers(name: &str, record: &Record) {
    let peers: Vec<&str> = PEERS
        .into_iter()
        .filter(|peer| record.versions.contains_key(*peer))
        .collect();
    let titles: Vec<String> = peers
        .iter()
        .map(|peer| format!("{peer} {}", record.versions[*peer]))
        .collect();
    println!(
        "\n| {name} | this crate | floor | candle-nn | {} |\n| {}",
        titles.join(" | "),
        "--- | ".repeat(4 + peers.len())
    );
    for (case, turns) in record
        .turns
        .iter()
        .filter(|(_, turns)| turns.contains_key(PEERS[0]))
    {
        let column = |who: &str| {
            let turns = || {
                turns
                    .get(who)
                    .into_iter()
                    .flatten()
                    .copied()
                    .filter(|turn| *turn > 0.0)
            };
            let least = turns().reduce(f64::min);
            least.map_or("–".to_string(), |least| {
                format!("{:.2} ({least:.2})", median(turns()))
            })
        };
        let columns: Vec<String> = ["bench", "floor", "candle-nn"]
            .iter()
            .chain(&peers)
            .map(|who| column(who))
            .collect();
        println!("| `{case}` | {} |", columns.join(" | "));
    }
}

fn print(name: &str, record: &Record) {
    println!(
        "\n| {name} | bytes | ns | of the floor | ns in the cache, one thread | cycles |\n\
         | --- | --- | --- | --- | --- | --- |"
    );
    let written = |number: f64, digits: usize| {
        if number > 0.0 {
            format!("{number:.digits$}")
        } else {
            "–".to_string()
        }
    };
    for (name, case) in &record.cases {
        println!(
            "| `{name}` | {} | {} | {} | {} | {} |",
            case.bytes,
            written(case.ours(), 2),
            written(case.of_floor(), 2),
            written(case.cached, 2),
            written(case.cycles, 1)
        );
    }
}

fn main() -> Result<(), Box<dyn Error>> {
    let options = Options::parse();
    let mut files: Vec<PathBuf> = fs::read_dir(&options.records)?
        .map(|entry| Ok(entry?.path()))
        .collect::<std::io::Result<_>>()?;
    files.sort();
    let mut records = BTreeMap::new();
    for file in files
        .iter()
        .filter(|file| file.extension().is_some_and(|extension| extension == "txt"))
    {
        records.append(&mut read(file).map_err(|error| format!("{}: {error}", file.display()))?);
    }
    for (name, record) in &records {
        if record.turns.is_empty() {
            print(name, record)
        } else {
            print_peers(name, record)
        }
    }
    records.retain(|_, record| !record.cases.is_empty());
    let root = canvas(&options.out)?;
    let area = titled(
        &root,
        "What limits a step",
        "lines: a loop that moves the bytes and computes nothing; dashes: Adam's root and quotient and \
         nothing else",
    )?;
    let (bytes, growth) = area.split_vertically(area.dim_in_pixel().1 * 2 / 3);
    draw_bytes(&bytes, &records)?;
    draw_growth(&growth, &records)?;
    root.present()?;
    println!("\nwrote {}", options.out.display());
    Ok(())
}

type Area<'a> = DrawingArea<BitMapBackend<'a>, plotters::coord::Shift>;

/// Bytes against time: a line for memory, dashes for the divider, a point for each case.
fn draw_bytes(area: &Area<'_>, records: &BTreeMap<String, Record>) -> Result<(), Box<dyn Error>> {
    let is_drawn = |(name, case): &(&String, &Case)| case.bytes > 0.0 && !name.starts_with(GROWTH);
    let all = || {
        records
            .values()
            .flat_map(|record| &record.cases)
            .filter(is_drawn)
            .map(|(_, case)| case)
    };
    let most = |of: fn(&Case) -> f64| all().map(of).fold(0.0, f64::max) * 1.1;
    let mut chart = ChartBuilder::on(area)
        .margin(30)
        .x_label_area_size(90)
        .y_label_area_size(130)
        .build_cartesian_2d(0.0..most(|case| case.bytes), 0.0..most(Case::ours))?;
    chart
        .configure_mesh()
        .x_desc("bytes per parameter")
        .y_desc("ns per parameter")
        .label_style(("sans-serif", 30, &INK))
        .draw()?;
    for (place, (name, record)) in records.iter().enumerate() {
        let colour = Palette99::pick(place).to_rgba();
        let cases: Vec<&Case> = record
            .cases
            .iter()
            .filter(is_drawn)
            .map(|(_, case)| case)
            .collect();
        let slope = median(
            cases
                .iter()
                .map(|case| median(case.floor.iter().copied()) / case.bytes),
        );
        let end = most(|case| case.bytes);
        let line = chart.draw_series([PathElement::new(
            [(0.0, 0.0), (end, slope * end)],
            colour.stroke_width(2),
        )])?;
        line.label(name)
            .legend(move |(x, y)| PathElement::new([(x, y), (x + 50, y)], colour.stroke_width(6)));
        if record.divider > 0.0 && record.threads > 0.0 {
            let least = record.divider / record.threads;
            let dashes = (0..40).map(|dash| f64::from(dash) * end / 40.0);
            let dash = |start: f64| {
                PathElement::new(
                    [(start, least), (start + end / 80.0, least)],
                    colour.stroke_width(2),
                )
            };
            chart.draw_series(dashes.map(dash))?;
        }
        chart.draw_series(
            cases
                .iter()
                .map(|case| Circle::new((case.bytes, case.ours()), 8, colour.filled())),
        )?;
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
    Ok(())
}

/// Parameters against the time that one of them takes.
fn draw_growth(area: &Area<'_>, records: &BTreeMap<String, Record>) -> Result<(), Box<dyn Error>> {
    let points = |record: &Record| -> Vec<(f64, f64)> {
        let parameters = |name: &str| name.strip_prefix(GROWTH)?.parse::<f64>().ok();
        let mut points: Vec<_> = record
            .cases
            .iter()
            .filter_map(|(name, case)| Some((parameters(name)?, case.ours())))
            .collect();
        points.sort_by(|a, b| a.0.total_cmp(&b.0));
        points
    };
    let all = || records.values().flat_map(points);
    let (least, most) = (
        all().map(|point| point.0).fold(f64::INFINITY, f64::min),
        all().map(|point| point.0).fold(0.0, f64::max),
    );
    let slowest = all().map(|point| point.1).fold(0.0, f64::max) * 1.1;
    let mut chart = ChartBuilder::on(area)
        .margin(30)
        .x_label_area_size(90)
        .y_label_area_size(130)
        .build_cartesian_2d((least..most).log_scale(), 0.0..slowest)?;
    let thousands = |parameters: &f64| format!("{parameters:e}");
    let mut mesh = chart.configure_mesh();
    mesh.x_desc("parameters")
        .y_desc("ns per parameter")
        .y_labels(5)
        .x_label_formatter(&thousands)
        .label_style(("sans-serif", 30, &INK))
        .draw()?;
    for (place, record) in records.values().enumerate() {
        let colour = Palette99::pick(place).to_rgba();
        chart.draw_series(LineSeries::new(points(record), colour.stroke_width(4)).point_size(6))?;
    }
    Ok(())
}
