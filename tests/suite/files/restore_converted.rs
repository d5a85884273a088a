//! A run goes on in another precision: the most precise copy of each parameter becomes the most precise copy
//! of the new one.

use std::collections::BTreeMap;

use candle_core::{DType, Tensor};
use half::{bf16, f16};
use optimisers::{
    AccumGrad, Adam, Checkpoint, CheckpointFile, ClipGlobalNorm, ErrorKind, Flow, Gradient, Kahan, Leaf,
    MixedPrecision, Momentum, Optimiser, OptimiserChain, Parameter, Result, Rule, Slot, SplitMaster, State,
    StateTree, StochasticRounding, hyper_parameters, range, setup, update,
};

use crate::model::models::{CPU, of};
use support::common::{Vars, bits, is_kind, nearest16, random, says, snapshot, values, var};
use support::crafted_checkpoints::{file_of, open};

/// A dtype of parameters and one of masters, if there are any.
type Precision = (DType, Option<DType>);

fn precisions() -> impl Iterator<Item = Precision> {
    let parameters = [DType::F16, DType::BF16, DType::F32, DType::F64];
    parameters
        .into_iter()
        .flat_map(|parameter| [None, Some(DType::F32), Some(DType::F64)].map(|master| (parameter, master)))
}

fn with_masters(master: Option<DType>, rule: &dyn Rule) -> Optimiser {
    let rule = dyn_clone::clone_box(rule);
    match master {
        None => Optimiser::new(rule),
        Some(dtype) => Optimiser::new(MixedPrecision::new(dtype, rule)),
    }
}

fn started((dtype, master): Precision, rule: &dyn Rule, seed: u64) -> (Vars, StateTree) {
    started_with(with_masters(master, rule), dtype, seed)
}

/// A model and its state after three calls.
fn started_with(optimiser: Optimiser, dtype: DType, seed: u64) -> (Vars, StateTree) {
    let shapes: [&[usize]; 3] = [&[7], &[], &[3, 0]];
    let model: Vars = shapes
        .iter()
        .enumerate()
        .map(|(i, shape)| (i.to_string(), var(&random(seed, shape, dtype, CPU))))
        .collect();
    let mut state = setup(optimiser, &model).unwrap();
    for call in 0..3 {
        step(&mut state, &model, seed + call);
    }
    (model, state)
}

fn step(state: &mut StateTree, model: &Vars, seed: u64) {
    let gradients: BTreeMap<_, _> = model
        .iter()
        .map(|(path, x)| (path.clone(), random(seed, x.dims(), x.dtype(), CPU)))
        .collect();
    update(state, model, &gradients).unwrap();
}

fn rules() -> [Box<dyn Rule>; 3] {
    [
        Box::new(Adam::new(0.01)),
        Box::new(OptimiserChain::new((
            AccumGrad::new(2),
            ClipGlobalNorm::new(0.5),
            Momentum::new(0.1),
        ))),
        Box::new(optimisers::Descent::new(0.1)),
    ]
}

/// These values rounded once to a dtype.
fn rounded(exact: &[f64], dtype: DType) -> Vec<f64> {
    let round = |value: f64| match dtype {
        DType::F16 => f16::from_bits(nearest16(dtype, value)).to_f64(),
        DType::BF16 => bf16::from_bits(nearest16(dtype, value)).to_f64(),
        DType::F32 => f64::from(value as f32),
        _ => value,
    };
    exact.iter().map(|&value| round(value)).collect()
}

fn tensor(leaf: &Leaf, name: &str) -> Option<Tensor> {
    leaf.tensor(name).ok()
}

/// The most precise copy of a leaf's parameter.
fn precise(model: &Vars, leaf: &Leaf) -> Vec<f64> {
    values(&tensor(leaf, "master").unwrap_or_else(|| model[leaf.path()].copy().expect("a copy")))
}

