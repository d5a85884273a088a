//! The prelude beside everything that candle exports.

/// All names at once. A name that two glob imports have is ambiguous where it is used, so this compiles only if the prelude has none of candle's.
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
        Adjust CandleOptimizer Checkpoint CheckpointFile Drive LossScaler MixedPrecision Model Optimiser OptimiserChain Outcome Rule Schedule Scheduler
        StateTree Status Update model setup setup_with trainables update updated
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
}

#[test]
fn the_prelude_has_none_of_candles_names_and_all_of_it_was_tried() {
    let source = include_str!("../../src/prelude.rs");
    let (_, exported) = source.rsplit_once("pub use crate::{").expect("one list of names");
    let names: Vec<&str> = exported.split(['}', ',']).map(str::trim).filter(|name| !name.is_empty() && *name != ";").collect();
    assert_eq!(names, beside_candle::USED);

    let x = candle_core::Var::new(0f32, &candle_core::Device::Cpu).expect("a variable");
    let adamw = candle_nn::AdamW::new_lr(vec![x.clone()], 0.5).expect("candle's optimiser");
    assert_eq!(beside_candle::learning_rate(&adamw).expect("a rate"), 0.5);
    let state = optimisers::setup(optimisers::AdamW::new(0.5), &x).expect("a state");
    assert_eq!(alone::count(&state), Ok(1));
}
