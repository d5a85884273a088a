//! What a program adds to a checkpoint beside state and model: bytes; and the count of steps.

use candle_core::{DType, Device, Var};
use optimisers::{
    Adam, Checkpoint, CheckpointFile, Communicator, Error, ErrorKind, Schedule, Setup, StateTree, setup,
};

use support::common::{Vars, is_kind};
use support::crafted_checkpoints::{Pieces, file_of, open};
use support::threads::on;

fn variable() -> Var {
    Var::ones(3, DType::F32, &Device::Cpu).expect("a variable")
}

fn state(x: &Var) -> StateTree {
    setup(Adam::new(0.1), x).expect("a state")
}

#[test]
fn bytes_and_steps_come_back() {
    let x = variable();
    let mut state = state(&x);
    state.set_steps(777).expect("a count");
    let long: Vec<u8> = (0..100_000u32)
        .map(|i| (i.wrapping_mul(2_654_435_761) >> 24) as u8)
        .collect();
    let cases = [
        ("generator", long),
        ("", vec![255]),
        ("none", vec![]),
        ("a \"name\"/of\n\u{0}\u{1F600}", vec![0; 3]),
    ];
    let mut checkpoint = Checkpoint::new(&state).model(&x);
    for (name, bytes) in &cases {
        checkpoint = checkpoint.bytes(*name, bytes.clone());
    }
    let file = open(&file_of(checkpoint)).expect("a checkpoint");
    for (name, bytes) in &cases {
        assert_eq!(
            file.bytes(name).expect("an entry").as_ref(),
            Some(bytes),
            "{name:?}"
        );
        assert!(file.tensor_names().contains(&format!("optimisers.bytes/{name}")));
    }
    assert_eq!(
        (file.bytes("loader").expect("no entry"), file.steps()),
        (None, 777)
    );
    file.restore_with_model(&mut state, &x).expect("a restore");

    // The file of a program that adds none says nothing of them.
    let without = file_of(Checkpoint::new(&state).model(&x));
    let file = open(&without).expect("a checkpoint");
    assert_eq!(file.bytes("generator").expect("no entry"), None);
    let description = Pieces::of(&without).description;
    assert!(description.get("bytes").is_none(), "{description}");
}

#[test]
fn the_last_bytes_of_a_name_are_saved() {
    let x = variable();
    let state = state(&x);
    let file = open(&file_of(
        Checkpoint::new(&state).bytes("a", [1]).bytes("a", [2, 3]),
    ))
    .expect("a checkpoint");
    assert_eq!(file.bytes("a").expect("an entry"), Some(vec![2, 3]));
}

#[test]
fn a_parameter_of_the_same_name() {
    let folder = tempfile::tempdir().expect("a folder");
    let model = Vars::from([("optimisers.bytes/a".to_string(), variable())]);
    let state = setup(Adam::new(0.1), &model).expect("a state");
    let saved = Checkpoint::new(&state)
        .model(&model)
        .bytes("a", [1])
        .save(folder.path().join("run"));
    is_kind(
        &saved.expect_err("two entries"),
        ErrorKind::Model,
        &[
            "the name \"optimisers.bytes/a\" in the file",
            "rename a parameter",
        ],
    );
}

/// What the description says and what the file has are compared.
#[test]
fn a_damaged_description() {
    let x = variable();
    let mut state = state(&x);
    let bytes = file_of(Checkpoint::new(&state).bytes("a", [1, 2, 3]));
    let crafted = |edit: fn(&mut Pieces)| -> CheckpointFile {
        let mut pieces = Pieces::of(&bytes);
        edit(&mut pieces);
        open(&pieces.bytes()).expect("a checkpoint")
    };
    let refused = |error: Error, words: &[&str]| is_kind(&error, ErrorKind::File, words);

    let missing = crafted(|pieces| pieces.description["bytes"] = serde_json::json!(["a", "b"]));
    refused(
        missing.bytes("b").expect_err("no entry"),
        &["names the bytes \"optimisers.bytes/b\"", "crafted"],
    );
    assert_eq!(missing.bytes("a").expect("an entry"), Some(vec![1, 2, 3]));
    let other = crafted(|pieces| pieces.description["bytes"] = serde_json::json!(["a", "a/../x"]));
    refused(
        other.bytes("a/../x").expect_err("no entry"),
        &["which the file lacks"],
    );
    let unnamed = crafted(|pieces| drop(pieces.description.as_object_mut().expect("a map").remove("bytes")));
    assert_eq!(unnamed.bytes("a").expect("no name"), None);
    refused(
        unnamed.restore(&mut state).expect_err("one too many"),
        &["optimisers.bytes/a", "does not name"],
    );
}

#[test]
fn over_ranks_all_have_to_bring_the_same() {
    let told = on(3, |world| {
        let folder = std::env::temp_dir();
        let path = folder.join(format!("optimisers-extras-{}", std::process::id()));
        let model = vec![Var::ones(1200, DType::F32, &Device::Cpu).expect("a variable")];
        let mut state = Setup::over(&world)
            .build(Adam::new(0.1), &model)
            .expect("a state");
        state.set_steps(5).expect("a count");
        let same = Checkpoint::new(&state)
            .model(&model)
            .bytes("a", [1, 2])
            .bytes("b", [])
            .save(&path);
        same.expect("a save");
        let file = CheckpointFile::open(&path).expect("a checkpoint");
        assert_eq!(
            (file.bytes("a").expect("an entry"), file.steps()),
            (Some(vec![1, 2]), 5)
        );
        file.restore_with_model(&mut state, &model).expect("a restore");

        let rank = world.rank() as u8;
        let other_bytes = Checkpoint::new(&state)
            .bytes("a", [1, rank])
            .save(&path)
            .expect_err("other bytes");
        let other_names = Checkpoint::new(&state)
            .bytes(format!("a{rank}"), [1])
            .save(&path)
            .expect_err("other names");
        state.set_steps(5 + u64::from(rank)).expect("a count");
        let other_steps = Checkpoint::new(&state).save(&path).expect_err("other steps");
        state.set_steps(5).expect("a count");
        state
            .schedule(Schedule::cosine(0.1, 0.01, 1000 + u64::from(rank)))
            .expect("a schedule");
        let other_schedules = Checkpoint::new(&state).save(&path).expect_err("other schedules");
        (
            path,
            [other_bytes, other_names, other_steps, other_schedules]
                .map(|error| (error.kind(), error.to_string())),
        )
    });
    for (path, errors) in told {
        let _ = std::fs::remove_file(path);
        for ((kind, text), word) in errors.into_iter().zip([
            "the bytes",
            "the bytes",
            "the count of applied steps",
            "the schedules",
        ]) {
            assert!(kind == ErrorKind::Ranks && text.contains(word), "{text}");
        }
    }
}
