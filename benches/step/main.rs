//! How fast one optimiser step is: ours, the floor that memory sets, and candle-nn's AdamW, interleaved in one run.
//!
//! Per case one line, medians over rounds in nanoseconds per parameter:
//! `bench <case> ns_per_element=<x> floor_ns=<x> candle_nn_ns=<x or ->`.

mod cases;
mod floor;

use std::time::{Duration, Instant};

use clap::Parser;

use cases::Case;

/// Measures optimiser steps against the speed of memory and against candle-nn.
#[derive(Parser)]
struct Options {
    /// Smaller tensors and fewer rounds: under a minute.
    #[arg(long)]
    quick: bool,
    /// Rounds per case; the median is reported.
    #[arg(long, default_value_t = 9, value_parser = clap::value_parser!(u32).range(1..))]
    rounds: u32,
    /// Every elementwise rule by itself, in place of the cases.
    #[arg(long)]
    rules: bool,
    /// Only cases whose name contains this.
    filter: Option<String>,
    /// Passed by cargo.
    #[arg(long, hide = true)]
    bench: bool,
}

/// Something to be timed: steps over `elements` parameters.
pub struct Timed {
    elements: usize,
    /// Takes steps for as long as the function it is given says so.
    run: Box<Steps>,
}

/// Steps, taken while the function that is passed says so.
type Steps = dyn FnMut(&mut dyn FnMut() -> bool);

impl Timed {
    /// Nanoseconds per parameter, over as many steps as fill a measurable time, after one that warms up: whoever ran before has left the
    /// caches and the page tables to itself.
    fn nanoseconds(&mut self) -> f64 {
        let mut start = Instant::now();
        let mut taken = Duration::ZERO;
        let mut steps = 0u32;
        (self.run)(&mut || {
            if steps <= 1 {
                start = Instant::now();
            }
            taken = start.elapsed();
            let go_on = steps <= 1 || taken < Duration::from_millis(20);
            steps += u32::from(go_on);
            go_on
        });
        taken.as_nanos() as f64 / f64::from(steps - 1) / self.elements as f64
    }
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let options = Options::parse();
    println!("threads={} rounds={} quick={}", rayon::current_num_threads(), options.rounds, options.quick);
    for case in if options.rules { cases::rules() } else { cases::all(options.quick) } {
        if options.filter.as_ref().is_none_or(|filter| case.name.contains(filter)) {
            measure(&case, options.rounds)?;
        }
    }
    Ok(())
}

fn measure(case: &Case, rounds: u32) -> Result<(), Box<dyn std::error::Error>> {
    let (mut ours, mut floor) = (case.ours()?, case.floor());
    let mut candle_nn = case.candle_nn()?;
    let (mut ours_ns, mut floor_ns, mut candle_nn_ns) = (Vec::new(), Vec::new(), Vec::new());
    for round in 0..=rounds {
        let sample = (ours.nanoseconds(), floor.nanoseconds(), candle_nn.as_mut().map(Timed::nanoseconds));
        // The first round touches fresh memory.
        if round > 0 {
            ours_ns.push(sample.0);
            floor_ns.push(sample.1);
            candle_nn_ns.extend(sample.2);
        }
    }
    let (ours, floor) = (median(ours_ns), median(floor_ns));
    let candle_nn = if candle_nn_ns.is_empty() { "-".to_string() } else { format!("{:.3}", median(candle_nn_ns)) };
    println!("bench {} ns_per_element={ours:.4} floor_ns={floor:.4} candle_nn_ns={candle_nn}", case.name);
    Ok(())
}

fn median(mut samples: Vec<f64>) -> f64 {
    samples.sort_by(f64::total_cmp);
    samples[samples.len() / 2]
}
