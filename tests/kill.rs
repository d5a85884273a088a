//! A process that is killed while it saves leaves the old checkpoint or the new one, whole.
#![cfg(unix)]

use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use candle_core::{Device, Tensor, Var};
use optimisers::{Adam, Checkpoint, CheckpointFile, CheckpointSaver, StateTree, Warning, setup, update};

/// Where the child saves.
const PATH: &str = "OPTIMISERS_TEST_SAVES_TO";

const LEAVES: usize = 3;
const LENGTH: usize = 60_000;
const KILLS: usize = 220;
/// Kills while a thread writes a series of files.
const KILLS_BESIDE: usize = 60;

/// A model and its state, all of whose tensors and hyper-parameters depend on `value`.
fn started(value: f32) -> (Vec<Var>, StateTree) {
    let numbers = || Tensor::full(value, LENGTH, &Device::Cpu).expect("a tensor");
    let model: Vec<Var> = (0..LEAVES)
        .map(|_| Var::from_tensor(&numbers()).expect("a variable"))
        .collect();
    let mut state = setup(Adam::new(f64::from(value)), &model).expect("a state");
    let gradients = (0..LEAVES)
        .map(|i| (i.to_string(), numbers()))
        .collect::<std::collections::BTreeMap<_, _>>();
    update(&mut state, &model, &gradients).expect("an update");
    (model, state)
}

fn save((model, state): &(Vec<Var>, StateTree), path: &Path) {
    Checkpoint::new(state).model(model).save(path).expect("a save");
}

/// Every tensor's number, and the learning rates. All elements of a tensor are the same.
fn contents((model, state): &(Vec<Var>, StateTree)) -> Vec<f64> {
    let moments = state
        .leaves()
        .flat_map(|leaf| ["m", "v"].map(|name| leaf.tensor(name).expect("a copy")));
    let number = |tensor: &Tensor| {
        let numbers: Vec<f32> = tensor.to_vec1().expect("numbers");
        assert!(
            numbers.iter().all(|number| *number == numbers[0]),
            "numbers of two states in one tensor"
        );
        f64::from(numbers[0])
    };
    let parameters = model.iter().map(|x| number(x));
    let rates = state.leaves().filter_map(|leaf| leaf.learning_rate());
    parameters
        .chain(moments.map(|moment| number(&moment)))
        .chain(rates)
        .collect()
}

/// A child process that does not outlive its test.
struct Saver(Child);

impl Drop for Saver {
    /// On Unix this is SIGKILL.
    fn drop(&mut self) {
        self.0.kill().expect("a child to kill");
        self.0.wait().expect("its end");
    }
}

/// Starts a test again, to save two states by turns.
fn saver(test: &str, path: &Path) -> Saver {
    let program = std::env::current_exe().expect("this program");
    let mut command = Command::new(program);
    command
        .args(["--exact", test])
        .env(PATH, path)
        .stdout(Stdio::null());
    Saver(command.spawn().expect("a child"))
}

/// Waits until the child saves.
fn wait_for_temporary(folder: &Path) {
    let start = Instant::now();
    while std::fs::read_dir(folder).expect("the folder").count() < 2 {
        assert!(
            start.elapsed() < Duration::from_secs(20),
            "the child does not save"
        );
        std::thread::sleep(Duration::from_micros(100));
    }
}

#[test]
fn a_killed_save() {
    let states = [1.0, 2.0].map(started);
    if let Some(path) = std::env::var_os(PATH) {
        loop {
            states.iter().for_each(|state| save(state, Path::new(&path)));
        }
    }
    std::thread::scope(|scope| {
        let threads = [0, 1].map(|_| scope.spawn(|| kill_many(&states, KILLS / 2)));
        for thread in threads {
            thread.join().expect("one of the two states after each kill");
        }
    });
}

