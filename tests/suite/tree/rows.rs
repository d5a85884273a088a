//! Parameters that get other rows in the middle of a training.

use candle_core::{DType, Device, Tensor};
use optimisers::{
    AccumGrad, Adafactor, Adam, Checkpoint, CheckpointFile, Descent, Ema, ErrorKind, Flow, Gradient, Kind,
    Leaf, MixedPrecision, OptimiserChain, Parameter, Q8, Result, Rule, Slot, State, StateTree, StoreAs,
    Update, hyper_parameters, range, setup, update,
};

use support::common::{
    Snapshot, Vars, assert_same, bits, constant, engines, grads, is_kind, model, optimisers_for,
    rounding_to_nearest, rules_and_chains, snapshot, tensor, var,
};

/// More calls than any window of the tests has, and not a multiple of it.
const CALLS: u64 = 7;

const DTYPES: [DType; 2] = [DType::BF16, DType::F32];

/// The rows of a tensor: the old ones, and those of `new` for the others.
fn rows_of(old: &Tensor, new: &Tensor, rows: &[Option<usize>]) -> Tensor {
    let row = |(i, row): (usize, &Option<usize>)| {
        row.map_or_else(|| new.narrow(0, i, 1), |row| old.narrow(0, row, 1))
            .expect("a row")
    };
    Tensor::cat(&rows.iter().enumerate().map(row).collect::<Vec<_>>(), 0)
        .and_then(|tensor| tensor.copy())
        .expect("rows")
}

/// The model with other rows of the variable at `path`, whose new ones have the values of a seed.
pub fn with_rows(model: &Vars, path: &str, rows: &[Option<usize>]) -> Vars {
    let old = &model[path];
    let dims = [&[rows.len()], &old.dims()[1..]].concat();
    let mut new = model.clone();
    new.insert(
        path.to_string(),
        var(&rows_of(old, &tensor(77, &dims, old.dtype()), rows)),
    );
    new
}

pub fn step(state: &mut StateTree, model: &Vars, call: u64) {
    let dx = model
        .values()
        .zip(0..)
        .map(|(x, leaf)| Some(tensor(100 * call + leaf, x.dims(), DType::F32)));
    update(state, model, &grads(dx)).expect("an update");
}

fn state_tensor(leaf: &Leaf, name: &str) -> Tensor {
    leaf.tensor(name).expect("a copy")
}

#[test]
fn the_same_rows_change_nothing() {
    for dtype in DTYPES {
        for optimiser in optimisers_for(dtype) {
            for calls in [0, 2, CALLS] {
                let x = [tensor(1, &[4, 3], dtype), tensor(2, &[5], dtype)];
                let [untouched, mut resized] = [model(&x), model(&x)];
                let mut states =
                    [&untouched, &resized].map(|model| setup(optimiser.clone(), model).expect("a state"));
                for call in 0..calls {
                    step(&mut states[0], &untouched, call);
                    step(&mut states[1], &resized, call);
                }
                for (path, count) in [("0", 4), ("1", 5)] {
                    let same: Vec<_> = (0..count).map(Some).collect();
                    resized = with_rows(&resized, path, &same);
                    let answer = states[1].resize_rows(path, &resized, &same).expect("other rows");
                    assert!(answer[0].fresh.is_empty(), "{answer:?}");
                }
                let mut snapshots = vec![[snapshot(&untouched, &states[0]), snapshot(&resized, &states[1])]];
                for call in calls..calls + CALLS {
                    step(&mut states[0], &untouched, call);
                    step(&mut states[1], &resized, call);
                    snapshots.push([snapshot(&untouched, &states[0]), snapshot(&resized, &states[1])]);
                }
                let [expected, got]: [Vec<Snapshot>; 2] =
                    [0, 1].map(|i| snapshots.iter().map(|pair| pair[i].clone()).collect());
                assert_same(&got, &expected, optimiser.name());
            }
        }
    }
}

