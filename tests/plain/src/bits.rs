//! A line for each optimiser and dtype: the bits of parameters and checkpoint after some steps, or the error.
//! With and without candle the lines are the same.

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
            }
        }
    }
    lines
}