#[test]
fn every_precision_into_every_other() {
    for rule in rules() {
        for from in precisions() {
            let (saved_model, saved) = started(from, &*rule, 1);
            let file = file_of(Checkpoint::new(&saved).model(&saved_model));
            for to in precisions() {
                let (model, mut state) = started(to, &*rule, 40);
                let what = format!("{} from {from:?} to {to:?}", rule.name());
                let before = snapshot(&model, &state);
                let strict = open(&file).unwrap().restore_with_model(&mut state, &model);
                if from == to {
                    strict.unwrap();
                } else {
                    says(&strict.expect_err(&what), &["CheckpointFile::converting"]);
                    assert!(snapshot(&model, &state) == before, "{what}: something changed");
                }

                open(&file)
                    .unwrap()
                    .converting()
                    .restore_with_model(&mut state, &model)
                    .unwrap();
                for (leaf, old) in state.leaves().zip(saved.leaves()) {
                    let exact = precise(&saved_model, old);
                    // From the master, if there is one.
                    let master = tensor(leaf, "master").map_or(DType::F64, |master| master.dtype());
                    let parameter = rounded(&rounded(&exact, master), to.0);
                    assert_eq!(values(&model[leaf.path()]), parameter, "{what}");
                    for name in leaf.tensor_names() {
                        let new = tensor(leaf, &name).unwrap();
                        let exact = if name == "master" {
                            exact.clone()
                        } else {
                            values(&tensor(old, &name).unwrap())
                        };
                        assert_eq!(values(&new), rounded(&exact, new.dtype()), "{what}: {name}");
                    }
                    let facts = |leaf: &Leaf| (leaf.counters(), leaf.steps(), leaf.optimiser().fields());
                    assert_eq!(facts(leaf), facts(old), "{what}");
                }
                step(&mut state, &model, 9);
            }
        }
    }
}

/// There and back again through a wider precision is a way without loss.
#[test]
fn back_again() {
    for (from, through) in [
        ((DType::BF16, Some(DType::F32)), (DType::F32, None)),
        ((DType::BF16, Some(DType::F32)), (DType::F16, Some(DType::F64))),
        ((DType::F16, Some(DType::F32)), (DType::BF16, Some(DType::F32))),
        ((DType::F32, None), (DType::F64, None)),
        ((DType::F32, None), (DType::F16, Some(DType::F32))),
        ((DType::F16, None), (DType::F32, Some(DType::F64))),
    ] {
        for rule in rules() {
            let (model, mut state) = started(from, &*rule, 1);
            let before = snapshot(&model, &state);
            let (other_model, mut other) = started(through, &*rule, 40);
            open(&file_of(Checkpoint::new(&state).model(&model)))
                .unwrap()
                .converting()
                .restore_with_model(&mut other, &other_model)
                .unwrap();
            (0..3).for_each(|seed| step(&mut state, &model, seed));
            let file = file_of(Checkpoint::new(&other).model(&other_model));
            open(&file)
                .unwrap()
                .converting()
                .restore_with_model(&mut state, &model)
                .unwrap();
            assert!(
                snapshot(&model, &state) == before,
                "{} in {from:?} through {through:?}",
                rule.name()
            );
        }
    }
}

/// A number that is a tie for the parameter only after it was rounded to the master: the two agree, as an
/// update expects.
#[test]
fn a_parameter_is_its_new_master_rounded() {
    for (parameter, digits) in [(DType::BF16, 8), (DType::F16, 11)] {
        let above_a_tie = 1.0 + 2f64.powi(-digits) + 2f64.powi(-40);
        let saved = Vars::from([("0".to_string(), var(&of(&[above_a_tie; 2], DType::F64)))]);
        let file = file_of(Checkpoint::new(&setup(Momentum::new(0.1), &saved).unwrap()).model(&saved));
        for (master, expected) in [
            (None, 1.0 + 2f64.powi(1 - digits)),
            (Some(DType::F32), 1.0),
            (Some(DType::F64), 1.0 + 2f64.powi(1 - digits)),
        ] {
            let model = Vars::from([("0".to_string(), var(&of(&[3.0; 2], parameter)))]);
            let mut state = setup(with_masters(master, &Momentum::new(0.1)), &model).unwrap();
            open(&file)
                .unwrap()
                .converting()
                .restore_with_model(&mut state, &model)
                .unwrap();
            assert_eq!(
                values(&model["0"]),
                [expected; 2],
                "{parameter:?} with masters in {master:?}"
            );
            step(&mut state, &model, 1);
        }
    }
}

