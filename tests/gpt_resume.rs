//! The gpt example: a run that is stopped and resumed in another process ends as one that was not, and one on
//! several ranks as one on one, to the last bit.

use std::fs;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use optimisers::CheckpointSaver;
use support::examples::{self, TINY, folder};

fn program() -> &'static Path {
    static PROGRAM: OnceLock<PathBuf> = OnceLock::new();
    PROGRAM.get_or_init(|| examples::program("gpt"))
}

fn gpt(folder: &Path, options: &[&str]) -> Command {
    let mut command = Command::new(program());
    command.current_dir(folder).args(TINY).args(options);
    command
}

fn run(folder: &Path, options: &[&str]) -> Output {
    gpt(folder, options).output().expect("the example runs")
}

/// The line for programs, which is the last one.
fn result(output: &Output) -> String {
    let (out, err) = (
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr),
    );
    let last = out.lines().last().unwrap_or_default();
    assert!(last.starts_with("result step="), "no result in\n{out}\n{err}");
    last.to_string()
}

/// The state, the parameters and the notes after the last step, and the picture of all losses.
fn files(folder: &Path) -> [Vec<u8>; 2] {
    let (_, last) = checkpoints(folder).pop().expect("a checkpoint");
    [last, folder.join("gpt-loss.png")].map(|path| fs::read(path).expect("a file of the run"))
}

/// The checkpoints of a run, each with its step.
fn checkpoints(folder: &Path) -> Vec<(u64, PathBuf)> {
    CheckpointSaver::new(folder.join("gpt.safetensors"))
        .files()
        .expect("a folder")
}

#[test]
fn a_resumed_run_ends_as_one_that_was_not_stopped() {
    for dtype in ["bf16", "f16", "f32"] {
        let options = [
            "--dtype",
            dtype,
            "--steps",
            "12",
            "--evaluate-every",
            "4",
            "--micro-batches",
            "2",
        ];
        let (whole, parts) = (folder(), folder());
        let uninterrupted = run(whole.path(), &options);

        // Once between two validations, once at one, and once before all is done already.
        for stop in ["3", "8", "12"] {
            let resume: &[&str] = if stop == "3" { &[] } else { &["--resume"] };
            let part = run(parts.path(), &[&options, resume, &["--stop-at", stop]].concat());
            assert!(part.status.success());
            assert!(result(&part).starts_with(&format!("result step={stop} ")));
        }
        assert_eq!(
            result(&run(parts.path(), &[&options[..], &["--resume"]].concat())),
            result(&uninterrupted),
            "{dtype}"
        );
        assert!(
            files(parts.path()) == files(whole.path()),
            "{dtype}: the files differ"
        );
    }
}

#[test]
fn ranks_end_with_the_parameters_of_one() {
    for dtype in ["bf16", "f16", "f32"] {
        let on = |ranks: &str| {
            let options = [
                "--dtype",
                dtype,
                "--steps",
                "6",
                "--evaluate-every",
                "3",
                "--micro-batches",
                "2",
                "--ranks",
                ranks,
            ];
            result(&run(folder().path(), &options))
        };
        assert_eq!(on("2"), on("1"), "{dtype}");
    }
}

#[test]
fn a_run_goes_on_on_another_number_of_ranks() {
    for dtype in ["bf16", "f32"] {
        let options = [
            "--dtype",
            dtype,
            "--steps",
            "8",
            "--evaluate-every",
            "4",
            "--micro-batches",
            "2",
        ];
        let uninterrupted = result(&run(folder().path(), &options));
        let parts = folder();
        for (stop, ranks, resume) in [
            ("2", "2", &[][..]),
            ("3", "1", &["--resume"]),
            ("5", "2", &["--resume"]),
        ] {
            result(&run(
                parts.path(),
                &[&options[..], &["--stop-at", stop, "--ranks", ranks], resume].concat(),
            ));
        }
        let last = run(
            parts.path(),
            &[&options[..], &["--ranks", "1", "--resume"]].concat(),
        );
        assert_eq!(result(&last), uninterrupted, "{dtype}");
    }
}

/// Killed ten times, at moments of no order, also while it writes a checkpoint.
#[cfg(unix)]
#[test]
fn a_run_that_is_killed_ends_as_one_that_was_not() {
    const KILLS: u64 = 10;
    let options = [
        "--steps",
        "400",
        "--evaluate-every",
        "50",
        "--checkpoint-every",
        "3",
        "--keep-last",
        "3",
        "--micro-batches",
        "2",
        "--stream",
    ];
    let (whole, killed) = (folder(), folder());
    let uninterrupted = run(whole.path(), &options);
    let mut last = 0;
    for kill in 0..KILLS {
        let resume: &[&str] = if kill == 0 { &[] } else { &["--resume"] };
        let mut command = gpt(killed.path(), &[&options, resume].concat());
        let mut child = command
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .expect("the example runs");
        let start = Instant::now();
        let newest = || checkpoints(killed.path()).last().map_or(0, |(step, _)| *step);
        while newest() <= last {
            assert!(
                start.elapsed() < Duration::from_secs(60) && child.try_wait().expect("a child").is_none(),
                "no checkpoint after {last}"
            );
            std::thread::sleep(Duration::from_micros(200));
        }
        // Up to the time of a few steps, each with its own.
        std::thread::sleep(Duration::from_micros(3000 * (kill * 7 % KILLS)));
        assert!(
            child.try_wait().expect("a child").is_none(),
            "the run was over before it was killed"
        );
        child.kill().expect("a child to kill");
        child.wait().expect("its end");
        last = newest();
        assert!(
            (1..=4).contains(&checkpoints(killed.path()).len()),
            "{:?}",
            checkpoints(killed.path())
        );
    }
    assert_eq!(
        result(&run(killed.path(), &[&options[..], &["--resume"]].concat())),
        result(&uninterrupted)
    );
    let steps = |folder: &Path| {
        checkpoints(folder)
            .into_iter()
            .map(|(step, _)| step)
            .collect::<Vec<_>>()
    };
    assert_eq!(
        (steps(killed.path()), steps(whole.path())),
        (vec![396, 399, 400], vec![396, 399, 400])
    );
    assert!(files(killed.path()) == files(whole.path()), "the files differ");
}

