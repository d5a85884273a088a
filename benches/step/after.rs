//! A step right after candle has computed, and the same step alone: what is left of its threads then is in
//! the way.

use std::time::{Duration, Instant};

use candle_core::{DType, Device, Tensor};
use candle_nn::loss::cross_entropy;
use optimisers::{AdamW, Engine, MixedPrecision, Update, setup};

use crate::model::{Gpt, Size};

/// A network of 7 M parameters.
const SIZE: Size = Size {
    characters: 128,
    context: 64,
    layers: 4,
    width: 384,
    heads: 6,
};
const WINDOWS: usize = 4;
/// Long enough for every thread to be asleep.
const PAUSE: Duration = Duration::from_millis(30);

/// What happens between the gradients and the step.
#[derive(Clone, Copy)]
enum Before {
    Nothing,
    Step,
    Product,
    Pause,
}

/// Prints, for a network in bf16 with f32 masters, how long a step takes right after another step, a backward
/// pass, a product of matrices and a pause.
pub fn measure(engine: Engine, rounds: u32) -> Result<(), Box<dyn std::error::Error>> {
    let gpt = Gpt::new(SIZE, DType::BF16, 0, &Device::Cpu)?;
    let mut state = setup(MixedPrecision::new(DType::F32, AdamW::new(1e-5)), &gpt)?;
    let tokens = WINDOWS * SIZE.context;
    let characters = Tensor::from_iter(
        (0..tokens as u32).map(|token| token % SIZE.characters as u32),
        &Device::Cpu,
    )?;
    let windows = characters.reshape((WINDOWS, SIZE.context))?;
    let matrix = Tensor::ones((768, 768), DType::F32, &Device::Cpu)?;
    let elements = state.elements() as f64;
    let all = [
        (Before::Step, "a_step"),
        (Before::Nothing, "a_backward_pass"),
        (Before::Product, "a_product"),
        (Before::Pause, "a_pause"),
    ];
    let mut samples = all.map(|_| Vec::new());
    for _ in 0..=rounds {
        for ((before, _), samples) in all.iter().zip(&mut samples) {
            let logits = gpt.forward(&windows)?.reshape((tokens, SIZE.characters))?;
            let grads = cross_entropy(&logits, &characters)?.backward()?;
            match before {
                Before::Nothing => {}
                Before::Step => drop(Update::new(&mut state).engine(engine).apply(&gpt, &grads)?),
                Before::Pause => std::thread::sleep(PAUSE),
                Before::Product => drop(std::hint::black_box(matrix.matmul(&matrix)?)),
            }
            let start = Instant::now();
            Update::new(&mut state).engine(engine).apply(&gpt, &grads)?;
            samples.push(start.elapsed().as_nanos() as f64 / elements);
        }
    }
    for ((_, name), samples) in all.iter().zip(&mut samples) {
        // The first touches fresh memory.
        let samples = &mut samples[1..];
        samples.sort_by(f64::total_cmp);
        println!("after {name} ns_per_element={:.4}", samples[samples.len() / 2]);
    }
    Ok(())
}
