//! A tree that changes with its model: leaves added, removed, renamed, and given other rules.

use std::collections::BTreeMap;

use candle_core::{DType, Device, Tensor};
use optimisers::{
    AccumGrad, AdEMAMix, AdaBelief, Adam, AdamW, Adjust, ClipGrad, Descent, Elementwise, Error, ErrorKind,
    GradientSlices, LAMB, Lion, Lookahead, MixedPrecision, Momentum, Nesterov, Optimiser, OptimiserChain,
    ParameterSlices, RMSProp, Rule, Scale, Slot, StateChange, StateTree, WeightDecay, hyper_parameters,
    range, setup, setup_with, update, value::Value,
};

use support::common::{
    Grads, Snapshot, Vars, assert_same, bits, is_kind, random, rules_and_chains, snapshot, unnamed, values,
    var,
};
use support::random_programs::draw;

const PATHS: [&str; 4] = [
    "encoder.0.weight",
    "encoder.bias",
    "encoder2.weight",
    "head.weight",
];

fn tensor(seed: u64, dtype: DType) -> Tensor {
    random(seed, &[3], dtype, &Device::Cpu)
}

fn model(dtype: DType) -> Vars {
    PATHS
        .iter()
        .zip(1..)
        .map(|(path, seed)| (path.to_string(), var(&tensor(seed, dtype))))
        .collect()
}

/// A gradient for each variable of a model.
fn gradients(model: &Vars, seed: u64) -> Grads {
    model
        .keys()
        .zip(seed..)
        .map(|(path, seed)| (path.clone(), tensor(seed, DType::F32)))
        .collect()
}

fn paths(state: &StateTree) -> Vec<&str> {
    state.leaves().map(|leaf| leaf.path()).collect()
}

/// What belongs to the leaves at these paths.
fn of(model: &Vars, state: &StateTree, wanted: &[&str]) -> Snapshot {
    let belongs = |name: &str| {
        wanted
            .iter()
            .any(|path| name == *path || name.starts_with(&format!("{path}/")))
    };
    snapshot(model, state)
        .into_iter()
        .filter(|(name, _)| belongs(name))
        .collect()
}

#[test]
fn a_new_layer_gets_leaves_and_the_rest_keeps_its_moments() {
    let mut grown = model(DType::BF16);
    let mut state = setup(MixedPrecision::new(DType::F32, Adam::new(0.1)), &grown).expect("a state");
    update(&mut state, &grown, &gradients(&grown, 10)).expect("an update");
    let before = snapshot(&grown, &state);

    grown.insert("decoder.weight".into(), var(&tensor(5, DType::BF16)));
    grown.insert("zoo.weight".into(), var(&tensor(6, DType::BF16)));
    let unknown = update(&mut state, &grown, &gradients(&grown, 20)).expect_err("an unknown gradient");
    is_kind(
        &unknown,
        ErrorKind::Model,
        &["\"decoder.weight\"", "not in this state", "added after `setup`"],
    );
    assert_eq!(
        state.add(Descent::new(1.0), &grown).expect("new leaves"),
        ["decoder.weight", "zoo.weight"]
    );
    assert_eq!(
        state.add(Descent::new(1.0), &grown).expect("nothing new"),
        [""; 0]
    );
    assert_eq!(
        paths(&state),
        [&["decoder.weight"], &PATHS[..], &["zoo.weight"]].concat()
    );
    assert_same(&[of(&grown, &state, &PATHS)], &[before], "the old leaves");
    assert_eq!(
        update(&mut state, &grown, &gradients(&grown, 20))
            .expect("an update")
            .applied,
        6
    );
    assert_eq!(
        state
            .leaf("zoo.weight")
            .map(|leaf| (leaf.steps(), leaf.learning_rate())),
        Some((1, Some(1.0)))
    );
}

#[test]
fn adding_respects_what_was_left_out_and_can_take_it_in() {
    let model = model(DType::F32);
    let mut state =
        setup_with(&model, |path, _| path.starts_with("head").then(|| Adam::new(0.1))).expect("a state");
    assert_eq!(
        state.add(Adam::new(0.1), &model).expect("nothing unknown"),
        [""; 0]
    );
    let added = state
        .add_with(&model, |path, _| {
            path.ends_with("bias").then(|| Descent::new(0.1))
        })
        .expect("a leaf");
    assert_eq!(added, ["encoder.bias"]);
    assert_eq!(
        update(&mut state, &model, &gradients(&model, 1))
            .expect("the others are passed over")
            .applied,
        2
    );
}

