//! What goes to the terminal.

use crate::problem::Problem;
use crate::train::{Run, Study};

/// What is about to happen, and the head of the table.
pub(crate) fn header<P: Problem>(problem: &P, epochs: u32, seed: u64) {
    println!("{}: {} samples, {epochs} epochs, AdamW with η = {}, seed {seed}\n", P::TITLE, problem.samples(), P::ETA);
    println!("{:>30}  {:>10}  {:>8}  {:>15}  {:>17}", "", "train loss", "accuracy", "bytes/parameter", "ns/step/parameter");
}

/// A line of the table.
pub(crate) fn row(run: &Run) {
    let Run { variant, bytes_per_parameter, nanoseconds_per_parameter, .. } = run;
    let (title, loss, told) = (variant.title, run.loss(), run.told());
    println!("{title:>30}  {loss:>10.5}  {told:>8}  {bytes_per_parameter:>15}  {nanoseconds_per_parameter:>17.2}");
}

/// The comparison, one line each, for programs.
pub(crate) fn results(study: &Study) {
    for run in &study.runs {
        let (name, loss, told, bytes) = (run.variant.name, run.loss(), run.told(), run.bytes_per_parameter);
        println!("result {} {name} loss={loss:.6} accuracy={told} bytes_per_parameter={bytes}", study.name);
    }
}
