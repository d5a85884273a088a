//! Checkpoints and the file system: what is at a path is the old file or the new one, and nothing is left
//! beside it.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Mutex;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::{Duration, SystemTime};

use candle_core::{CpuStorage, DType, InplaceOp1, Layout, Var};
use optimisers::{
    Checkpoint, CheckpointFile, Communicator, Descent, ErrorKind, Momentum, Result, Setup, StateTree,
    StochasticRounding, Warning, setup,
};
use tempfile::TempDir;

use crate::model::models::CPU;
use support::common::{Vars, is_kind, random, says};
use support::crafted_checkpoints::file_of;
use support::threads::on;

/// A state with one tensor of this length.
fn state(length: usize) -> StateTree {
    setup(Momentum::new(0.1), &Var::zeros(length, DType::F32, CPU).unwrap()).unwrap()
}

fn save(length: usize, path: impl AsRef<Path>) -> Result<Vec<Warning>> {
    Checkpoint::new(&state(length)).save(path)
}

fn folder() -> TempDir {
    tempfile::tempdir().expect("a folder")
}

/// The names in a folder, sorted.
pub fn names(folder: &Path) -> Vec<String> {
    let entries = fs::read_dir(folder)
        .expect("a folder")
        .map(|entry| entry.expect("an entry").file_name());
    let mut names: Vec<String> = entries.map(|name| name.to_string_lossy().into_owned()).collect();
    names.sort();
    names
}

/// The length of the state's tensor in a file.
fn length(path: &Path) -> usize {
    CheckpointFile::open(path)
        .and_then(|file| file.tensor("/velocity"))
        .expect("a checkpoint")
        .expect("a tensor")
        .elem_count()
}

fn refused<T: std::fmt::Debug>(result: Result<T>, path: &Path, kind: ErrorKind, words: &[&str]) {
    let error = result.expect_err("an error");
    says(&error, words);
    is_kind(&error, kind, &[&path.display().to_string()]);
    assert_eq!(error.file(), Some(path));
}

#[test]
fn a_save_replaces_what_was_there() {
    let folder = folder();
    let path = folder.path().join("run");
    fs::write(&path, "something else, and longer than a checkpoint".repeat(1000)).unwrap();
    for length_now in [1000, 3, 2000] {
        save(length_now, &path).unwrap();
        assert_eq!(
            (length(&path), names(folder.path())),
            (length_now, vec!["run".to_string()])
        );
    }
    // The bytes are those that any save of this state makes, wherever it goes.
    assert_eq!(fs::read(&path).unwrap(), file_of(Checkpoint::new(&state(2000))));
}

/// Nobody, not even root, can make files in /proc. A pipe or a device is written to, not replaced, by other
/// programs; it is refused.
#[cfg(unix)]
#[test]
fn a_failed_save_leaves_everything_as_it_was() {
    let folder = folder();
    let [occupied, pipe] = ["folder", "pipe"].map(|name| folder.path().join(name));
    fs::create_dir(&occupied).unwrap();
    fs::write(occupied.join("run"), "old").unwrap();
    assert!(Command::new("mkfifo").arg(&pipe).status().unwrap().success());
    let (temporary, replace) = (
        "cannot make a temporary file in the same folder",
        "cannot replace what is there: it is no regular file",
    );
    for (path, words) in [
        (folder.path().join("none/run"), temporary),
        (occupied.join("run/x"), temporary),
        (PathBuf::from("/proc/run.safetensors"), temporary),
        (occupied.clone(), replace),
        (pipe.clone(), replace),
        (PathBuf::new(), ""),
    ] {
        refused(save(3, &path), &path, ErrorKind::Io, &[words]);
    }
    assert_eq!(
        [folder.path(), &occupied].map(names).concat(),
        ["folder", "pipe", "run"]
    );
    assert_eq!(
        (
            fs::read(occupied.join("run")).unwrap(),
            fs::metadata(&pipe).unwrap().is_file()
        ),
        (b"old".to_vec(), false)
    );
    for path in [folder.path().join("none"), occupied] {
        refused(
            CheckpointFile::open(&path),
            &path,
            ErrorKind::Io,
            &["cannot read the file"],
        );
    }
}

