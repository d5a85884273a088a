//! A glob import of the crate.

/// Everything that this crate exports, beside the standard library's names.
mod everything {
    use optimisers::*;

    /// Types by the names of the standard library's prelude are the standard library's.
    type Names = (Option<u8>, Vec<u8>, String, Box<u8>);
    type OfStd = (
        std::option::Option<u8>,
        std::vec::Vec<u8>,
        std::string::String,
        std::boxed::Box<u8>,
    );
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

    /// A rule's own state, by the one `init` that there is.
    pub fn has_state(rule: &impl Rule, x: &candle_core::Tensor) -> bool {
        rule.init(x.into()).is_ok()
    }
}

#[test]
fn a_glob_of_the_crate_leaves_the_standard_librarys_names_alone() {
    let x = candle_core::Var::new(0f32, &candle_core::Device::Cpu).expect("a variable");
    let state = optimisers::setup(optimisers::AdamW::new(0.5), &x).expect("a state");
    assert_eq!(everything::count(&state), Ok(1));
    assert_eq!(everything::boxed(&state).ok(), Some(1));
    assert_eq!(everything::of_tensor(&x), (candle_core::DType::F32, &().into()));
    assert!(everything::own(&x).is_ok() && everything::has_state(&optimisers::Adam::new(0.1), &x));
}
