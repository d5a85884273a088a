//! Path patterns in an order: the first that matches a parameter decides for it.

#[cfg(any(feature = "candle", feature = "config"))]
mod choice;

use wildmatch::WildMatch;

use crate::error::{Error, ErrorKind, Result, each_once, listed, one_of};

/// Path patterns in an order. `*` matches any text, dots included, and `?` one character. A pattern must
/// match the whole path.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Patterns {
    texts: Vec<String>,
    compiled: Vec<WildMatch>,
}

impl Patterns {
    pub(crate) fn new(texts: Vec<String>) -> Self {
        let compiled = texts.iter().map(|text| WildMatch::new(text)).collect();
        Patterns { texts, compiled }
    }

    pub(crate) fn texts(&self) -> &[String] {
        &self.texts
    }

    fn matches(&self, pattern: usize, paths: &[impl AsRef<str>]) -> bool {
        paths.iter().any(|path| self.compiled[pattern].matches(path.as_ref()))
    }

    /// The index of the first pattern that matches any of a parameter's paths.
    pub(crate) fn first(&self, paths: &[impl AsRef<str>]) -> Option<usize> {
        (0..self.texts.len()).find(|&pattern| self.matches(pattern, paths))
    }

    /// Refuses a pattern that matches none of the paths, because it is probably mistyped.
    pub(crate) fn check_matched<'p>(&self, paths: impl Iterator<Item = &'p str> + Clone) -> Result<()> {
        let is_idle = |&pattern: &usize| !paths.clone().any(|path| self.compiled[pattern].matches(path));
        (0..self.texts.len()).find(is_idle).map_or(Ok(()), |idle| Err(self.unmatched(idle, paths.clone())))
    }

    /// The error for a pattern that matches none of these paths, which may contain a path twice.
    fn unmatched<'p>(&self, pattern: usize, paths: impl Iterator<Item = &'p str>) -> Error {
        let available = listed(each_once(paths).into_iter());
        Error::new(ErrorKind::Argument, format!("the pattern {:?} matches no parameter", self.texts[pattern]))
            .with_expected(format_args!("one that matches {}", one_of(&available)))
    }
}
