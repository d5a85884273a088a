//! Checkpoints that are written beside the training: what is in the file, what comes back and when, which
//! files stay, and which one is the newest.

use std::fs::{self, File};
use std::path::PathBuf;
use std::time::{Duration, SystemTime};

use candle_core::{DType, Device, Tensor, Var};
use optimisers::{
    Adam, Checkpoint, CheckpointFile, CheckpointSaver, Communicator, ErrorKind, Momentum, NewestCheckpoint,
    Setup, StateTree, Warning, setup, update,
};
use tempfile::TempDir;

use support::common::{is_kind, logged, says};
use support::crafted_checkpoints::file_of;
use support::threads::on;

fn folder() -> TempDir {
    tempfile::tempdir().expect("a folder")
}

/// A model and its state, whose numbers and learning rate depend on `value`.
fn started(value: f32) -> (Vec<Var>, StateTree) {
    let model: Vec<Var> = (1..4)
        .map(|length| Var::from_vec(vec![value; length], length, &Device::Cpu).expect("a variable"))
        .collect();
    let mut state = setup(Adam::new(f64::from(value)), &model).expect("a state");
    step(&model, &mut state);
    (model, state)
}

fn step(model: &Vec<Var>, state: &mut StateTree) {
    let losses: Vec<Tensor> = model
        .iter()
        .map(|x| x.sqr()?.sum_all())
        .collect::<candle_core::Result<_>>()
        .expect("losses");
    let loss = Tensor::stack(&losses, 0)
        .and_then(|losses| losses.sum_all())
        .expect("a loss");
    update(state, model, &loss.backward().expect("gradients")).expect("an update");
}

fn checkpoint<'s>((model, state): &'s (Vec<Var>, StateTree)) -> Checkpoint<'s> {
    Checkpoint::new(state).model(model).bytes("place", "7")
}

/// The steps in the names of a saver's files.
fn steps(saver: &CheckpointSaver) -> Vec<u64> {
    saver
        .files()
        .expect("a folder")
        .into_iter()
        .map(|(step, _)| step)
        .collect()
}

/// The step of the newest file, and the sentences about those that were passed over.
fn newest(saver: &mut CheckpointSaver) -> (Option<u64>, Vec<String>) {
    let NewestCheckpoint {
        found, passed_over, ..
    } = saver.newest().expect("a folder");
    (
        found.map(|(step, _)| step),
        passed_over.iter().map(Warning::to_string).collect(),
    )
}

fn at(folder: &TempDir, step: u64) -> PathBuf {
    folder.path().join(format!("run-{step:09}.safetensors"))
}

fn saver(folder: &TempDir) -> CheckpointSaver {
    CheckpointSaver::new(folder.path().join("run.safetensors"))
}

#[test]
fn the_file_has_the_bytes_of_a_save_at_that_step() {
    let folder = folder();
    let mut saver = saver(&folder);
    let mut run = started(0.5);
    let mut expected = Vec::new();
    for number in 1..=5 {
        expected.push(file_of(checkpoint(&run)));
        assert_eq!(saver.save(number, checkpoint(&run)).expect("a save"), []);
        // One file is written at a time: those before are in their place.
        (1..number).for_each(|before| assert!(at(&folder, before).is_file(), "{before} of {number}"));
        let (model, state) = &mut run;
        step(model, state);
    }
    assert_eq!(saver.wait().expect("a file"), []);
    assert!(!saver.is_saving());
    assert_eq!(steps(&saver), [1, 2, 3, 4, 5]);
    for (number, expected) in (1..).zip(expected) {
        assert!(
            fs::read(at(&folder, number)).expect("a file") == expected,
            "step {number}"
        );
    }
    assert_eq!(
        fs::read_dir(folder.path()).expect("the folder").count(),
        5,
        "no other file"
    );
}

/// The memory of a copy is used again by states of other sizes.
#[test]
fn a_saver_of_several_states() {
    let folder = folder();
    let mut saver = saver(&folder);
    for (number, length) in (1..).zip([1000, 3, 100_000, 0, 2000]) {
        let x = Var::ones(length, DType::F32, &Device::Cpu).expect("a variable");
        let state = setup(Momentum::new(0.1), &x).expect("a state");
        saver
            .save(number, Checkpoint::new(&state).model(&x))
            .expect("a save");
        saver.wait().expect("a file");
        assert!(
            fs::read(at(&folder, number)).expect("a file") == file_of(Checkpoint::new(&state).model(&x)),
            "{length}"
        );
    }
}

