//! Checkpoints of versions whose rules had fewer hyper-parameters.

use std::collections::BTreeMap;

use candle_core::{DType, Tensor};
use optimisers::{
    AccumGrad, Adam, AdamW, Adjust, Checkpoint, CheckpointFile, ClipGrad, Ema, Error, FieldValue, Kahan, MixedPrecision, Momentum, Offload,
    Optimiser, OptimiserChain, Restored, Rule, SplitMaster, StateTree, StochasticRounding, StoreAs, Summation, UniformAverage, rules,
    setup, setup_with, update,
};
use serde_json::Value;

use crate::common::{Grads, Vars, grads, model, random, says, snapshot, var};
use crate::crafted_checkpoints::{Pieces, file_of, open};
use crate::models::CPU;

/// The file of a state of one parameter, without some of its hyper-parameters.
fn without(optimiser: impl Optimiser, x: &Vars, places: &[usize]) -> CheckpointFile {
    let mut pieces = Pieces::of(&file_of(Checkpoint::new(&setup(optimiser, x).expect("a state"))));
    let fields = pieces.description["optimisers"][0]["fields"].as_array_mut().expect("fields");
    places.iter().rev().for_each(|&place| _ = fields.remove(place));
    open(&pieces.bytes()).expect("a checkpoint")
}

/// What was taken from nowhere, as rule, field and value.
fn taken(restored: &Restored) -> Vec<(&str, &str, FieldValue)> {
    assert!(restored.defaults.iter().all(|taken| taken.path == "0"));
    restored.defaults.iter().map(|taken| (taken.rule.as_str(), taken.field.as_str(), taken.value)).collect()
}

/// A file that this crate wrote before `Ema` had a start, in the middle of a window, goes on bit for bit as it would have gone on then.
#[test]
fn a_file_from_before_a_field_goes_on_as_it_would_have() {
    let file = CheckpointFile::from_bytes("old", include_bytes!("../golden/before_ema_start.safetensors").to_vec()).expect("a file");
    let variable = |path: &str| (path.to_string(), var(&random(1, &[3], DType::F32, CPU)));
    let model: Vars = ["a", "b"].map(variable).into();
    let rule = |_: &str, _: &Tensor| {
        let averages = (Ema { start: 9, ..Ema::default() }, UniformAverage::new(7));
        Some(OptimiserChain::new((AccumGrad::new(5), Momentum::default(), averages.0, averages.1)))
    };
    let mut state = setup_with(&model, rule).expect("a state");
    let restored = file.restore_with_model(&mut state, &model).expect("an old file");
    let new = |path: &str| {
        let field = |rule: &str, field: &str, value| (path.to_string(), rule.to_string(), field.to_string(), value);
        [field("AccumGrad", "order", Summation::InOrder.into()), field("Ema", "start", FieldValue::Count(0))]
    };
    let defaults = restored.defaults.into_iter().map(|taken| (taken.path, taken.rule, taken.field, taken.value));
    assert_eq!(defaults.collect::<Vec<_>>(), ["a", "b"].map(new).concat());

    for call in 7..16 {
        let gradient = |(i, path): (usize, &String)| (path.clone(), random(10 * call + i as u64, &[3], DType::F32, CPU));
        update(&mut state, &model, &model.keys().enumerate().map(gradient).collect::<Grads>()).expect("an update");
    }
    let expected: BTreeMap<String, Vec<u32>> = serde_json::from_str(file.note("expected").expect("a note")).expect("bits");
    for (name, expected) in expected {
        let tensor = match name.split_once('/') {
            None => model[&name].as_detached_tensor(),
            Some((path, tensor)) => state.leaf(path).expect("a leaf").tensor(tensor).expect("a copy").expect("a tensor"),
        };
        let bits: Vec<u32> = tensor.to_vec1::<f32>().expect("numbers").into_iter().map(f32::to_bits).collect();
        assert_eq!(bits, expected, "{name}");
    }
}