/// Lent memory is known by its paths alone.
#[test]
fn lent_memory_that_was_left_out_can_be_added() {
    let (mut bias, mut weight) = ([1f32; 2], [1f32; 2]);
    let model = ParameterSlices::new()
        .with("bias", 2, &mut bias[..])
        .expect("a parameter");
    let model = model.with("weight", 2, &mut weight[..]).expect("a parameter");
    let is_weight = |path: &str| (path == "weight").then(|| Descent::new(0.5));
    let mut state = setup_with(&model, |path, _| is_weight(path)).expect("a state");
    assert_eq!(
        state
            .add_with(&model, |path, _| is_weight(path))
            .expect("left out again"),
        [""; 0]
    );
    assert_eq!(
        state
            .add_with(&model, |_, _| Some(Descent::new(0.5)))
            .expect("a leaf"),
        ["bias"]
    );
    assert_eq!(
        state
            .add_with(&model, |_, _| Some(Descent::new(0.5)))
            .expect("no new leaf"),
        [""; 0]
    );
    let ones = [1f32; 2];
    let gradients = GradientSlices::new().with("bias", &ones[..]).expect("a gradient");
    let gradients = gradients.with("weight", &ones[..]).expect("a gradient");
    assert_eq!(
        update(&mut state, &model, &gradients).expect("an update").applied,
        2
    );
    drop(model);
    assert_eq!([bias, weight], [[0.5; 2]; 2]);
}

#[test]
fn another_variable_of_a_known_path_is_refused() {
    let old = model(DType::F32);
    let mut state = setup(Adam::new(0.1), &old).expect("a state");
    let mut new = old.clone();
    new.insert("head.weight".into(), var(&tensor(9, DType::F32)));
    let before = snapshot(&old, &state);
    let error = state.add(Adam::new(0.1), &new).expect_err("refused");
    is_kind(&error, ErrorKind::Model, &["the state has this path already"]);
    assert_eq!(error.path(), Some("head.weight"), "{error}");
    assert_same(&[snapshot(&old, &state)], &[before], "after the refusal");
    state.remove("head").expect("the old head");
    assert_eq!(
        state.add(Adam::new(0.1), &new).expect("the new head"),
        ["head.weight"]
    );
    assert_eq!(
        update(&mut state, &new, &gradients(&new, 1))
            .expect("an update")
            .applied,
        4
    );
}

#[test]
fn an_invalid_rule_is_not_added() {
    let mut grown = model(DType::F32);
    let mut state = setup(Adam::new(0.1), &grown).expect("a state");
    grown.insert("new".into(), var(&tensor(9, DType::F32)));
    let invalid = || Adam::new(-1.0);
    let refused = |error: Error| is_kind(&error, ErrorKind::Argument, &["Adam: eta is -1"]);
    refused(state.add(invalid(), &grown).expect_err("refused"));
    refused(
        state
            .add_with(&grown, |_, _| Some(invalid()))
            .expect_err("refused"),
    );
    refused(state.all().replace(invalid(), &grown).expect_err("refused"));
    assert_eq!(paths(&state), PATHS);
}

