//! Trains a small network on handwritten digits four times, from the same weights and with the same batches:
//!
//! - `f32`: everything in f32, with a rule of this crate;
//! - `bf16+master`: parameters, activations and gradients in bf16, the rule on f32 masters
//!   (`MixedPrecision`);
//! - `f16+master`: the same in f16;
//! - `bf16`: everything in bf16 with candle-nn's AdamW, the way it is done without this crate.
//!
//! Then it compares them. Run with `cargo run --release --example digits`; start reading at `train.rs`.

#[path = "../support/chart.rs"]
mod chart;
mod data;
#[path = "../support/device.rs"]
mod device;
#[path = "../support/digits.rs"]
mod digits;
mod model;
#[path = "../support/picture.rs"]
mod picture;
mod plot;
#[path = "../support/random.rs"]
mod random;
#[path = "../support/ranks.rs"]
mod ranks;
mod report;
mod train;
#[path = "../support/variable.rs"]
mod variable;
mod variant;

use std::error::Error;
use std::path::PathBuf;
use std::process::ExitCode;

use clap::Parser;
use optimisers::Rule;

use data::Digits;
use device::DeviceName;
use ranks::{Ranks, World};
use variant::{RuleName, VARIANTS};

/// Trains a network on handwritten digits in f32, bf16 and f16, with and without f32 masters, and compares.
///
/// The last variant, `bf16`, always is candle-nn's AdamW on bf16 parameters, whatever the rule; with
/// `--rule adamw` it has the same hyper-parameters as the others.
///
/// With --ranks 2 two threads train each variant together, and with `mpirun -n 2 digits --ranks mpi` two
/// processes: both have a half of each batch. The means over the halves are rounded on their own, so losses
/// are those of one rank but for rounding; threads and processes have the same bits.
#[derive(Parser)]
struct Args {
    /// How often to go through the training images
    #[arg(long, default_value_t = 80, value_parser = clap::value_parser!(u32).range(1..))]
    epochs: u32,

    /// Decides the initial weights and the order of the images
    #[arg(long, default_value_t = 0)]
    seed: u64,

    /// The rule of the first three variants
    #[arg(long, value_enum, default_value_t = RuleName::Adamw)]
    rule: RuleName,

    /// The learning rate; the rule's own default if not given
    #[arg(long, allow_negative_numbers = true)]
    eta: Option<f64>,

    /// Who shares the images of each batch and the optimiser's state: so many threads, or `mpi`, the
    /// processes that `mpirun` has started
    #[arg(long, default_value = "1")]
    ranks: Ranks,

    /// Where to train
    #[arg(long, value_enum, default_value_t = DeviceName::Cpu)]
    device: DeviceName,

    /// Where to write the picture of the loss curves
    #[arg(long, default_value = "digits-loss.png", value_parser = picture::png_path)]
    out: PathBuf,
}

fn main() -> ExitCode {
    let args: Args = ranks::options();
    ranks::on_each(
        args.ranks,
        |rank, ranks| Start::new(&args, rank, ranks),
        |start, world| run(&args, start, &world),
    )
}

/// What all ranks of a process start with.
struct Start {
    rule: Box<dyn Rule>,
    digits: Digits,
}

impl Start {
    /// Refuses what can be refused before the training.
    fn new(args: &Args, rank: usize, ranks: usize) -> Result<Self, Box<dyn Error>> {
        let start = Start {
            rule: args.rule.rule(args.eta)?,
            digits: Digits::load(&args.device.open()?)?,
        };
        train::check_ranks(&start.digits, ranks)?;
        if rank == 0 {
            picture::check_writable(&args.out)?;
        }
        Ok(start)
    }
}

/// A rank's part. Rank 0 speaks for all.
fn run(args: &Args, Start { rule, digits }: &Start, world: &World) -> Result<ExitCode, Box<dyn Error>> {
    if world.is_first() {
        report::header(digits, rule.as_ref(), args, world.size());
    }
    let runs = VARIANTS
        .iter()
        .map(|variant| train::train(variant, digits, args, world))
        .collect::<Result<Vec<_>, _>>()?;
    if world.is_first() {
        report::table(&runs);
        plot::loss_curves(&runs, rule.as_ref(), args)?;
        println!("\nloss curves: {}\n", args.out.display());
        report::results(&runs);
    }
    Ok(ExitCode::SUCCESS)
}
