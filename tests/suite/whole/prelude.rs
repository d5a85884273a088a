//! The prelude beside everything that candle exports.

use std::collections::BTreeSet;

/// All names at once. A name that two glob imports have is ambiguous where it is used, so this compiles only
/// if the prelude has none of candle's.
mod beside_candle {
    use candle_core::*;
    use candle_nn::*;
    use optimisers::prelude::*;

    macro_rules! used {
        ($($name:ident)*) => {
            /// What is used here.
            pub const USED: &[&str] = &[$(stringify!($name)),*];

            #[allow(unused_imports)]
            mod used {
                $(use super::$name;)*
            }
        };
    }

    used! {
        Adjust CandleOptimizer Checkpoint CheckpointFile IntoOptimiser LossScaler MixedPrecision Model Optimiser OptimiserChain Outcome Rule Schedule StateTree Status Update model setup setup_with trainables update
    }

    /// candle's `Result`, and candle-nn's `AdamW` and `Optimizer`.
    pub fn learning_rate(adamw: &AdamW) -> Result<f64> {
        Ok(adamw.learning_rate())
    }
}

/// The standard library's names.
mod alone {
    use optimisers::prelude::*;

    pub fn count(state: &StateTree) -> Result<usize, String> {
        Some(state.len()).ok_or("no leaf".to_string())
    }

    /// A rule's own state, by the one `init` that there is.
    pub fn has_state(rule: &impl Rule, x: &candle_core::Tensor) -> bool {
        rule.init(x.into()).is_ok()
    }

    /// The same of a rule whose type is known.
    pub fn adam_has_state(x: &candle_core::Tensor) -> bool {
        optimisers::Adam::new(0.1).init(x.into()).is_ok()
    }
}

/// Everything that this crate exports, beside the standard library's names.
mod everything {
    use optimisers::*;

    /// Types by the names of the standard library's prelude are the standard library's.
    type Names = (Option<u8>, Vec<u8>, String, Box<u8>);
    type OfStd = (std::option::Option<u8>, std::vec::Vec<u8>, std::string::String, std::boxed::Box<u8>);
    const _: fn(Names) -> OfStd = |names| names;
    const _: fn(Result<u8, String>) -> std::result::Result<u8, String> = |result| result;

    pub fn count(state: &StateTree) -> Result<usize, String> {
        let length: Result<usize, String> = Some(state.len()).ok_or("no leaf".to_string());
        match length {
            Ok(length) => Ok(length),
            Err(reason) => Result::Err(reason),
        }
    }

    pub fn boxed(state: &StateTree) -> Result<usize, Box<dyn std::error::Error>> {
        let rate = state.leaf("").and_then(Leaf::learning_rate).ok_or("no rate")?;
        Ok(rate.to_string().parse::<f64>().map(|_| state.len())?)
    }

    /// A variable's methods are candle's, which it has from its tensor: a trait's would stand before them.
    pub fn of_tensor(x: &candle_core::Var) -> (candle_core::DType, &candle_core::Shape) {
        (x.dtype(), x.shape())
    }

    /// With one argument it is this crate's.
    pub fn own(x: &candle_core::Tensor) -> Result<State> {
        AdamW::new(0.1).init(x.into())
    }
}

#[test]
fn a_glob_of_the_crate_leaves_the_standard_librarys_names_alone() {
    let x = candle_core::Var::new(0f32, &candle_core::Device::Cpu).expect("a variable");
    let state = optimisers::setup(optimisers::AdamW::new(0.5), &x).expect("a state");
    assert_eq!(everything::count(&state), Ok(1));
    assert_eq!(everything::boxed(&state).ok(), Some(1));
    assert_eq!(everything::of_tensor(&x), (candle_core::DType::F32, &().into()));
    assert!(
        everything::own(&x).is_ok()
            && alone::has_state(&optimisers::Adam::new(0.1), &x)
            && alone::adam_has_state(&x)
    );
}

#[test]
fn the_prelude_has_none_of_candles_names_and_all_of_it_was_tried() {
    let source = include_str!("../../../src/prelude.rs");
    let lists = source.split("pub use crate::{").skip(1).filter_map(|list| list.split_once('}'));
    let names: BTreeSet<&str> =
        lists.flat_map(|(list, _)| list.split(',')).map(str::trim).filter(|name| !name.is_empty()).collect();
    assert_eq!(names, beside_candle::USED.iter().copied().collect());

    let x = candle_core::Var::new(0f32, &candle_core::Device::Cpu).expect("a variable");
    let adamw = candle_nn::AdamW::new_lr(vec![x.clone()], 0.5).expect("candle's optimiser");
    assert_eq!(beside_candle::learning_rate(&adamw).expect("a rate"), 0.5);
    let state = optimisers::setup(optimisers::AdamW::new(0.5), &x).expect("a state");
    assert_eq!(alone::count(&state), Ok(1));
}