/// Bad names and models are found before a file is begun.
#[test]
fn a_refused_checkpoint_leaves_no_file() {
    let folder = folder();
    let path = folder.path().join("run");
    let variable = |length: usize| Var::zeros(length, DType::F32, CPU).unwrap();
    for (name, other) in [("a/velocity", "a"), ("__metadata__", "b")] {
        let model = Vars::from([name, other].map(|name| (name.to_string(), variable(2))));
        let state = setup(Momentum::new(0.1), &model).unwrap();
        let words = [&*format!("the name {name:?} in the file"), "rename a parameter"];
        refused(
            Checkpoint::new(&state).model(&model).save(&path),
            &path,
            ErrorKind::Model,
            &words,
        );
    }
    let eight = Var::from_tensor(&random(1, &[2], DType::F32, CPU).to_dtype(DType::F8E4M3).unwrap()).unwrap();
    let model = Vars::from([("a".to_string(), variable(2)), ("b".to_string(), eight)]);
    let state = optimisers::setup_with(&model, |path, _| (path == "a").then(|| Descent::new(0.1))).unwrap();
    let dtype = ErrorKind::Tensor;
    refused(
        Checkpoint::new(&state).model(&model).save(&path),
        &path,
        dtype,
        &["\"b\" is F8E4M3"],
    );
    Checkpoint::new(&state).save(&path).unwrap();
    fs::remove_file(&path).unwrap();

    let error = Checkpoint::new(&state)
        .model(&variable(2))
        .save(&path)
        .unwrap_err();
    is_kind(
        &error,
        ErrorKind::Model,
        &["it is not in this state", "set up a state for this model"],
    );
    let fewer = Vars::from([("b".to_string(), model["b"].clone())]);
    let error = Checkpoint::new(&state).model(&fewer).save(&path).unwrap_err();
    is_kind(
        &error,
        ErrorKind::Model,
        &["parameter \"a\"", "but the model does not"],
    );
    assert!(names(folder.path()).is_empty());
}

/// Readers of safetensors files accept headers of up to 100 MB: what nobody could read again is not written.
#[test]
fn a_header_that_no_reader_accepts() {
    let folder = folder();
    let path = folder.path().join("run");
    save(3, &path).unwrap();
    // Each takes seven bytes in the file.
    let big = Checkpoint::new(&state(4))
        .bytes("\u{1}".repeat(14_300_000), [])
        .save(&path);
    refused(
        big,
        &path,
        ErrorKind::Unsupported,
        &["100000000", "shorter names"],
    );
    assert_eq!(
        (length(&path), names(folder.path())),
        (3, vec!["run".to_string()])
    );
}

#[cfg(unix)]
#[test]
fn a_link_stays_a_link() {
    use std::os::unix::fs::symlink;
    let folder = folder();
    let at = |name: &str| folder.path().join(name);
    fs::create_dir(at("runs")).unwrap();
    fs::create_dir(at("links")).unwrap();
    symlink("links/second", at("first")).unwrap();
    symlink("../runs/run", at("links/second")).unwrap();
    // Before there is a file, and after.
    for size in [3, 4] {
        save(size, at("first")).unwrap();
        assert_eq!(
            [at("first"), at("links/second"), at("runs/run")].map(|path| length(&path)),
            [size; 3]
        );
        assert_eq!(
            [at("first"), at("links/second")].map(|path| fs::read_link(path).unwrap()),
            ["links/second", "../runs/run"].map(PathBuf::from)
        );
        assert_eq!(
            [folder.path(), &at("links"), &at("runs")].map(names).concat(),
            ["first", "links", "runs", "second", "run"]
        );
    }
    symlink("circle", at("circle")).unwrap();
    refused(
        save(3, at("circle")),
        &at("circle"),
        ErrorKind::Io,
        &["FilesystemLoop"],
    );
    assert_eq!(names(folder.path()), ["circle", "first", "links", "runs"]);
}

