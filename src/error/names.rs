//! Lists of names in messages, and the name that the user may have meant.

use std::collections::HashSet;
use std::fmt::Display;

use super::{Error, ErrorKind};

impl Error {
    /// The error for an unknown name. `what` is the kind of thing that is named: "rule". The message suggests
    /// the nearest available name.
    pub(crate) fn unknown(what: impl Display, name: &str, available: &[impl AsRef<str>]) -> Self {
        Error::new(ErrorKind::UnknownName, format!("there is no {what} {name:?}{}", meant(name, available)))
            .with_expected(one_of(available))
    }

    /// [`Error::unknown`] among the paths of a model, of which the message has only the first.
    pub(crate) fn unknown_path<'p>(what: &str, path: &str, paths: impl Iterator<Item = &'p str>) -> Self {
        let paths: Vec<&str> = paths.collect();
        Error::unknown(what, path, &paths).with_expected(one_of(&listed(paths.into_iter())))
    }
}

/// The available names, as text for [`Error::with_expected`].
pub(crate) fn one_of(available: &[impl AsRef<str>]) -> String {
    format!("{}{}", if available.is_empty() { "" } else { "one of: " }, joined(available))
}

/// Names with commas, or "none". An empty name, which is the path of a model that is a single variable, is in
/// quotes.
pub(crate) fn joined(names: &[impl AsRef<str>]) -> String {
    if names.is_empty() {
        return "none".to_string();
    }
    names
        .iter()
        .map(|name| if name.as_ref().is_empty() { "\"\"" } else { name.as_ref() })
        .collect::<Vec<_>>()
        .join(", ")
}

/// The first names and "..." for the rest, because a model may have thousands.
pub(crate) fn listed(names: impl Iterator<Item = impl Into<String>>) -> Vec<String> {
    const LISTED: usize = 20;
    let mut names: Vec<String> = names.take(LISTED + 1).map(Into::into).collect();
    if names.len() > LISTED {
        names[LISTED] = "...".to_string();
    }
    names
}

/// The names without those that stand before, in their order.
pub(crate) fn each_once<'n>(names: impl Iterator<Item = &'n str>) -> Vec<String> {
    let mut known = HashSet::new();
    names.filter(|name| known.insert(*name)).map(str::to_string).collect()
}

/// Names in other libraries and of other rules, each with the name of this crate. A name may occur twice: the
/// first row whose second name is available counts.
const ELSEWHERE: [(&str, &str); 12] = [
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
];

/// The available name that an unknown one may mean, as text in brackets; empty if no name is near.
pub(crate) fn meant(name: &str, available: &[impl AsRef<str>]) -> String {
    /// No name of this crate is nearly as long, and `edits` takes time in proportion to both lengths.
    const LONGEST: usize = 64;
    if name.len() > LONGEST {
        return String::new();
    }
    let available = || available.iter().map(AsRef::as_ref);
    let is_available = |ours: &str| available().any(|known| known == ours);
    let elsewhere = ELSEWHERE.iter().find(|(theirs, ours)| *theirs == name && is_available(ours));
    let is_same = |known: &str| known.eq_ignore_ascii_case(name);
    let nearest = || {
        let near = available().map(|known| (edits(name, known), known));
        near.min().filter(|(edits, _)| *edits <= (name.len() / 3).min(2)).map(|(_, known)| known)
    };
    let found = elsewhere
        .map(|(_, ours)| *ours)
        .or_else(|| available().find(|known| is_same(known)))
        .or_else(nearest);
    found.map_or_else(String::new, |found| format!(" (did you mean {found}?)"))
}

/// The edit distance of two words: the number of letters to leave out, add, exchange, or swap with their
/// neighbour (optimal string alignment). `rows[i][j]` is the distance of the first i and j letters.
fn edits(from: &str, to: &str) -> usize {
    let (from, to): (Vec<char>, Vec<char>) = (from.chars().collect(), to.chars().collect());
    let mut rows = vec![(0..=to.len()).collect::<Vec<usize>>()];
    for i in 1..=from.len() {
        let mut row = vec![i];
        for j in 1..=to.len() {
            let exchanged = rows[i - 1][j - 1] + usize::from(from[i - 1] != to[j - 1]);
            let is_swap = i > 1 && j > 1 && from[i - 1] == to[j - 2] && from[i - 2] == to[j - 1];
            let swapped = if is_swap { rows[i - 2][j - 2] + 1 } else { usize::MAX };
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
            assert_eq!(meant(name, &rules), format!(" (did you mean {expected}?)"));
        }
        let decay = ["decay_lambda", "decay_eta_max"].map(str::to_string);
        assert_eq!(meant("weight_decay", &decay), " (did you mean decay_lambda?)");
        assert_eq!(meant("eta_max", &decay), " (did you mean decay_eta_max?)");
        for name in ["SGD", "momentum", "x", "", "inf"] {
            assert_eq!(meant(name, &rules), "", "{name}");
        }
    }
}
