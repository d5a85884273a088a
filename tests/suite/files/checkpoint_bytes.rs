//! Checkpoints are read and written by position: the bytes are the same ones, and a file that changes while
//! it is open is not taken over.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{Seek, SeekFrom, Write};
use std::path::Path;
use std::time::Duration;

use candle_core::{DType, Tensor, Var};
use optimisers::torch::TorchState;
use optimisers::{
    Adam, Checkpoint, CheckpointFile, Descent, ErrorKind, LossScaler, MixedPrecision, Parameter, StateTree,
    Weights, setup, setup_with, update,
};
use safetensors::SafeTensors;
use tempfile::TempDir;

use crate::model::models::CPU;
use support::common::{Grads, Snapshot, Vars, bits, is_kind, snapshot, values, var};
use support::crafted_checkpoints::{Pieces, file_of, open, with_checksum};
use support::tested::Tested;

/// More elements than are in memory at a time, twice.
const LONG: usize = 300_001;

/// Numbers that every platform computes alike.
fn numbers(seed: usize, length: usize, dtype: DType) -> Tensor {
    let numbers: Vec<f64> = (0..length)
        .map(|i| ((i * 37 + seed * 11) % 101) as f64 / 64.0 + 0.25)
        .collect();
    Tensor::from_vec(numbers, length, CPU)
        .and_then(|x| x.to_dtype(dtype))
        .expect("a tensor")
}

/// A model with a variable that is no parameter, and its state after a step.
fn started(seed: usize) -> (Vars, StateTree) {
    let parameters = [
        ("double", 5, DType::F64),
        ("empty", 0, DType::F32),
        ("half", 3, DType::BF16),
        ("large", LONG, DType::F16),
        ("tokens", 7, DType::U8),
    ];
    let variable = |(i, (name, length, dtype)): (usize, (&str, usize, DType))| {
        (name.to_string(), var(&numbers(seed + i, length, dtype)))
    };
    let model: Vars = parameters.into_iter().enumerate().map(variable).collect();
    let optimiser = |_: &str, x: Parameter<'_>| {
        x.dtype()
            .is_float()
            .then(|| MixedPrecision::new(DType::F32, Adam::new(0.125)))
    };
    let mut state = setup_with(&model, optimiser).expect("a state");
    let floats = model.iter().filter(|(_, x)| x.dtype().is_float());
    let gradients: Grads = floats
        .map(|(name, x)| (name.clone(), x.affine(2.0, 0.5).expect("a gradient").detach()))
        .collect();
    update(&mut state, &model, &gradients).expect("an update");
    (model, state)
}

fn full((model, state): &(Vars, StateTree)) -> Checkpoint<'_> {
    Checkpoint::new(state).model(model).scaler(&LossScaler::dynamic())
}

/// The sum is that of a file from before pieces of files were written to their places: every number is where
/// it was.
#[test]
fn the_bytes_of_a_file_are_what_they_were() {
    let folder = tempfile::tempdir().unwrap();
    let (path, started) = (folder.path().join("masters"), started(0));
    started.1.save_masters(&started.0, &path).unwrap();
    let (file, masters) = (file_of(full(&started)), fs::read(path).unwrap());
    for (bytes, data, sum) in [
        (&file, 4_200_183, 0x7a17_9c37),
        (&masters, 1_200_056, 0xec6e_059b_u32),
    ] {
        let tensors = &bytes[bytes.len() - data..];
        assert_eq!(crc32fast::hash(tensors), sum);
        let read = SafeTensors::deserialize(bytes).unwrap();
        let described = SafeTensors::read_metadata(bytes).unwrap().1.metadata().clone();
        assert!(
            safetensors::serialize(read.tensors(), described).unwrap() == *bytes,
            "not as the library writes it"
        );
    }
    assert!(
        with_checksum(file.clone()) == file,
        "the checksum of the pieces is not that of the file"
    );
}

