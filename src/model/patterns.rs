//! Path patterns in an order: the first that matches a parameter decides for it.

#[cfg(any(feature = "candle", feature = "config"))]
mod choice;

use std::collections::{BTreeMap, HashSet};

use wildmatch::WildMatch;

use crate::error::{Error, ErrorKind, Result, each_once, listed, one_of};

/// Path patterns in an order. `*` matches any text, dots included, and `?` one character. A pattern must
/// match the whole path.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Patterns {
    texts: Vec<String>,
    /// The first of the patterns that are a path without `*` and `?`. There may be one for each parameter.
    literals: BTreeMap<String, usize>,
    /// All others.
    wild: Vec<(usize, WildMatch)>,
}

impl Patterns {
    pub(crate) fn new(texts: Vec<String>) -> Self {
        let (mut literals, mut wild) = (BTreeMap::new(), Vec::new());
        for (pattern, text) in texts.iter().enumerate() {
            match text.contains(['*', '?']) {
                true => wild.push((pattern, WildMatch::new(text))),
                false => _ = literals.entry(text.clone()).or_insert(pattern),
            }
        }
        Patterns { texts, literals, wild }
    }

    pub(crate) fn texts(&self) -> &[String] {
        &self.texts
    }

    #[cfg(any(feature = "candle", feature = "config"))]
    fn matches(&self, pattern: usize, paths: &[impl AsRef<str>]) -> bool {
        match self.wild.binary_search_by_key(&pattern, |(wild, _)| *wild) {
            Ok(place) => paths.iter().any(|path| self.wild[place].1.matches(path.as_ref())),
            Err(_) => paths.iter().any(|path| path.as_ref() == self.texts[pattern]),
        }
    }

    /// The index of the first pattern that matches any of a parameter's paths.
    pub(crate) fn first(&self, paths: &[impl AsRef<str>]) -> Option<usize> {
        let literal = paths.iter().filter_map(|path| self.literals.get(path.as_ref()).copied()).min();
        let is_before = |pattern| literal.is_none_or(|literal| pattern < literal);
        let mut before = self.wild.iter().take_while(|(pattern, _)| is_before(*pattern));
        let wild = before.find(|(_, wild)| paths.iter().any(|path| wild.matches(path.as_ref())));
        wild.map(|(pattern, _)| *pattern).or(literal)
    }

    /// Refuses a pattern that matches none of the paths, because it is probably mistyped.
    pub(crate) fn check_matched<'p>(&self, paths: impl Iterator<Item = &'p str> + Clone) -> Result<()> {
        let literals: HashSet<&str> =
            paths.clone().filter(|path| self.literals.contains_key(*path)).collect();
        let idle =
            self.literals.iter().filter(|(text, _)| !literals.contains(&***text)).map(|(_, idle)| *idle);
        let is_idle = |(_, wild): &&(usize, WildMatch)| !paths.clone().any(|path| wild.matches(path));
        let idle = idle.chain(self.wild.iter().find(is_idle).map(|(idle, _)| *idle)).min();
        idle.map_or(Ok(()), |idle| Err(self.unmatched(idle, paths.clone())))
    }

    /// The error for a pattern that matches none of these paths, which may contain a path twice.
    fn unmatched<'p>(&self, pattern: usize, paths: impl Iterator<Item = &'p str>) -> Error {
        let available = listed(each_once(paths).into_iter());
        Error::new(ErrorKind::Argument, format!("the pattern {:?} matches no parameter", self.texts[pattern]))
            .with_expected(format_args!("one that matches {}", one_of(&available)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// All lists of up to three patterns, with and without `*` and `?`, also one of them twice.
    #[test]
    fn the_first_pattern_that_matches_decides() {
        const TEXTS: [&str; 7] = ["a", "a.b", "a.*", "*", "?.b", "a.b.c", "x"];
        let paths: [&[&str]; 6] = [&["a"], &["a.b"], &["a.b.c"], &["c.b"], &["c.b", "a"], &["z", "a.b"]];
        for all in 0..TEXTS.len().pow(3) {
            let texts = [all % 7, all / 7 % 7, all / 49].map(|place| TEXTS[place].to_string());
            let patterns = Patterns::new(texts.to_vec());
            let matches = |text: &String, path: &&str| WildMatch::new(text).matches(path);
            for paths in paths {
                let first = texts.iter().position(|text| paths.iter().any(|path| matches(text, path)));
                assert_eq!(patterns.first(paths), first, "{texts:?} {paths:?}");
                let idle = texts.iter().find(|text| !paths.iter().any(|path| matches(text, path)));
                let error =
                    patterns.check_matched(paths.iter().copied()).err().map(|error| error.to_string());
                assert_eq!(error.is_some(), idle.is_some(), "{texts:?} {paths:?}");
                assert!(error.zip(idle).is_none_or(|(error, idle)| error.contains(&format!("{idle:?}"))));
            }
        }
    }
}
