//! What is saved comes back: every bit of the state, the model, and what goes with them.

use std::collections::{BTreeMap, BTreeSet};

use candle_core::{DType, Device, Tensor, Var};
use candle_nn::{Embedding, Linear, VarMap};
use optimisers::{
    AccumGrad, Adam, Adjust, Checkpoint, CheckpointFile, CheckpointSaver, ClipGrad, ErrorKind, FieldValue,
    Leaf, MixedPrecision, Momentum, Optimiser, OptimiserChain, Parameter, Sizes, StateTree, model, setup,
    setup_with, update,
};
use safetensors::SafeTensors;

use crate::model::models::{CPU, trained, var_map};
use support::common::{
    Snapshot, Vars, assert_same, bits, devices, grads, is_kind, optimisers_for, random, snapshot, values, var,
};
use support::crafted_checkpoints::{file_of, open};

/// An odd number of elements, several dimensions, a scalar, and nothing at all.
const SHAPES: [&[usize]; 4] = [&[7], &[2, 3], &[], &[3, 0]];

/// A model of [`SHAPES`] with the values of a seed.
fn shapes(seed: u64, dtype: DType, device: &Device) -> Vars {
    let leaf =
        |(i, shape): (usize, &&[usize])| (i.to_string(), var(&random(seed + i as u64, shape, dtype, device)));
    SHAPES.iter().enumerate().map(leaf).collect()
}

/// Calls with gradients that depend on the number of the call; the first leaf has none in every fourth.
fn run(state: &mut StateTree, model: &Vars, calls: std::ops::Range<u64>) -> Vec<Snapshot> {
    let mut call = |call: u64| {
        let gradient = |(i, x): (usize, &Var)| {
            (i > 0 || call % 4 != 3).then(|| random(100 * call + i as u64, x.dims(), x.dtype(), x.device()))
        };
        update(state, model, &grads(model.values().enumerate().map(gradient))).expect("an update");
        snapshot(model, state)
    };
    calls.map(&mut call).collect()
}

/// The same optimiser with every hyper-parameter changed, but for those that decide what the state consists
/// of.
fn adjusted(optimiser: &Optimiser) -> Optimiser {
    let mut optimiser = optimiser.clone();
    let other = |(_, value)| match value {
        // RAdam's threshold is 4 at least.
        FieldValue::Real(4.0) => FieldValue::Real(5.0),
        FieldValue::Real(value) => FieldValue::Real(0.5 * value + 0.001),
        FieldValue::Pair(first, second) => FieldValue::Pair(0.5 * first, 0.875 * second),
        FieldValue::Triple(first, second, third) => {
            FieldValue::Triple(0.5 * first, 0.25 * second, 0.125 * third)
        }
        FieldValue::Count(count) => FieldValue::Count(count + 1),
        FieldValue::Flag(flag) => FieldValue::Flag(!flag),
        FieldValue::Choice(choice) => FieldValue::Choice(choice.named(choice.names()[1]).expect("a choice")),
        FieldValue::Sizes(_) => FieldValue::Sizes(Sizes::from([3, 1])),
        other => panic!("{other:?} is new here"),
    };
    let tensors = |optimiser: Optimiser| {
        // Values that do not go together make no state.
        let state = setup(optimiser, &shapes(1, DType::BF16, CPU)).ok()?;
        let shape = |leaf: &Leaf, name: &str| leaf.tensor(name).ok().map(|tensor| tensor.dims().to_vec());
        let tensors = |leaf: &Leaf| {
            leaf.tensor_names()
                .iter()
                .map(|name| (name.clone(), shape(leaf, name)))
                .collect::<Vec<_>>()
        };
        Some(state.leaves().map(tensors).collect::<Vec<_>>())
    };
    let as_before = tensors(optimiser.clone());
    let mut values: Vec<FieldValue> = optimiser.fields().into_iter().map(|(_, value)| value).collect();
    for (i, field) in optimiser.fields().into_iter().enumerate() {
        let before = std::mem::replace(&mut values[i], other(field));
        let mut changed = optimiser.clone();
        changed.set_fields(&values).expect("values of the right types");
        if tensors(changed) != as_before {
            values[i] = before;
        }
    }
    optimiser.set_fields(&values).expect("values of the right types");
    optimiser.check().expect("values in range");
    optimiser
}

