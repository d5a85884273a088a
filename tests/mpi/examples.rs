//! The examples over ranks that are processes: the numbers of threads, also after a rank was killed.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use crate::job::{Finished, Job, LIMIT, Running, Test, pids, send};
use support::examples::{TINY, folder, program};

/// How far apart the losses of digits may be on other ranks after a few epochs, relative to them: in f32, and
/// with activations and gradients of 16 bits.
const TOLERANCES: [(&str, f64); 4] = [
    ("f32", 1e-5),
    ("bf16+master", 5e-3),
    ("f16+master", 5e-3),
    ("bf16", 5e-3),
];

pub fn tests() -> Vec<Test> {
    let mut tests: Vec<Test> = Vec::new();
    for ranks in [1, 2, 4] {
        tests.push((
            format!("gpt_has_the_numbers_of_threads::{ranks}_ranks"),
            Box::new(move || whole(ranks)),
        ));
    }
    tests.push((
        "gpt_goes_on_on_others_after_a_rank_was_killed".to_string(),
        Box::new(killed),
    ));
    tests.push((
        "gpt_saves_where_one_rank_is_interrupted".to_string(),
        Box::new(interrupted),
    ));
    let refusals: [(&str, &'static [&str], &str); 3] = [
        ("before_mpi", &["--micro-batches", "two"], "invalid value 'two'"),
        (
            "by_the_number_of_ranks",
            &["--micro-batches", "1"],
            "--micro-batches 1 cannot be shared by 2 ranks",
        ),
        (
            "in_training",
            &[
                "--micro-batches",
                "2",
                "--eta",
                "1e30",
                "--dtype",
                "f16",
                "--steps",
                "10",
            ],
            "the training loss is NaN",
        ),
    ];
    for (name, options, sentence) in refusals {
        tests.push((
            format!("gpt_says_an_error_once::{name}"),
            Box::new(move || refused(options, sentence)),
        ));
    }
    tests.push((
        "digits_has_the_losses_of_one_process".to_string(),
        Box::new(digits),
    ));
    tests
}

fn gpt() -> &'static Path {
    static GPT: OnceLock<PathBuf> = OnceLock::new();
    GPT.get_or_init(|| program("gpt"))
}

/// A run of gpt on so many processes.
fn over(ranks: usize, options: &[&str], folder: tempfile::TempDir) -> Running {
    let options = [&TINY[..], options, &["--ranks", "mpi"]].concat();
    Job::of(gpt(), &options, ranks, folder).start()
}

/// What a program without ranks, or with ranks that are threads, says.
fn alone(program: &Path, options: &[&str], folder: &Path) -> Result<String, String> {
    let output = Command::new(program)
        .args(options)
        .current_dir(folder)
        .output()
        .map_err(|error| error.to_string())?;
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    if output.status.success() {
        Ok(said)
    } else {
        Err(format!("{said}\n{}", String::from_utf8_lossy(&output.stderr)))
    }
}

/// The lines for programs, which one rank alone prints.
fn results(said: &str) -> Vec<&str> {
    said.lines().filter(|line| line.starts_with("result ")).collect()
}

fn same(said: &str, expected: &str) -> Result<(), String> {
    let (own, expected) = (results(said), results(expected));
    if own == expected && !own.is_empty() {
        Ok(())
    } else {
        Err(format!("{own:?} and not {expected:?}\n{said}"))
    }
}

fn successful(finished: Finished) -> Result<Finished, String> {
    if finished.status.success() {
        Ok(finished)
    } else {
        Err(format!("{}\n{}", finished.status, finished.said))
    }
}

/// Two micro-batches have one sum, on one rank or on two.
const SHARED: [&str; 6] = [
    "--micro-batches",
    "2",
    "--evaluate-every",
    "10",
    "--checkpoint-every",
    "5",
];

fn whole(ranks: usize) -> Result<(), String> {
    let options = ["--micro-batches", "4", "--steps", "10"];
    let number = ranks.to_string();
    let threads = [&TINY[..], &options, &["--ranks", &number]].concat();
    let threads = alone(gpt(), &threads, folder().path())?;
    let finished = successful(over(ranks, &options, folder()).finish(LIMIT)?)?;
    same(&finished.said, &threads)
}

