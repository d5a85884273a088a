//! Lists of names in messages, and the name that the user may have meant.

use std::collections::HashSet;
use std::fmt::Display;

use super::{Error, ErrorKind};

impl Error {
    /// The error for an unknown name. `what` is the kind of thing with that name: "rule". The message
    /// suggests the nearest available name.
    pub(crate) fn unknown(what: impl Display, name: &str, available: &[impl AsRef<str>]) -> Self {
        Error::new(
            ErrorKind::UnknownName,
            format!("there is no {what} {name:?}{}", suggestion(name, available)),
        )
        .with_expected(one_of(available))
    }

    /// [`Error::unknown`] for a path of a model. The message has only the first of the available paths.
    pub(crate) fn unknown_path<'p>(what: &str, path: &str, paths: impl Iterator<Item = &'p str>) -> Self {
        let paths: Vec<&str> = paths.collect();
        Error::unknown(what, path, &paths).with_expected(one_of(&first_names(paths.into_iter())))
    }
}

/// The available names, as text for [`Error::with_expected`].
pub(crate) fn one_of(available: &[impl AsRef<str>]) -> String {
    format!(
        "{}{}",
        if available.is_empty() { "" } else { "one of: " },
        comma_separated(available)
    )
}

/// Names with commas, or "none". An empty name, which is the path of a model that is a single variable,
/// becomes `""`.
pub(crate) fn comma_separated(names: &[impl AsRef<str>]) -> String {
    if names.is_empty() {
        return "none".to_string();
    }
    names
        .iter()
        .map(|name| {
            if name.as_ref().is_empty() {
                "\"\""
            } else {
                name.as_ref()
            }
        })
        .collect::<Vec<_>>()
        .join(", ")
}

/// The first names and "..." for the rest, because a model may have thousands.
pub(crate) fn first_names(names: impl Iterator<Item = impl Into<String>>) -> Vec<String> {
    const LISTED: usize = 20;
    let mut names: Vec<String> = names.take(LISTED + 1).map(Into::into).collect();
    if names.len() > LISTED {
        names[LISTED] = "...".to_string();
    }
    names
}

/// The names without repetitions, in the order of their first occurrence.
pub(crate) fn distinct<'n>(names: impl Iterator<Item = &'n str>) -> Vec<String> {
    let mut earlier = HashSet::new();
    names
        .filter(|name| earlier.insert(*name))
        .map(str::to_string)
        .collect()
}

/// Names in other libraries and of other rules, each with the name in this crate. If a name has several rows,
/// the first row whose second name is available counts.
const SYNONYMS: [(&str, &str); 13] = [
    ("lr", "eta"),
    ("learning_rate", "eta"),
    ("weight_decay", "lambda"),
    ("betas", "beta"),
    ("beta1", "beta"),
    ("beta2", "beta"),
    ("eps", "epsilon"),
    ("momentum", "rho"),
    ("max_norm", "omega"),
    ("lambda", "decay_lambda"),
    ("weight_decay", "decay_lambda"),
    ("eta_max", "decay_eta_max"),
    ("lr", "first_step_size"),
];

/// The available name that an unknown one may mean, as text in brackets; empty if no name is near.
pub(crate) fn suggestion(name: &str, available: &[impl AsRef<str>]) -> String {
    /// Names of this crate are much shorter, and the time of `edit_distance` grows with both lengths.
    const LONGEST: usize = 64;
    if name.len() > LONGEST {
        return String::new();
    }
    let candidates = || available.iter().map(AsRef::as_ref);
    let is_available = |ours: &str| candidates().any(|candidate| candidate == ours);
    let synonym = SYNONYMS
        .iter()
        .find(|(theirs, ours)| *theirs == name && is_available(ours));
    let is_same = |candidate: &str| candidate.eq_ignore_ascii_case(name);
    let nearest = || {
        let distances = candidates().map(|candidate| (edit_distance(name, candidate), candidate));
        let (distance, candidate) = distances.min()?;
        (distance <= (name.len() / 3).min(2)).then_some(candidate)
    };
    let best = synonym
        .map(|(_, ours)| *ours)
        .or_else(|| candidates().find(|candidate| is_same(candidate)))
        .or_else(nearest);
    best.map_or_else(String::new, |best| format!(" (did you mean {best}?)"))
}

/// The edit distance of two words: the number of letters to leave out, add, exchange, or swap with their
/// neighbour (optimal string alignment). `rows[i][j]` is the distance of the first i and j letters.
fn edit_distance(from: &str, to: &str) -> usize {
    let (from, to): (Vec<char>, Vec<char>) = (from.chars().collect(), to.chars().collect());
    let mut rows = vec![(0..=to.len()).collect::<Vec<usize>>()];
    for i in 1..=from.len() {
        let mut row = vec![i];
        for j in 1..=to.len() {
            let exchanged = rows[i - 1][j - 1] + usize::from(from[i - 1] != to[j - 1]);
            let is_swap = i > 1 && j > 1 && from[i - 1] == to[j - 2] && from[i - 2] == to[j - 1];
            let swapped = if is_swap {
                rows[i - 2][j - 2] + 1
            } else {
                usize::MAX
            };
            row.push(exchanged.min(rows[i - 1][j] + 1).min(row[j - 1] + 1).min(swapped));
        }
        rows.push(row);
    }
    rows[from.len()][to.len()]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_nearest_name_is_meant() {
        let rules = ["Adam", "AdamW", "Lion", "ClipGlobalNorm", "eta", "beta", "lambda"].map(str::to_string);
        let cases = [
            ("AdmaW", "AdamW"),
            ("adamw", "AdamW"),
            ("ClipGlobalNrm", "ClipGlobalNorm"),
            ("lr", "eta"),
            ("weight_decay", "lambda"),
            ("lamda", "lambda"),
        ];
        for (name, expected) in cases {
            assert_eq!(suggestion(name, &rules), format!(" (did you mean {expected}?)"));
        }
        let decay = ["decay_lambda", "decay_eta_max"].map(str::to_string);
        assert_eq!(
            suggestion("weight_decay", &decay),
            " (did you mean decay_lambda?)"
        );
        assert_eq!(suggestion("eta_max", &decay), " (did you mean decay_eta_max?)");
        for name in ["SGD", "momentum", "x", "", "inf"] {
            assert_eq!(suggestion(name, &rules), "", "{name}");
        }
    }
}