/// Every field of every rule but the first can be missing, wherever the rule stands; all others come from the file.
#[test]
fn a_missing_hyper_parameter_gets_its_default() {
    let x = model(&[random(1, &[2, 3], DType::F32, CPU)]);
    for listing in rules::catalogue() {
        let around = |rule: Box<dyn Rule>| OptimiserChain::new((ClipGrad::new(3.0), rule, Adam::new(0.5)));
        let (defaults, mut other) = (listing.rule.fields(), listing.rule.clone());
        // Other values than the defaults, in the file and in the state.
        for (name, value) in defaults.iter().filter(|(name, _)| *name != "centred") {
            let changed = match *value {
                FieldValue::Real(value) => FieldValue::Real(0.75 * value + 0.01),
                FieldValue::Count(count) => FieldValue::Count(count + 1),
                value => value,
            };
            other.set_field(name, changed).expect("a field");
        }
        for missing in 1..defaults.len() {
            let file = without(around(other.clone()), &x, &[1 + missing]);
            let mut state = setup(around(other.clone()), &x).expect("a state");
            let restored = file.restore(&mut state).expect("a file of an older version");
            let (field, default) = defaults[missing];
            assert_eq!(taken(&restored), [(listing.name, field, default)]);
            let mut expected = around(other.clone()).fields();
            expected[1 + missing].1 = default;
            assert_eq!(state.leaf("0").expect("the leaf").optimiser().fields(), expected, "{}", listing.name);
        }
    }
}

/// Where one name occurs in several rules, it is the right one that is missing.
#[test]
fn a_missing_hyper_parameter_is_that_of_its_rule() {
    let x = model(&[random(1, &[2], DType::BF16, CPU)]);
    let averages = OptimiserChain::new((Ema { delta: 0.5, debias: true, start: 4 }, UniformAverage::new(6)));
    let twice = OptimiserChain::new((Adam { epsilon: 0.5, ..Adam::new(0.25) }, Adam { epsilon: 0.75, ..Adam::new(0.125) }));
    let wrapped = |rule| StochasticRounding::new(3, StoreAs::new([("m", DType::BF16)], rule));
    let epsilon = FieldValue::Real(1e-8);
    type Row<'r> = (Box<dyn Optimiser>, &'r [usize], &'r [(&'r str, &'r str, FieldValue)]);
    let rows: [Row<'_>; 7] = [
        (Box::new(averages.clone()), &[2], &[("Ema", "start", FieldValue::Count(0))]),
        (Box::new(averages.clone()), &[1, 2], &[("Ema", "debias", FieldValue::Flag(false)), ("Ema", "start", FieldValue::Count(0))]),
        (Box::new(MixedPrecision::new(DType::F32, averages)), &[2], &[("Ema", "start", FieldValue::Count(0))]),
        (Box::new(twice.clone()), &[2], &[("Adam", "epsilon", epsilon)]),
        (Box::new(twice.clone()), &[5], &[("Adam", "epsilon", epsilon)]),
        (
            Box::new(twice.clone()),
            &[1, 2, 5],
            &[("Adam", "beta", FieldValue::Pair(0.9, 0.999)), ("Adam", "epsilon", epsilon), ("Adam", "epsilon", epsilon)],
        ),
        (Box::new(wrapped(twice)), &[3], &[("Adam", "epsilon", epsilon)]),
    ];
    for (optimiser, missing, expected) in rows {
        let mut state = setup(optimiser.clone(), &x).expect("a state");
        let restored = without(optimiser.clone(), &x, missing).restore(&mut state).expect("a file of an older version");
        assert_eq!(taken(&restored), expected, "{}", optimiser.name());
        let mut fields = optimiser.fields();
        missing.iter().zip(expected).for_each(|(&place, (_, _, default))| fields[place].1 = *default);
        assert_eq!(state.leaf("0").expect("the leaf").optimiser().fields(), fields);
    }
}

#[test]
fn a_whole_file_takes_nothing_from_defaults() {
    let x = model(&[random(1, &[2], DType::F32, CPU)]);
    let mut state = setup(AdamW::new(0.5), &x).expect("a state");
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("state");
    state.save(&path).expect("a file");
    assert_eq!(state.load(&path).expect("the same"), Restored::default());
}