/// What takes several windows is taken over whole, also in another precision.
#[test]
fn long_tensors_are_taken_over_whole() {
    let (saved, mut restored) = (started(0), started(5));
    let file = open(&file_of(full(&saved))).unwrap();
    file.restore_with_model(&mut restored.1, &restored.0).unwrap();
    assert!(snapshot(&restored.0, &restored.1) == snapshot(&saved.0, &saved.1));

    let wide: Vars = saved
        .0
        .iter()
        .map(|(name, x)| (name.clone(), var(&x.to_dtype(DType::F32).unwrap())))
        .collect();
    let wide: Vars = wide.into_iter().filter(|(name, _)| name == "large").collect();
    let narrow: Vars = saved
        .0
        .iter()
        .filter(|(name, _)| *name == "large")
        .map(|(name, x)| (name.clone(), x.clone()))
        .collect();
    let mut narrow_state = setup(MixedPrecision::new(DType::F32, Adam::new(0.125)), &narrow).unwrap();
    update(
        &mut narrow_state,
        &narrow,
        &Grads::from([("large".to_string(), numbers(3, LONG, DType::F16))]),
    )
    .unwrap();
    let file = file_of(Checkpoint::new(&narrow_state).model(&narrow));
    let mut wide_state = setup(Adam::new(0.125), &wide).unwrap();
    open(&file)
        .unwrap()
        .converting()
        .restore_with_model(&mut wide_state, &wide)
        .unwrap();
    let tensor = |state: &StateTree, name: &str| state.leaf("large").unwrap().tensor(name).unwrap();
    assert!(bits(&wide["large"]) == bits(&tensor(&narrow_state, "master")));
    assert!(
        ["m", "v"]
            .iter()
            .all(|name| bits(&tensor(&wide_state, name)) == bits(&tensor(&narrow_state, name)))
    );

    let back = Vars::from([("large".to_string(), var(&numbers(9, LONG, DType::BF16)))]);
    let mut back_state = setup(MixedPrecision::new(DType::F32, Adam::new(0.125)), &back).unwrap();
    let wide_file = file_of(Checkpoint::new(&wide_state).model(&wide));
    open(&wide_file)
        .unwrap()
        .converting()
        .restore_with_model(&mut back_state, &back)
        .unwrap();
    assert!(bits(&tensor(&back_state, "master")) == bits(&wide["large"]));
    assert!(values(&back["large"]) == values(&wide["large"].to_dtype(DType::BF16).unwrap()));
}

/// The index is that in the tensor, whatever window it is in.
#[test]
fn what_is_wrong_in_a_later_window() {
    let (saved, mut restored) = (started(0), started(5));
    let before = snapshot(&restored.0, &restored.1);
    let mut refused = |name: &str, bytes: &[u8], kind: ErrorKind, words: &[&str]| {
        let mut pieces = Pieces::of(&file_of(full(&saved)));
        let place = 200_003 * bytes.len();
        pieces.tensor(name)[place..place + bytes.len()].copy_from_slice(bytes);
        let file = open(&pieces.bytes()).unwrap();
        let error = file.restore_with_model(&mut restored.1, &restored.0).unwrap_err();
        is_kind(&error, kind, words);
        assert_eq!((error.path(), error.element()), (Some("large"), Some(200_003)));
        assert!(snapshot(&restored.0, &restored.1) == before);
    };
    refused(
        "large/m",
        &f32::NAN.to_le_bytes(),
        ErrorKind::NotFinite,
        &["\"large/m\"", "200003"],
    );
    refused(
        "large/master",
        &1e30f32.to_le_bytes(),
        ErrorKind::Changed,
        &["\"large\"", "its master", "200003"],
    );
}

/// A file at a path, opened, and a state to take it over into.
struct Opened {
    folder: TempDir,
    file: CheckpointFile,
    target: (Vars, StateTree),
    before: Snapshot,
}

impl Opened {
    fn new() -> Self {
        let folder = tempfile::tempdir().expect("a folder");
        full(&started(0)).save(folder.path().join("run")).expect("a save");
        let file = CheckpointFile::open(folder.path().join("run")).expect("a checkpoint");
        let target = started(5);
        let before = snapshot(&target.0, &target.1);
        Opened {
            folder,
            file,
            target,
            before,
        }
    }

    fn path(&self) -> std::path::PathBuf {
        self.folder.path().join("run")
    }

    fn refused(&mut self) {
        let path = self.path().display().to_string();
        let words = [
            "cannot read the file",
            "changed after it had been opened",
            "open it again",
            &path,
        ];
        let Opened {
            file,
            target: (model, state),
            ..
        } = self;
        is_kind(
            &file.restore_with_model(state, &*model).expect_err("an error"),
            ErrorKind::Io,
            &words,
        );
        is_kind(&file.restore(state).expect_err("an error"), ErrorKind::Io, &words);
        assert!(snapshot(model, state) == self.before, "something has changed");
    }
}

/// Writes a byte into the middle of a file, later than it was made.
fn change(path: &Path) {
    std::thread::sleep(Duration::from_millis(100));
    let mut file = File::options().write(true).open(path).expect("the file");
    let middle = file.metadata().expect("its length").len() / 2;
    file.seek(SeekFrom::Start(middle))
        .and_then(|_| file.write_all(&[0x55]))
        .expect("a byte");
}

/// A job that writes checkpoints does not disturb one that reads.
#[cfg(unix)]
#[test]
fn a_file_that_is_replaced_while_it_is_open() {
    let mut opened = Opened::new();
    full(&started(7)).save(opened.path()).unwrap();
    opened
        .file
        .restore_with_model(&mut opened.target.1, &opened.target.0)
        .unwrap();
    let expected = started(0);
    assert!(snapshot(&opened.target.0, &opened.target.1) == snapshot(&expected.0, &expected.1));
    fs::remove_file(opened.path()).unwrap();
    opened.file.restore(&mut opened.target.1).unwrap();
}

