//! What goes to the terminal.

use std::error::Error;

use crate::problem::Problem;
use crate::train::{Run, Study};

/// What is about to happen, and the head of the table.
pub(crate) fn header<P: Problem>(problem: &P, epochs: u32, seed: u64) {
    println!(
        "{}: {} samples, {epochs} epochs, AdamW with η = {}, seed {seed}\n",
        P::TITLE,
        problem.samples(),
        P::ETA
    );
    println!(
        "{:>40}  {:>10}  {:>8}  {:>15}  {:>17}",
        "", "train loss", "accuracy", "bytes/parameter", "ns/step/parameter"
    );
}

/// A line of the table.
pub(crate) fn row(run: &Run) {
    let Run {
        variant,
        bytes_per_parameter,
        nanoseconds_per_parameter,
        ..
    } = run;
    let (title, loss, told) = (variant.title, run.loss(), run.told());
    println!(
        "{title:>40}  {loss:>10.5}  {told:>8}  {bytes_per_parameter:>15.2}  \
         {nanoseconds_per_parameter:>17.2}"
    );
}

/// The comparison, one line each, for programs. Distances are from the first variant.
pub(crate) fn results(study: &Study) -> Result<(), Box<dyn Error>> {
    for run in &study.runs {
        let (name, loss, told, bytes) = (run.variant.name, run.loss(), run.told(), run.bytes_per_parameter);
        let distance = study.runs[0].distance_to(run)?;
        println!(
            "result {} {name} loss={loss:.6} accuracy={told} bytes_per_parameter={bytes:.3} \
             distance={distance:.4}",
            study.name
        );
    }
    Ok(())
}

/// What several seeds have come to: means and standard deviations of the losses, and of what they are above
/// those of the first variant with the same seed.
pub(crate) fn spread(studies: &[Study]) {
    let Some(first) = studies.first() else { return };
    println!(
        "\n{}, {} seeds: last losses, and those above {}'s of the same seed",
        first.title,
        studies.len(),
        first.runs[0].variant.title
    );
    for (i, run) in first.runs.iter().enumerate() {
        let losses: Vec<f64> = studies.iter().map(|study| study.runs[i].loss().into()).collect();
        let above: Vec<f64> = studies
            .iter()
            .zip(&losses)
            .map(|(study, loss)| loss - f64::from(study.runs[0].loss()))
            .collect();
        let [(loss, of_loss), (more, of_more)] = [mean_and_deviation(&losses), mean_and_deviation(&above)];
        let name = run.variant.name;
        println!(
            "spread {} {name} loss={loss:.6} sd={of_loss:.6} above={more:.6} sd_above={of_more:.6}",
            first.name
        );
    }
}

fn mean_and_deviation(values: &[f64]) -> (f64, f64) {
    let count = values.len() as f64;
    let mean = values.iter().sum::<f64>() / count;
    let squares = values.iter().map(|value| (value - mean).powi(2)).sum::<f64>();
    (mean, (squares / (count - 1.0).max(1.0)).sqrt())
}