#[test]
fn removed_leaves_are_gone_and_the_rest_goes_on() {
    let whole = model(DType::F32);
    let mut state = setup(Adam::new(0.1), &whole).expect("a state");
    update(&mut state, &whole, &gradients(&whole, 1)).expect("an update");
    let before = of(&whole, &state, &PATHS[2..]);
    assert_eq!(state.remove("encoder").expect("two leaves"), PATHS[..2]);
    assert_eq!(paths(&state), PATHS[2..]);
    assert_same(&[of(&whole, &state, &PATHS[2..])], &[before], "the rest");
    let unknown = update(&mut state, &whole, &gradients(&whole, 1)).expect_err("an unknown gradient");
    is_kind(&unknown, ErrorKind::Model, &["\"encoder.", "not in this state"]);
    let rest: Vars = PATHS[2..]
        .iter()
        .map(|path| (path.to_string(), whole[*path].clone()))
        .collect();
    assert_eq!(
        update(&mut state, &rest, &gradients(&rest, 1))
            .expect("an update")
            .applied,
        2
    );
    let error = state.remove("encoder").expect_err("nothing is there");
    assert_eq!(
        error.to_string(),
        r#"the path "encoder" selects no leaf, expected one of: encoder2.weight, head.weight"#
    );

    // The parameters may also stay in the model without being trained.
    state.add_with(&whole, |_, _| None::<Descent>).expect("left out");
    assert_eq!(
        update(&mut state, &whole, &gradients(&whole, 1))
            .expect("an update")
            .applied,
        2
    );
}

#[test]
fn renaming_moves_everything_below() {
    let model = model(DType::F32);
    let mut state = setup(Adam::new(0.1), &model).expect("a state");
    update(&mut state, &model, &gradients(&model, 1)).expect("an update");
    let before = unnamed(of(&model, &state, &PATHS[..2]));

    state.rename("encoder", "zebra.encoder").expect("new names");
    assert_eq!(
        paths(&state),
        [
            "encoder2.weight",
            "head.weight",
            "zebra.encoder.0.weight",
            "zebra.encoder.bias"
        ]
    );
    let renamed: Vars = [
        ("zebra.encoder.0.weight", PATHS[0]),
        ("zebra.encoder.bias", PATHS[1]),
    ]
    .map(|(new, old)| (new.into(), model[old].clone()))
    .into();
    assert_same(
        &[unnamed(of(
            &renamed,
            &state,
            &["zebra.encoder.0.weight", "zebra.encoder.bias"],
        ))],
        &[before],
        "the renamed leaves",
    );
    assert_eq!(
        update(&mut state, &model, &gradients(&renamed, 1))
            .expect("gradients by the new names")
            .applied,
        2
    );

    state.rename("zebra", "").expect("a step up");
    assert_eq!(paths(&state), PATHS);
    let taken = state
        .rename("encoder.bias", "encoder2.weight")
        .expect_err("taken");
    is_kind(&taken, ErrorKind::Model, &["the state has this path already"]);
    assert_eq!(taken.path(), Some("encoder2.weight"), "{taken}");
    for part in ["nothing", "enc"] {
        let error = state.rename(part, "new").expect_err(part);
        is_kind(
            &error,
            ErrorKind::UnknownName,
            &[&format!("{part:?} selects no leaf")],
        );
    }
    assert_eq!(paths(&state), PATHS);
}

#[test]
fn a_tied_variable_is_renamed_under_each_of_its_names() {
    let shared = var(&tensor(1, DType::F32));
    let tied: Vars = [("embedding", &shared), ("head", &shared)]
        .map(|(path, x)| (path.into(), x.clone()))
        .into();
    let mut state = setup(Descent::new(1.0), &tied).expect("a state");
    state.rename("embedding", "token").expect("a new name");
    assert_eq!(
        state.leaf("head").map(|leaf| leaf.paths().collect::<Vec<_>>()),
        Some(vec!["head", "token"])
    );
    let before = values(&shared);
    let both = BTreeMap::from([("head", tensor(2, DType::F32)), ("token", tensor(3, DType::F32))]);
    update(&mut state, &tied, &both).expect("an update");
    let expected = before
        .iter()
        .zip(values(&both["head"]))
        .zip(values(&both["token"]))
        .map(|((x, a), b)| *x as f32 - (a as f32 + b as f32));
    assert_eq!(values(&shared), expected.map(f64::from).collect::<Vec<_>>());
}

