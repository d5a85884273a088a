//! Path patterns in an order: the first pattern that matches a parameter decides for the parameter.

#[cfg(any(feature = "candle", feature = "config"))]
mod choice;

use std::collections::{BTreeMap, HashSet};

use wildmatch::WildMatch;

use crate::error::{Error, ErrorKind, Result, distinct, first_names, one_of};

/// Path patterns in an order. `*` matches any text, dots included, and `?` one character. A pattern must
/// match the whole path.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Patterns {
    texts: Vec<String>,
    /// The patterns without `*` and `?`, each with the index of the first pattern of that text. The field is
    /// a map, because there may be a pattern for each parameter.
    literals: BTreeMap<String, usize>,
    /// The patterns with `*` or `?`, with their indices.
    wildcards: Vec<(usize, WildMatch)>,
}

impl Patterns {
    pub(crate) fn new(texts: Vec<String>) -> Self {
        let (mut literals, mut wildcards) = (BTreeMap::new(), Vec::new());
        for (pattern, text) in texts.iter().enumerate() {
            match text.contains(['*', '?']) {
                true => wildcards.push((pattern, WildMatch::new(text))),
                false => _ = literals.entry(text.clone()).or_insert(pattern),
            }
        }
        Patterns {
            texts,
            literals,
            wildcards,
        }
    }

    pub(crate) fn texts(&self) -> &[String] {
        &self.texts
    }

    #[cfg(any(feature = "candle", feature = "config"))]
    fn matches(&self, pattern: usize, paths: &[impl AsRef<str>]) -> bool {
        match self.wildcards.binary_search_by_key(&pattern, |(index, _)| *index) {
            Ok(wildcard) => paths
                .iter()
                .any(|path| self.wildcards[wildcard].1.matches(path.as_ref())),
            Err(_) => paths.iter().any(|path| path.as_ref() == self.texts[pattern]),
        }
    }

    /// The index of the first pattern that matches any of a parameter's paths.
    pub(crate) fn first_match(&self, paths: &[impl AsRef<str>]) -> Option<usize> {
        let literal = paths
            .iter()
            .filter_map(|path| self.literals.get(path.as_ref()).copied())
            .min();
        let is_before = |pattern| literal.is_none_or(|literal| pattern < literal);
        let mut earlier = self
            .wildcards
            .iter()
            .take_while(|(pattern, _)| is_before(*pattern));
        let wildcard = earlier.find(|(_, text)| paths.iter().any(|path| text.matches(path.as_ref())));
        wildcard.map(|(pattern, _)| *pattern).or(literal)
    }

    /// Refuses a pattern that matches none of the paths, because such a pattern is probably mistyped.
    pub(crate) fn check_matched<'p>(&self, paths: impl Iterator<Item = &'p str> + Clone) -> Result<()> {
        let matched: HashSet<&str> = paths
            .clone()
            .filter(|path| self.literals.contains_key(*path))
            .collect();
        let idle_literals = self
            .literals
            .iter()
            .filter(|(text, _)| !matched.contains(&***text))
            .map(|(_, index)| *index);
        let is_idle = |(_, text): &&(usize, WildMatch)| !paths.clone().any(|path| text.matches(path));
        let idle_wildcard = self.wildcards.iter().find(is_idle).map(|(index, _)| *index);
        let first_idle = idle_literals.chain(idle_wildcard).min();
        first_idle.map_or(Ok(()), |idle| Err(self.unmatched_error(idle, paths.clone())))
    }

    /// The error for a pattern that matches none of these paths, which may contain a path twice.
    fn unmatched_error<'p>(&self, pattern: usize, paths: impl Iterator<Item = &'p str>) -> Error {
        let available = first_names(distinct(paths).into_iter());
        Error::new(
            ErrorKind::Argument,
            format!("the pattern {:?} matches no parameter", self.texts[pattern]),
        )
        .with_expected(format_args!("one that matches {}", one_of(&available)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// All lists of three patterns, with and without `*` and `?`, also with one pattern twice.
    #[test]
    fn the_first_pattern_that_matches_decides() {
        const TEXTS: [&str; 7] = ["a", "a.b", "a.*", "*", "?.b", "a.b.c", "x"];
        let paths: [&[&str]; 6] = [
            &["a"],
            &["a.b"],
            &["a.b.c"],
            &["c.b"],
            &["c.b", "a"],
            &["z", "a.b"],
        ];
        for list in 0..TEXTS.len().pow(3) {
            let texts = [list % 7, list / 7 % 7, list / 49].map(|place| TEXTS[place].to_string());
            let patterns = Patterns::new(texts.to_vec());
            let matches = |text: &String, path: &&str| WildMatch::new(text).matches(path);
            for paths in paths {
                let first = texts
                    .iter()
                    .position(|text| paths.iter().any(|path| matches(text, path)));
                assert_eq!(patterns.first_match(paths), first, "{texts:?} {paths:?}");
                let idle = texts
                    .iter()
                    .find(|text| !paths.iter().any(|path| matches(text, path)));
                let error = patterns
                    .check_matched(paths.iter().copied())
                    .err()
                    .map(|error| error.to_string());
                assert_eq!(error.is_some(), idle.is_some(), "{texts:?} {paths:?}");
                assert!(
                    error
                        .zip(idle)
                        .is_none_or(|(error, idle)| error.contains(&format!("{idle:?}")))
                );
            }
        }
    }
}
