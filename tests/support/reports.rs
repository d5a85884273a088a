//! Training over ranks, and what can be said of each of them after each call.

use std::collections::{BTreeMap, HashMap};
use std::ops::Range;
use std::sync::{LazyLock, Mutex};

use candle_core::{DType, Device, Tensor};
use optimisers::{Engine, Leaf, Optimiser, Outcome, Setup, StateTree, Update};

use crate::common::{Grads, Vars, bits, grads, model, random, tensor};

/// Several chunks, an odd end, a matrix, a little, nothing.
pub const SHAPES: [&[usize]; 5] = [&[33_001], &[5], &[130, 140], &[0], &[3, 4]];

pub fn parameters(dtype: DType) -> Vec<Tensor> {
    (1..)
        .zip(SHAPES)
        .map(|(seed, shape)| random(seed, shape, dtype, &Device::Cpu))
        .collect()
}

/// The gradients of a call, those of this rank where they differ. The fifth parameter has one in every other
/// call. They are made once.
pub fn gradients(call: u64, rank: u64, dtype: DType) -> Grads {
    type Known = Mutex<HashMap<(u64, u64, DType), Grads>>;
    static KNOWN: LazyLock<Known> = LazyLock::new(Mutex::default);
    let of = |(index, shape): (u64, &&[usize])| {
        (index != 4 || call.is_multiple_of(2)).then(|| tensor(100 * call + 10 * rank + index, shape, dtype))
    };
    let make = || grads((0..).zip(&SHAPES).map(of).collect::<Vec<_>>());
    KNOWN
        .lock()
        .expect("no panic")
        .entry((call, rank, dtype))
        .or_insert_with(make)
        .clone()
}

/// What can be said of a rank after a call.
#[derive(Clone, Debug)]
pub struct Said {
    pub outcome: Outcome,
    pub model: Vec<Vec<u64>>,
    pub leaves: Vec<LeafSaid>,
}

/// The part of a leaf, its state tensors, and its other numbers.
pub type LeafSaid = (Range<usize>, BTreeMap<String, Vec<u64>>, Vec<(String, u64)>);

pub fn said(outcome: Outcome, model: &Vars, state: &StateTree) -> Said {
    let of_leaf = |leaf: &Leaf| {
        let tensors = leaf.tensor_names().into_iter().map(|name| {
            let values = bits(&leaf.tensor(&name).expect("a tensor"));
            (name, values)
        });
        let mut numbers = leaf.counters();
        numbers.extend(
            leaf.numbers()
                .into_iter()
                .map(|(name, number)| (name, number.to_bits())),
        );
        numbers.push(("steps".to_string(), leaf.steps()));
        (leaf.part(), tensors.collect(), numbers)
    };
    Said {
        outcome,
        model: model.values().map(|x| bits(x)).collect(),
        leaves: state.leaves().map(of_leaf).collect(),
    }
}

/// What is said after each of so many calls, all with the gradients of rank 0.
pub fn steps(
    setup: Setup,
    engine: Engine,
    optimiser: Optimiser,
    dtypes: [DType; 2],
    calls: u64,
) -> Vec<Said> {
    let [dtype, of_gradient] = dtypes;
    let model = model(&parameters(dtype));
    let mut state = setup.build(optimiser, &model).expect("a state");
    let step = |call| {
        let outcome = Update::new(&mut state)
            .engine(engine)
            .apply(&model, &gradients(call, 0, of_gradient))
            .expect("an update");
        said(outcome, &model, &state)
    };
    (0..calls).map(step).collect()
}

/// A rank has the parameters of one process, and its part of that process's state.
pub fn assert_part(own: &[Said], whole: &[Said], what: &str) {
    for (call, (said, expected)) in own.iter().zip(whole).enumerate() {
        let what = format!("{what}, call {call}");
        assert_eq!(said.outcome, expected.outcome, "{what}");
        for (leaf, (own, expected)) in said.model.iter().zip(&expected.model).enumerate() {
            let first = own
                .iter()
                .zip(expected)
                .position(|(own, expected)| own != expected);
            assert_eq!(first, None, "{what}: parameter {leaf}");
        }
        for (leaf, ((part, tensors, numbers), (all, expected, whole_numbers))) in
            said.leaves.iter().zip(&expected.leaves).enumerate()
        {
            assert_eq!(numbers, whole_numbers, "{what}: leaf {leaf}");
            for (name, values) in tensors {
                let expected = &expected[name];
                let own = if part.len() == all.len() {
                    &expected[..]
                } else {
                    expected.get(part.clone()).unwrap_or_default()
                };
                assert!(
                    part.is_empty() && values.is_empty() || values == own,
                    "{what}: {name} of leaf {leaf}"
                );
            }
        }
    }
    assert_eq!(own.len(), whole.len(), "{what}");
}