/// Whatever was renamed, removed and added: a path finds its variable and all that is below it, ties and
/// variables that were left out included.
#[test]
fn paths_find_their_leaves_after_any_edits() {
    const SEGMENTS: [&str; 5] = ["a", "a0", "b", "b.a", "c"];
    let segment = |facts: (usize, usize, &str)| SEGMENTS[draw(facts, SEGMENTS.len())];
    let mut applied = [0; 3];
    for seed in 0..40 {
        let variables: Vec<_> = (0..8).map(|i| var(&tensor(i, DType::F32))).collect();
        // Ten names of eight variables: two have a second one. Every fifth variable is left out.
        let mut named: BTreeMap<String, usize> = (0..10)
            .map(|i| (format!("{}.{i}", segment((seed, i, "first"))), i % 8))
            .collect();
        let left_out = |i: usize| i % 5 == 3;
        let model = |named: &BTreeMap<String, usize>| -> Vars {
            named
                .iter()
                .map(|(path, i)| (path.clone(), variables[*i].clone()))
                .collect()
        };
        let of_path: BTreeMap<String, usize> = named.clone();
        let mut state = setup_with(&model(&named), |path, _| {
            (!left_out(of_path[path])).then(|| Descent::new(0.1))
        })
        .expect("a state");
        for edit in 0..12 {
            let (from, to) = (segment((seed, edit, "from")), segment((seed, edit, "to")));
            let is_below = |path: &str| path == from || path.starts_with(&format!("{from}."));
            match draw((seed, edit, "what"), 3) {
                0 => {
                    let renamed = |path: &str| {
                        if is_below(path) {
                            format!("{to}{}", &path[from.len()..])
                        } else {
                            path.to_string()
                        }
                    };
                    let expected: BTreeMap<String, usize> =
                        named.iter().map(|(path, i)| (renamed(path), *i)).collect();
                    let is_possible =
                        expected.len() == named.len() && named.keys().any(|path| is_below(path));
                    assert_eq!(
                        state.rename(from, to).is_ok(),
                        is_possible,
                        "{seed} {edit}: {from} to {to} of {named:?}"
                    );
                    if is_possible {
                        named = expected;
                        applied[0] += 1;
                    }
                }
                1 => {
                    let gone: Vec<usize> = named
                        .iter()
                        .filter(|(path, _)| is_below(path))
                        .map(|(_, i)| *i)
                        .collect();
                    assert_eq!(
                        state.remove(from).is_ok(),
                        !gone.is_empty(),
                        "{seed} {edit}: without {from} of {named:?}"
                    );
                    named.retain(|_, i| !gone.contains(i));
                    applied[1] += usize::from(!gone.is_empty());
                }
                _ => {
                    let (path, i) = (
                        format!("{to}.new{edit}"),
                        draw((seed, edit, "which"), variables.len()),
                    );
                    if named.values().any(|known| *known == i) {
                        continue;
                    }
                    named.insert(path.clone(), i);
                    let added = state.add_with(&model(&named), |path, _| {
                        (!left_out(named[path])).then(|| Descent::new(0.1))
                    });
                    assert_eq!(
                        added.expect("a new variable"),
                        if left_out(i) { vec![] } else { vec![path] }
                    );
                    applied[2] += 1;
                }
            }
            let leaves: BTreeMap<&String, usize> = named
                .iter()
                .filter(|(_, i)| !left_out(**i))
                .map(|(path, i)| (path, *i))
                .collect();
            let mut first: Vec<&String> = Vec::new();
            leaves.iter().for_each(|(path, i)| {
                first.extend((!first.iter().any(|known| leaves[known] == *i)).then_some(*path))
            });
            assert_eq!(paths(&state), first, "{seed} {edit}");
            for (path, i) in &leaves {
                let own: Vec<&String> = leaves
                    .iter()
                    .filter(|(_, other)| *other == i)
                    .map(|(path, _)| *path)
                    .collect();
                assert!(
                    state.leaf(path).expect("a leaf").paths().eq(own),
                    "{seed} {edit}: {path}"
                );
            }
            for prefix in SEGMENTS.into_iter().chain(["", "b.a.9", "a."]) {
                let is_below = |path: &str| {
                    prefix.is_empty() || path == prefix || path.starts_with(&format!("{prefix}."))
                };
                let wanted: Vec<&str> = first
                    .iter()
                    .filter(|path| {
                        leaves
                            .iter()
                            .any(|(other, i)| *i == leaves[*path] && is_below(other))
                    })
                    .map(|path| path.as_str())
                    .collect();
                let selected = state.at(prefix).map(|selection| {
                    selection
                        .leaves()
                        .map(|leaf| leaf.path().to_string())
                        .collect::<Vec<_>>()
                });
                assert_eq!(
                    selected.unwrap_or_default(),
                    wanted,
                    "{seed} {edit}: {prefix:?} of {named:?}"
                );
            }
            if !leaves.is_empty() {
                let model = model(&named);
                let gradients: Grads = first
                    .iter()
                    .map(|path| (path.to_string(), tensor(9, DType::F32)))
                    .collect();
                assert_eq!(
                    update(&mut state, &model, &gradients).expect("an update").applied,
                    first.len(),
                    "{seed} {edit}"
                );
            }
        }
    }
    assert!(applied.iter().all(|count| *count > 40), "{applied:?}");
}