/// Without the model a master can become a master of another precision, and nothing else.
#[test]
fn the_state_alone() {
    let rule = Momentum::new(0.1);
    let (_, saved) = started((DType::BF16, Some(DType::F32)), &rule, 1);
    let file = || open(&file_of(Checkpoint::new(&saved))).unwrap().converting();

    let (model, mut state) = started((DType::F16, Some(DType::F64)), &rule, 40);
    let parameters: Vec<_> = model.values().map(|x| bits(x)).collect();
    file().restore(&mut state).unwrap();
    let masters = |state: &StateTree| {
        state
            .leaves()
            .map(|leaf| bits(&tensor(leaf, "master").unwrap()))
            .collect::<Vec<_>>()
    };
    assert_eq!(
        (
            masters(&state),
            model.values().map(|x| bits(x)).collect::<Vec<_>>()
        ),
        (masters(&saved), parameters)
    );

    let refused = |file: CheckpointFile, to: Precision, kind: ErrorKind, words: &[&str]| {
        let (model, mut state) = started(to, &rule, 40);
        let before = snapshot(&model, &state);
        is_kind(&file.restore(&mut state).unwrap_err(), kind, words);
        assert!(snapshot(&model, &state) == before);
    };
    let words = [
        "parameter \"0\"",
        "the file has a master, but the state does not",
        "`restore_with_model`",
    ];
    refused(file(), (DType::F32, None), ErrorKind::Unsupported, &words);
    let (_, bare) = started((DType::F32, None), &rule, 1);
    let bare = open(&file_of(Checkpoint::new(&bare))).unwrap().converting();
    let words = [
        "parameter \"0\"",
        "neither a master nor the parameter",
        "`Checkpoint::model`",
    ];
    refused(bare, (DType::BF16, Some(DType::F32)), ErrorKind::File, &words);
}

/// Numbers that the new dtype has no finite number for, at the edge to those that it has.
#[test]
fn numbers_too_large_for_the_new_dtype() {
    let rule = optimisers::Descent::new(0.0);
    let edge = |dtype| match dtype {
        DType::F16 => 65520.0,
        DType::BF16 => 2f64.powi(128) - 2f64.powi(119),
        _ => 2f64.powi(128) - 2f64.powi(103),
    };
    for (from, to) in [
        (DType::F64, DType::F32),
        (DType::F64, DType::BF16),
        (DType::F64, DType::F16),
        (DType::BF16, DType::F16),
    ] {
        for sign in [1.0, -1.0] {
            let below = f64::from_bits(edge(to).to_bits() - 1);
            let (small, large) = if from == DType::F64 {
                (sign * below, sign * edge(to))
            } else {
                (sign * 65280.0, sign * 65536.0)
            };
            for (number, fits) in [(small, true), (large, false)] {
                let saved = Vars::from([("x".to_string(), var(&of(&[1.0, 2.0, number], from)))]);
                let file = || {
                    open(&file_of(
                        Checkpoint::new(&setup(rule.clone(), &saved).unwrap()).model(&saved),
                    ))
                    .unwrap()
                    .converting()
                };
                let model = Vars::from([("x".to_string(), var(&of(&[3.0, 4.0, 5.0], to)))]);
                let mut state = setup(rule.clone(), &model).unwrap();
                let before = snapshot(&model, &state);
                let result = file().restore_with_model(&mut state, &model);
                if fits {
                    result.unwrap();
                    assert!(values(&model["x"])[2].is_finite());
                    continue;
                }
                let place = format!(
                    "the file's \"x\" is {number} at element 2, expected a number that {to:?} can hold"
                );
                let words = [&*place, "CheckpointFile::accepting_non_finite"];
                is_kind(&result.unwrap_err(), ErrorKind::Tensor, &words);
                assert!(snapshot(&model, &state) == before);
                file()
                    .accepting_non_finite()
                    .restore_with_model(&mut state, &model)
                    .unwrap();
                assert_eq!(values(&model["x"]), [1.0, 2.0, sign * f64::INFINITY]);
            }
        }
    }
}