#[test]
fn rows_stay_as_they_were_and_new_ones_are_as_in_a_new_state() {
    let rows = [Some(2), None, Some(0), Some(2), None, Some(3)];
    for dtype in DTYPES {
        for optimiser in optimisers_for(dtype) {
            let old = model(&[tensor(1, &[4, 3], dtype), tensor(2, &[5], dtype)]);
            let mut state = setup(optimiser.clone(), &old).expect("a state");
            (0..CALLS).for_each(|call| step(&mut state, &old, call));
            let before = state.try_clone().expect("a copy");
            let new = with_rows(&old, "0", &rows);
            let answer = state.resize_rows("0", &new, &rows).expect("other rows");
            let fresh = setup(optimiser.clone(), &new).expect("a state");
            let [before, after, fresh] =
                [&before, &state, &fresh].map(|state| state.leaf("0").expect("the leaf"));
            for name in after.tensor_names() {
                let [was, is, start] = [before, after, fresh].map(|leaf| state_tensor(leaf, &name));
                let expected = if answer[0].fresh.contains(&name) {
                    start
                } else if was.dims()[0] == 4 {
                    rows_of(&was, &start, &rows)
                } else {
                    was
                };
                assert_eq!(
                    (is.dims(), bits(&is)),
                    (expected.dims(), bits(&expected)),
                    "{name} of {}",
                    optimiser.name()
                );
            }
            let all = after.tensor_names().len() + after.counters().len() + after.numbers().len();
            // Rows are mixed in the bases of these, and in a norm.
            if !answer[0].fresh.is_empty() {
                let is_mixing = ["SOAP", "Shampoo", "GaLore", "APOLLO", "Hyperball"]
                    .iter()
                    .any(|mixing| optimiser.name().contains(mixing));
                assert!(
                    is_mixing && answer[0].kept.len() + answer[0].fresh.len() == all,
                    "{answer:?} of {}",
                    optimiser.name()
                );
            } else {
                assert_eq!(
                    (after.counters(), after.numbers(), after.steps()),
                    (before.counters(), before.numbers(), before.steps())
                );
                assert_eq!(
                    (answer[0].kept.len(), answer[0].fresh.len()),
                    (all, 0),
                    "{answer:?}"
                );
            }
            (CALLS..2 * CALLS).for_each(|call| step(&mut state, &new, call));
            assert!(state.check_masters(&new).is_ok());
        }
    }
}

/// Where no element knows of another one.
#[test]
fn rows_can_change_their_places_before_steps_or_after_them() {
    let order = [Some(3), Some(1), Some(0), Some(2)];
    for dtype in DTYPES {
        let elementwise = rules_and_chains()
            .into_iter()
            .filter(|rule| rule.kind() == Kind::Elementwise);
        for optimiser in elementwise.flat_map(|rule| rounding_to_nearest(dtype, rule)) {
            let [early, late] = [(); 2].map(|()| model(&[tensor(1, &[4, 3], dtype)]));
            let mut states = [&early, &late].map(|model| setup(optimiser.clone(), model).expect("a state"));
            (0..CALLS).for_each(|call| step(&mut states[0], &early, call));
            (0..CALLS).for_each(|call| step(&mut states[1], &late, call));
            let early = with_rows(&early, "0", &order);
            states[0].resize_rows("0", &early, &order).expect("other rows");
            for call in CALLS..2 * CALLS {
                let dx = tensor(call, &[4, 3], DType::F32);
                update(&mut states[0], &early, &grads([Some(rows_of(&dx, &dx, &order))])).expect("an update");
                update(&mut states[1], &late, &grads([Some(dx)])).expect("an update");
            }
            let late = with_rows(&late, "0", &order);
            states[1].resize_rows("0", &late, &order).expect("other rows");
            assert_same(
                &[snapshot(&early, &states[0])],
                &[snapshot(&late, &states[1])],
                optimiser.name(),
            );
        }
    }
}

#[test]
fn every_engine_goes_on_with_other_rows() {
    let rows = [None, Some(1), Some(1)];
    for engine in engines() {
        let old = model(&[tensor(1, &[2, 3], DType::BF16)]);
        let chain = OptimiserChain::new((AccumGrad::new(2), Adam::new(0.1), Ema::new(0.9)));
        let mut state = setup(MixedPrecision::new(DType::F32, chain), &old).expect("a state");
        let go = |state: &mut StateTree, model: &Vars, call| {
            let dx = grads([Some(tensor(call, model["0"].dims(), DType::F32))]);
            Update::new(state)
                .engine(engine)
                .apply(model, &dx)
                .expect("an update");
        };
        go(&mut state, &old, 1);
        let new = with_rows(&old, "0", &rows);
        state.resize_rows("0", &new, &rows).expect("other rows");
        go(&mut state, &new, 2);
        assert_eq!(state.leaf("0").map(Leaf::steps), Some(1), "the window went on");
    }
}