/// A state with one leaf for two places has no leaf for the second of two variables.
#[test]
fn a_tied_variable_is_not_rebound_to_two() {
    let two = |first: &str, second: &str| -> Vars {
        [
            (first.to_string(), var(&tensor(7, DType::F32))),
            (second.to_string(), var(&tensor(8, DType::F32))),
        ]
        .into()
    };
    let shared = var(&tensor(1, DType::F32));
    let tied: Vars = [("embedding", &shared), ("head", &shared)]
        .map(|(path, x)| (path.into(), x.clone()))
        .into();
    let mut state = setup(Adam::new(0.1), &tied).expect("a state");
    update(&mut state, &tied, &gradients(&tied, 1)).expect("an update");
    let before = snapshot(&tied, &state);
    let error = state.rebind(&two("embedding", "head")).expect_err("refused");
    is_kind(
        &error,
        ErrorKind::Model,
        &[
            "\"embedding\" and \"head\" are one variable in this state",
            "tie the two",
        ],
    );
    assert_same(&[snapshot(&tied, &state)], &[before], &error);
    update(&mut state, &tied, &gradients(&tied, 1)).expect("the old model");

    let again = var(&tensor(9, DType::F32));
    let other: Vars = [("embedding", &again), ("head", &again)]
        .map(|(path, x)| (path.into(), x.clone()))
        .into();
    state.rebind(&other).expect("one variable for both");
    update(&mut state, &other, &gradients(&other, 1)).expect("an update");

    // One that was left out is no other.
    let mut trained = tied.clone();
    trained.insert("other".into(), var(&tensor(2, DType::F32)));
    let mut state =
        setup_with(&trained, |path, _| (path == "other").then(|| Adam::new(0.1))).expect("a state");
    let mut untied = two("embedding", "head");
    untied.insert("other".into(), var(&tensor(3, DType::F32)));
    let error = state.rebind(&untied).expect_err("refused");
    is_kind(
        &error,
        ErrorKind::Model,
        &["\"embedding\" and \"head\" are one variable in this state"],
    );
    update(&mut state, &trained, &grads_of(&trained, &["other"])).expect("the old model");
}

fn grads_of(model: &Vars, wanted: &[&str]) -> Grads {
    gradients(model, 1)
        .into_iter()
        .filter(|(path, _)| wanted.contains(&path.as_str()))
        .collect()
}

fn names(names: &[&str]) -> Vec<String> {
    names.iter().map(|name| name.to_string()).collect()
}

