//! Prints a line for each optimiser and dtype: the bits of parameters and checkpoint after some steps, or the
//! error. With and without candle the lines are the same.

use optimisers::{DType, Optimiser, Result, StateTree, setup, update};
use optimisers_plain::{Plain, all_rules, hash, saved, stored};

fn trained(optimiser: impl Optimiser, dtype: DType) -> Result<(Plain, StateTree)> {
    let mut model = Plain::new(1, dtype);
    let mut state = setup(optimiser, &model.lend())?;
    for step in 0..5 {
        let gradients = model.gradients(step);
        update(&mut state, &model.lend(), &gradients.show())?;
    }
    Ok((model, state))
}

fn main() {
    for (name, rule) in all_rules() {
        for (store, optimiser) in stored(&|| rule.clone()) {
            for dtype in [DType::F16, DType::BF16, DType::F32, DType::F64] {
                match trained(optimiser.clone(), dtype) {
                    Ok((mut model, state)) => {
                        println!("{name}, {store}, {dtype}: {:016x} {:016x}", model.hash(), hash(&saved(&state, &mut model)));
                    }
                    Err(error) => println!("{name}, {store}, {dtype}: {error}"),
                }
            }
        }
    }
}