/// Saves in the middle of a run and goes on with another state, in which everything was different: from a
/// file, and from entries. Returns the state that was saved.
pub fn assert_resumes(optimiser: &Optimiser, dtype: DType, device: &Device) -> StateTree {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("run.safetensors");
    let model = shapes(1, dtype, device);
    let mut state = setup(optimiser.clone(), &model).unwrap();
    run(&mut state, &model, 0..7);
    let saved = state.try_clone().unwrap();
    let checkpoint = || Checkpoint::new(&state).model(&model).bytes("calls", "7");
    checkpoint().save(&path).unwrap();
    assert!(
        checkpoint().to_bytes().unwrap().0 == std::fs::read(&path).unwrap(),
        "{}",
        optimiser.name()
    );
    let handed_model = shapes(70, dtype, device);
    let mut handed = setup(optimiser.clone(), &handed_model).unwrap();
    run(&mut handed, &handed_model, 1000..1002);
    handed_model
        .iter()
        .for_each(|(path, x)| x.set(&model[path]).unwrap());
    handed.set_entries(state.entries().unwrap()).unwrap();
    assert_same(
        &[snapshot(&handed_model, &handed)],
        &[snapshot(&model, &state)],
        optimiser.name(),
    );
    let mut saver = CheckpointSaver::new(&path);
    saver.save(7, checkpoint()).unwrap();

    let resumed_model = shapes(50, dtype, device);
    let mut resumed = setup(adjusted(optimiser), &resumed_model).unwrap();
    run(&mut resumed, &resumed_model, 1000..1002);
    let file = CheckpointFile::open(&path).unwrap();
    file.restore_with_model(&mut resumed, &resumed_model).unwrap();
    assert_same(
        &[snapshot(&resumed_model, &resumed)],
        &[snapshot(&model, &state)],
        optimiser.name(),
    );
    let next = String::from_utf8(file.bytes("calls").unwrap().unwrap())
        .unwrap()
        .parse()
        .unwrap();
    let expected = run(&mut state, &model, 7..17);
    saver.wait().unwrap();
    assert!(
        std::fs::read(&saver.files().unwrap()[0].1).unwrap() == std::fs::read(&path).unwrap(),
        "{}",
        optimiser.name()
    );
    assert_same(
        &run(&mut resumed, &resumed_model, next..17),
        &expected,
        optimiser.name(),
    );
    assert_same(
        &run(&mut handed, &handed_model, 7..17),
        &expected,
        optimiser.name(),
    );
    saved
}

#[test]
fn a_resumed_run_is_the_uninterrupted_one() {
    let mut half_way = 0;
    for device in devices() {
        for (place, dtype) in [DType::F16, DType::BF16, DType::F32, DType::F64]
            .into_iter()
            .enumerate()
        {
            // The compiler takes a tenth of a second for a kernel.
            let is_wanted = |index: usize| device.is_cpu() || index % 4 == place;
            for (_, optimiser) in optimisers_for(dtype)
                .into_iter()
                .enumerate()
                .filter(|(i, _)| is_wanted(*i))
            {
                let saved = assert_resumes(&optimiser, dtype, &device);
                half_way += usize::from(
                    saved
                        .leaves()
                        .flat_map(|leaf| leaf.counters())
                        .any(|(name, n)| name.ends_with("calls") && n > 0),
                );
            }
        }
    }
    assert!(half_way > 20, "{half_way} windows were left half-way");
}

