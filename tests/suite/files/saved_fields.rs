//! Checkpoints whose rules have fewer hyper-parameters, or others.

use candle_core::DType;
use optimisers::{
    Adam, AdamW, Adjust, Checkpoint, CheckpointFile, ClipGrad, Ema, ErrorKind, FieldValue, IntoOptimiser,
    MixedPrecision, Optimiser, OptimiserChain, Restored, Rule, StateTree, StochasticRounding, StoreAs,
    UniformAverage, rules, setup, update,
};
use serde_json::Value;

use crate::model::models::CPU;
use support::common::{Vars, grads, is_kind, model, random, snapshot};
use support::crafted_checkpoints::{Pieces, file_of, open};

/// The file of a state of one parameter, without some of its hyper-parameters.
fn without(optimiser: impl IntoOptimiser, x: &Vars, places: &[usize]) -> CheckpointFile {
    let mut pieces = Pieces::of(&file_of(Checkpoint::new(&setup(optimiser, x).expect("a state"))));
    for &place in places.iter().rev() {
        let mut place = place;
        for fields in pieces.fields() {
            if place < fields.len() {
                fields.remove(place);
                break;
            }
            place -= fields.len();
        }
    }
    open(&pieces.bytes()).expect("a checkpoint")
}

/// What the file lacks, as rule and field.
fn lacking(restored: &Restored) -> Vec<(&str, &str)> {
    assert!(
        restored
            .differences
            .iter()
            .all(|other| other.path == "0" && other.file.is_none())
    );
    restored
        .differences
        .iter()
        .map(|other| (other.rule.as_str(), other.field.as_str()))
        .collect()
}

/// Every field of every rule can be missing, wherever the rule stands; all others come from the file.
#[test]
fn a_missing_hyper_parameter_gets_its_default() {
    let x = model(&[random(1, &[2, 3], DType::F32, CPU)]);
    for listing in rules::catalogue() {
        let around = |rule: Box<dyn Rule>| OptimiserChain::new((ClipGrad::new(3.0), rule, Adam::new(0.5)));
        let (defaults, mut other) = (listing.rule.fields(), listing.rule.clone());
        // Other values than the defaults, in the file and in the state.
        for (name, value) in defaults.iter().filter(|(name, _)| *name != "centred") {
            let changed = match *value {
                // RAdam's threshold is 4 at least.
                FieldValue::Real(4.0) => FieldValue::Real(5.0),
                FieldValue::Real(value) => FieldValue::Real(0.75 * value + 0.01),
                FieldValue::Count(count) => FieldValue::Count(count + 1),
                value => value,
            };
            other.set_field(name, changed).expect("a field");
        }
        for missing in 0..defaults.len() {
            let file = without(around(other.clone()), &x, &[1 + missing]);
            let mut state = setup(around(other.clone()), &x).expect("a state");
            let restored = file.restore(&mut state).expect("a file with fewer fields");
            let (field, default) = defaults[missing];
            assert_eq!(lacking(&restored), [(listing.name, field)]);
            let mut expected = around(other.clone()).fields();
            expected[1 + missing].1 = default;
            assert_eq!(
                state.leaf("0").expect("the leaf").optimiser().fields(),
                expected,
                "{}",
                listing.name
            );
        }
    }
}