#[test]
fn a_copy_beside_a_forward_and_backward_pass() {
    let folder = folder();
    let mut saver = saver(&folder);
    let mut run = started(0.5);
    let expected = file_of(checkpoint(&run));
    let (model, state) = &mut run;
    let gradients = std::thread::scope(|threads| {
        let copied = threads.spawn(|| saver.save(1, Checkpoint::new(state).model(model).bytes("place", "7")));
        let gradients = model[2]
            .sqr()
            .and_then(|x| x.sum_all())
            .and_then(|loss| loss.backward())
            .expect("gradients");
        copied.join().expect("no panic").expect("a copy");
        gradients
    });
    update(state, &*model, &gradients).expect("an update");
    saver.wait().expect("a file");
    assert!(fs::read(at(&folder, 1)).expect("a file") == expected);
}

#[test]
fn a_dropped_saver_waits() {
    let folder = folder();
    let run = started(0.5);
    saver(&folder).save(3, checkpoint(&run)).expect("a save");
    assert!(fs::read(at(&folder, 3)).expect("a file") == file_of(checkpoint(&run)));
}

/// A folder in the place of a file makes the thread fail. It is told once, by whatever comes next.
#[test]
fn a_failed_save_is_an_error_of_the_next_call() {
    let folder = folder();
    let run = started(0.5);
    let mut saver = saver(&folder);
    fs::create_dir(at(&folder, 5)).expect("a folder");
    let failing =
        |saver: &mut CheckpointSaver| assert_eq!(saver.save(5, checkpoint(&run)).expect("a copy"), []);
    let told = |error: optimisers::Error| {
        is_kind(
            &error,
            ErrorKind::Io,
            &["cannot replace what is there", "no regular file"],
        );
        assert_eq!(error.file(), Some(&*at(&folder, 5)));
    };

    failing(&mut saver);
    told(saver.wait().expect_err("an error"));
    assert_eq!(saver.wait().expect("told already"), []);
    failing(&mut saver);
    told(saver.save(6, checkpoint(&run)).expect_err("an error"));
    assert!(!at(&folder, 6).exists(), "nothing is written beside an error");
    failing(&mut saver);
    told(saver.newest().expect_err("an error"));
    failing(&mut saver);
    let ((), lines) = logged(|| drop(saver));
    let words = [
        "not saved",
        "run-000000005",
        "no regular file",
        "`CheckpointSaver::wait`",
    ];
    assert!(
        lines.len() == 1 && words.iter().all(|word| lines[0].contains(word)),
        "{lines:?}"
    );
}

#[test]
fn numbers_that_are_not_finite_are_warned_of() {
    let folder = folder();
    let x = Var::new(&[1f32, f32::NAN], &Device::Cpu).expect("a variable");
    let state = setup(Momentum::new(0.1), &x).expect("a state");
    let mut saver = saver(&folder);
    let warns = |warnings: Vec<Warning>, step| match &warnings[..] {
        [Warning::NotFinite { file, index: 1, .. }] => assert_eq!(*file, at(&folder, step)),
        other => panic!("{other:?}"),
    };
    saver.save(1, Checkpoint::new(&state).model(&x)).expect("a save");
    warns(
        saver.save(2, Checkpoint::new(&state).model(&x)).expect("a save"),
        1,
    );
    warns(saver.wait().expect("a file"), 2);
}

