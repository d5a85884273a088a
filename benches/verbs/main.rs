//! How the time of each verb grows: all verbs of the crate, once with few leaves and once with many.
//!
//! Per verb one line, the least of several runs in milliseconds, and how many times longer the larger run
//! takes: `verb <name> few_ms=<x> many_ms=<x> growth=<x>`. With 8 times as many leaves (phases, members) a
//! growth of 8 is linear, and 64 is quadratic. Verbs of single leaves are called for [`CALLS`] leaves, and
//! their time is that of calls for all leaves. A call that gets the model visits all of it, so such calls for
//! one leaf after another are quadratic, and one call for all leaves is not.
//!
//! `--earlier <file>` prints the lines of this file next to those of the present run.

mod cases;
mod trained;

use std::collections::BTreeMap;
use std::error::Error;
use std::fs;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use clap::Parser;

use cases::{Case, Run};
use trained::Trained;

/// The leaves for which a verb of single leaves is called.
const CALLS: usize = 256;

/// Measures how the time of each verb grows with leaves, phases and members.
#[derive(Parser)]
struct Options {
    /// The number of leaves in the small run.
    #[arg(long, default_value_t = 2_000)]
    leaves: usize,
    /// How many times as many the large run has.
    #[arg(long, default_value_t = 8)]
    times: usize,
    /// Runs of each verb, of which the least counts.
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..))]
    rounds: u32,
    /// An earlier output.
    #[arg(long)]
    earlier: Option<PathBuf>,
    /// Only verbs whose name contains one of these.
    filters: Vec<String>,
    /// Passed by cargo.
    #[arg(long, hide = true)]
    bench: bool,
}

fn main() -> Result<(), Box<dyn Error>> {
    let options = Options::parse();
    let earlier = options
        .earlier
        .as_ref()
        .map(fs::read_to_string)
        .transpose()?
        .unwrap_or_default();
    let earlier: BTreeMap<&str, &str> = earlier
        .lines()
        .filter_map(|line| line.strip_prefix("verb ")?.split_once(' '))
        .collect();
    println!(
        "leaves={} times={} rounds={}",
        options.leaves, options.times, options.rounds
    );
    let is_wanted = |case: &&Case| {
        options.filters.is_empty() || options.filters.iter().any(|filter| case.name.contains(filter))
    };
    for case in cases::all().iter().filter(is_wanted) {
        let few = case.few.unwrap_or(options.leaves);
        let [few, many] = [few, few * options.times].map(|n| least(case, n, options.rounds));
        let (few, many) = (few?.as_secs_f64() * 1e3, many?.as_secs_f64() * 1e3);
        println!(
            "verb {} few_ms={few:.3} many_ms={many:.3} growth={:.1}",
            case.name,
            many / few
        );
        if let Some(earlier) = earlier.get(case.name) {
            println!("     {:width$} {earlier}", "", width = case.name.len());
        }
    }
    Ok(())
}

/// The least time that a verb takes with `n` leaves.
fn least(case: &Case, n: usize, rounds: u32) -> Result<Duration, Box<dyn Error>> {
    let mut least = Duration::MAX;
    for _ in 0..rounds {
        let mut trained = Trained::new(case.start, n)?;
        let (start, calls) = match case.run {
            Run::All(run) => {
                let start = Instant::now();
                run(&mut trained)?;
                (start, 1.0)
            }
            Run::Each(run) => {
                let calls = CALLS.min(n);
                let start = Instant::now();
                for call in 0..calls {
                    run(&mut trained, call * n / calls)?;
                }
                (start, n as f64 / calls as f64)
            }
        };
        least = least.min(start.elapsed().mul_f64(calls));
        // A verb that takes seconds is measured once.
        if least > Duration::from_secs(5) {
            break;
        }
    }
    Ok(least)
}