/// A save does not touch the model, and neither does `restore`.
#[test]
fn a_state_alone() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("state");
    let model = shapes(1, DType::BF16, CPU);
    let mut state = setup(MixedPrecision::new(DType::F32, Adam::new(0.1)), &model).unwrap();
    run(&mut state, &model, 0..3);
    Checkpoint::new(&state).save(&path).unwrap();
    assert!(
        !CheckpointFile::open(&path)
            .unwrap()
            .tensor_names()
            .contains(&"0".to_string()),
        "no model"
    );

    let at_save = snapshot(&model, &state);
    run(&mut state, &model, 3..5);
    let moved: Vec<_> = model.values().map(|x| bits(x)).collect();
    CheckpointFile::open(&path)
        .and_then(|file| file.restore(&mut state))
        .unwrap();
    let parameters: Vec<_> = model.values().map(|x| bits(x)).collect();
    assert_eq!(parameters, moved);
    assert_same(
        &[snapshot(&model, &state)[SHAPES.len()..].to_vec()],
        &[at_save[SHAPES.len()..].to_vec()],
        "the state",
    );
}

#[test]
fn frozen_leaves_and_shared_optimisers() {
    let model = shapes(1, DType::F32, CPU);
    let mut state = setup(Adam::new(0.1), &model).unwrap();
    run(&mut state, &model, 0..2);
    state.at("0").unwrap().freeze();
    state.at("2").unwrap().adjust(0.5).unwrap();
    run(&mut state, &model, 2..3);
    let file = file_of(Checkpoint::new(&state));

    let shares = |state: &StateTree| {
        let leaves: Vec<_> = state.leaves().collect();
        [(0, 1), (0, 2), (0, 3)].map(|(a, b)| std::ptr::addr_eq(leaves[a].optimiser(), leaves[b].optimiser()))
    };
    let steps = |state: &StateTree| {
        state
            .leaves()
            .map(|leaf| (leaf.steps(), leaf.is_frozen()))
            .collect::<Vec<_>>()
    };
    assert_eq!(
        (shares(&state), steps(&state)),
        (
            [true, false, true],
            vec![(2, true), (3, false), (3, false), (3, false)]
        )
    );
    let mut together = setup(Adam::default(), &model).unwrap();
    together.at("1").unwrap().freeze();
    open(&file).unwrap().restore(&mut together).unwrap();
    assert_eq!(
        (shares(&together), steps(&together)),
        (shares(&state), steps(&state))
    );
    assert_same(
        &[snapshot(&model, &together)],
        &[snapshot(&model, &state)],
        "restored",
    );

    // Leaves that never shared need not start to.
    let mut apart = setup_with(&model, |_, _| Some(Adam::default())).unwrap();
    open(&file).unwrap().restore(&mut apart).unwrap();
    assert_eq!(shares(&apart), [false; 3]);
    assert_same(
        &[snapshot(&model, &apart)],
        &[snapshot(&model, &state)],
        "restored",
    );
}

/// The entries of a file that other programs see: name, dtype, shape, and the values' bits.
fn entries(file: &[u8]) -> BTreeMap<String, (String, Vec<usize>, Vec<u64>)> {
    let tensors = SafeTensors::deserialize(file).expect("a safetensors file");
    let checkpoint = open(file).expect("a checkpoint");
    let entry = |name: String| {
        let (view, tensor) = (
            tensors.tensor(&name).expect("a tensor"),
            checkpoint.tensor(&name).expect("a dtype").expect("a tensor"),
        );
        (
            name,
            (
                view.dtype().to_string(),
                view.shape().to_vec(),
                if tensor.dtype().is_float() {
                    bits(&tensor)
                } else {
                    Vec::new()
                },
            ),
        )
    };
    checkpoint.tensor_names().into_iter().map(entry).collect()
}