#[cfg(unix)]
#[test]
fn permissions() {
    use std::os::unix::fs::PermissionsExt;
    let folder = folder();
    let at = |name: &str| folder.path().join(name);
    let mode = |path: &Path| fs::metadata(path).unwrap().permissions().mode() & 0o777;
    File::create(at("plain")).unwrap();
    save(3, at("new")).unwrap();
    assert_eq!(mode(&at("new")), mode(&at("plain")), "as any new file");
    for kept in [0o600, 0o640, 0o666] {
        fs::set_permissions(at("new"), fs::Permissions::from_mode(kept)).unwrap();
        save(3, at("new")).unwrap();
        assert_eq!(mode(&at("new")), kept, "as the file that was there");
    }
}

/// What a killed save left behind goes with the next; what somebody may still need stays.
#[test]
fn abandoned_temporary_files() {
    let folder = folder();
    let at = |name: &str| folder.path().join(name);
    let make = |name: &str, age: u64| {
        let file = File::create(at(name)).unwrap();
        file.set_modified(SystemTime::now() - Duration::from_secs(age))
            .unwrap();
        file
    };
    let abandoned = [".run.aB3xYz.partial", ".run.000000.partial"];
    let kept = [
        (".run.Fresh1.partial", 5),
        (".run.Locked.partial", 600),
        (".other.aB3xYz.partial", 600),
        (".run.notes.partial", 600),
        (".run.of.a.user.partial", 600),
        (".run.aB3xYz.part", 600),
        ("run.aB3xYz.partial", 600),
        (".run.aB-xYz.partial", 600),
    ];
    abandoned.iter().for_each(|name| _ = make(name, 600));
    let files = kept.map(|(name, age)| (name, make(name, age)));
    files
        .iter()
        .filter(|(name, _)| name.contains("Locked"))
        .for_each(|(_, file)| file.try_lock().unwrap());
    fs::create_dir(at(".run.folder.partial")).unwrap();

    save(3, at("run")).unwrap();
    let mut expected: Vec<String> = kept.map(|(name, _)| name.to_string()).to_vec();
    expected.extend([".run.folder.partial".to_string(), "run".to_string()]);
    expected.sort();
    assert_eq!(names(folder.path()), expected);

    drop(files);
    File::open(at(".run.Fresh1.partial"))
        .unwrap()
        .set_modified(SystemTime::now() - Duration::from_secs(600))
        .unwrap();
    save(3, at("run")).unwrap();
    expected.retain(|name| !name.contains("Fresh") && !name.contains("Locked"));
    assert_eq!(names(folder.path()), expected);
}

/// Keeps a tensor locked for writing until it is told to go on.
struct Hold {
    begun: Sender<()>,
    go_on: Mutex<Receiver<()>>,
}

impl InplaceOp1 for Hold {
    fn name(&self) -> &'static str {
        "hold"
    }

    fn cpu_fwd(&self, _: &mut CpuStorage, _: &Layout) -> candle_core::Result<()> {
        let _ = self.begun.send(());
        let _ = self
            .go_on
            .lock()
            .expect("the only user")
            .recv_timeout(Duration::from_secs(20));
        Ok(())
    }
}

/// A save that takes long is not taken for one that was killed, however old its file: the file is locked.
#[test]
fn a_save_that_takes_long() {
    let folder = folder();
    let path = folder.path().join("run");
    let x = Var::ones(3, DType::F32, CPU).unwrap();
    let slow = setup(Momentum::new(0.1), &x).unwrap();
    let ((begun, has_begun), (go_on, told)) = (channel(), channel());
    std::thread::scope(|scope| {
        scope.spawn(|| {
            x.as_detached_tensor()
                .inplace_op1(&Hold {
                    begun,
                    go_on: Mutex::new(told),
                })
                .unwrap()
        });
        has_begun.recv_timeout(Duration::from_secs(20)).unwrap();
        // So long that the header is in the file before the parameters are waited for.
        let checkpoint = Checkpoint::new(&slow).model(&x).bytes("x".repeat(100_000), []);
        let saving = scope.spawn(|| checkpoint.save(&path).unwrap());
        let begun = || {
            let name = names(folder.path())
                .into_iter()
                .find(|name| name.ends_with(".partial"))?;
            let file = File::open(folder.path().join(name)).ok()?;
            file.metadata()
                .is_ok_and(|metadata| metadata.len() > 0)
                .then_some(file)
        };
        let wait = || {
            (0..2000).find_map(|_| {
                let found = begun();
                if found.is_none() {
                    std::thread::sleep(Duration::from_millis(5));
                }
                found
            })
        };
        let file = wait().expect("a temporary file");
        assert!(file.try_lock().is_err());
        file.set_modified(SystemTime::now() - Duration::from_secs(600))
            .unwrap();
        save(5, &path).unwrap();
        assert_eq!((length(&path), names(folder.path()).len()), (5, 2));
        go_on.send(()).unwrap();
        saving.join().unwrap();
    });
    assert_eq!(
        (length(&path), names(folder.path())),
        (3, vec!["run".to_string()])
    );
}

