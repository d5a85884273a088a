//! What holds for every rule and every way to keep a parameter, on slices.

use optimisers::{
    Checkpoint, CheckpointFile, DType, ErrorKind, IntoOptimiser, Lend, Rule, Schedule, StateTree, Status,
    TensorSlice, Update, View, ranks, rules, setup, update,
};
use optimisers_plain::{OF_CANDLE, Plain, all_rules, alone, hash, is_divided, of_rank, saved, stored, train};

fn made(optimiser: impl IntoOptimiser, model: &mut Plain) -> StateTree {
    setup(optimiser, &model.lend()).expect("a state")
}

#[test]
fn all_rules_but_those_of_whole_tensors_are_there() {
    let names: Vec<&str> = rules::catalogue()
        .into_iter()
        .map(|listing| listing.name)
        .collect();
    let missing = OF_CANDLE.iter().filter(|name| !names.contains(name)).count();
    assert_eq!(missing, OF_CANDLE.len());
    assert!(
        ["AdamW", "Lion", "Prodigy", "ScheduleFree"]
            .iter()
            .all(|name| names.contains(name))
    );
}

/// A run that is saved, and goes on from the file in another state and model, or from the entries of the
/// state, has the bits of one that was never stopped.
#[test]
fn a_resumed_run_is_the_run() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("checkpoint.safetensors");
    for (name, rule) in all_rules() {
        for (store, optimiser) in stored(&|| rule.clone()) {
            let mut model = Plain::new(1, DType::BF16);
            let mut state = made(optimiser.clone(), &mut model);
            train(&mut state, &mut model, 0..3);
            Checkpoint::new(&state)
                .model(&model.lend())
                .save(&path)
                .expect("a checkpoint");
            let mut other = Plain::new(2, DType::BF16);
            let mut resumed = made(optimiser.clone(), &mut other);
            let file = CheckpointFile::open(&path).expect("the file");
            file.restore_with_model(&mut resumed, &other.lend())
                .expect("a restored state");
            let mut handed = made(optimiser, &mut other);
            handed
                .set_entries(state.entries().expect("entries"))
                .expect("new entries");
            train(&mut state, &mut model, 3..6);
            let bytes = saved(&state, &mut model);
            for state in [&mut resumed, &mut handed] {
                let mut model = other.clone();
                train(state, &mut model, 3..6);
                assert!(saved(state, &mut model) == bytes, "{name}, {store}");
            }
        }
    }
}

/// Ranks that are threads have the bits of one process with the mean of their gradients: here each has the
/// same.
#[test]
fn ranks_are_one_process() {
    for (name, rule) in all_rules() {
        for (store, optimiser) in stored(&|| rule.clone())
            .into_iter()
            .filter(|(store, _)| is_divided(store))
        {
            let expected = alone(optimiser.clone());
            let folder = tempfile::tempdir().expect("a folder");
            let path = folder.path().join("checkpoint.safetensors");
            let (optimiser, path) = (&optimiser, path.as_path());
            let hashes: Vec<u64> = std::thread::scope(|scope| {
                let threads: Vec<_> = ranks(2)
                    .into_iter()
                    .map(|world| scope.spawn(move || of_rank(&world, optimiser.clone(), path)))
                    .collect();
                threads
                    .into_iter()
                    .map(|thread| thread.join().expect("a rank"))
                    .collect()
            });
            assert_eq!(hashes, [expected.0; 2], "{name}, {store}");
            assert_eq!(
                hash(&std::fs::read(path).expect("the file")),
                expected.1,
                "{name}, {store}"
            );
        }
    }
}

/// A step whose gradients come one at a time, in another order, is an update; rules that need all gradients
/// together are refused.
#[test]
fn a_step_in_pieces_is_an_update() {
    let mut refused = Vec::new();
    for (name, rule) in all_rules() {
        for (store, optimiser) in stored(&|| rule.clone()) {
            let [mut whole, mut parts] = [Plain::new(1, DType::BF16), Plain::new(1, DType::BF16)];
            let mut expected = made(optimiser.clone(), &mut whole);
            let mut state = made(optimiser, &mut parts);
            for call in 0..4 {
                let gradients = whole.gradients(call);
                let outcome = update(&mut expected, &whole.lend(), &gradients.show()).expect("an update");
                let lent = parts.lend();
                let step = match Update::new(&mut state).begin(&lent) {
                    Ok(step) => step,
                    Err(error) => {
                        assert_eq!(
                            (error.kind(), call),
                            (ErrorKind::Unsupported, 0),
                            "{name}, {store}: {error}"
                        );
                        refused.push(name.clone());
                        break;
                    }
                };
                for named in gradients.0.iter().rev() {
                    let values = TensorSlice::new(&*named.shape, named.values.show()).expect("a slice");
                    step.push(&named.path, values)
                        .unwrap_or_else(|error| panic!("{name}, {store}: {error}"));
                }
                assert_eq!(step.finish().expect("an outcome"), outcome, "{name}, {store}");
                drop(lent);
                assert!(
                    saved(&expected, &mut whole) == saved(&state, &mut parts),
                    "{name}, {store}, call {call}"
                );
            }
        }
    }
    refused.dedup();
    let of_model = [
        "Prodigy",
        "ClipGlobalNorm",
        "SkipOutliers",
        "OptimiserChain(ClipGlobalNorm, AdamW, Ema)",
    ];
    assert_eq!(refused, of_model);
}

