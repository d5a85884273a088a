//! What goes wrong on one rank while a checkpoint is saved or restored: one outcome everywhere, nothing has
//! changed, and the next call works.

use std::fs;
use std::path::Path;
use std::sync::Arc;

use candle_core::DType;
use optimisers::{
    Adafactor, Checkpoint, CheckpointFile, Communicator, ErrorKind, LossScaler, MixedPrecision, Result,
    Setup, StateTree, Warning, Weights, setup, update,
};

use crate::files::checkpoint_files::names;
use support::common::{Grads, Vars, assert_same, model, says, snapshot, tensor};
use support::crafted_checkpoints::{Pieces, file_of};
use support::reports::{gradients, parameters};
use support::threads::{Failure, Leaving, on};

fn rule() -> impl optimisers::IntoOptimiser + Clone {
    MixedPrecision::new(DType::F32, optimisers::AdamW::new(0.1))
}

/// A model with the state of a rank, after a step.
fn trained(world: &(impl Communicator + Clone + 'static)) -> (Vars, StateTree) {
    let model = model(&parameters(DType::BF16));
    let mut state = Setup::over(world).build(rule(), &model).expect("a state");
    update(&mut state, &model, &gradients(0, 0, DType::BF16)).expect("an update");
    (model, state)
}

/// Waits for all ranks.
fn meet(state: &StateTree, model: &Vars) {
    state.check_masters(model).expect("masters as they were left");
}

/// On rank 1 the error says these words, on others that rank 1 has refused with them.
fn refused<T: std::fmt::Debug>(rank: usize, result: Result<T>, words: &[&str]) {
    let error = result.expect_err("an error on all");
    says(&error, words);
    if rank != 1 {
        says(&error, &["rank 1"]);
    }
}

#[test]
fn an_error_in_a_save_is_one_on_all_ranks() {
    type Save = fn(&mut StateTree, &Vars, &Path) -> Result<Vec<Warning>>;
    fn whole<'s>(state: &'s StateTree, model: &'s Vars) -> Checkpoint<'s> {
        Checkpoint::new(state).model(model).bytes("step", "1")
    }
    let bytes = &[
        "\"more\": 0 bytes, checksum 00000000 on rank 1",
        "\"step\": 1 bytes",
    ];
    let etas = &["optimiser of \"3\": eta = 0.1 on ranks 0 and 2; eta = 0.5 on rank 1"];
    let wrongs: [(Save, &[&str]); 10] = [
        (
            |x, own, path| whole(x, own).bytes("step", "2").save(path),
            &["the bytes", "\"step\": 1 bytes, checksum 1ad5be0d"],
        ),
        (|x, own, path| whole(x, own).bytes("more", "").save(path), bytes),
        (
            |x, own, path| Checkpoint::new(x).model(own).save(path),
            &["\"step\": 1 bytes", "nothing more"],
        ),
        (
            |x, _, path| Checkpoint::new(x).bytes("step", "1").save(path),
            &["model", "none"],
        ),
        (
            |x, _, path| whole(x, &model(&parameters(DType::BF16))).save(path),
            &["model"],
        ),
        (
            |x, own, path| whole(x, own).scaler(&LossScaler::dynamic()).save(path),
            &["loss scaler", "none"],
        ),
        (
            |x, own, path| whole(x, own).scaler(&LossScaler::fixed(f64::NAN)).save(path),
            &["scale", "NaN"],
        ),
        (
            |x, own, path| whole(x, own).save(path.with_file_name("other")),
            &["path", "other", "run"],
        ),
        (
            |x, own, path| {
                x.at("3")?.adjust(0.5)?;
                let saved = whole(x, own).save(path);
                x.at("3")?.adjust(0.1)?;
                saved
            },
            etas,
        ),
        (|x, own, path| x.save_masters(own, path), &["`save_masters`"]),
    ];
    let folder = Arc::new(tempfile::tempdir().expect("a folder"));
    on(3, move |world| {
        let path = folder.path().join("run");
        let (model, mut state) = trained(&world);
        whole(&state, &model).save(&path).expect("a save");
        let old = fs::read(&path).expect("the file");
        for (wrong, words) in wrongs {
            let saved = if world.rank() == 1 {
                wrong(&mut state, &model, &path)
            } else {
                whole(&state, &model).save(&path)
            };
            refused(world.rank(), saved, words);
            meet(&state, &model);
            assert!(fs::read(&path).expect("the old file") == old, "{words:?}");
            assert_eq!(names(folder.path()), ["run"], "{words:?}");
            meet(&state, &model);
        }
        // Only the first rank makes a file.
        for (missing, words) in [("none/run", "temporary file"), (".", "no regular file")] {
            let error = whole(&state, &model)
                .save(folder.path().join(missing))
                .expect_err("an error on all");
            says(&error, &[words]);
            assert!(
                world.rank() == 0 || error.to_string().starts_with("rank 0 refused"),
                "{error}"
            );
        }
        update(&mut state, &model, &gradients(1, 0, DType::BF16)).expect("an update");
        whole(&state, &model).save(&path).expect("the next save");
        assert!(fs::read(&path).expect("the new file") != old);
    });
}

/// How many words of a save come before the last, that it is done: what each wants, the file's name and the
/// pieces, each in two, the lengths first.
const WORDS_BEFORE_SAVED: usize = 6;

#[test]
fn a_rank_that_leaves_in_the_middle_of_a_save() {
    for (leaver, words) in [1, 0]
        .into_iter()
        .flat_map(|rank| (0..=WORDS_BEFORE_SAVED).map(move |words| (rank, words)))
    {
        let folder = Arc::new(tempfile::tempdir().expect("a folder"));
        let path = folder.path().join("run");
        let files = on(3, move |own| {
            let path = folder.path().join("run");
            let world = Leaving::new(own, usize::MAX, Failure::Before);
            let (model, mut state) = trained(&world);
            Checkpoint::new(&state).save(&path).expect("a save");
            let old = fs::read(&path).expect("the file");
            update(&mut state, &model, &gradients(1, 0, DType::BF16)).expect("an update");
            let (left, said) = if world.rank() == leaver {
                (words, "this rank leaves".to_string())
            } else {
                (usize::MAX, format!("rank {leaver} has left"))
            };
            world.say(left);
            says(
                &Checkpoint::new(&state).save(&path).expect_err("an error on all"),
                &[&said],
            );
            (folder.clone(), old)
        });
        for (folder, old) in files {
            assert_eq!(names(folder.path()), ["run"], "rank {leaver} after {words} words");
            // When all pieces are there, the file is put into its place.
            assert_eq!(
                fs::read(&path).expect("a file") == old,
                words < WORDS_BEFORE_SAVED,
                "rank {leaver} after {words} words"
            );
            let _ = CheckpointFile::open(&path).expect("a whole file");
        }
    }
}

#[test]
fn a_folder_that_one_rank_does_not_see() {
    fn lose_partial(folder: &Path) {
        let partial = names(folder)
            .into_iter()
            .filter(|name| name.ends_with(".partial"));
        partial.for_each(|name| fs::remove_file(folder.join(name)).expect("it is there"));
    }
    let folder = Arc::new(tempfile::tempdir().expect("a folder"));
    let failure = Failure::Then(lose_partial, Box::leak(Box::<Path>::from(folder.path())));
    on(3, move |own| {
        let path = folder.path().join("run");
        let world = Leaving::new(own, usize::MAX, failure);
        let (model, state) = trained(&world);
        Checkpoint::new(&state).save(&path).expect("a save");
        let old = fs::read(&path).expect("the file");
        if world.rank() == 1 {
            // Behind the word that has brought the file's name.
            world.say(3);
        }
        says(
            &Checkpoint::new(&state).save(&path).expect_err("an error on all"),
            &["a folder that all ranks see"],
        );
        meet(&state, &model);
        assert!(fs::read(&path).expect("the old file") == old);
        assert_eq!(names(folder.path()), ["run"]);
        meet(&state, &model);
        Checkpoint::new(&state).save(&path).expect("the next save");
    });
}

/// A file that is right, and others that are not.
fn make_files(folder: &Path) {
    let whole = |length: usize, steps: u64| {
        let parameters = parameters(DType::BF16).into_iter().map(|x| {
            if x.dims() == [5] {
                tensor(2, &[length], DType::BF16)
            } else {
                x
            }
        });
        let model = model(&parameters.collect::<Vec<_>>());
        let mut state = setup(rule(), &model).expect("a state");
        for step in 0..steps {
            let mut grads = gradients(step, 0, DType::BF16);
            grads.insert("1".to_string(), tensor(7, &[length], DType::BF16));
            update(&mut state, &model, &grads).expect("an update");
        }
        file_of(Checkpoint::new(&state).model(&model))
    };
    let put = |name: &str, bytes: &[u8]| fs::write(folder.join(name), bytes).expect("a file");
    let right = whole(5, 1);
    put("right", &right);
    put("shape", &whole(6, 1));
    put("later", &whole(5, 2));
    // In the part of the second rank.
    for (name, tensor, number) in [("nan", "0/m", f32::NAN), ("stale", "0/master", 7.0)] {
        let mut pieces = Pieces::of(&right);
        pieces.tensor(tensor)[4 * 33_000..4 * 33_001].copy_from_slice(&number.to_le_bytes());
        put(name, &pieces.bytes());
    }
}

#[test]
fn an_error_in_a_restore_is_one_on_all_ranks() {
    type Restore = fn(&mut StateTree, &Vars, &Path) -> Result<()>;
    fn whole(state: &mut StateTree, model: &Vars, path: &Path) -> Result<()> {
        CheckpointFile::open(path)?
            .restore_with_model(state, model)
            .map(drop)
    }
    fn right(state: &mut StateTree, model: &Vars, folder: &Path) -> Result<()> {
        whole(state, model, &folder.join("right"))
    }
    fn state_alone(state: &mut StateTree, _: &Vars, folder: &Path) -> Result<()> {
        CheckpointFile::open(folder.join("right"))?
            .restore(state)
            .map(drop)
    }
    fn nan(state: &mut StateTree, model: &Vars, folder: &Path) -> Result<()> {
        whole(state, model, &folder.join("nan"))
    }
    fn stale(state: &mut StateTree, model: &Vars, folder: &Path) -> Result<()> {
        whole(state, model, &folder.join("stale"))
    }
    fn converting(state: &mut StateTree, model: &Vars, folder: &Path) -> Result<()> {
        CheckpointFile::open(folder.join("right"))?
            .converting()
            .restore_with_model(state, model)
            .map(drop)
    }
    /// What rank 1 does, what the others do, and what is said of it.
    type Wrong = (Restore, Restore, &'static [&'static str]);
    let wrongs: [Wrong; 7] = [
        (
            |state, model, folder| whole(state, model, &folder.join("shape")),
            right,
            &["\"1\"", "[6]", "[5]"],
        ),
        (
            |state, model, folder| whole(state, model, &folder.join("later")),
            right,
            &["a file with the checksum"],
        ),
        (
            |state, _, folder| right(state, &model(&parameters(DType::BF16)), folder),
            right,
            &["model"],
        ),
        (nan, nan, &["\"0/m\"", "NaN", "33000"]),
        (stale, stale, &["\"0\"", "33000", "its master, 7"]),
        (converting, right, &["converting"]),
        (state_alone, right, &["with the model"]),
    ];
    let folder = Arc::new(tempfile::tempdir().expect("a folder"));
    make_files(folder.path());
    on(3, move |world| {
        let (model, mut state) = trained(&world);
        for call in 1..3 {
            update(&mut state, &model, &gradients(call, 0, DType::BF16)).expect("an update");
        }
        let before = snapshot(&model, &state);
        for (wrong, others, words) in wrongs {
            let restore = if world.rank() == 1 { wrong } else { others };
            refused(world.rank(), restore(&mut state, &model, folder.path()), words);
            assert_same(&[snapshot(&model, &state)], std::slice::from_ref(&before), words);
        }
        right(&mut state, &model, folder.path()).expect("the next restore");
        assert_eq!(state.leaf("0").expect("a leaf").steps(), 1);
        update(&mut state, &model, &gradients(1, 0, DType::BF16)).expect("an update");
    });
}