/// A damaged checkpoint is passed over with a word, and written again.
#[test]
fn a_damaged_checkpoint_is_passed_over() {
    let options = ["--steps", "9", "--checkpoint-every", "3", "--keep-last", "3"];
    let (whole, damaged) = (folder(), folder());
    let uninterrupted = run(whole.path(), &options);
    result(&run(
        damaged.path(),
        &[&options[..], &["--stop-at", "6"]].concat(),
    ));
    let (step, last) = checkpoints(damaged.path()).pop().expect("a checkpoint");
    let bytes = fs::read(&last).expect("a checkpoint");
    fs::write(&last, &bytes[..bytes.len() / 2]).expect("a file");
    let resumed = run(damaged.path(), &[&options[..], &["--resume"]].concat());
    let said = String::from_utf8_lossy(&resumed.stderr);
    assert!(
        step == 6
            && said.contains(
                "a checkpoint was passed over: checkpoint gpt-000000006.safetensors: not a whole safetensors \
                 file"
            ),
        "{said}"
    );
    assert_eq!(result(&resumed), result(&uninterrupted));
    assert!(files(damaged.path()) == files(whole.path()), "the files differ");
    assert!(fs::read(&last).expect("a checkpoint") == bytes, "written again");
}

#[cfg(unix)]
#[test]
fn ctrl_c_saves_the_run() {
    let options = [
        "--steps",
        "300",
        "--evaluate-every",
        "100",
        "--checkpoint-every",
        "100000",
    ];
    let (whole, interrupted) = (folder(), folder());

    let mut child = gpt(interrupted.path(), &options)
        .stdout(Stdio::piped())
        .spawn()
        .expect("the example runs");
    let mut lines = BufReader::new(child.stdout.take().expect("a pipe"))
        .lines()
        .map_while(Result::ok);
    let validated = lines.find(|line| line.split_whitespace().next() == Some("100"));
    assert!(validated.is_some(), "no validation at step 100");
    let kill = Command::new("kill")
        .args(["-INT", &child.id().to_string()])
        .status()
        .expect("kill runs");
    assert!(kill.success());
    let last = lines.last().expect("a result");
    assert_eq!(child.wait().expect("an exit status").code(), Some(130), "{last}");
    let step: usize = last
        .split(['=', ' '])
        .nth(2)
        .and_then(|step| step.parse().ok())
        .expect("a step");
    assert!((100..300).contains(&step), "{last}");

    let resumed = run(interrupted.path(), &[&options[..], &["--resume"]].concat());
    assert_eq!(result(&resumed), result(&run(whole.path(), &options)));
    assert!(
        files(interrupted.path()) == files(whole.path()),
        "the files differ"
    );
}

#[test]
fn another_run_is_not_resumed() {
    let folder = folder();
    let options = ["--steps", "4"];
    result(&run(folder.path(), &options));
    let before = files(folder.path());

    let cases: [(&[&str], &[&str]); 5] = [
        (
            &["--resume", "--eta", "0.5"],
            &["--eta ", "(now 0.5)", "repeat its options"],
        ),
        (&["--resume", "--dtype", "f16"], &["--dtype bf16 (now f16)"]),
        (
            &["--resume", "--seed", "7", "--heads", "2"],
            &["--seed 0 (now 7)", "--heads 4 (now 2)"],
        ),
        (
            &["--resume", "--checkpoint", "gpt-loss.png"],
            &[
                "no whole checkpoint such as gpt-loss-000000000.png",
                "without --resume",
            ],
        ),
        (
            &[],
            &["gpt-000000004.safetensors exists", "--resume", "--overwrite"],
        ),
    ];
    let refuse = |more: &[&str], sentences: &[&str]| {
        let output = run(folder.path(), &[&options, more].concat());
        let message = String::from_utf8_lossy(&output.stderr);
        assert!(!output.status.success(), "{more:?} is accepted");
        for sentence in sentences {
            assert!(
                message.contains(sentence),
                "{more:?}: no {sentence:?} in\n{message}"
            );
        }
    };
    for (more, sentences) in cases {
        refuse(more, sentences);
    }
    fs::write(folder.path().join("text.txt"), "to be or not to be ".repeat(30)).expect("a text");
    refuse(
        &["--resume"],
        &["--text of ", "(now of 570 characters with crc32 "],
    );
    assert!(files(folder.path()) == before, "a refused run changed a file");
}

/// The numbers do not depend on how the gradients come.
#[test]
fn segments_have_the_numbers_of_the_whole_network() {
    for dtype in ["bf16", "f16"] {
        let options = [
            "--dtype",
            dtype,
            "--steps",
            "8",
            "--evaluate-every",
            "4",
            "--micro-batches",
            "2",
        ];
        let options = [&options[..], &["--ranks", "2"]].concat();
        let whole = result(&run(folder().path(), &options));
        let segments = run(folder().path(), &[&options[..], &["--segments"]].concat());
        assert_eq!(result(&segments), whole, "{dtype}");
    }
}