/// A run of two ranks once it has come to its tenth step; the steps that follow take seconds.
fn under_way(options: &[&str]) -> Result<Running, String> {
    let (running, started) = (over(2, options, folder()), Instant::now());
    while !running.said().contains("\n      10 ") {
        if started.elapsed() > LIMIT {
            return Err(running.finish(Duration::ZERO).err().unwrap_or_default());
        }
        std::thread::sleep(Duration::from_millis(1));
    }
    Ok(running)
}

/// Over two processes until one is killed, then over one, then over two threads.
fn killed() -> Result<(), String> {
    let options = [&SHARED[..], &["--steps", "60"]].concat();
    let one = alone(gpt(), &[&TINY[..], &options].concat(), folder().path())?;
    let running = under_way(&options)?;
    send("KILL", pids(running.folder.path())[1]);
    let finished = running.finish(LIMIT)?;
    if finished.status.success() {
        return Err(format!("a good end\n{}", finished.said));
    }
    let alone_on = [&options[..], &["--resume", "--stop-at", "50"]].concat();
    let finished = successful(over(1, &alone_on, finished.folder).finish(LIMIT)?)?;
    if !finished.said.contains("result step=50 ") {
        return Err(finished.said);
    }
    let threads = [&TINY[..], &options, &["--resume", "--ranks", "2"]].concat();
    same(&alone(gpt(), &threads, finished.folder.path())?, &one)
}

/// All ranks stop after the step in which one heard of it.
fn interrupted() -> Result<(), String> {
    let options = [&SHARED[..4], &["--steps", "60", "--checkpoint-every", "1000"]].concat();
    let one = alone(gpt(), &[&TINY[..], &options].concat(), folder().path())?;
    let running = under_way(&options)?;
    send("INT", pids(running.folder.path())[1]);
    let finished = running.finish(LIMIT)?;
    if finished.status.code() != Some(130)
        || results(&finished.said).len() != 1
        || !finished.said.contains("of 60 steps; the same command")
    {
        return Err(format!("{}\n{}", finished.status, finished.said));
    }
    let resumed = [&options[..], &["--resume"]].concat();
    same(
        &successful(over(1, &resumed, finished.folder).finish(LIMIT)?)?.said,
        &one,
    )
}

fn refused(options: &[&str], sentence: &str) -> Result<(), String> {
    let finished = over(2, options, folder()).finish(LIMIT)?;
    let is_said_once = finished.said.matches(sentence).count() == 1;
    if is_said_once && !finished.status.success() {
        Ok(())
    } else {
        Err(format!("{}\n{}", finished.status, finished.said))
    }
}

/// The name and the loss of each variant.
fn losses(said: &str) -> Vec<(&str, f64)> {
    let loss = |line: &str| line.split(" loss=").nth(1)?.split(' ').next()?.parse().ok();
    results(said)
        .into_iter()
        .map(|line| {
            (
                line.split(' ').nth(1).expect("a name"),
                loss(line).expect("a loss"),
            )
        })
        .collect()
}

/// Threads and processes have the same bits; one rank has them but for the rounding of means over half a
/// batch.
fn digits() -> Result<(), String> {
    let (digits, here) = (program("digits"), tempfile::tempdir().expect("a folder"));
    let run = |ranks| alone(&digits, &["--epochs", "2", "--ranks", ranks], here.path());
    let [one, threads] = [run("1")?, run("2")?];
    let job = Job::of(
        &digits,
        &["--epochs", "2", "--ranks", "mpi"],
        2,
        tempfile::tempdir().expect("a folder"),
    );
    let processes = successful(job.start().finish(LIMIT)?)?.said;
    same(&processes, &threads)?;
    let pairs: Vec<_> = losses(&one).into_iter().zip(losses(&processes)).collect();
    let is_close = |((name, one), (_, other)): ((&str, f64), (&str, f64)), tolerance: (&str, f64)| {
        name == tolerance.0 && (one - other).abs() <= tolerance.1 * one
    };
    let are_close = pairs.len() == TOLERANCES.len()
        && pairs
            .iter()
            .zip(TOLERANCES)
            .all(|(pair, tolerance)| is_close(*pair, tolerance));
    if are_close {
        Ok(())
    } else {
        Err(format!("{pairs:?}"))
    }
}