/// Only the owner of a leaf that is not cut knows what shapes its state has.
#[test]
fn shapes_that_only_the_owner_knows() {
    let small = || model(&[tensor(1, &[6, 4], DType::F32), tensor(2, &[40_000], DType::F32)]);
    let mut pieces = Pieces::of(&file_of(Checkpoint::new(
        &setup(Adafactor::new(0.1), &small()).expect("a state"),
    )));
    pieces.tensors["0/row_v"]["shape"] = serde_json::json!([1, 6]);
    let bytes = pieces.bytes();
    let owners = on(3, move |world| {
        let model = small();
        let mut state = Setup::over(&world)
            .build(Adafactor::new(0.1), &model)
            .expect("a state");
        let file = CheckpointFile::from_bytes("file", bytes.clone()).expect("a checkpoint");
        let before = snapshot(&model, &state);
        let error = file.restore(&mut state).expect_err("an error on all");
        says(&error, &["\"0/row_v\"", "[1, 6]", "[6, 1]"]);
        assert_same(&[snapshot(&model, &state)], &[before], "as it was");
        let is_owner = error.kind() == ErrorKind::Tensor;
        assert!(
            is_owner || (error.kind(), error.rank().is_some()) == (ErrorKind::Ranks, true),
            "{error}"
        );
        assert_eq!(error.file(), is_owner.then_some(Path::new("file")), "{error}");
        is_owner
    });
    assert_eq!(owners.into_iter().filter(|is_owner| *is_owner).count(), 1);
}

