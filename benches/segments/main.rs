//! A training step in segments, compared with one of the whole model: peak memory, time, and the longest
//! sequence for a given amount of memory.
//!
//! The model is the transformer of `examples/gpt` in bf16, with f32 masters and AdamW. Three ways take turns:
//! - `plain`: `loss.backward()`, then `Update::apply_owned`.
//! - `gradients`: `Segments::gradients`, then `Update::apply_owned`.
//! - `train`: `Segments::train`, whose gradients go into the step as they come.
//!
//! One line for each, `kept` and `peak` in MB: parameters with their state, and all that a step had at one
//! time. Seconds are medians over rounds:
//! `segments <way> length=<n> kept=<x> peak=<x> seconds=<x> ratio=<x>`.
//! With `--limit` a line for each with the longest sequence whose step stays below that number of GB:
//! `segments <way> limit=<x> longest=<n>`, in steps of 128.

#[allow(dead_code)]
#[path = "../../examples/gpt/model.rs"]
mod model;
#[path = "../support/peak.rs"]
mod peak;
#[allow(dead_code)]
#[path = "../../examples/support/random.rs"]
mod random;
#[path = "../../examples/support/variable.rs"]
mod variable;

use std::time::Instant;

use candle_core::{DType, Device, Tensor};
use candle_nn::loss::cross_entropy;
use clap::Parser;
use optimisers::{AdamW, MixedPrecision, Result, StateTree, Update, setup};

use model::{Gpt, Size};
use peak::{peak, used};
use random::Random;

/// Measures steps in segments.
#[derive(Parser)]
struct Options {
    /// Blocks of the transformer.
    #[arg(long, default_value_t = 24)]
    layers: usize,
    /// Numbers per token within it.
    #[arg(long, default_value_t = 256)]
    width: usize,
    /// Attention heads.
    #[arg(long, default_value_t = 4)]
    heads: usize,
    /// Tokens in a step, all in one sequence.
    #[arg(long, default_value_t = 512)]
    length: usize,
    /// Rounds; the median is reported.
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..))]
    rounds: u32,
    /// Looks for the longest sequence whose step takes less than this number of GB, and measures nothing
    /// else.
    #[arg(long)]
    limit: Option<f64>,
    /// Passed by cargo.
    #[arg(long, hide = true)]
    bench: bool,
}

/// How many different tokens there are.
const TOKENS: usize = 8192;

#[derive(Clone, Copy, Debug)]
enum Way {
    Plain,
    Gradients,
    Train,
}

/// How exactly the longest sequence is found.
const STEP: usize = 128;

const WAYS: [Way; 3] = [Way::Plain, Way::Gradients, Way::Train];

/// A network and the state of its optimiser.
struct Training {
    gpt: Gpt,
    state: StateTree,
}

impl Training {
    fn new(options: &Options, length: usize) -> Result<Self> {
        let Options {
            layers, width, heads, ..
        } = *options;
        let size = Size {
            characters: TOKENS,
            context: length,
            layers,
            width,
            heads,
        };
        let gpt = Gpt::new(size, DType::BF16, 0, &Device::Cpu)?;
        let state = setup(MixedPrecision::new(DType::F32, AdamW::new(1e-3)), &gpt)?;
        Ok(Training { gpt, state })
    }

    fn step(&mut self, way: Way, length: usize) -> Result<()> {
        let mut random = Random::new(length as u64);
        let tokens: Vec<u32> = (0..=length).map(|_| random.below(TOKENS) as u32).collect();
        let inputs = Tensor::new(&tokens[..length], &Device::Cpu)?.unsqueeze(0)?;
        let targets = Tensor::new(&tokens[1..], &Device::Cpu)?;
        let Training { gpt, state } = self;
        let loss = |logits: &Tensor| cross_entropy(logits, &targets);
        let segments = gpt.segments(&inputs)?;
        let update = Update::new(state);
        match way {
            Way::Plain => {
                let grads = loss(&gpt.forward(&inputs)?)?.backward()?;
                update.apply_owned(gpt, grads)?;
            }
            Way::Gradients => {
                let (_, grads) = segments.gradients(loss)?;
                update.apply_owned(gpt, grads)?;
            }
            Way::Train => drop(segments.train(update, gpt, loss)?),
        }
        Ok(())
    }
}

fn main() -> Result<()> {
    let options = Options::parse();
    match options.limit {
        Some(limit) => WAYS.into_iter().try_for_each(|way| longest(&options, way, limit)),
        None => compare(&options),
    }
}

/// All ways train one state in turns.
fn compare(options: &Options) -> Result<()> {
    let length = options.length;
    let before = used();
    let mut training = Training::new(options, length)?;
    training.step(Way::Plain, length)?;
    let kept = used() - before;
    let mut seconds = [const { Vec::new() }; 3];
    let mut peaks = [0; 3];
    for _ in 0..options.rounds {
        for (i, way) in WAYS.into_iter().enumerate() {
            let start = Instant::now();
            let mut result = Ok(());
            peaks[i] = kept + peak(|| result = training.step(way, length));
            result?;
            seconds[i].push(start.elapsed().as_secs_f64());
        }
    }
    let medians = seconds.map(|mut seconds| {
        seconds.sort_by(f64::total_cmp);
        seconds[seconds.len() / 2]
    });
    for (i, way) in WAYS.into_iter().enumerate() {
        println!(
            "segments {} length={length} kept={:.0} peak={:.0} seconds={:.3} ratio={:.2}",
            name(way),
            kept as f64 / 1e6,
            peaks[i] as f64 / 1e6,
            medians[i],
            medians[i] / medians[0]
        );
    }
    Ok(())
}

/// The longest sequence for a number of GB, in steps of 128 tokens.
fn longest(options: &Options, way: Way, limit: f64) -> Result<()> {
    let total = |length: usize| -> Result<f64> {
        let before = used();
        let mut training = Training::new(options, length)?;
        // In the first step of a state segments run twice.
        training.step(way, 16)?;
        let kept = used() - before;
        let mut result = Ok(());
        let step = peak(|| result = training.step(way, length));
        result.map(|()| (kept + step) as f64 / 1e9)
    };
    let (mut fits, mut exceeds) = (0, 512);
    while total(exceeds)? < limit {
        (fits, exceeds) = (exceeds, 2 * exceeds);
    }
    while exceeds - fits > STEP {
        let middle = (fits + exceeds) / 2;
        *if total(middle)? < limit {
            &mut fits
        } else {
            &mut exceeds
        } = middle;
    }
    println!("segments {} limit={limit} longest={fits}", name(way));
    Ok(())
}

fn name(way: Way) -> String {
    format!("{way:?}").to_lowercase()
}