#[test]
fn replacing_says_what_fits() {
    let model: Vars = [("x".to_string(), var(&tensor(1, DType::BF16)))].into();
    let chain = |rule| OptimiserChain::new((ClipGrad::new(1.0), rule));
    let mut state = setup(Adam::new(0.1), &model).expect("a state");
    let step = |state: &mut StateTree, seed| {
        update(state, &model, &gradients(&model, seed))
            .map(|_| ())
            .expect("an update")
    };
    step(&mut state, 1);
    step(&mut state, 2);
    let moments = |state: &StateTree, name: &str| {
        state
            .leaf("x")
            .and_then(|leaf| leaf.tensor(name).ok())
            .map(|tensor| bits(&tensor))
    };
    let (m, v) = (moments(&state, "m"), moments(&state, "v"));
    let check = |state: &mut StateTree,
                 rule: optimisers::Optimiser,
                 kept: &[&str],
                 fresh: &[&str],
                 dropped: &[&str]| {
        let [
            StateChange {
                path,
                kept: k,
                fresh: f,
                dropped: d,
                ..
            },
        ] = &state.all().replace(rule, &model).expect("a new rule")[..]
        else {
            panic!("one leaf, one answer");
        };
        assert_eq!(
            (path.as_str(), k, f, d),
            ("x", &names(kept), &names(fresh), &names(dropped))
        );
    };
    check(
        &mut state,
        Optimiser::new(AdamW::new(0.1)),
        &["m", "v", "t"],
        &[],
        &[],
    );
    check(
        &mut state,
        Optimiser::new(chain(AdamW::new(0.1))),
        &["1.m", "1.v", "1.t"],
        &["0.t"],
        &[],
    );
    check(
        &mut state,
        Optimiser::new(MixedPrecision::new(DType::F64, chain(AdamW::new(0.1)))),
        &["0.t", "1.m", "1.v", "1.t"],
        &["master"],
        &[],
    );
    assert_eq!(
        (moments(&state, "1.m"), moments(&state, "1.v")),
        (m.clone(), v.clone())
    );
    assert_eq!(
        state.leaf("x").map(|leaf| (leaf.steps(), leaf.counters())),
        Some((2, vec![("0.t".into(), 0), ("1.t".into(), 2)]))
    );
    check(
        &mut state,
        Optimiser::new(MixedPrecision::new(DType::F32, Adam::new(0.1))),
        &["master", "m", "v", "t"],
        &[],
        &["0.t"],
    );
    check(
        &mut state,
        Optimiser::new(Adam::new(0.1)),
        &["m", "v", "t"],
        &[],
        &["master"],
    );
    assert_eq!((moments(&state, "m"), moments(&state, "v")), (m, v));
    let collecting = OptimiserChain::new((AccumGrad::new(2), Adam::new(0.1)));
    check(
        &mut state,
        Optimiser::new(collecting),
        &["1.m", "1.v", "1.t"],
        &["0.acc", "0.calls", "0.received", "0.weight"],
        &[],
    );
    check(
        &mut state,
        Optimiser::new(Momentum::new(0.1)),
        &[],
        &["velocity", "t"],
        &["0.acc", "0.calls", "0.received", "0.weight", "1.m", "1.v", "1.t"],
    );
    check(
        &mut state,
        Optimiser::new(Nesterov::new(0.1)),
        &[],
        &["displacement", "t"],
        &["velocity", "t"],
    );
    step(&mut state, 3);
    assert_eq!(state.leaf("x").map(|leaf| leaf.steps()), Some(3));
}

/// A mean that is kept with its count, beside another that starts at 0, would make steps of AdaBelief 30
/// times too long.
#[test]
fn replacing_keeps_all_tensors_of_a_rule_or_none() {
    let model = model(DType::F64);
    let replaced = |rules: [optimisers::Optimiser; 2]| {
        let [old, new] = rules;
        let mut state = setup(old, &model).expect("a state");
        for call in 0..3 {
            update(&mut state, &model, &gradients(&model, call)).expect("an update");
        }
        state.all().replace(new, &model).expect("a new rule")[0]
            .kept
            .clone()
    };
    let adam = || Optimiser::new(Adam::new(0.1));
    let lion = || Optimiser::new(Lion::new(0.1));
    let (rms_prop, signed) = (
        || Optimiser::new(RMSProp::new(0.1)),
        || Optimiser::new(SignedMean::default()),
    );
    let cases: [([Optimiser; 2], &[&str]); 7] = [
        ([adam(), Optimiser::new(AdaBelief::new(0.1))], &[]),
        ([lion(), adam()], &[]),
        ([adam(), lion()], &["m", "t"]),
        ([adam(), Optimiser::new(LAMB::new(0.1))], &["m", "v", "t"]),
        // The slow mean of gradients would become the weights to which Lookahead leads the parameter back.
        (
            [
                Optimiser::new(AdEMAMix::new(0.1)),
                Optimiser::new(Lookahead::new(5)),
            ],
            &[],
        ),
        // RMSProp would take the root of negative numbers.
        ([signed(), rms_prop()], &[]),
        ([rms_prop(), signed()], &["v", "t"]),
    ];
    for (rules, kept) in cases {
        let names = rules.each_ref().map(Adjust::name);
        assert_eq!(replaced(rules), kept, "{names:?}");
    }
}