#[test]
fn new_masters_that_are_not_the_same() {
    on(3, move |world| {
        let (model, mut state) = trained(&world);
        let values = |seed: u64| -> Grads {
            model
                .iter()
                .map(|(path, x)| (path.clone(), tensor(seed, x.dims(), DType::F32)))
                .collect()
        };
        let before = snapshot(&model, &state);
        let mut wrong = |seed: u64, unknown: bool, words: &[&str]| {
            let mut own = values(if world.rank() == 1 { seed } else { 7 });
            if world.rank() == 1 && unknown {
                own.insert("none".to_string(), tensor(1, &[1], DType::F32));
            }
            refused(world.rank(), state.set_masters(&model, &own), words);
            assert_same(&[snapshot(&model, &state)], std::slice::from_ref(&before), words);
        };
        wrong(8, false, &["\"0\"", "the new values of"]);
        wrong(7, true, &["\"none\""]);
        let none = Weights::open([""; 0]).expect("no files");
        let missing = if world.rank() == 1 {
            state.set_masters(&model, &none)
        } else {
            state.set_masters(&model, &values(7))
        };
        refused(world.rank(), missing, &["no tensor"]);
        assert_same(&[snapshot(&model, &state)], &[before], "files that have nothing");
        state.set_masters(&model, &values(7)).expect("new masters");
        update(&mut state, &model, &gradients(1, 0, DType::BF16)).expect("an update");
    });
}