/// A call that is refused changes nothing.
#[test]
fn a_gradient_that_is_not_finite_changes_nothing() {
    for (name, rule) in all_rules() {
        let mut model = Plain::new(1, DType::F32);
        let mut state = made(rule, &mut model);
        train(&mut state, &mut model, 0..2);
        let before = (model.clone(), saved(&state, &mut model));
        let mut gradients = model.gradients(2);
        let optimisers_plain::Vector::F32(bias) = &mut gradients.0[1].values else {
            panic!("an f32 vector")
        };
        bias[5] = f32::NAN;
        let outcome = Update::new(&mut state)
            .finite_only()
            .apply(&model.lend(), &gradients.show())
            .expect("an update");
        assert!(
            matches!(outcome.status, Status::Skipped(_)),
            "{name}: {:?}",
            outcome.status
        );
        // Windows that were open are given up.
        if !name.contains("AccumGrad") {
            assert!(before.1 == saved(&state, &mut model), "{name}");
        }
        assert!(before.0 == model, "{name}");
    }
}

/// Masters come out of a state and go in again.
#[test]
fn masters_are_set_as_they_were() {
    for (name, rule) in all_rules() {
        for (store, optimiser) in stored(&|| rule.clone()) {
            let mut model = Plain::new(1, DType::BF16);
            let mut state = made(optimiser, &mut model);
            train(&mut state, &mut model, 0..2);
            let before = model.clone();
            let lent = model.lend();
            let masters = state.masters(&lent).expect("masters");
            state
                .set_masters(&lent, &masters)
                .unwrap_or_else(|error| panic!("{name}, {store}: {error}"));
            state
                .check_masters(&lent)
                .unwrap_or_else(|error| panic!("{name}, {store}: {error}"));
            drop(lent);
            // What a compensated parameter stands for may round to another one than it is.
            assert!(before == model || store == "compensated", "{name}, {store}");
        }
    }
}

/// The numbers of a state are read from what lends them.
#[test]
fn a_state_lends_its_numbers() {
    let mut model = Plain::new(1, DType::BF16);
    let mut state = made(
        optimisers::MixedPrecision::new(DType::F32, optimisers::AdamW::new(0.01)),
        &mut model,
    );
    train(&mut state, &mut model, 0..2);
    let master = state
        .leaf("matrix")
        .expect("the leaf")
        .tensor("master")
        .expect("a copy");
    assert_eq!(
        (master.lent_shape(), master.lent_dtype()),
        (&[70, 130][..], DType::F32)
    );
    let mut numbers = Vec::new();
    let read = master.read(&mut |view| {
        numbers = view.numbers();
        Ok(())
    });
    read.expect("the numbers");
    assert!(optimisers_plain::Vector::new(DType::BF16, &numbers) == model.0[0].values);
    let columns = [1f32, 4.0, 2.0, 5.0, 3.0, 6.0];
    assert_eq!(
        View::strided(&columns, &[2, 3], &[1, 2])
            .expect("a view")
            .numbers(),
        [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]
    );
}

/// A parameter gets other rows, and trains on.
#[test]
fn rows_come_and_go() {
    for (name, rule) in all_rules() {
        let mut model = Plain::new(1, DType::BF16);
        let mut state = made(
            optimisers::MixedPrecision::new(DType::F32, rule as Box<dyn Rule>),
            &mut model,
        );
        train(&mut state, &mut model, 0..2);
        let rows: Vec<Option<usize>> = (0..72)
            .map(|row| (row % 7 != 3).then_some((row * 5) % 70))
            .collect();
        let old = model.0[0].values.numbers();
        let of_row =
            |row: &Option<usize>| row.map_or(vec![0.5; 130], |row| old[130 * row..130 * (row + 1)].to_vec());
        model.0[0].values =
            optimisers_plain::Vector::new(DType::BF16, &rows.iter().flat_map(of_row).collect::<Vec<_>>());
        model.0[0].shape = vec![72, 130];
        state
            .resize_rows("matrix", &model.lend(), &rows)
            .unwrap_or_else(|error| panic!("{name}: {error}"));
        train(&mut state, &mut model, 2..4);
    }
}

/// A schedule drives the rate, and what it drives goes into the file.
#[test]
fn schedules_drive_slices() {
    let mut model = Plain::new(1, DType::F32);
    let mut state = made(optimisers::AdamW::new(0.1), &mut model);
    state.schedule(Schedule::cosine(0.1, 0.0, 3)).expect("a schedule");
    for step in 0..3 {
        let gradients = model.gradients(step);
        update(&mut state, &model.lend(), &gradients.show()).expect("an update");
    }
    let before = model.clone();
    train(&mut state, &mut model, 3..4);
    assert!(before == model, "the rate is 0 at the end");
}
