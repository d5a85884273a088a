//! Two lines for each optimiser and dtype: the bits of parameters and checkpoint after some steps, and those of
//! the text and the numbers of its printed kernels; or the error. With and without candle they are the same.

use optimisers::printed::{PrintedStep, printed};
use optimisers::{DType, IntoOptimiser, Result, StateTree, setup, update};

use crate::{Plain, all_rules, hash, saved, stored};

fn trained(optimiser: impl IntoOptimiser, dtype: DType) -> Result<(Plain, StateTree)> {
    let mut model = Plain::new(1, dtype);
    let mut state = setup(optimiser, &model.lend())?;
    for step in 0..5 {
        let gradients = model.gradients(step);
        update(&mut state, &model.lend(), &gradients.show())?;
    }
    Ok((model, state))
}

/// The text and the numbers of some steps, in short.
fn kernels(optimiser: impl IntoOptimiser, dtype: DType) -> Result<String> {
    let mut printed = printed(optimiser, dtype, DType::BF16)?;
    let steps = (0..5).map(|_| printed.step()).collect::<Result<Vec<_>>>()?;
    let bits =
        |step: &PrintedStep| -> Vec<u64> { step.scalars.iter().map(|scalar| scalar.to_bits()).collect() };
    let of_step = |step: &PrintedStep| (step.kernel.source().to_string(), bits(step), step.key, step.moves);
    let steps: Vec<_> = steps.iter().map(of_step).collect();
    Ok(format!(
        "{:016x}",
        hash(format!("{:?} {steps:?}", printed.state()).as_bytes())
    ))
}

/// The lines.
pub fn lines() -> Vec<String> {
    let mut lines = Vec::new();
    for (name, rule) in all_rules() {
        for (store, optimiser) in stored(&|| rule.clone()) {
            for dtype in [DType::F16, DType::BF16, DType::F32, DType::F64] {
                let outcome = match trained(optimiser.clone(), dtype) {
                    Ok((mut model, state)) => {
                        format!("{:016x} {:016x}", model.hash(), hash(&saved(&state, &mut model)))
                    }
                    Err(error) => error.to_string(),
                };
                lines.push(format!("{name}, {store}, {dtype}: {outcome}"));
                let printed = kernels(optimiser.clone(), dtype).unwrap_or_else(|error| error.to_string());
                lines.push(format!("{name}, {store}, {dtype}, printed: {printed}"));
            }
        }
    }
    lines
}
