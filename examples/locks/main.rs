//! Trains a framework's own arrays, which lie behind locks, without candle: the arrays lend their memory, and
//! another thread evaluates the model while it is trained.
//!
//! It shows what a framework writes to have every rule, masters and checkpoints: `Lend` for its array, in
//! thirty lines, and `Model` for what has arrays. The run stops in the middle, goes on from its checkpoint in
//! new arrays, and ends with the bits of a run that was not stopped.
//! Run with `cargo run --release --no-default-features --example locks`.

mod arrays;

use std::error::Error;

use optimisers::{
    AdamW, Checkpoint, CheckpointFile, ClipGlobalNorm, DType, MixedPrecision, OptimiserChain, Schedule,
    StateTree, setup, update,
};

use arrays::{Array, Arrays};

/// How many numbers go into the model.
const INPUTS: usize = 8;

/// The input of an example, and what the model is to make of it.
fn example(index: usize) -> ([f32; INPUTS], f32) {
    let input = std::array::from_fn(|i| ((index * (2 * i + 3) + i * i) % 17) as f32 / 17.0 - 0.5);
    (
        input,
        input
            .iter()
            .enumerate()
            .map(|(i, x)| x * (i as f32 - 3.0))
            .sum::<f32>()
            + 0.7,
    )
}

impl Arrays {
    fn of(bias: f32, weight: Vec<f32>) -> Self {
        let arrays = [
            ("bias", Array::new(&[], vec![bias])),
            ("weight", Array::new(&[1, INPUTS], weight)),
        ];
        Arrays(
            arrays
                .into_iter()
                .map(|(name, array)| (name.to_string(), array))
                .collect(),
        )
    }

    fn zeros() -> Self {
        Arrays::of(0.0, vec![0.0; INPUTS])
    }

    fn error(&self, index: usize) -> ([f32; INPUTS], f32) {
        let (input, target) = example(index);
        let products = self.0["weight"]
            .values()
            .iter()
            .zip(input)
            .map(|(w, x)| w * x)
            .sum::<f32>();
        (input, products + self.0["bias"].values()[0] - target)
    }

    /// The mean of squared errors.
    fn loss(&self) -> f32 {
        (0..64).map(|index| self.error(index).1.powi(2)).sum::<f32>() / 64.0
    }

    /// The gradients of the squared errors of a batch.
    fn gradients(&self, batch: usize) -> Arrays {
        let (mut weight, mut bias) = (vec![0.0; INPUTS], 0.0);
        for index in batch * 16..(batch + 1) * 16 {
            let (input, error) = self.error(index);
            weight
                .iter_mut()
                .zip(input)
                .for_each(|(sum, x)| *sum += 2.0 * error * x / 16.0);
            bias += 2.0 * error / 16.0;
        }
        Arrays::of(bias, weight)
    }
}

const STEPS: u64 = 400;

/// A new state.
fn begin(model: &Arrays) -> Result<StateTree, optimisers::Error> {
    let rule = OptimiserChain::new((ClipGlobalNorm::new(1.0), AdamW::new(0.1)));
    setup(MixedPrecision::new(DType::F64, rule), model)
}

fn train(
    model: &Arrays,
    state: &mut StateTree,
    steps: std::ops::Range<u64>,
) -> Result<(), optimisers::Error> {
    for step in steps {
        update(state, model, &model.gradients(step as usize % 4))?;
    }
    Ok(())
}

fn main() -> Result<(), Box<dyn Error>> {
    let path = std::env::temp_dir().join(format!("optimisers-locks-{}.safetensors", std::process::id()));

    let model = Arrays::zeros();
    let mut state = begin(&model)?;
    state.schedule(Schedule::cosine(0.1, 0.0, STEPS))?;
    println!(
        "{} parameters behind locks; the loss is {:.4}",
        state.elements(),
        model.loss()
    );
    std::thread::scope(|scope| {
        // The forward pass of another thread reads the arrays while they are trained.
        let losses = scope.spawn(|| (0..5).map(|_| model.loss()).collect::<Vec<_>>());
        train(&model, &mut state, 0..STEPS / 2)?;
        let losses = losses.join().map_err(|_| "the evaluation failed")?;
        println!("meanwhile another thread saw losses of {losses:.4?}");
        Ok::<_, Box<dyn Error>>(())
    })?;
    Checkpoint::new(&state).model(&model).save(&path)?;
    train(&model, &mut state, STEPS / 2..STEPS)?;

    let resumed = Arrays::zeros();
    let mut state = begin(&resumed)?;
    CheckpointFile::open(&path)?.restore_with_model(&mut state, &resumed)?;
    train(&resumed, &mut state, STEPS / 2..STEPS)?;
    std::fs::remove_file(&path)?;

    println!(
        "the loss is {:.2e}, and {:.2e} in the run that went on from the checkpoint",
        model.loss(),
        resumed.loss()
    );
    let same = ["bias", "weight"]
        .into_iter()
        .all(|name| model.0[name].values() == resumed.0[name].values());
    if same {
        Ok(())
    } else {
        Err("the two runs differ".into())
    }
}