/// What is known before the file is written is an error of `save`, and nothing is written.
#[test]
fn a_refused_save_leaves_no_file() {
    let folder = folder();
    let (run, other) = (started(0.5), started(0.25));
    let mut saver = saver(&folder);
    let error = saver
        .save(1, Checkpoint::new(&run.1).model(&other.0))
        .expect_err("another model");
    assert_eq!(error.kind(), ErrorKind::Model);
    let long = Checkpoint::new(&run.1).bytes("\u{1}".repeat(14_300_000), []);
    says(
        &saver.save(1, long).expect_err("a header that no reader accepts"),
        &["100000000", "shorter names", "run-000000001"],
    );
    let mut none = CheckpointSaver::new(folder.path().join("run.safetensors")).keep_last(0);
    let error = none.save(1, checkpoint(&run)).expect_err("no file to keep");
    is_kind(
        &error,
        ErrorKind::Argument,
        &["`keep_last` was called with 0", "at least 1"],
    );
    assert_eq!(fs::read_dir(folder.path()).expect("the folder").count(), 0);

    let missing = folder.path().join("none/run.safetensors");
    for error in [
        CheckpointSaver::new(&missing)
            .save(1, checkpoint(&run))
            .expect_err("no folder"),
        CheckpointSaver::new(&missing).newest().expect_err("no folder"),
        CheckpointSaver::new(&missing).files().expect_err("no folder"),
    ] {
        is_kind(&error, ErrorKind::Io, &["cannot read the folder"]);
        assert_eq!(error.file(), Some(&*missing));
    }
    for path in ["", "/", ".."] {
        let error = CheckpointSaver::new(path)
            .save(1, checkpoint(&run))
            .expect_err("no name");
        is_kind(
            &error,
            ErrorKind::Argument,
            &["names no file", "folder/run.safetensors"],
        );
    }
}

#[test]
fn the_last_files_are_kept() {
    for kept in 1..4 {
        let folder = folder();
        let run = started(0.5);
        let mut saver = saver(&folder).keep_last(kept);
        // Files of others, and what only looks like one of the series.
        let others = [
            "run.safetensors",
            "run-1.safetensors",
            "run-000000001.json",
            "run2-000000001.safetensors",
            "run-00000000x.safetensors",
        ];
        others
            .iter()
            .for_each(|name| drop(File::create(folder.path().join(name)).expect("a file")));
        for number in [10, 20, 30, 30, 40, 4_000_000_000] {
            saver.save(number, checkpoint(&run)).expect("a save");
            saver.wait().expect("a file");
        }
        assert_eq!(steps(&saver), [20, 30, 40, 4_000_000_000][4 - kept..]);
        others
            .iter()
            .for_each(|name| assert!(folder.path().join(name).is_file(), "{name}"));
    }
}

/// The file of a later step would be taken for the newest, so nothing is saved before it.
#[test]
fn a_step_before_the_last_is_refused() {
    let folder = folder();
    let run = started(0.5);
    saver(&folder).save(30, checkpoint(&run)).expect("a save");
    let mut saver = saver(&folder).keep_last(1);
    let error = saver.save(29, checkpoint(&run)).expect_err("an earlier step");
    is_kind(
        &error,
        ErrorKind::Argument,
        &[
            "the step to save is 29, expected at least 30",
            "under another path",
        ],
    );
    assert_eq!((error.file(), steps(&saver)), (Some(&*at(&folder, 30)), vec![30]));
    saver.save(30, checkpoint(&run)).expect("the same step");
    saver.wait().expect("a file");
    fs::write(at(&folder, 30), "nothing").expect("a file");
    saver
        .save(29, checkpoint(&run))
        .expect("the later one is not whole");
}

