//! `StoreAs`: state in chosen dtypes.

use std::collections::BTreeSet;

use candle_core::DType;
use optimisers::value::Value;
use optimisers::{
    AccumGrad, Adam, AdamW, ClipGrad, Descent, Elementwise, ErrorKind, MixedPrecision, Optimiser,
    OptimiserChain, Rule, Slot, StoreAs, hyper_parameters, range, rules, setup, update,
};

use support::common::{bits16, constant, grads, is_kind, model, nearest16, tensor, values};

/// The mean over accumulated bf16 gradients in bf16 and in f32, both of DeepSpeed's modes, with their bytes.
#[test]
fn the_accumulation_dtype_is_the_users() {
    let sum = |dtype: Option<DType>, mixed: bool| {
        let x = model(&[constant(0.0, 1, DType::BF16)]);
        let collect = AccumGrad {
            average: optimisers::Average::Sum,
            ..AccumGrad::new(1000)
        };
        let chain: Box<dyn Rule> = match dtype {
            Some(dtype) => Box::new(StoreAs::new(
                [("acc", dtype)],
                OptimiserChain::new((collect, Descent::new(1.0))),
            )),
            None => Box::new(OptimiserChain::new((collect, Descent::new(1.0)))),
        };
        let optimiser = if mixed {
            Optimiser::new(MixedPrecision::new(DType::F32, chain))
        } else {
            Optimiser::new(chain)
        };
        let mut state = setup(optimiser, &x).expect("a state");
        for _ in 0..1000 {
            update(&mut state, &x, &grads([Some(constant(1e-3, 1, DType::BF16))])).expect("an update");
        }
        (-values(&x["0"])[0], state.bytes())
    };
    for mixed in [false, true] {
        let master = if mixed { 4 } else { 0 };
        assert_eq!(sum(None, mixed), (1.0, 4 + master));
        assert_eq!(sum(Some(DType::F32), mixed), (1.0, 4 + master));
        // T18: it stands still where a thousandth is less than half of the last digit.
        assert_eq!(sum(Some(DType::BF16), mixed), (0.5, 2 + master));
    }
}

#[test]
fn moments_are_stored_as_asked_and_nothing_else_is() {
    let x = model(&[tensor(1, &[5], DType::BF16)]);
    let stored = StoreAs::new([("m", DType::BF16)], AdamW::new(0.1));
    let mut state = setup(MixedPrecision::new(DType::F32, stored.clone()), &x).expect("a state");
    update(&mut state, &x, &grads([Some(tensor(2, &[5], DType::BF16))])).expect("an update");
    let leaf = state.leaf("0").expect("the leaf");
    let dtypes: Vec<_> = leaf
        .tensor_names()
        .iter()
        .map(|name| leaf.tensor(name).ok().map(|tensor| tensor.dtype()))
        .collect();
    assert_eq!(dtypes, [Some(DType::F32), Some(DType::BF16), Some(DType::F32)]);
    let m = leaf.tensor("m").expect("a copy");
    let exact = values(&tensor(2, &[5], DType::BF16))
        .into_iter()
        .map(|g| f64::from(g as f32 * (1.0 - 0.9f64) as f32));
    assert_eq!(
        bits16(&m),
        exact.map(|m| nearest16(DType::BF16, m)).collect::<Vec<_>>()
    );

    let unknown = setup(StoreAs::new([("n", DType::BF16)], Adam::default()), &x).expect_err("no such tensor");
    is_kind(
        &unknown,
        ErrorKind::UnknownName,
        &[r#"Adam has no state tensor "n", expected one of: m, v"#],
    );
    let integer = setup(StoreAs::new([("m", DType::U8)], Adam::default()), &x).expect_err("no such dtype");
    is_kind(
        &integer,
        ErrorKind::Argument,
        &[r#"state tensor "m" is to be stored as U8"#],
    );
}

hyper_parameters! {
    /// A rule of the user's with a second moment of its own.
    struct Squares {
        /// The learning rate.
        eta: f64 = 0.1 => range::non_negative,
    }
}

impl Elementwise for Squares {
    type Scalars = f64;
    type Slots<T> = [T; 1];

    fn slots(&self) -> [Slot; 1] {
        [Slot::zeros("squares").second_moment()]
    }

    fn scalars(&self, _t: u64) -> f64 {
        self.eta
    }

    fn step<V: Value>(eta: f64, _x: V, dx: V, [squares]: &mut [V; 1]) -> V {
        *squares = *squares + dx * dx;
        dx * eta / (squares.sqrt() + 1e-8)
    }
}

/// Small gradients have squares that are 0 in f16, and a step by ε alone.
#[test]
fn no_second_moment_is_stored_in_f16() {
    let x = model(&[tensor(1, &[2, 3], DType::F16)]);
    let store = |name: &str, dtype, rule: Box<dyn Rule>| setup(StoreAs::new([(name, dtype)], rule), &x);
    let squares = [
        "v",
        "variance",
        "square_of_steps",
        "row_v",
        "column_v",
        "sum_of_squares",
        "square_ahead",
        "largest_v",
        "scaled_v",
        "squares",
        "weighted_squares",
        "eigen_v",
        "low_rank_v",
        "orthogonal_v",
        "orthogonal_row_v",
    ];
    let precise = [
        "left",
        "left_basis",
        "left_root",
        "right",
        "right_basis",
        "right_root",
    ];
    let mut seen = BTreeSet::new();
    let own = Box::new(Squares::default()) as Box<dyn Rule>;
    for rule in rules::catalogue()
        .into_iter()
        .map(|listing| listing.rule)
        .chain([own])
    {
        let state = setup(rule.clone(), &x).expect("a state");
        for name in state.leaf("0").expect("the leaf").tensor_names() {
            let in_bf16 = store(&name, DType::BF16, rule.clone());
            let stored = store(&name, DType::F16, rule.clone());
            if precise.contains(&name.as_str()) || name == "slow" && rule.name() == "AdEMAMix" {
                for refused in [in_bf16, stored] {
                    let words = format!("{name:?} is to be stored as");
                    is_kind(
                        &refused.expect_err("refused"),
                        ErrorKind::Argument,
                        &[&words, "F32 or F64"],
                    );
                }
                continue;
            }
            let _ = in_bf16.expect("a state in bf16");
            if squares.contains(&name.as_str()) {
                seen.insert(name.clone());
                let words = format!("{name:?} is to be stored as F16, expected F32 or F64");
                is_kind(&stored.expect_err("refused"), ErrorKind::Argument, &[&words]);
            } else {
                let _ = stored.expect("a state in f16");
            }
        }
    }
    assert_eq!(seen, squares.map(str::to_string).into());
    let inside = StoreAs::new(
        [("v", DType::F16)],
        OptimiserChain::new((ClipGrad::new(1.0), Adam::new(0.1))),
    );
    let refused = setup(MixedPrecision::new(DType::F32, inside), &x).expect_err("refused");
    is_kind(&refused, ErrorKind::Argument, &["parameter \"0\"", "squares"]);
}