/// A field that nobody knows, one in another place, and a rule without its first are errors, and nothing changes.
#[test]
fn hyper_parameters_of_another_rule_are_refused() {
    let x = model(&[random(1, &[2], DType::F32, CPU)]);
    let optimiser = || OptimiserChain::new((ClipGrad::new(1.0), AdamW::new(0.5)));
    let edited = |edit: &dyn Fn(&mut Vec<Value>)| {
        let mut pieces = Pieces::of(&file_of(Checkpoint::new(&setup(optimiser(), &x).expect("a state"))));
        edit(pieces.description["optimisers"][0]["fields"].as_array_mut().expect("fields"));
        open(&pieces.bytes()).expect("a checkpoint")
    };
    let files = [
        edited(&|fields| fields.push(serde_json::json!(["momentum", 0.5]))),
        edited(&|fields| fields.insert(0, serde_json::json!(["momentum", 0.5]))),
        edited(&|fields| fields[3][0] = "momentum".into()),
        edited(&|fields| fields.swap(2, 3)),
        edited(&|fields| fields.swap(0, 1)),
        edited(&|fields| _ = fields.remove(0)),
        edited(&|fields| _ = fields.remove(1)),
        edited(&|fields| fields.push(fields[2].clone())),
        edited(&|fields| fields.clear()),
    ];
    for file in files {
        let mut state: StateTree = setup(optimiser(), &x).expect("a state");
        update(&mut state, &x, &grads([Some(random(2, &[2], DType::F32, CPU))])).expect("an update");
        let before = snapshot(&x, &state);
        let error: Error = file.restore(&mut state).expect_err("another rule");
        says(&error, &["OtherNames", "fields", "another version of the rule"]);
        assert!(snapshot(&x, &state) == before);
    }
}

/// Every way to store parameters, by its name in a file.
fn ways_to_store() -> Vec<(&'static str, Box<dyn Optimiser>)> {
    let adam = || Adam::new(0.5);
    let chain = || OptimiserChain::new((ClipGrad::new(1.0), Momentum::new(0.5)));
    let plain: Vec<(&str, Box<dyn Optimiser>)> = vec![
        ("rounded", Box::new(adam())),
        ("rounded", Box::new(chain())),
        ("master", Box::new(MixedPrecision::new(DType::F32, adam()))),
        ("master", Box::new(MixedPrecision::new(DType::F64, adam()))),
        ("master", Box::new(MixedPrecision::new(DType::F32, chain()))),
        ("split", Box::new(SplitMaster::new(adam()))),
        ("compensated", Box::new(Kahan::new(adam()))),
        ("stochastic", Box::new(StochasticRounding::new(3, adam()))),
    ];
    let offloaded = |(kind, inner): &(_, Box<dyn Optimiser>)| {
        let offloaded: Box<dyn Optimiser> = Box::new(Offload::new(inner.clone()).everywhere());
        (*kind, offloaded)
    };
    let offloaded: Vec<_> = plain.iter().map(offloaded).collect();
    plain.into_iter().chain(offloaded).collect()
}

/// Files of versions that did not write how parameters are stored are restored, converted and refused as those that say it.
#[test]
fn how_parameters_are_stored_is_known_of_files_that_do_not_say_it() {
    let x = model(&[random(1, &[2], DType::BF16, CPU)]);
    let (mut restored, mut refused) = (0, 0);
    for (place, (kind, saved)) in ways_to_store().into_iter().enumerate() {
        let mut state = setup(saved, &x).expect("a state");
        update(&mut state, &x, &grads([Some(random(2, &[2], DType::BF16, CPU))])).expect("an update");
        let mut pieces = Pieces::of(&file_of(Checkpoint::new(&state).model(&x)));
        let new = pieces.bytes();
        let said = pieces.description["optimisers"][0].as_object_mut().and_then(|saved| saved.remove("storage"));
        assert_eq!(said, Some(serde_json::json!({ "kind": kind, "offloaded": place >= 8 })));
        let old = pieces.bytes();
        for (_, other) in ways_to_store() {
            for converts in [false, true] {
                let taken_over = |bytes: &[u8]| {
                    let y = model(&[random(3, &[2], DType::BF16, CPU)]);
                    let mut state = setup(other.clone(), &y).expect("a state");
                    let file = open(bytes).expect("a checkpoint");
                    let file = if converts { file.converting() } else { file };
                    file.restore_with_model(&mut state, &y).map(|_| snapshot(&y, &state)).map_err(|error| error.to_string())
                };
                let (of_new, of_old) = (taken_over(&new), taken_over(&old));
                assert!(of_new == of_old, "{place} into {}: {of_new:?}, {of_old:?}", other.name());
                *(if of_old.is_ok() { &mut restored } else { &mut refused }) += 1;
            }
        }
    }
    // Each into itself; in a conversion also those without more than masters into those with the same rule.
    let expected = 16 + 6 * 6 + 4 * 4 + 6;
    assert_eq!((restored, refused), (expected, 2 * 16 * 16 - expected));
}