#[test]
fn every_entry_has_its_documented_name() {
    let model = Vars::from([
        (
            "encoder.0.weight".to_string(),
            var(&random(1, &[2, 3], DType::BF16, CPU)),
        ),
        ("norm".to_string(), var(&random(2, &[3], DType::F64, CPU))),
    ]);
    let chain = OptimiserChain::new((
        AccumGrad::new(2),
        OptimiserChain::new((ClipGrad::new(1.0), Adam::new(0.1))),
        Momentum::new(0.1),
    ));
    let mut state = setup(MixedPrecision::new(DType::F32, chain), &model).unwrap();
    let gradients = model
        .iter()
        .map(|(path, x)| (path.clone(), random(3, x.dims(), x.dtype(), CPU)))
        .collect::<BTreeMap<_, _>>();
    (0..3).for_each(|_| _ = update(&mut state, &model, &gradients).unwrap());

    let mut expected = BTreeMap::new();
    for (path, slots, dtype) in [
        (
            "encoder.0.weight",
            &["master", "0.acc", "1.1.m", "1.1.v", "2.velocity"][..],
            "F32",
        ),
        ("norm", &["0.acc", "1.1.m", "1.1.v", "2.velocity"], "F64"),
    ] {
        let shape = model[path].dims().to_vec();
        expected.insert(
            path.to_string(),
            (
                format!("{:?}", model[path].dtype()),
                shape.clone(),
                bits(&model[path]),
            ),
        );
        for slot in slots {
            let tensor = state.leaf(path).unwrap().tensor(slot).unwrap();
            expected.insert(
                format!("{path}/{slot}"),
                (dtype.to_string(), shape.clone(), bits(&tensor)),
            );
        }
    }
    assert_eq!(entries(&file_of(Checkpoint::new(&state).model(&model))), expected);
    expected.retain(|name, _| name.contains('/'));
    assert_eq!(entries(&file_of(Checkpoint::new(&state))), expected);
}

/// Everything in the map is in the file, trained or not, and candle reads it without this crate.
#[test]
fn a_var_map_loads_its_variables_from_the_same_file() {
    let weights = |seed| {
        var_map([
            (
                "fc.weight".to_string(),
                var(&random(seed, &[3, 2], DType::F32, CPU)),
            ),
            (
                "bn.running_mean".to_string(),
                var(&random(seed + 1, &[3], DType::F64, CPU)),
            ),
            (
                "tokens".to_string(),
                Var::from_tensor(&Tensor::new(&[seed as u32, 7], CPU).unwrap()).unwrap(),
            ),
            ("empty".to_string(), var(&random(seed, &[0, 2], DType::F16, CPU))),
        ])
    };
    let contents = |map: &VarMap| -> BTreeMap<String, Vec<f64>> {
        map.data()
            .lock()
            .unwrap()
            .iter()
            .map(|(name, x)| (name.clone(), values(x)))
            .collect()
    };
    let trains = |path: &str, _: Parameter<'_>| (!path.contains("running")).then(|| Momentum::new(0.1));
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("with everything");
    let map = weights(1);
    let mut state = setup_with(&map, trains).unwrap();
    let gradient = BTreeMap::from([("fc.weight", random(5, &[3, 2], DType::F32, CPU))]);
    update(&mut state, &map, &gradient).unwrap();
    Checkpoint::new(&state).model(&map).save(&path).unwrap();

    let mut loaded = weights(20);
    assert_ne!(contents(&loaded), contents(&map));
    loaded.load(&path).unwrap();
    assert_eq!(contents(&loaded), contents(&map));

    let restored = weights(30);
    let mut resumed = setup_with(&restored, trains).unwrap();
    CheckpointFile::open(&path)
        .unwrap()
        .restore_with_model(&mut resumed, &restored)
        .unwrap();
    assert_eq!(contents(&restored), contents(&map));
    assert_eq!(resumed.leaf("fc.weight").unwrap().steps(), 1);
}

struct Tied {
    head: Linear,
    embedding: Embedding,
}
model!(Tied { head, embedding });

#[test]
fn a_tied_variable_is_saved_once() {
    let tied = || {
        let weight = trained(&[5, 3]);
        Tied {
            head: Linear::new(weight.clone(), None),
            embedding: Embedding::new(weight, 3),
        }
    };
    let model = tied();
    let mut state = setup(Momentum::new(0.1), &model).unwrap();
    let gradient = BTreeMap::from([("head.weight", random(3, &[5, 3], DType::F32, CPU))]);
    update(&mut state, &model, &gradient).unwrap();
    let file = file_of(Checkpoint::new(&state).model(&model));
    assert_eq!(
        entries(&file).into_keys().collect::<Vec<_>>(),
        ["embedding.weight", "embedding.weight/velocity"]
    );

    let restored = tied();
    let mut resumed = setup(Momentum::new(0.1), &restored).unwrap();
    open(&file)
        .unwrap()
        .restore_with_model(&mut resumed, &restored)
        .unwrap();
    assert_eq!(bits(restored.head.weight()), bits(model.embedding.embeddings()));
    assert_eq!(resumed.leaf("head.weight").unwrap().steps(), 1);
}