/// Starts and kills children that save to one path, and looks at what is there after each.
fn kill_many(states: &[(Vec<Var>, StateTree); 2], kills: usize) {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("run.safetensors");
    let expected = states.each_ref().map(contents);
    let start = Instant::now();
    (0..5).for_each(|_| save(&states[0], &path));
    let one_save = start.elapsed() / 5;

    let mut restored = started(9.0);
    for kill in 0..kills {
        let saver = saver("a_killed_save", &path);
        wait_for_temporary(folder.path());
        // Moments spread over the time of three saves, in no order.
        std::thread::sleep(one_save * 3 * (kill * 89 % kills) as u32 / kills as u32);
        drop(saver);
        let file = CheckpointFile::open(&path).expect("a whole file");
        file.restore_with_model(&mut restored.1, &restored.0)
            .expect("a checkpoint of this model");
        let found = contents(&restored);
        assert!(expected.contains(&found), "neither state: {found:?}");
        for entry in std::fs::read_dir(folder.path())
            .expect("the folder")
            .flatten()
            .filter(|entry| entry.path() != path)
        {
            std::fs::remove_file(entry.path()).expect("a temporary file");
        }
    }
}

/// Each process goes on from the newest file, and two files are kept.
#[test]
fn a_killed_save_beside_the_training() {
    let states = [1.0, 2.0].map(started);
    if let Some(path) = std::env::var_os(PATH) {
        let mut saver = CheckpointSaver::new(path).keep_last(2);
        let done = saver
            .newest()
            .expect("the folder")
            .found
            .map_or(0, |(step, _)| step);
        for step in done + 1.. {
            let (model, state) = &states[step as usize % 2];
            saver
                .save(step, Checkpoint::new(state).model(model))
                .expect("a save");
        }
    }
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("run.safetensors");
    let expected = states.each_ref().map(contents);
    let mut restored = started(9.0);
    let (mut last, mut count, mut unfinished) = (0, 0, 0);
    for kill in 0..KILLS_BESIDE {
        let child = saver("a_killed_save_beside_the_training", &path);
        let start = Instant::now();
        let mut files = CheckpointSaver::new(&path);
        let has_begun = || {
            files
                .files()
                .expect("the folder")
                .last()
                .is_some_and(|(step, _)| *step > last)
        };
        while !has_begun() {
            assert!(
                start.elapsed() < Duration::from_secs(20),
                "the child does not save"
            );
            std::thread::sleep(Duration::from_micros(100));
        }
        // Moments spread over the time of several saves, in no order.
        std::thread::sleep(Duration::from_micros(400 * (kill * 89 % KILLS_BESIDE) as u64));
        drop(child);
        let newest = files.newest().expect("the folder");
        let (step, file) = newest.found.expect("a whole file");
        assert!(step > last, "step {step} after {last}");
        file.restore_with_model(&mut restored.1, &restored.0)
            .expect("a checkpoint of this model");
        assert_eq!(contents(&restored), expected[step as usize % 2], "step {step}");
        // Nothing but a temporary file is not whole.
        for warning in newest.passed_over {
            let Warning::PassedOver { file, reason } = &warning else {
                panic!("{warning}")
            };
            assert!(
                file.extension().is_some_and(|extension| extension == "partial")
                    && reason.contains("unfinished"),
                "{warning}"
            );
            unfinished += 1;
            std::fs::remove_file(file).expect("a temporary file");
        }
        let steps: Vec<u64> = files
            .files()
            .expect("the folder")
            .into_iter()
            .map(|(step, _)| step)
            .collect();
        // One more, if the process was killed before it has removed the oldest. Its first save removes all
        // that are too many, before the second.
        let most = if step > last + 1 { 3 } else { count + 1 };
        assert!(
            (1..=most).contains(&steps.len()) && steps.is_sorted_by(|a, b| a + 1 == *b),
            "{steps:?}, {count} before"
        );
        (last, count) = (step, steps.len());
    }
    assert!(
        unfinished > KILLS_BESIDE / 4,
        "only {unfinished} of {KILLS_BESIDE} kills met a file that was being written"
    );
}
