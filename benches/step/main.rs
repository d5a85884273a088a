//! How fast one optimiser step is: ours, the floor that memory sets, and candle-nn's AdamW, interleaved in one run.
//!
//! Per case one line, medians over rounds in nanoseconds per parameter:
//! `bench <case> ns_per_element=<x> floor_ns=<x> candle_nn_ns=<x or ->`.
//!
//! With `--device cuda` the floor is a copy within the GPU's memory that moves the same number of bytes, and the line goes on with the
//! number of parameters, the bytes that our step moves per nanosecond, and how much of the copy's speed that is:
//! `elements=<n> gb_per_s=<x> of_copy=<x>`.

mod cases;
#[path = "../../examples/support/device.rs"]
mod device;
mod floor;
#[cfg(feature = "cuda")]
mod gpu;
mod sizes;
mod timed;

use candle_core::Device;
use clap::Parser;

use cases::Case;
use device::DeviceName;
use sizes::Sizes;
use timed::Timed;

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
    /// Where to measure.
    #[arg(long, value_enum, default_value_t = DeviceName::Cpu)]
    device: DeviceName,
    /// Parameters of each case but `small_f32` and `growth`. Without it 33.5 M, with --quick 8.4 M; on a GPU 1e9 for the main cases and 1e8 for the
    /// others. Where a GPU has too little memory they are fewer.
    #[arg(long, value_parser = clap::builder::RangedU64ValueParser::<usize>::new().range(2..))]
    elements: Option<usize>,
    /// Only cases whose name contains this.
    filter: Option<String>,
    /// Passed by cargo.
    #[arg(long, hide = true)]
    bench: bool,
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let options = Options::parse();
    let sizes = Sizes { device: options.device.open()?, quick: options.quick, elements: options.elements };
    println!("threads={} rounds={} quick={}{}", rayon::current_num_threads(), options.rounds, options.quick, described(&sizes.device)?);
    for mut case in if options.rules { cases::rules(&sizes) } else { cases::all(&sizes) } {
        if options.filter.as_ref().is_none_or(|filter| case.name.contains(filter)) {
            case.fit()?;
            measure(&case, options.rounds, sizes.device.is_cpu())?;
        }
    }
    Ok(())
}

/// The GPU, if it is one.
fn described(device: &Device) -> candle_core::Result<String> {
    match device {
        #[cfg(feature = "cuda")]
        Device::Cuda(gpu) => Ok(format!(" device={:?} free_bytes={}", gpu::name(gpu)?, gpu::free_memory(gpu)?)),
        _ => Ok(String::new()),
    }
}

fn measure(case: &Case, rounds: u32, on_cpu: bool) -> Result<(), Box<dyn std::error::Error>> {
    let (mut ours, mut floor) = (case.ours()?, case.floor()?);
    let mut candle_nn = case.candle_nn()?;
    let (mut ours_ns, mut floor_ns, mut candle_nn_ns) = (Vec::new(), Vec::new(), Vec::new());
    for round in 0..=rounds {
        let sample = (ours.nanoseconds()?, floor.nanoseconds()?, candle_nn.as_mut().map(Timed::nanoseconds).transpose()?);
        // The first round touches fresh memory.
        if round > 0 {
            ours_ns.push(sample.0);
            floor_ns.push(sample.1);
            candle_nn_ns.extend(sample.2);
        }
    }
    let (ours, floor) = (median(ours_ns), median(floor_ns));
    let candle_nn = (!candle_nn_ns.is_empty()).then(|| median(candle_nn_ns));
    let (digits, more) = if on_cpu { (4, String::new()) } else { (6, on_gpu(case, ours, floor)) };
    let candle_nn = candle_nn.map_or("-".to_string(), |candle_nn| format!("{candle_nn:.*}", digits - 1));
    println!("bench {} ns_per_element={ours:.digits$} floor_ns={floor:.digits$} candle_nn_ns={candle_nn}{more}", case.name);
    Ok(())
}

/// The columns for a GPU.
fn on_gpu(case: &Case, ours: f64, copy: f64) -> String {
    format!(" elements={} gb_per_s={:.1} of_copy={:.3}", case.elements(), case.moved() as f64 / ours, copy / ours)
}

fn median(mut samples: Vec<f64>) -> f64 {
    samples.sort_by(f64::total_cmp);
    samples[samples.len() / 2]
}