/// A lone variable has the empty path.
#[test]
fn a_lone_variable() {
    let (x, y) = (
        var(&random(1, &[3], DType::BF16, CPU)),
        var(&random(2, &[3], DType::BF16, CPU)),
    );
    let rule = || MixedPrecision::new(DType::F32, Momentum::new(0.1));
    let mut state = setup(rule(), &x).unwrap();
    update(
        &mut state,
        &x,
        &BTreeMap::from([("", random(4, &[3], DType::BF16, CPU))]),
    )
    .unwrap();
    let file = file_of(Checkpoint::new(&state).model(&x));
    assert_eq!(
        entries(&file).into_keys().collect::<Vec<_>>(),
        ["", "/master", "/velocity"]
    );
    let mut resumed = setup(rule(), &y).unwrap();
    open(&file).unwrap().restore_with_model(&mut resumed, &y).unwrap();
    assert_eq!(bits(&y), bits(&x));
}

/// A leaf that was renamed has its parameter beside it, whatever the model calls it; so a state under new
/// paths reads a file with old ones.
#[test]
fn a_renamed_leaf() {
    let vars =
        |path: &str, seed| Vars::from([(path.to_string(), var(&random(seed, &[3], DType::BF16, CPU)))]);
    let started = |path: &str, seed| {
        let model = vars(path, seed);
        let mut state = setup(MixedPrecision::new(DType::F32, Momentum::new(0.1)), &model).unwrap();
        update(
            &mut state,
            &model,
            &BTreeMap::from([(path, random(seed, &[3], DType::F32, CPU))]),
        )
        .unwrap();
        (model, state)
    };
    let (model, state) = started("old.weight", 1);
    let file = file_of(Checkpoint::new(&state).model(&model));
    let (new_model, mut new) = started("new.weight", 20);
    new.rename("new", "old").unwrap();
    open(&file)
        .unwrap()
        .restore_with_model(&mut new, &new_model)
        .unwrap();
    assert_eq!(file_of(Checkpoint::new(&new).model(&new_model)), file);
    assert_eq!(bits(&new_model["new.weight"]), bits(&model["old.weight"]));

    // Also where the parameter takes the value of its master.
    let wide = Vars::from([("new.weight".to_string(), var(&random(30, &[3], DType::F32, CPU)))]);
    let mut wide_state = setup(Momentum::new(0.1), &wide).unwrap();
    wide_state.rename("new", "old").unwrap();
    open(&file)
        .unwrap()
        .converting()
        .restore_with_model(&mut wide_state, &wide)
        .unwrap();
    assert_eq!(
        bits(&wide["new.weight"]),
        bits(&state.leaf("old.weight").unwrap().tensor("master").unwrap())
    );

    let both = Vars::from([
        ("new.weight".to_string(), wide["new.weight"].clone()),
        ("old.weight".to_string(), var(&random(3, &[2], DType::F32, CPU))),
    ]);
    let mut mixed_up = setup_with(&both, |path, _| {
        (path == "new.weight").then(|| Momentum::new(0.1))
    })
    .unwrap();
    mixed_up.rename("old", "other").unwrap();
    mixed_up.rename("new", "old").unwrap();
    let error = Checkpoint::new(&mixed_up)
        .model(&both)
        .save("nowhere")
        .unwrap_err();
    is_kind(
        &error,
        ErrorKind::Model,
        &["two variables of the model have this path"],
    );
    assert_eq!(error.path(), Some("old.weight"));
}