/// Where one name occurs in several rules, it is the right one that is missing.
#[test]
fn a_missing_hyper_parameter_is_that_of_its_rule() {
    let x = model(&[random(1, &[2], DType::BF16, CPU)]);
    let averages = OptimiserChain::new((
        Ema {
            delta: 0.5,
            debias: true,
            start: 4,
        },
        UniformAverage::new(6),
    ));
    let twice = OptimiserChain::new((
        Adam {
            epsilon: 0.5,
            ..Adam::new(0.25)
        },
        Adam {
            epsilon: 0.75,
            ..Adam::new(0.125)
        },
    ));
    let wrapped = |rule| StochasticRounding::new(3, StoreAs::new([("m", DType::BF16)], rule));
    let epsilon = FieldValue::Real(1e-8);
    type Row<'r> = (Optimiser, &'r [usize], &'r [(&'r str, &'r str, FieldValue)]);
    let rows: [Row<'_>; 7] = [
        (
            Optimiser::new(averages.clone()),
            &[2],
            &[("Ema", "start", FieldValue::Count(0))],
        ),
        (
            Optimiser::new(averages.clone()),
            &[1, 2],
            &[
                ("Ema", "debias", FieldValue::Flag(false)),
                ("Ema", "start", FieldValue::Count(0)),
            ],
        ),
        (
            Optimiser::new(MixedPrecision::new(DType::F32, averages)),
            &[2],
            &[("Ema", "start", FieldValue::Count(0))],
        ),
        (
            Optimiser::new(twice.clone()),
            &[2],
            &[("Adam", "epsilon", epsilon)],
        ),
        (
            Optimiser::new(twice.clone()),
            &[6],
            &[("Adam", "epsilon", epsilon)],
        ),
        (
            Optimiser::new(twice.clone()),
            &[1, 2, 6],
            &[
                ("Adam", "beta", FieldValue::Pair(0.9, 0.999)),
                ("Adam", "epsilon", epsilon),
                ("Adam", "epsilon", epsilon),
            ],
        ),
        (
            Optimiser::new(wrapped(twice)),
            &[3],
            &[("Adam", "epsilon", epsilon)],
        ),
    ];
    for (optimiser, missing, expected) in rows {
        let mut state = setup(optimiser.clone(), &x).expect("a state");
        let restored = without(optimiser.clone(), &x, missing)
            .restore(&mut state)
            .expect("a file with fewer fields");
        let names: Vec<_> = expected.iter().map(|&(rule, field, _)| (rule, field)).collect();
        assert_eq!(lacking(&restored), names, "{}", optimiser.name());
        let mut fields = optimiser.fields();
        missing
            .iter()
            .zip(expected)
            .for_each(|(&place, (_, _, default))| fields[place].1 = *default);
        assert_eq!(state.leaf("0").expect("the leaf").optimiser().fields(), fields);
    }
}

#[test]
fn a_whole_file_takes_nothing_from_defaults() {
    let x = model(&[random(1, &[2], DType::F32, CPU)]);
    let mut state = setup(AdamW::new(0.5), &x).expect("a state");
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("state");
    Checkpoint::new(&state).save(&path).expect("a file");
    let restored = CheckpointFile::open(&path)
        .and_then(|file| file.restore(&mut state))
        .expect("the same");
    assert_eq!(
        (restored.taken, restored.differences),
        (vec!["0".to_string()], Vec::new())
    );
}

/// A field that nobody knows, one in another place and one that is there twice are errors, and nothing
/// changes.
#[test]
fn hyper_parameters_of_another_rule_are_refused() {
    let x = model(&[random(1, &[2], DType::F32, CPU)]);
    let optimiser = || OptimiserChain::new((ClipGrad::new(1.0), AdamW::new(0.5)));
    let edited = |rule: usize, edit: &dyn Fn(&mut Vec<Value>)| {
        let mut pieces = Pieces::of(&file_of(Checkpoint::new(
            &setup(optimiser(), &x).expect("a state"),
        )));
        edit(pieces.fields()[rule]);
        open(&pieces.bytes()).expect("a checkpoint")
    };
    let files = [
        edited(0, &|fields| fields.push(serde_json::json!(["momentum", 0.5]))),
        edited(1, &|fields| fields.push(serde_json::json!(["momentum", 0.5]))),
        edited(1, &|fields| {
            fields.insert(0, serde_json::json!(["momentum", 0.5]))
        }),
        edited(1, &|fields| fields[2][0] = "momentum".into()),
        edited(1, &|fields| fields.swap(1, 2)),
        edited(0, &|fields| fields[0][0] = "eta".into()),
        edited(1, &|fields| fields.push(fields[1].clone())),
    ];
    for file in files {
        let mut state: StateTree = setup(optimiser(), &x).expect("a state");
        update(&mut state, &x, &grads([Some(random(2, &[2], DType::F32, CPU))])).expect("an update");
        let before = snapshot(&x, &state);
        let error = file.restore(&mut state).expect_err("another rule");
        is_kind(
            &error,
            ErrorKind::OtherRule,
            &["fields", "another version of the rule"],
        );
        assert!(snapshot(&x, &state) == before);
    }
}