#[test]
fn saves_at_the_same_time() {
    let folder = folder();
    let path = folder.path().join("run");
    let sizes = [30_000, 20_000, 10_000];
    std::thread::scope(|scope| {
        for size in sizes {
            let path = &path;
            scope.spawn(move || {
                let state = state(size);
                (0..20).for_each(|_| _ = Checkpoint::new(&state).save(path).unwrap());
            });
        }
    });
    assert!(sizes.contains(&length(&path)));
    assert_eq!(names(folder.path()), ["run"]);
}

/// In a process of its own, which may write no file of more than a few KB, and whose folder is another.
#[cfg(unix)]
#[test]
fn a_disk_that_fills_up() {
    if std::env::var_os("ALONE").is_some() {
        let path = Path::new("run");
        save(3, path).unwrap();
        save(4, "./run2").unwrap();
        let old = fs::read(path).unwrap();
        for size in [10_000, 100_000, 1_000_000] {
            refused(
                save(size, path),
                path,
                ErrorKind::Io,
                &["cannot write the tensors"],
            );
        }
        let long = Checkpoint::new(&state(3))
            .bytes("long", "x".repeat(100_000))
            .save(path);
        refused(long, path, ErrorKind::Io, &["cannot write"]);
        // What any rank of a divided state cannot write, none has written.
        let errors = on(5, move |world| {
            let model: Vec<Var> = (0..5)
                .map(|_| Var::zeros(1200, DType::F32, CPU).unwrap())
                .collect();
            let state = Setup::over(&world)
                .build(StochasticRounding::new(1, Momentum::new(0.1)), &model)
                .unwrap();
            assert_eq!(
                state.leaves().map(|leaf| leaf.part().len()).collect::<Vec<_>>()[world.rank()],
                1200
            );
            Checkpoint::new(&state).save(path).unwrap_err()
        });
        errors
            .iter()
            .for_each(|error| says(error, &["cannot write the tensors"]));
        let kinds = [&errors[0], &errors[4]].map(|error| (error.kind(), error.file()));
        assert_eq!(
            kinds,
            [(ErrorKind::Ranks, None), (ErrorKind::Io, Some(path))],
            "{errors:?}"
        );
        assert_eq!(
            (fs::read(path).unwrap(), names(Path::new("."))),
            (old, vec!["run".into(), "run2".into()])
        );
        return;
    }
    let folder = folder();
    let (_, module) = module_path!().split_once("::").expect("a module of this program");
    let output = Command::new("sh")
        .args(["-c", "trap '' XFSZ; ulimit -f 16; exec \"$@\"", "sh"])
        .arg(std::env::current_exe().unwrap())
        .args([
            "--exact",
            &format!("{module}::a_disk_that_fills_up"),
            "--nocapture",
        ])
        .env("ALONE", "1")
        .current_dir(folder.path())
        .output()
        .unwrap();
    let [text, errors] =
        [output.stdout, output.stderr].map(|text| String::from_utf8_lossy(&text).into_owned());
    assert!(
        output.status.success() && text.contains("1 passed"),
        "{text}{errors}"
    );
    assert_eq!(
        ["run", "run2"].map(|name| length(&folder.path().join(name))),
        [3, 4]
    );
}
