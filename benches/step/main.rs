//! How fast one optimiser step is: ours, the floor that memory sets, and candle-nn's AdamW, interleaved in
//! one run.
//!
//! Per case one line, medians over rounds in nanoseconds per parameter:
//! `bench <case> ns_per_element=<x> floor_ns=<x> candle_nn_ns=<x or -> bytes=<n>`, the last being the bytes
//! that a step reads and writes for a parameter.
//!
//! Before them one line says what they hold for, also with which instruction set our steps ran: `isa=<name>`,
//! which `--isa` chooses. The floor is compiled for what every processor of the target has.
//!
//! The cases `growth_<n>` have several models that take turns, so that each finds its data in memory and not
//! in a cache, as after a backward pass.
//!
//! With `--device cuda` the floor is a copy within the GPU's memory that moves the same number of bytes, and
//! the line has in place of them the number of parameters, the bytes that our step moves per nanosecond, and
//! how much of the copy's speed that is: `elements=<n> gb_per_s=<x> of_copy=<x>`.

mod after;
mod cached;
mod cases;
#[path = "../../examples/support/device.rs"]
mod device;
mod divider;
mod floor;
#[cfg(feature = "cuda")]
mod gpu;
mod instructions;
mod matrices;
#[allow(dead_code, reason = "the example has more use for it")]
#[path = "../../examples/gpt/model.rs"]
mod model;
#[allow(dead_code, reason = "the examples have more use for it")]
#[path = "../../examples/support/random.rs"]
mod random;
mod sizes;
mod timed;
#[path = "../../examples/support/variable.rs"]
mod variable;

use candle_core::Device;
use clap::Parser;
use optimisers::Engine;

use cases::Case;
use device::DeviceName;
use instructions::IsaName;
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
    /// A step right after a backward pass and by itself, in place of the cases.
    #[arg(long)]
    after: bool,
    /// Arithmetic by itself: each case on one thread, on leaves that stay in the second-level cache.
    #[arg(long, conflicts_with_all = ["after", "matrices"])]
    cached: bool,
    /// Rules of matrices, on stacks of these and on one after another, in place of the cases.
    #[arg(long)]
    matrices: bool,
    /// Where to measure.
    #[arg(long, value_enum, default_value_t = DeviceName::Cpu)]
    device: DeviceName,
    /// The instruction set of our steps on the CPU: the best if not said.
    #[arg(long, value_enum, default_value_t = IsaName::best())]
    isa: IsaName,
    /// Parameters of each case but `small` and `growth`. Without it 33.5 M, with --quick 8.4 M; on a GPU
    /// 1e9 for the main cases and 1e8 for the others. Where a GPU has too little memory they are fewer.
    #[arg(long, value_parser = clap::builder::RangedU64ValueParser::<usize>::new().range(2..))]
    elements: Option<usize>,
    /// Only cases whose name contains one of these.
    filters: Vec<String>,
    /// Passed by cargo.
    #[arg(long, hide = true)]
    bench: bool,
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let options = Options::parse();
    if options.cached {
        rayon::ThreadPoolBuilder::new().num_threads(1).build_global()?;
    }
    let sizes = Sizes {
        device: options.device.open()?,
        isa: options.isa.expect()?,
        quick: options.quick,
        elements: options.elements,
    };
    let threads = rayon::current_num_threads();
    println!(
        "threads={threads} rounds={} quick={} isa={}{}",
        options.rounds,
        options.quick,
        options.isa,
        described(&sizes.device)?
    );
    if options.after {
        return after::measure(Engine::FusedWith(sizes.isa), options.rounds);
    }
    if options.matrices {
        return matrices::measure(Engine::FusedWith(sizes.isa), options.rounds);
    }
    let cases = if options.rules {
        cases::rules(&sizes)
    } else {
        cases::all(&sizes)
    };
    let is_wanted = |case: &Case| {
        options.filters.is_empty() || options.filters.iter().any(|filter| case.name.contains(filter))
    };
    if options.cached {
        let bounds = cases::bounds(&sizes).ok_or("no rule of a root and a quotient")?;
        return Ok(cached::measure(
            bounds,
            cases.into_iter().flatten().filter(is_wanted),
            options.isa,
            options.rounds,
        )?);
    }
    for mut together in cases {
        together.retain(is_wanted);
        together.iter_mut().try_for_each(Case::fit)?;
        measure(&together, options.rounds, sizes.device.is_cpu())?;
    }
    Ok(())
}

/// The GPU, if it is one.
fn described(device: &Device) -> candle_core::Result<String> {
    match device {
        #[cfg(feature = "cuda")]
        Device::Cuda(gpu) => Ok(format!(
            " device={:?} free_bytes={}",
            gpu::name(gpu)?,
            gpu::free_memory(gpu)?
        )),
        _ => Ok(String::new()),
    }
}

/// What is timed, and how long it took in each round.
struct Series {
    timed: Timed,
    nanoseconds: Vec<f64>,
}

impl Series {
    fn new(timed: Timed) -> Self {
        Series {
            timed,
            nanoseconds: Vec::new(),
        }
    }

    fn sample(&mut self) -> candle_core::Result<()> {
        self.nanoseconds.push(self.timed.nanoseconds()?);
        Ok(())
    }

    /// Of all rounds but the first, which touches fresh memory.
    fn median(mut self) -> f64 {
        let samples = &mut self.nanoseconds[1..];
        samples.sort_by(f64::total_cmp);
        samples[samples.len() / 2]
    }
}

/// Measures these cases in the same rounds, as a machine is not equally fast at all times.
fn measure(together: &[Case], rounds: u32, on_cpu: bool) -> Result<(), Box<dyn std::error::Error>> {
    let series = |case: &Case| {
        Ok([Some(case.ours()?), Some(case.floor()?), case.candle_nn()?].map(|timed| timed.map(Series::new)))
    };
    let mut all = together
        .iter()
        .map(series)
        .collect::<candle_core::Result<Vec<_>>>()?;
    for _ in 0..=rounds {
        // What is compared comes one after another.
        for place in 0..3 {
            all.iter_mut()
                .filter_map(|series| series[place].as_mut())
                .try_for_each(Series::sample)?;
        }
    }
    for (case, series) in together.iter().zip(all) {
        let [ours, floor, candle_nn] = series.map(|series| series.map(Series::median));
        let (ours, floor) = (ours.unwrap_or_default(), floor.unwrap_or_default());
        let (digits, more) = if on_cpu {
            (4, format!(" bytes={}", case.moved()))
        } else {
            (6, on_gpu(case, ours, floor))
        };
        let candle_nn = candle_nn.map_or("-".to_string(), |candle_nn| format!("{candle_nn:.*}", digits - 1));
        println!(
            "bench {} ns_per_element={ours:.digits$} floor_ns={floor:.digits$} \
             candle_nn_ns={candle_nn}{more}",
            case.name
        );
    }
    Ok(())
}

/// The columns for a GPU.
fn on_gpu(case: &Case, ours: f64, copy: f64) -> String {
    format!(
        " elements={} gb_per_s={:.1} of_copy={:.3}",
        case.elements(),
        case.moved() as f64 / ours,
        copy / ours
    )
}