/// A tensor of 8 bits: below 4096 elements it is not, and blocks of 128 elements are whole rows or not.
#[test]
fn codes_are_decoded_and_rows_of_whole_blocks_keep_theirs() {
    let optimiser = || StoreAs::all(Q8, Adam::new(0.1));
    let bytes = |rows: usize, width: usize| {
        setup(optimiser(), &model(&[tensor(1, &[rows, width], DType::F32)]))
            .expect("a state")
            .bytes()
    };
    for (width, before, after) in [(128, 40, 33), (100, 50, 47), (100, 40, 50), (100, 50, 40)] {
        let old = model(&[tensor(1, &[before, width], DType::F32)]);
        let mut state = setup(optimiser(), &old).expect("a state");
        (0..3).for_each(|call| step(&mut state, &old, call));
        let was = state.try_clone().expect("a copy");
        let rows: Vec<_> = (0..after)
            .map(|row| (row % 7 != 5).then_some((row * 3) % before))
            .collect();
        let new = with_rows(&old, "0", &rows);
        state.resize_rows("0", &new, &rows).expect("other rows");
        assert_eq!(state.bytes(), bytes(after, width));
        for name in ["m", "v"] {
            let [was, is] =
                [&was, &state].map(|state| state_tensor(state.leaf("0").expect("the leaf"), name));
            let zeros = Tensor::zeros((after, width), DType::F32, &Device::Cpu).expect("zeros");
            let expected = rows_of(&was, &zeros, &rows);
            if width == 128 || after * width < 4096 {
                assert_eq!(bits(&is), bits(&expected), "{name}");
            } else {
                let far = (&is - &expected)
                    .and_then(|off| off.abs()?.max_all()?.to_scalar::<f32>())
                    .expect("a number");
                let largest = expected
                    .abs()
                    .and_then(|x| x.max_all()?.to_scalar::<f32>())
                    .expect("a number");
                assert!(far <= largest / 8.0, "{name}: {far} of {largest}");
            }
        }
        (3..6).for_each(|call| step(&mut state, &new, call));
    }
}

#[test]
fn what_has_no_rows_stays_and_leaves_below_a_path_go_together() {
    let of = |rows: usize, seed: u64| {
        Vars::from([
            (
                "points.colour".to_string(),
                var(&tensor(seed, &[rows, 3], DType::F32)),
            ),
            (
                "points.opacity".to_string(),
                var(&tensor(seed + 1, &[rows], DType::F32)),
            ),
            ("scale".to_string(), var(&tensor(9, &[2], DType::F32))),
        ])
    };
    let old = of(4, 1);
    let mut state = setup(Adafactor::new(0.1), &old).expect("a state");
    state.at("points.opacity").expect("the leaf").freeze();
    let dx = |model: &Vars| {
        model
            .iter()
            .map(|(path, x)| (path.clone(), tensor(5, x.dims(), DType::F32)))
            .collect::<Vec<_>>()
    };
    update(&mut state, &old, &dx(&old)).expect("an update");
    let column = state_tensor(state.leaf("points.colour").expect("the leaf"), "column_v");
    let rows = [Some(3), None];
    let new = {
        let mut new = of(2, 20);
        new.insert("scale".to_string(), old["scale"].clone());
        for path in ["points.colour", "points.opacity"] {
            new.insert(path.to_string(), with_rows(&old, path, &rows)[path].clone());
        }
        new
    };
    let answer = state.resize_rows("points", &new, &rows).expect("other rows");
    assert_eq!(
        answer.iter().map(|leaf| leaf.path.as_str()).collect::<Vec<_>>(),
        ["points.colour", "points.opacity"]
    );
    assert_eq!(answer[0].kept, ["row_v", "column_v", "t"]);
    let leaf = state.leaf("points.colour").expect("the leaf");
    assert_eq!(state_tensor(leaf, "row_v").dims(), [2, 1]);
    assert_eq!(bits(&state_tensor(leaf, "column_v")), bits(&column));
    assert!(state.leaf("points.opacity").expect("the leaf").is_frozen());
    assert_eq!(update(&mut state, &new, &dx(&new)).expect("an update").applied, 2);
}

hyper_parameters! {
    /// Keeps Σ dx·dxᵀ and Σ dx.
    pub struct Products {
        /// Whether the products are named.
        named: bool = true => range::any,
    }
}

impl Rule for Products {
    fn init(&self, x: Parameter<'_>) -> Result<State> {
        let products = Tensor::zeros((x.shape()[0], x.shape()[0]), DType::F32, &Device::Cpu)?;
        let state = State::empty()
            .with_tensor("products", &products)?
            .with_slot(Slot::zeros("sum"), x, x.shape())?
            .with_counter("t");
        Ok(if self.named {
            state.restarted_by_new_rows("products")
        } else {
            state
        })
    }

    fn apply<'a>(&'a self, state: &'a mut State, _x: Parameter<'a>, dx: Gradient<'a>) -> Result<Flow<'a>> {
        Ok(Flow::Step(dx.with_tensors(state, |_, _, dx, slots| {
            slots[0] = (&slots[0] + dx.matmul(&dx.t()?)?)?;
            slots[1] = (&slots[1] + &dx)?;
            Ok(dx)
        })))
    }
}

