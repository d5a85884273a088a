//! Trains two problems with every way this crate has to keep low-precision parameters, from the same weights
//! (rounded to the dtype), with the same batches and the same AdamW, and compares what is reached and what it
//! costs:
//!
//! - `digits`: the network of the digits example;
//! - `regression`: a linear model whose steps are too small for bf16 on its own.
//!
//! Run with `cargo run --release --example precision`; start reading at `variant.rs`.

#[path = "../support/chart.rs"]
mod chart;
#[path = "../digits/data.rs"]
mod data;
#[path = "../support/device.rs"]
mod device;
#[path = "../support/digits.rs"]
mod digits;
#[path = "../digits/model.rs"]
mod model;
#[path = "../support/picture.rs"]
mod picture;
mod plot;
mod problem;
#[path = "../support/random.rs"]
mod random;
mod regression;
mod report;
mod train;
#[path = "../support/variable.rs"]
mod variable;
mod variant;

use std::error::Error;
use std::path::PathBuf;
use std::process::ExitCode;

use clap::Parser;

use data::Digits;
use device::DeviceName;
use problem::Problem;
use regression::Regression;
use train::Study;

/// Compares the ways to keep parameters in low precision: f32 masters, split masters, Kahan's
/// summation, stochastic rounding.
#[derive(Parser)]
struct Args {
    /// How often to go through the training images
    #[arg(long, default_value_t = 80, value_parser = clap::value_parser!(u32).range(1..))]
    epochs: u32,

    /// How often to go through the samples of the regression
    #[arg(long, default_value_t = 160, value_parser = clap::value_parser!(u32).range(1..))]
    regression_epochs: u32,

    /// Decides the initial weights, the regression's samples, the order of both and the random rounding
    #[arg(long, default_value_t = 0)]
    seed: u64,

    /// How many seeds from that on to train with; several are compared by their means
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u64).range(1..))]
    seeds: u64,

    /// Where to train
    #[arg(long, value_enum, default_value_t = DeviceName::Cpu)]
    device: DeviceName,

    /// Where to write the picture of the loss curves
    #[arg(long, default_value = "precision-loss.png", value_parser = picture::png_path)]
    out: PathBuf,

    /// Where to write the picture of the distances from f32
    #[arg(long, default_value = "precision-distance.png", value_parser = picture::png_path)]
    distance_out: PathBuf,

    /// Ends with a line for each run that programs can read
    #[arg(long)]
    machine: bool,
}

fn main() -> ExitCode {
    match run(&Args::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::FAILURE
        }
    }
}

fn run(args: &Args) -> Result<(), Box<dyn Error>> {
    // What can be refused is refused now, not after the training.
    let device = args.device.open()?;
    picture::check_writable(&args.out)?;
    picture::check_writable(&args.distance_out)?;

    let (mut digits, mut regressions) = (Vec::new(), Vec::new());
    for seed in args.seed..args.seed.saturating_add(args.seeds) {
        digits.push(study(&Digits::load(&device)?, args.epochs, seed)?);
        regressions.push(study(
            &Regression::new(seed, &device)?,
            args.regression_epochs,
            seed,
        )?);
    }
    let first = [&digits[0], &regressions[0]];
    plot::loss_curves(first, args)?;
    println!("loss curves: {}", args.out.display());
    plot::distances(first, args)?;
    println!("distances: {}", args.distance_out.display());
    if args.machine {
        println!();
        first.into_iter().try_for_each(report::results)?;
    }
    if args.seeds > 1 {
        [&digits, &regressions]
            .into_iter()
            .for_each(|studies| report::spread(studies));
    }
    Ok(())
}

/// Trains a problem with every variant, and reports on each.
fn study<P: Problem>(problem: &P, epochs: u32, seed: u64) -> Result<Study, Box<dyn Error>> {
    report::header(problem, epochs, seed);
    let mut runs = Vec::new();
    for variant in &variant::VARIANTS {
        let run = train::train(variant, problem, epochs, seed)?;
        report::row(&run);
        runs.push(run);
    }
    println!();
    Ok(Study {
        name: P::NAME,
        title: P::TITLE,
        eta: P::ETA,
        runs,
    })
}
