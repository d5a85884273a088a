//! What goes to the terminal.

use optimisers::Rule;

use crate::Args;
use crate::data::Digits;
use crate::train::{GOAL, Run};

/// What is about to happen.
pub(crate) fn header(digits: &Digits, rule: &dyn Rule, args: &Args, ranks: usize) {
    let shared = if ranks > 1 {
        format!(", on {ranks} ranks")
    } else {
        String::new()
    };
    println!(
        "{} training images, {} test images, {} epochs, seed {}{shared}",
        digits.train.len(),
        digits.test.len(),
        args.epochs,
        args.seed
    );
    println!("{}; bf16: candle-nn's AdamW\n", describe(rule));
}

/// The rule with its hyper-parameters.
pub(crate) fn describe(rule: &dyn Rule) -> String {
    let fields: Vec<String> = rule
        .fields()
        .iter()
        .map(|(name, value)| format!("{name} = {value}"))
        .collect();
    format!("{} ({})", rule.name(), fields.join(", "))
}

/// The comparison, for people.
pub(crate) fn table(runs: &[Run]) {
    let goal = format!("epochs to {GOAL}");
    println!(
        "{:>11}  {:>10}  {:>13}  {goal:>14}  {:>21}  {:>7}",
        "", "train loss", "test accuracy", "state bytes/parameter", "seconds"
    );
    for run in runs {
        let Run {
            variant,
            accuracy,
            state_bytes_per_parameter,
            seconds,
            ..
        } = run;
        let (name, loss, epochs) = (variant.name, run.loss(), epochs_to_goal(run));
        println!(
            "{name:>11}  {loss:>10.5}  {accuracy:>13.4}  {epochs:>14}  {state_bytes_per_parameter:>21}  \
             {seconds:>7.1}"
        );
    }
}

/// The comparison, one line each, for programs.
pub(crate) fn results(runs: &[Run]) {
    for run in runs {
        let (name, loss) = (run.variant.name, run.loss());
        let Run {
            accuracy,
            state_bytes_per_parameter,
            ..
        } = run;
        let epochs = epochs_to_goal(run);
        println!(
            "result {name} accuracy={accuracy:.4} loss={loss:.6} epochs_to_goal={epochs} \
             state_bytes_per_parameter={state_bytes_per_parameter}"
        );
    }
}

fn epochs_to_goal(run: &Run) -> String {
    run.epochs_to_goal
        .map_or("-".to_string(), |epochs| epochs.to_string())
}
