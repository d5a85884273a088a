//! All rules on the same runs, in one table.

use std::error::Error;

use candle_core::Device;
use clap::ValueEnum;

use crate::ranks::World;
use crate::rules::RuleName;
use crate::settings::Settings;
use crate::text::Text;
use crate::trainer::Trainer;

/// What came of the runs of a rule, one for each seed.
struct Row {
    losses: Vec<f32>,
    /// Of an update, per parameter.
    nanoseconds: f64,
    /// Of parameter and state on all ranks, per parameter.
    bytes: f64,
}

/// Trains with every rule and this many seeds, and prints a table in Markdown. A rule that diverges has the
/// loss NaN.
pub(crate) fn compare(
    settings: &Settings,
    seeds: u64,
    text: &Text,
    device: &Device,
    world: &World,
) -> Result<(), Box<dyn Error>> {
    let say = |line: String| {
        if world.is_first() {
            println!("{line}");
        }
    };
    say(
        "| `--rule` | η | validation loss | ns per parameter and step | bytes per parameter |\n\
         | --- | --- | --- | --- | --- |"
            .to_string(),
    );
    let chosen = settings
        .rule
        .map_or(RuleName::value_variants().to_vec(), |rule| vec![rule]);
    for rule in chosen {
        let of_rule = Settings {
            rule: Some(rule),
            ..settings.clone()
        };
        let row = row(&of_rule, seeds, text, device, world)?;
        let name = rule
            .to_possible_value()
            .map_or(String::new(), |name| name.get_name().to_string());
        let (mean, deviation) = mean_and_deviation(&row.losses);
        say(format!(
            "| `{name}` | {} | {mean:.3} ± {deviation:.3} | {:.1} | {:.2} |",
            of_rule.eta(),
            row.nanoseconds,
            row.bytes
        ));
    }
    Ok(())
}

fn row(
    settings: &Settings,
    seeds: u64,
    text: &Text,
    device: &Device,
    world: &World,
) -> Result<Row, Box<dyn Error>> {
    let (mut losses, mut nanoseconds, mut bytes) = (Vec::new(), 0.0, 0.0);
    for seed in 0..seeds {
        let settings = Settings {
            seed,
            ..settings.clone()
        };
        let mut trainer = Trainer::new(&settings, text, device, world.clone())?;
        let trained = (0..settings.steps).try_for_each(|_| trainer.step(&settings, text, false).map(drop));
        losses.push(
            trained
                .and_then(|()| trainer.validation_loss(&settings, text))
                .unwrap_or(f32::NAN),
        );
        let elements = trainer.state.elements() as f64;
        nanoseconds +=
            trainer.updating.as_nanos() as f64 / (elements * trainer.history.steps() as f64) / seeds as f64;
        let state: usize = world
            .of_all(trainer.state.bytes().to_le_bytes())?
            .into_iter()
            .map(usize::from_le_bytes)
            .sum();
        bytes = (state + trainer.parameter_bytes()) as f64 / elements;
    }
    Ok(Row {
        losses,
        nanoseconds,
        bytes,
    })
}

/// The mean, and by how much single runs differ from it.
fn mean_and_deviation(losses: &[f32]) -> (f64, f64) {
    let count = losses.len() as f64;
    let mean = losses.iter().map(|&loss| f64::from(loss)).sum::<f64>() / count;
    let squares: f64 = losses.iter().map(|&loss| (f64::from(loss) - mean).powi(2)).sum();
    (mean, (squares / (count - 1.0).max(1.0)).sqrt())
}