#[test]
fn a_file_that_is_cut_while_it_is_open() {
    let mut opened = Opened::new();
    for length in [4_000_000, 10, 0, 5_000_000] {
        File::options()
            .write(true)
            .open(opened.path())
            .unwrap()
            .set_len(length)
            .unwrap();
        opened.refused();
    }
}

#[test]
fn a_file_that_is_changed_while_it_is_open() {
    let mut opened = Opened::new();
    change(&opened.path());
    opened.refused();
    let words = ["changed after it had been opened", "open it again"];
    is_kind(&opened.file.tensor("large/m").unwrap_err(), ErrorKind::Io, &words);
    assert!(opened.file.scaler().unwrap().is_some());
    is_kind(
        &CheckpointFile::open(opened.path()).unwrap_err(),
        ErrorKind::File,
        &["checksum"],
    );
}

/// Also if a restore reads no tensor, because the rule has no state.
#[test]
fn a_file_without_tensors_that_is_changed_while_it_is_open() -> Tested {
    let folder = tempfile::tempdir()?;
    let [saved, torch] = ["saved", "torch"].map(|name| folder.path().join(name));
    let x = Var::new(&[1f32, 2.0], CPU)?;
    let mut state = setup(Descent::new(0.5), &x)?;
    Checkpoint::new(&state).save(&saved)?;
    state.save_torch(&torch)?;
    let (of_saved, of_torch) = (CheckpointFile::open(&saved)?, TorchState::open(&torch)?);
    of_saved.restore(&mut state)?;
    of_torch.restore(&mut state)?;
    for path in [&saved, &torch] {
        let length = fs::metadata(path)?.len();
        File::options().write(true).open(path)?.set_len(length + 8)?;
    }
    let words = ["changed after it had been opened", "open it again"];
    is_kind(
        &of_saved.restore(&mut state).expect_err("another file"),
        ErrorKind::Io,
        &words,
    );
    is_kind(
        &of_torch.restore(&mut state).expect_err("another file"),
        ErrorKind::Io,
        &words,
    );
    Ok(())
}

#[test]
fn weights_that_are_changed_while_they_are_open() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model");
    let (saved, mut target) = (started(0), started(5));
    for damage in [change, |path: &Path| {
        File::options()
            .write(true)
            .open(path)
            .unwrap()
            .set_len(1000)
            .unwrap()
    }] {
        full(&saved).save(&path).unwrap();
        let weights = Weights::open([&path]).unwrap();
        let before = snapshot(&target.0, &target.1);
        damage(&path);
        for error in [
            weights.load_into(&target.0).unwrap_err(),
            target.1.set_masters(&target.0, &weights).unwrap_err(),
        ] {
            is_kind(&error, ErrorKind::Io, &["cannot read the file"]);
            assert_eq!(error.file(), Some(&*path));
        }
        assert!(snapshot(&target.0, &target.1) == before);
    }
}

/// What cannot be read by position, such as the output of a program that unpacks, is read into memory.
#[cfg(unix)]
#[test]
fn a_pipe_is_read() {
    let folder = tempfile::tempdir().unwrap();
    let pipe = folder.path().join("pipe");
    assert!(
        std::process::Command::new("mkfifo")
            .arg(&pipe)
            .status()
            .unwrap()
            .success()
    );
    let (saved, mut restored) = (started(0), started(5));
    let bytes = file_of(full(&saved));
    let file = std::thread::scope(|scope| {
        scope.spawn(|| fs::write(&pipe, &bytes).unwrap());
        CheckpointFile::open(&pipe).unwrap()
    });
    file.restore_with_model(&mut restored.1, &restored.0).unwrap();
    assert!(snapshot(&restored.0, &restored.1) == snapshot(&saved.0, &saved.1));
}

/// Many threads may read one file.
#[test]
fn one_file_for_many_states() {
    let opened = Opened::new();
    let expected = started(0);
    let expected: BTreeMap<&str, Vec<u64>> = expected
        .0
        .iter()
        .map(|(name, x)| (name.as_str(), bits(x)))
        .collect();
    std::thread::scope(|scope| {
        for seed in [1, 2, 3, 4] {
            let (file, expected) = (&opened.file, &expected);
            scope.spawn(move || {
                let (model, mut state): (Vars, StateTree) = started(seed);
                file.restore_with_model(&mut state, &model).unwrap();
                assert!(
                    model
                        .iter()
                        .all(|(name, x): (&String, &Var)| bits(x) == expected[name.as_str()])
                );
            });
        }
    });
}
