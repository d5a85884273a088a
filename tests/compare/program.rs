//! Runs random trainings through two commits of the crate and compares every bit.
//!
//! `compare [cases for each rule] [first seed]`. A difference names the rule, the seed, the event and the tensor;
//! the program then ends with 1. It also does if a kind of case was never compared.

use std::collections::{BTreeMap, BTreeSet};

use case::{After, Case, Event, Run};

/// What the first difference is, and after which event.
fn difference(case: &Case, before: &Run, now: &Run) -> Option<String> {
    let (before, now) = match (before, now) {
        (None, None) => return None,
        (Some(before), Some(now)) => (before, now),
        (Some(_), None) => return Some("the model is refused now".to_string()),
        (None, Some(_)) => return Some("the model was refused before".to_string()),
    };
    let index = before.iter().zip(now).position(|(before, now)| before != now)?;
    let event = match &case.events[index] {
        Event::Step(step) => format!("a step {:?}", step.delivery),
        Event::Add(parameter) => {
            format!(
                "Add a parameter of {:?} in {:?}",
                parameter.shape, parameter.format
            )
        }
        event => format!("{event:?}"),
    };
    Some(format!(
        "event {index}, {event}: {}",
        first(&before[index], &now[index])
    ))
}

/// The first difference after an event.
fn first(before: &After, now: &After) -> String {
    if before.taken != now.taken {
        return (if now.taken {
            "was refused before"
        } else {
            "is refused now"
        })
        .to_string();
    }
    let names = |after: &After| {
        after
            .bits
            .iter()
            .map(|(name, _)| name.clone())
            .collect::<Vec<_>>()
    };
    if names(before) != names(now) {
        return format!("{:?} before, {:?} now", names(before), names(now));
    }
    let mut pairs = before.bits.iter().zip(&now.bits);
    let Some(((name, before), (_, now))) = pairs.find(|(before, now)| before != now) else {
        return "none".to_string();
    };
    let element = before
        .iter()
        .zip(now)
        .position(|(a, b)| a != b)
        .unwrap_or(before.len().min(now.len()));
    let number = |bits: &[u64]| match bits.get(element) {
        Some(bits) => format!("{:e} ({bits:x})", f64::from_bits(*bits)),
        None => "missing".to_string(),
    };
    format!("{name}[{element}] was {}, is {}", number(before), number(now))
}

/// How many trainings of a kind were compared, in how many of them no event was refused, how many models both
/// sides have refused, and how many trainings were different.
#[derive(Default)]
struct Count {
    compared: u64,
    whole: u64,
    refused: u64,
    different: u64,
}

fn main() {
    let mut arguments = std::env::args()
        .skip(1)
        .map(|argument| argument.parse::<u64>().expect("a number"));
    let (count, first) = (arguments.next().unwrap_or(60), arguments.next().unwrap_or(1));
    let rules: Vec<String> = before::names()
        .into_iter()
        .filter(|name| now::names().contains(name))
        .collect();
    let folder = std::env::temp_dir().join(format!("optimisers-compare-{}", std::process::id()));
    std::fs::create_dir_all(&folder).expect("a folder");
    let mut kinds = BTreeMap::<&str, Count>::new();
    let mut different = BTreeMap::<String, (u64, String)>::new();
    for (index, rule) in rules.iter().enumerate() {
        for seed in (first..first + count).map(|seed| seed + ((index as u64) << 32)) {
            let case = Case::new(seed, rule, &rules, folder.join("checkpoint.safetensors"));
            let (before, now) = (before::run(&case), now::run(&case));
            let difference = difference(&case, &before, &now);
            let names: BTreeSet<&str> = case.kinds().into_iter().chain(["all"]).collect();
            for name in &names {
                let kind = kinds.entry(name).or_default();
                *(if before.is_some() {
                    &mut kind.compared
                } else {
                    &mut kind.refused
                }) += 1;
                kind.whole += u64::from(before.iter().flatten().all(|after| after.taken) && before.is_some());
                kind.different += u64::from(difference.is_some());
            }
            if let Some(difference) = difference {
                let Case {
                    around,
                    moments,
                    store,
                    curve,
                    ranks,
                    slices,
                    tensors,
                    ..
                } = &case;
                let what = format!(
                    "seed {seed}, {:?}, {around:?}, {moments:?}, {store:?}, {curve:?}, ranks {ranks}, \
                     slices {slices}, tensors {tensors}: {difference}",
                    case.rules
                );
                different.entry(rule.clone()).or_insert((0, what)).0 += 1;
            }
        }
    }
    let _ = std::fs::remove_dir_all(&folder);
    println!(
        "{} rules; trainings compared, whole, refused by both sides, different:",
        rules.len()
    );
    for (
        kind,
        Count {
            compared,
            whole,
            refused,
            different,
        },
    ) in &kinds
    {
        println!("{compared:6} {whole:6} {refused:5} {different:5}  {kind}");
    }
    for (rule, (times, first)) in &different {
        println!("{rule}: {times} differ, the first: {first}");
    }
    // With few cases a kind may be absent by chance, which would be no comparison of it either.
    let missing: Vec<_> = case::KINDS
        .iter()
        .filter(|kind| kinds.get(*kind).is_none_or(|kind| kind.whole == 0))
        .collect();
    if !missing.is_empty() {
        println!("never compared without a refusal: {missing:?}");
    }
    std::process::exit(i32::from(!different.is_empty() || !missing.is_empty()));
}
