//! Trains a small network on handwritten digits without candle: parameters are vectors of bf16, gradients
//! vectors of f32, and the forward and backward pass are loops. The optimiser keeps f32 masters of the
//! parameters, and works on the vectors where they lie.
//!
//! It shows that a program with tensors of its own has all that candle's have: masters, clipping by the
//! global norm, a schedule. The loss falls and the accuracy comes to that of the digits example with candle.
//! Run with `cargo run --release --example plain`.

#[path = "../support/digits.rs"]
mod digits;
mod network;
#[path = "../support/random.rs"]
mod random;

use std::error::Error;

use clap::Parser;
use optimisers::{AdamW, ClipGlobalNorm, DType, MixedPrecision, OptimiserChain, Schedule, setup, update};

use digits::{Digit, digits, shuffle};
use network::Network;
use random::Random;

/// Trains a small network on handwritten digits, on plain vectors.
#[derive(Parser)]
struct Args {
    /// How often to go through the training images
    #[arg(long, default_value_t = 20, value_parser = clap::value_parser!(u64).range(1..))]
    epochs: u64,

    /// Images per step
    #[arg(long, default_value_t = 32, value_parser = clap::value_parser!(u64).range(1..))]
    batch: u64,

    /// The learning rate at the start
    #[arg(long, default_value_t = 0.01)]
    eta: f64,

    /// Decides the initial weights and the order of the images
    #[arg(long, default_value_t = 0)]
    seed: u64,
}

fn main() -> Result<(), Box<dyn Error>> {
    let Args {
        epochs,
        batch,
        eta,
        seed,
    } = Args::parse();
    let [train, test] = digits()?;
    let mut random = Random::new(seed);
    let mut network = Network::new(&mut random);

    let rule = OptimiserChain::new((ClipGlobalNorm::new(1.0), AdamW::new(eta)));
    let mut state = setup(MixedPrecision::new(DType::F32, rule), &network.lend()?)?;
    println!(
        "{} parameters in vectors of bf16, trained on {} handwritten digits without candle; accuracy is on \
         {} others",
        state.elements(),
        train.len(),
        test.len()
    );
    let batch = batch as usize;
    let steps = epochs * train.len().div_ceil(batch) as u64;
    state.schedule(Schedule::cosine(eta, 0.0, steps))?;

    let mut order: Vec<&Digit> = train.iter().collect();
    for epoch in 1..=epochs {
        shuffle(&mut order, &mut random);
        let mut total = 0.0;
        for batch in order.chunks(batch) {
            let (loss, gradients) = network.gradients(batch);
            update(&mut state, &network.lend()?, &gradients.show()?)?;
            total += loss * batch.len() as f32;
        }
        println!(
            "epoch {epoch}: loss {:.4}, accuracy {:.4}",
            total / train.len() as f32,
            network.accuracy(&test)
        );
    }
    println!(
        "{} bytes of state for {} parameters: an f32 master and two moments each",
        state.bytes(),
        state.elements()
    );
    Ok(())
}
