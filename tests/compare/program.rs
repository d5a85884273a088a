//! Runs random trainings through two commits of the crate and compares every bit.
//!
//! `compare [cases for each rule] [first seed]`. A difference names the rule, the seed, the call and the
//! tensor; the program then ends with 1.

use std::collections::BTreeMap;

use case::{Case, Run};

/// What the first difference is.
fn difference(before: &Run, now: &Run) -> Option<String> {
    let (before, now) = match (before, now) {
        (None, None) => return None,
        (Some(before), Some(now)) => (before, now),
        (Some(_), None) => return Some("the model is refused now".to_string()),
        (None, Some(_)) => return Some("the model was refused before".to_string()),
    };
    let calls = before.iter().zip(now).enumerate();
    calls
        .filter(|(_, (before, now))| before != now)
        .map(|(call, ((was_taken, before), (is_taken, now)))| {
            if was_taken != is_taken {
                return format!(
                    "call {call}: {}",
                    if *is_taken { "was refused before" } else { "is refused now" }
                );
            }
            let names =
                |all: &[(String, Vec<u64>)]| all.iter().map(|(name, _)| name.clone()).collect::<Vec<_>>();
            if names(before) != names(now) {
                return format!("call {call}: {:?} before, {:?} now", names(before), names(now));
            }
            let (name, before, now) = before
                .iter()
                .zip(now)
                .find(|(a, b)| a != b)
                .map(|((name, a), (_, b))| (name, a, b))
                .expect("a difference");
            let element =
                before.iter().zip(now).position(|(a, b)| a != b).unwrap_or(before.len().min(now.len()));
            let number = |bits: &[u64]| {
                bits.get(element)
                    .map(|bits| format!("{:e} ({bits:x})", f64::from_bits(*bits)))
                    .unwrap_or_default()
            };
            format!("call {call}: {name}[{element}] was {}, is {}", number(before), number(now))
        })
        .next()
}

fn main() {
    let mut arguments = std::env::args().skip(1).map(|argument| argument.parse::<u64>().expect("a number"));
    let (count, first) = (arguments.next().unwrap_or(60), arguments.next().unwrap_or(1));
    let rules: Vec<String> = before::names().into_iter().filter(|name| now::names().contains(name)).collect();
    let (mut refused, mut compared, mut different) = (0, 0, BTreeMap::<String, (u64, String)>::new());
    for (index, rule) in rules.iter().enumerate() {
        for seed in (first..first + count).map(|seed| seed + ((index as u64) << 32)) {
            let case = Case::new(seed, rule, &rules);
            let (before, now) = (before::run(&case), now::run(&case));
            if let Some(difference) = difference(&before, &now) {
                let Case { around, moments, store, slices, tensors, .. } = &case;
                let what = format!(
                    "seed {seed}, {:?}, {around:?}, {moments:?}, {store:?}, slices {slices}, tensors \
                     {tensors}: {difference}",
                    case.rules
                );
                let entry = different.entry(rule.clone()).or_insert((0, what));
                entry.0 += 1;
            }
            match before {
                Some(_) => compared += 1,
                None => refused += 1,
            }
        }
    }
    println!("{} rules, {compared} trainings compared, {refused} refused", rules.len());
    for (rule, (times, first)) in &different {
        println!("{rule}: {times} differ, the first: {first}");
    }
    std::process::exit(i32::from(!different.is_empty()));
}