#[test]
fn the_newest_file_that_is_whole() {
    let folder = folder();
    let run = started(0.5);
    let mut first = saver(&folder);
    assert_eq!(newest(&mut first), (None, vec![]));
    for number in [10, 20, 30, 40] {
        first.save(number, checkpoint(&run)).expect("a save");
    }
    assert_eq!(newest(&mut first), (Some(40), vec![]), "newest waits");

    // One is damaged, one cut, one of another format, and one was being written by a process that is gone.
    let mut bytes = fs::read(at(&folder, 30)).expect("a file");
    *bytes.last_mut().expect("a byte") ^= 1;
    fs::write(at(&folder, 30), &bytes).expect("a file");
    fs::write(at(&folder, 40), &bytes[..100]).expect("a file");
    let (mut other, format) = (file_of(checkpoint(&run)), br#"\"format\":1"#);
    let place = other
        .windows(format.len())
        .position(|window| window == format)
        .expect("a format");
    other[place + format.len() - 1] = b'9';
    fs::write(at(&folder, 50), other).expect("a file");
    let unfinished = folder.path().join(".run-000000060.safetensors.aB3xYz.partial");
    fs::write(&unfinished, "half").expect("a file");
    let before = folder.path().join(".run-000000015.safetensors.aB3xYz.partial");
    fs::write(&before, "half").expect("a file");

    let mut second = saver(&folder).keep_last(2);
    let ((found, passed_over), lines) = logged(|| newest(&mut second));
    assert_eq!((found, &lines), (Some(20), &passed_over));
    let reasons = [
        ("run-000000050", "format version 9"),
        ("run-000000040", "not a whole"),
        ("run-000000030", "damaged"),
        ("run-000000060", "unfinished"),
    ];
    assert_eq!(passed_over.len(), reasons.len(), "{passed_over:?}");
    for (line, (name, reason)) in passed_over.iter().zip(reasons) {
        assert!(line.contains(name) && line.contains(reason), "{line}");
    }

    // The run goes on before them: they are not counted, and are in nobody's way.
    for number in [25, 30, 35] {
        second.save(number, checkpoint(&run)).expect("a save");
        second.wait().expect("a file");
    }
    assert_eq!(steps(&second), [30, 35, 40, 50]);
    assert!(CheckpointFile::open(at(&folder, 30)).is_ok(), "written again");
    assert!(unfinished.is_file() && before.is_file(), "written just now");
    for path in [&unfinished, &before] {
        File::open(path)
            .expect("the file")
            .set_modified(SystemTime::now() - Duration::from_secs(600))
            .expect("a time");
    }
    second.save(36, checkpoint(&run)).expect("a save");
    second.wait().expect("a file");
    assert!(!unfinished.exists() && !before.exists());
    let mut third = saver(&folder);
    assert_eq!(newest(&mut third).0, Some(36));
}

#[test]
fn nothing_whole_at_all() {
    let folder = folder();
    fs::write(at(&folder, 7), "nothing").expect("a file");
    let mut saver = saver(&folder);
    let (found, passed_over) = newest(&mut saver);
    assert_eq!((found, passed_over.len()), (None, 1));
    saver.save(1, checkpoint(&started(0.5))).expect("a save");
    assert_eq!(newest(&mut saver).0, Some(1));
}

/// Names that a folder can just hold, names that are no text, and one without an ending.
#[cfg(unix)]
#[test]
fn odd_file_names() {
    use std::os::unix::ffi::OsStrExt;
    let run = started(0.5);
    for name in [&[b'x'; 245][..], b"\xff\n\"", b"run", "ключ 🔑.a.b".as_bytes()] {
        let folder = folder();
        let mut saver =
            CheckpointSaver::new(folder.path().join(std::ffi::OsStr::from_bytes(name))).keep_last(2);
        for number in 1..=4 {
            saver.save(number, checkpoint(&run)).expect("a save");
        }
        assert_eq!(newest(&mut saver), (Some(4), vec![]));
        assert_eq!(steps(&saver), [3, 4]);
    }
}

/// Over ranks the file is there when `save` returns, and it is that of one process.
#[test]
fn ranks_write_together() {
    for size in [1, 3] {
        let folder = folder();
        let path = folder.path().join("run.safetensors");
        let told = on(size, {
            let path = path.clone();
            move |world| {
                let model = vec![Var::ones(1200, DType::F32, &Device::Cpu).expect("a variable")];
                let state = Setup::over(&world)
                    .build(Momentum::new(0.1), &model)
                    .expect("a state");
                let mut saver = CheckpointSaver::new(&path).keep_last(2);
                for number in [1, 2, 3] {
                    saver
                        .save(number, Checkpoint::new(&state).model(&model))
                        .expect("a save");
                }
                saver.wait().expect("a file");
                let refused = saver
                    .save(2, Checkpoint::new(&state))
                    .expect_err("an earlier step");
                let differs = saver
                    .save(4 + world.rank() as u64, Checkpoint::new(&state))
                    .and_then(|_| saver.wait());
                (refused.kind(), differs.map_err(|error| error.kind()))
            }
        });
        let refused = |rank| {
            if rank == 0 {
                ErrorKind::Argument
            } else {
                ErrorKind::Ranks
            }
        };
        let differs = if size > 1 {
            Err(ErrorKind::Ranks)
        } else {
            Ok(vec![])
        };
        for (rank, told) in told.into_iter().enumerate() {
            assert_eq!(told, (refused(rank), differs.clone()), "rank {rank} of {size}");
        }
        let model = vec![Var::ones(1200, DType::F32, &Device::Cpu).expect("a variable")];
        let state = setup(Momentum::new(0.1), &model).expect("a state");
        assert!(fs::read(at(&folder, 3)).expect("a file") == file_of(Checkpoint::new(&state).model(&model)));
        assert_eq!(
            steps(&CheckpointSaver::new(&path)),
            if size > 1 { [2, 3] } else { [3, 4] }
        );
    }
}
