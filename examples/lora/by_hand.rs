//! The trainer as it is written by hand on candle-nn's AdamW.
//!
//! It has what public LoRA trainers on candle have: a store for the sum of gradients, a clip that reads a number
//! of each gradient, a schedule of their own, f32 throughout, and files that lose the moments of AdamW, because
//! candle-nn does not show them.

use std::error::Error;
use std::f64::consts::PI;
use std::ops::Range;
use std::path::Path;

use candle_core::backprop::GradStore;
use candle_core::{Device, Result, Tensor, safetensors};
use candle_nn::{AdamW, Optimizer, ParamsAdamW};

use crate::{EPOCHS, Factors, RATE, Task, WINDOW};

/// Adds the gradients of a batch to those of its window.
fn accumulate(sum: &mut Option<GradStore>, gradients: GradStore, factors: &Factors) -> Result<()> {
    // Only those of the factors: the store has gradients of the frozen weights, too.
    let sum = sum.get_or_insert_default();
    for factor in factors.values() {
        let gradient = match (sum.get(factor), gradients.get(factor)) {
            (Some(before), Some(gradient)) => (before + gradient)?,
            (None, Some(gradient)) => gradient.clone(),
            (_, None) => continue,
        };
        sum.insert(factor, gradient);
    }
    Ok(())
}

/// Scales all gradients so that their common norm is at most `largest`.
fn clip(gradients: &mut GradStore, factors: &Factors, divisor: f64, largest: f64) -> Result<()> {
    let mut squares = 0.0;
    for factor in factors.values() {
        if let Some(gradient) = gradients.get(factor) {
            // On a GPU this waits for the device once for each tensor.
            squares += f64::from(gradient.sqr()?.sum_all()?.to_scalar::<f32>()?);
        }
    }
    let scale = (largest / (squares.sqrt() / divisor)).min(1.0) / divisor;
    for factor in factors.values() {
        if let Some(gradient) = gradients.get(factor) {
            let scaled = (gradient * scale)?;
            gradients.insert(factor, scaled);
        }
    }
    Ok(())
}

fn save(file: &Path, factors: &Factors) -> Result<()> {
    let tensors = factors
        .iter()
        .map(|(name, factor)| (name.clone(), factor.as_tensor().clone()));
    safetensors::save(
        &tensors.collect::<std::collections::HashMap<String, Tensor>>(),
        file,
    )
}

fn load(file: &Path, factors: &Factors) -> Result<()> {
    let tensors = safetensors::load(file, &Device::Cpu)?;
    factors
        .iter()
        .try_for_each(|(name, factor)| match tensors.get(name) {
            Some(tensor) => factor.set(tensor),
            None => candle_core::bail!("the file has no tensor {name}"),
        })
}

pub(crate) fn train(
    task: &Task,
    factors: &Factors,
    epochs: Range<usize>,
    file: &Path,
) -> std::result::Result<usize, Box<dyn Error>> {
    let params = ParamsAdamW {
        lr: RATE,
        weight_decay: 0.0,
        ..ParamsAdamW::default()
    };
    let mut optimizer = AdamW::new(factors.values().cloned().collect(), params)?;
    if epochs.start > 0 {
        load(file, factors)?;
    }
    let windows = task.batches.len().div_ceil(WINDOW as usize);
    let (mut sum, mut in_window) = (None, 0);
    let mut step = epochs.start * windows;
    for _ in epochs {
        for (i, batch) in task.batches.iter().enumerate() {
            accumulate(&mut sum, task.loss(factors, batch)?.backward()?, factors)?;
            in_window += 1;
            let is_last = i + 1 == task.batches.len();
            if (in_window == WINDOW || is_last)
                && let Some(mut gradients) = sum.take()
            {
                clip(&mut gradients, factors, in_window as f64, 1.0)?;
                let progress = step as f64 / (EPOCHS * windows) as f64;
                optimizer.set_learning_rate(RATE * (1.0 + (PI * progress).cos()) / 2.0);
                optimizer.step(&gradients)?;
                (in_window, step) = (0, step + 1);
            }
        }
    }
    save(file, factors)?;
    let elements: usize = factors.values().map(|factor| factor.elem_count()).sum();
    Ok(3 * 4 * elements) // two moments and the sum of gradients
}