#[test]
fn a_rule_with_rows_of_another_meaning_starts_anew() {
    // Of a square parameter only its name tells.
    for (named, width) in [(true, 2), (false, 3)] {
        let old = model(&[tensor(1, &[2, width], DType::F32)]);
        let mut state =
            setup(OptimiserChain::new((Products { named }, Adam::new(0.1))), &old).expect("a state");
        step(&mut state, &old, 1);
        let rows = [Some(1), Some(0)];
        let new = with_rows(&old, "0", &rows);
        let answer = state.resize_rows("0", &new, &rows).expect("other rows");
        let names = |names: [&str; 3], place: usize| names.map(|name| format!("{place}.{name}")).to_vec();
        let (kept, fresh) = (names(["m", "v", "t"], 1), names(["products", "sum", "t"], 0));
        assert_eq!((&answer[0].kept, &answer[0].fresh), (&kept, &fresh));
        assert_eq!(
            bits(&state_tensor(state.leaf("0").expect("the leaf"), "0.sum")),
            vec![0; 2 * width]
        );
        step(&mut state, &new, 2);
    }
}

#[test]
fn a_checkpoint_has_the_new_rows() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("run.safetensors");
    let rows = [Some(1), None, Some(0)];
    for optimiser in optimisers_for(DType::BF16) {
        let old = model(&[tensor(1, &[2, 3], DType::BF16)]);
        let mut state = setup(optimiser.clone(), &old).expect("a state");
        (0..3).for_each(|call| step(&mut state, &old, call));
        let new = with_rows(&old, "0", &rows);
        state.resize_rows("0", &new, &rows).expect("other rows");
        Checkpoint::new(&state)
            .model(&new)
            .save(&path)
            .expect("a checkpoint");
        let other = model(&[tensor(5, &[3, 3], DType::BF16)]);
        let mut restored = setup(optimiser.clone(), &other).expect("a state");
        CheckpointFile::open(&path)
            .expect("a file")
            .restore_with_model(&mut restored, &other)
            .expect("a restored run");
        for call in 3..3 + CALLS {
            step(&mut state, &new, call);
            step(&mut restored, &other, call);
            assert_same(
                &[snapshot(&other, &restored)],
                &[snapshot(&new, &state)],
                optimiser.name(),
            );
        }
    }
}

#[test]
fn tied_variables_are_resized_as_one() {
    let x = var(&tensor(1, &[2, 3], DType::F32));
    let old = Vars::from([("embedding".to_string(), x.clone()), ("head".to_string(), x)]);
    let mut state = setup(Adam::new(0.1), &old).expect("a state");
    let rows = [Some(0), Some(1), None];
    let half = with_rows(&old, "head", &rows);
    let untied = state
        .resize_rows("head", &half, &rows)
        .expect_err("two variables");
    is_kind(
        &untied,
        ErrorKind::Model,
        &["\"embedding\" and \"head\" are one variable in this state and two in the model"],
    );
    let mut new = half.clone();
    new.insert("embedding".to_string(), half["head"].clone());
    assert_eq!(
        state.resize_rows("head", &new, &rows).expect("other rows")[0].path,
        "embedding"
    );
    update(&mut state, &new, &[("head", tensor(2, &[3, 3], DType::F32))]).expect("an update");
}

#[test]
fn a_parameter_that_no_gradient_has_reached_may_have_moved() {
    let old = model(&[tensor(1, &[2], DType::BF16), tensor(2, &[2], DType::BF16)]);
    let mut state = setup(MixedPrecision::new(DType::F32, Descent::new(0.5)), &old).expect("a state");
    update(
        &mut state,
        &old,
        &grads([Some(constant(1.0, 2, DType::F32)), None]),
    )
    .expect("an update");
    let mut new = old.clone();
    new.insert("1".to_string(), var(&constant(4.0, 3, DType::BF16)));
    state
        .resize_rows("1", &new, &[Some(0), Some(1), None])
        .expect("other rows");
    update(
        &mut state,
        &new,
        &grads([None, Some(constant(2.0, 3, DType::F32))]),
    )
    .expect("an update");
    assert_eq!(bits(&new["1"]), bits(&constant(3.0, 3, DType::BF16)));
}

#[test]
fn all_rows_may_go_and_come() {
    for (before, rows) in [(2, vec![]), (0, vec![None, None]), (3, vec![None; 4])] {
        let old = model(&[tensor(1, &[before, 3], DType::BF16)]);
        let mut state = setup(MixedPrecision::new(DType::F32, Adam::new(0.1)), &old).expect("a state");
        step(&mut state, &old, 1);
        let new = model(&[tensor(2, &[rows.len(), 3], DType::BF16)]);
        let answer = state.resize_rows("0", &new, &rows).expect("other rows");
        assert_eq!(
            (&answer[0].kept[..], &answer[0].fresh[..]),
            (
                &["t".to_string()][..],
                &["master", "m", "v"].map(String::from)[..]
            )
        );
        step(&mut state, &new, 2);
    }
}
