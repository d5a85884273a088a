//! The trainer with this crate.

use std::error::Error;
use std::ops::Range;
use std::path::Path;

use candle_core::DType::F32;
use optimisers::{
    AccumGrad, AdamW, Checkpoint, CheckpointFile, ClipGlobalNorm, MixedPrecision, OptimiserChain, Schedule,
    Update, setup, update,
};

use crate::{EPOCHS, Factors, RATE, Task, WINDOW};

pub(crate) fn train(
    task: &Task,
    factors: &Factors,
    epochs: Range<usize>,
    file: &Path,
) -> Result<usize, Box<dyn Error>> {
    let adamw = AdamW {
        lambda: 0.0,
        ..AdamW::new(RATE)
    };
    let rule = OptimiserChain::new((AccumGrad::new(WINDOW), ClipGlobalNorm::new(1.0), adamw));
    let mut state = setup(MixedPrecision::new(F32, rule), factors)?; // f32 factors need no masters and get none
    state.require_all();
    let steps = EPOCHS as u64 * (task.batches.len() as u64).div_ceil(WINDOW);
    state.schedule(Schedule::cosine(RATE, 0.0, steps))?;
    if epochs.start > 0 {
        CheckpointFile::open(file)?.restore_with_model(&mut state, factors)?;
    }
    for _ in epochs {
        for batch in &task.batches {
            update(&mut state, factors, &task.loss(factors, batch)?.backward()?)?;
        }
        Update::new(&mut state).release_windows(factors)?; // a step of the mean of what the last window has
    }
    Checkpoint::new(&state).model(factors).save(file)?;
    Ok(state.bytes())
}