hyper_parameters! {
    /// A mean of gradients whose slot has the name of RMSProp's mean of squares.
    struct SignedMean {
        /// The weight of the earlier mean.
        decay: f64 = 0.5 => range::decay,
    }
}

impl Elementwise for SignedMean {
    type Scalars = f64;
    type Slots<T> = [T; 1];

    fn slots(&self) -> [Slot; 1] {
        [Slot::zeros("v")]
    }

    fn scalars(&self, _t: u64) -> f64 {
        self.decay
    }

    fn step<V: Value>(decay: f64, _x: V, dx: V, [v]: &mut [V; 1]) -> V {
        *v = *v * decay + dx * (1.0 - decay);
        *v
    }
}

/// A rule that replaces itself changes nothing, and moments that were kept go on as if the rule had always
/// been the new one.
pub fn assert_replaces_itself(rule: Box<dyn Rule>) {
    let model = model(DType::BF16);
    let mut state = setup(MixedPrecision::new(DType::F32, rule.clone()), &model).expect("a state");
    for call in 0..4 {
        update(&mut state, &model, &gradients(&model, call)).expect("an update");
    }
    let before = snapshot(&model, &state);
    let replaced = state
        .all()
        .replace(MixedPrecision::new(DType::F32, rule.clone()), &model)
        .expect("the same rule");
    assert_same(&[snapshot(&model, &state)], &[before], rule.name());
    assert!(
        replaced
            .iter()
            .all(|leaf| leaf.fresh.is_empty() && leaf.dropped.is_empty()),
        "{replaced:?}"
    );
}

#[test]
fn replacing_a_rule_by_itself_changes_nothing() {
    rules_and_chains().into_iter().for_each(assert_replaces_itself);
}

#[test]
fn only_the_selected_leaves_get_the_new_rule() {
    let model = model(DType::F32);
    let mut state = setup(Adam::new(0.1), &model).expect("a state");
    update(&mut state, &model, &gradients(&model, 1)).expect("an update");
    let before = of(&model, &state, &[PATHS[0], PATHS[1], PATHS[2]]);
    state
        .at("head")
        .expect("a leaf")
        .replace(Descent::new(0.5), &model)
        .expect("a new rule");
    assert_same(
        &[of(&model, &state, &[PATHS[0], PATHS[1], PATHS[2]])],
        &[before],
        "the others",
    );
    assert_eq!(
        state.leaf("head.weight").and_then(|leaf| leaf.learning_rate()),
        Some(0.5)
    );
    let stranger: Vars = [("head.weight".to_string(), var(&tensor(1, DType::F32)))].into();
    let error = state
        .at("head")
        .expect("a leaf")
        .replace(Descent::new(0.1), &stranger)
        .expect_err("another model");
    is_kind(&error, ErrorKind::Model, &["but the model does not"]);
    assert_eq!(error.path(), Some("head.weight"), "{error}");
}

/// Maximising an objective is minimising its negative, weight decay apart.
#[test]
fn maximising_is_minimising_the_negative() {
    fn run(rule: impl Rule + Clone, sign: f64) -> Vec<u64> {
        let model = model(DType::F32);
        let mut state = setup(rule, &model).expect("a state");
        for call in 0..5 {
            let signed = gradients(&model, call)
                .into_iter()
                .map(|(path, gradient)| (path, (gradient * sign).expect("a gradient")));
            update(&mut state, &model, &signed.collect::<Grads>()).expect("an update");
        }
        model.values().flat_map(|x| bits(x)).collect()
    }
    fn maximise<R: Rule + Clone>(rule: R) -> OptimiserChain<(Scale, R)> {
        OptimiserChain::new((Scale::new(-1.0), rule))
    }
    for rule in rules_and_chains() {
        assert_eq!(
            run(maximise(rule.clone()), 1.0),
            run(rule.clone(), -1.0),
            "{}",
            rule.name()
        );
    }
    let decaying = OptimiserChain::new((WeightDecay::new(0.1), Descent::new(0.1)));
    assert_eq!(run(maximise(decaying.clone()), -1.0), run(decaying, 1.0));
}