/// What other wrappers keep beside the rule's state belongs to one dtype. They are restored as they are, and
/// replaced afterwards.
#[test]
fn other_wrappers() {
    let rule = || Adam::new(0.01);
    let wrapped = |i: usize| -> Optimiser {
        match i {
            0 => Optimiser::new(Kahan::new(rule())),
            1 => Optimiser::new(StochasticRounding::new(3, rule())),
            2 => Optimiser::new(SplitMaster::new(rule())),
            3 => Optimiser::new(MixedPrecision::new(DType::F32, rule())),
            _ => Optimiser::new(rule()),
        }
    };
    for (from, to) in (0..5).flat_map(|from| (0..5).map(move |to| (from, to))) {
        let (saved_model, saved) = started_with(wrapped(from), DType::BF16, 1);
        let file = || {
            open(&file_of(Checkpoint::new(&saved).model(&saved_model)))
                .unwrap()
                .converting()
        };
        for dtype in [DType::BF16, DType::F32] {
            let (model, mut state) = started_with(wrapped(to), dtype, 40);
            let before = snapshot(&model, &state);
            let result = file().restore_with_model(&mut state, &model);
            if from == to && dtype == DType::BF16 {
                result.unwrap();
                assert!(
                    snapshot(&model, &state) == snapshot(&saved_model, &saved),
                    "{from}"
                );
            } else if from.min(to) > 2 {
                result.unwrap();
            } else {
                let is_fixed = from < 3 && dtype == DType::F32;
                let kind = if is_fixed {
                    ErrorKind::Tensor
                } else {
                    ErrorKind::OtherRule
                };
                is_kind(
                    &result.unwrap_err(),
                    kind,
                    &["\"0\"", "and then replace the rule"],
                );
                assert!(
                    snapshot(&model, &state) == before,
                    "{from} to {to}: something changed"
                );
            }
        }
    }
}

hyper_parameters! {
    /// A rule with a tensor that is called like a master and is none.
    struct Remembers {
        /// The learning rate.
        eta: f64 = 0.1 => range::non_negative,
    }
}

impl Rule for Remembers {
    fn init(&self, x: Parameter<'_>) -> Result<State> {
        State::empty().with_slot(Slot::zeros("master"), x, x.shape())
    }

    fn apply<'a>(&'a self, state: &'a mut State, _x: Parameter<'a>, dx: Gradient<'a>) -> Result<Flow<'a>> {
        Ok(Flow::Step(dx.with_tensors(state, |_, _, dx, slots| {
            slots[0] = dx.to_dtype(DType::F32)?;
            Ok((dx * self.eta)?)
        })))
    }
}

#[test]
fn a_tensor_that_is_only_called_master() {
    let (saved_model, saved) = started((DType::F32, None), &Remembers::default(), 1);
    let (model, mut state) = started((DType::BF16, None), &Remembers::default(), 40);
    let restore = |saved: &StateTree, saved_model: &Vars, state: &mut StateTree, model: &Vars| {
        open(&file_of(Checkpoint::new(saved).model(saved_model)))
            .unwrap()
            .converting()
            .restore_with_model(state, model)
    };
    restore(&saved, &saved_model, &mut state, &model).unwrap();
    let leaf = |state: &StateTree| values(&tensor(state.leaf("0").unwrap(), "master").unwrap());
    assert_eq!(
        (leaf(&state), values(&model["0"])),
        (leaf(&saved), rounded(&values(&saved_model["0"]), DType::BF16))
    );

    let wrapped = |seed| {
        started_with(
            Optimiser::new(StochasticRounding::new(3, Remembers::default())),
            DType::BF16,
            seed,
        )
    };
    let ((saved_model, saved), (model, mut state)) = (wrapped(1), wrapped(40));
    restore(&saved, &saved_model, &mut state, &model).unwrap();
    assert!(snapshot(&model, &state) == snapshot(&saved_model, &saved));
}