/// The same state makes the same bytes, also after it went through a file. What the program has set up is a
/// part of the state.
#[test]
fn a_file_is_a_function_of_the_state() {
    let named = |i: usize| {
        (
            format!("layer.{}", i * 77 % 100),
            var(&random(i as u64, &[1 + i % 5], DType::F32, CPU)),
        )
    };
    let build = |order: &mut dyn Iterator<Item = usize>| {
        let map = var_map(order.map(named));
        let state = setup(Adam::new(0.1), &map).unwrap();
        file_of(
            Checkpoint::new(&state)
                .model(&map)
                .bytes("b", "1")
                .bytes("a", "2"),
        )
    };
    let file = build(&mut (0..100));
    assert_eq!(build(&mut (0..100).rev()), file);

    let map = var_map(
        (0..100)
            .map(named)
            .map(|(path, x)| (path, var(&x.zeros_like().unwrap()))),
    );
    let mut state = setup(Adam::new(0.1), &map).unwrap();
    open(&file).unwrap().restore_with_model(&mut state, &map).unwrap();
    assert_eq!(
        file_of(
            Checkpoint::new(&state)
                .model(&map)
                .bytes("a", "2")
                .bytes("b", "1")
        ),
        file
    );
    state.adjust(0.2).unwrap();
    assert_ne!(
        file_of(
            Checkpoint::new(&state)
                .model(&map)
                .bytes("a", "2")
                .bytes("b", "1")
        ),
        file
    );
}

/// Texts that could be taken for a part of the format.
#[test]
fn any_name_and_any_text() {
    let texts = [
        "",
        "a/b",
        "\"checksum\":\"12345678\"",
        r#"\"checksum\":\"12345678\""#,
        "\\",
        "\"",
        "ключ 🔑",
        "\n\0\u{7f}",
        "optimisers",
        "master",
    ];
    let build = |seed| -> Vars {
        texts
            .iter()
            .map(|text| (format!("x{text}"), var(&random(seed, &[2], DType::F32, CPU))))
            .collect()
    };
    let (model, restored) = (build(1), build(2));
    let state = setup(Momentum::new(0.1), &model).unwrap();
    let checkpoint = texts
        .iter()
        .fold(Checkpoint::new(&state).model(&model), |checkpoint, text| {
            checkpoint.bytes(*text, *text)
        });
    let file = open(&file_of(checkpoint)).unwrap();
    let mut resumed = setup(Momentum::new(0.5), &restored).unwrap();
    file.restore_with_model(&mut resumed, &restored).unwrap();
    assert_same(
        &[snapshot(&restored, &resumed)],
        &[snapshot(&model, &state)],
        "restored",
    );
    assert!(
        texts
            .iter()
            .all(|text| file.bytes(text).unwrap().unwrap() == text.as_bytes())
    );
    assert_eq!(file.bytes("none").unwrap(), None);
    let of_text = |text: &&str| {
        [
            format!("x{text}"),
            format!("x{text}/velocity"),
            format!("optimisers.bytes/{text}"),
        ]
    };
    let names: BTreeSet<String> = texts.iter().flat_map(of_text).collect();
    assert_eq!(file.tensor_names().into_iter().collect::<BTreeSet<_>>(), names);
    assert!(file.tensor("x").unwrap().is_some() && file.tensor("y").unwrap().is_none());
}

/// Variables of every dtype that a file can hold, beside a trained one.
#[test]
fn variables_of_every_dtype() {
    let dtypes = [
        DType::U8,
        DType::U32,
        DType::I16,
        DType::I32,
        DType::I64,
        DType::F16,
        DType::BF16,
        DType::F32,
        DType::F64,
    ];
    let build = |scale: f64| -> Vars {
        let variable = |dtype: DType| {
            let numbers = Tensor::new(&[3f64, 0.0, 7.0, 2.0, 1.0], CPU)
                .and_then(|x| (x * scale)?.to_dtype(dtype))
                .unwrap();
            (format!("{dtype:?}"), var(&numbers))
        };
        dtypes.into_iter().map(variable).collect()
    };
    let (model, restored) = (build(1.0), build(2.0));
    let (state, mut resumed) = (
        setup(Adam::new(0.1), &model).unwrap(),
        setup(Adam::new(0.1), &restored).unwrap(),
    );
    open(&file_of(Checkpoint::new(&state).model(&model)))
        .unwrap()
        .restore_with_model(&mut resumed, &restored)
        .unwrap();
    let all = |model: &Vars| model.values().map(|x| values(x)).collect::<Vec<_>>();
    assert_eq!(all(&restored), vec![vec![3.0, 0.0, 7.0, 2.0, 1.0]; 9]);
}
