//! The laws of ranks where they are processes of an MPI job, and the examples over such ranks. This program
//! starts itself under `mpirun`, once for each job: `cargo test --features mpi --test mpi -- [FILTER]`.
//!
//! `KILLS=200` sets how many jobs have a rank killed while it saves.

mod examples;
mod faults;
mod job;
mod laws;

use std::process::ExitCode;

use self::job::{Job, Test, Transport};

fn main() -> ExitCode {
    if let Some(case) = job::case() {
        return match laws::CASES
            .iter()
            .chain(faults::CASES)
            .find(|(name, _)| *name == case)
        {
            Some((_, run)) => run(),
            None => panic!("no case {case:?}"),
        };
    }
    let mut tests: Vec<Test> = Vec::new();
    for ranks in 1..=4 {
        for transport in [Transport::SharedMemory, Transport::Tcp] {
            for (case, _) in laws::CASES {
                tests.push((
                    format!("{case}::{ranks}_ranks::{transport}"),
                    Box::new(move || Job::new(case, ranks).over(transport).passes()),
                ));
            }
        }
    }
    tests.extend(faults::tests());
    tests.extend(examples::tests());
    let filters: Vec<String> = std::env::args()
        .skip(1)
        .filter(|argument| !argument.starts_with('-'))
        .collect();
    tests.retain(|(name, _)| {
        filters.is_empty() || filters.iter().any(|filter| name.contains(filter.as_str()))
    });
    println!("running {} tests", tests.len());
    let mut failed = Vec::new();
    for (name, test) in &tests {
        let outcome = test();
        println!(
            "test {name} ... {}",
            if outcome.is_ok() { "ok" } else { "FAILED" }
        );
        failed.extend(outcome.err().map(|reason| format!("---- {name} ----\n{reason}")));
    }
    println!(
        "\n{}\ntest result: {} passed; {} failed",
        failed.join("\n"),
        tests.len() - failed.len(),
        failed.len()
    );
    if failed.is_empty() {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    }
}
