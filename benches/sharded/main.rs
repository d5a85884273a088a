//! A step of ranks of an MPI job on this machine, against the whole update on every rank without
//! communication. It starts itself under `mpirun`: `cargo bench --features mpi --bench sharded`.
//!
//! Every rank has one thread; the model has bf16 parameters and gradients, f32 masters and AdamW. All cases
//! take turns in one run; the time of a round is that of the slowest rank. Per case one line, medians over
//! rounds in ns per element of the model: `sharded <case> ns_per_element=<x> ratio=<x>`.
//!
//! - `whole`: the whole update on every rank, nothing exchanged; what the others' ratios are to.
//!   `whole_clipped` is with `ClipGlobalNorm`.
//! - `data_parallel`: gradients widened and added up by `MPI_Allreduce` in f32, then the whole update.
//! - `sharded`, `sharded_clipped` (to `whole_clipped`): the state divided among the ranks.
//! - `world_of_one`: the whole update over a world of one rank.
//! - `exchange_sum`: the gradients to their owners and added up in f32, to `reduce_scatter`, which is MPI's
//!   own with an operation for bf16.
//! - `exchange`, `gather`: what a step sends, to `memcpy`, which copies the model's gradients.

mod cases;
mod collectives;
mod primitives;

use std::process::{Command, ExitCode};
use std::time::Instant;

use clap::Parser;
use optimisers::mpi::{World, run};
use optimisers::{Communicator, Error};

/// Measures steps of the ranks of an MPI job.
#[derive(Parser)]
struct Options {
    /// Only cases whose name contains one of these, and those that they are compared with.
    filters: Vec<String>,
    /// Ranks on this machine.
    #[arg(long, default_value_t = 2)]
    ranks: usize,
    /// Parameters, in millions.
    #[arg(long, default_value_t = 33)]
    millions: usize,
    /// Rounds per case; the median is reported.
    #[arg(long, default_value_t = 11)]
    rounds: usize,
    /// Further arguments for `mpirun`, such as `--mca btl tcp,self`.
    #[arg(long, default_value = "--bind-to core", allow_hyphen_values = true)]
    mpirun: String,
    /// Passed by cargo.
    #[arg(long, hide = true)]
    bench: bool,
}

/// A case and what its ratio is to.
struct Case<'c> {
    name: &'static str,
    baseline: &'static str,
    run: Box<dyn FnMut() -> Result<(), Error> + 'c>,
}

/// Set for ranks.
const RANK: &str = "OPTIMISERS_SHARDED_RANK";

fn main() -> ExitCode {
    let options = Options::parse();
    if std::env::var_os(RANK).is_some() {
        return match run(|world| measure(&world, &options)) {
            Ok(()) => ExitCode::SUCCESS,
            Err(error) => {
                eprintln!("{error}");
                ExitCode::FAILURE
            }
        };
    }
    let mut mpirun = Command::new("mpirun");
    mpirun
        .args(["--oversubscribe", "-n", &options.ranks.to_string()])
        .args(options.mpirun.split_whitespace());
    mpirun
        .arg(std::env::current_exe().expect("this program"))
        .args(std::env::args().skip(1));
    mpirun.envs([
        (RANK, "1"),
        ("RAYON_NUM_THREADS", "1"),
        ("OMPI_ALLOW_RUN_AS_ROOT", "1"),
        ("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1"),
    ]);
    // Ranks that have a core each need not give it away while they wait.
    if options.ranks <= std::thread::available_parallelism().map_or(1, usize::from) {
        mpirun.env("OMPI_MCA_mpi_yield_when_idle", "0");
    }
    match mpirun.status() {
        Ok(status) if status.success() => ExitCode::SUCCESS,
        Ok(_) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("mpirun: {error}; install it (Debian: openmpi-bin)");
            ExitCode::FAILURE
        }
    }
}

fn measure(world: &World, options: &Options) -> Result<(), Error> {
    let sizes = cases::sizes(options.millions);
    let elements: usize = sizes.iter().sum();
    let steps = cases::Steps::new(world, &sizes)?;
    let mut arrays = primitives::Arrays::new(world, elements);
    let mut cases = steps.cases();
    cases.extend(arrays.cases(world));
    let is_wanted = |name: &str| {
        options.filters.is_empty()
            || options
                .filters
                .iter()
                .any(|filter| name.contains(filter.as_str()))
    };
    let baselines: Vec<&str> = cases
        .iter()
        .filter(|case| is_wanted(case.name))
        .map(|case| case.baseline)
        .collect();
    cases.retain(|case| is_wanted(case.name) || baselines.contains(&case.name));

    let mut samples = vec![Vec::new(); cases.len()];
    for round in 0..=options.rounds {
        for (case, samples) in cases.iter_mut().zip(&mut samples) {
            collectives::barrier();
            let start = Instant::now();
            (case.run)()?;
            let seconds = collectives::largest(start.elapsed().as_secs_f64());
            // The first round brings memory and connections into being.
            if round > 0 {
                samples.push(seconds / elements as f64 * 1e9);
            }
        }
    }
    let medians: Vec<f64> = samples.iter_mut().map(|samples| median(samples)).collect();
    if world.rank() == 0 {
        println!(
            "ranks={} elements={elements} rounds={}",
            world.size(),
            options.rounds
        );
        for (case, time) in cases.iter().zip(&medians) {
            let baseline = cases
                .iter()
                .position(|other| other.name == case.baseline)
                .map_or(f64::NAN, |index| medians[index]);
            println!(
                "sharded {} ns_per_element={time:.3} ratio={:.3}",
                case.name,
                time / baseline
            );
        }
    }
    Ok(())
}

fn median(samples: &mut [f64]) -> f64 {
    samples.sort_by(f64::total_cmp);
    samples[samples.len() / 2]
}
