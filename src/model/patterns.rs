//! Which of several path patterns decides for a parameter: the first that matches.

use std::collections::HashSet;

use wildmatch::WildMatch;

use super::{Variable, empty_model};
use crate::error::{Error, ErrorKind, Result, listed, one_of};

/// Patterns in their order. `*` stands for any text, dots included, `?` for one character, and the whole path
/// must match.
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

    /// The index of the first pattern that matches one of a parameter's paths.
    pub(crate) fn first(&self, paths: &[impl AsRef<str>]) -> Option<usize> {
        (0..self.texts.len()).find(|&pattern| self.matches(pattern, paths))
    }

    /// The error that no pattern matches a path.
    pub(crate) fn uncovered(&self, path: &str) -> Error {
        let patterns = if self.texts.is_empty() { "none".to_string() } else { self.texts.join(", ") };
        Error::new(ErrorKind::Argument, "no pattern matches it; there are:")
            .with_got(patterns)
            .with_remedy("add one for it, or a last pattern \"*\"")
            .at(path)
    }

    /// Refuses a pattern that matches no path of these parameters, each with its paths.
    pub(crate) fn check_matched(&self, parameters: &[Vec<&str>]) -> Result<()> {
        let is_idle = |&pattern: &usize| !parameters.iter().any(|paths| self.matches(pattern, paths));
        let Some(idle) = (0..self.texts.len()).find(is_idle) else { return Ok(()) };
        Err(self.unmatched(idle, parameters.iter().filter_map(|paths| paths.first().copied())))
    }

    /// The error that a pattern matches none of these paths.
    fn unmatched<'p>(&self, pattern: usize, paths: impl Iterator<Item = &'p str>) -> Error {
        let available = listed(paths);
        Error::new(ErrorKind::Argument, format!("the pattern {:?} matches no parameter", self.texts[pattern]))
            .with_expected(format_args!("one that matches {}", one_of(&available)))
    }

    /// [`Patterns::first`] for each variable. `same` says whether two patterns choose the same; `blame` may
    /// add to an error which pattern it is about.
    ///
    /// # Errors
    /// If a variable has none, or two that contradict each other; if a pattern decides for no path: a
    /// mistyped pattern must not go unnoticed.
    pub(crate) fn choose(
        &self,
        variables: &[Variable<'_>],
        same: impl Fn(usize, usize) -> bool,
        blame: impl Fn(Option<usize>, Error) -> Error,
    ) -> Result<Vec<usize>> {
        if variables.is_empty() {
            return Err(empty_model());
        }
        let chosen: Vec<Option<usize>> =
            variables.iter().map(|variable| self.first(&variable.paths)).collect();
        let of_paths =
            variables.iter().flat_map(|variable| &variable.paths).filter_map(|path| self.first(&[path]));
        let deciding: HashSet<usize> = of_paths.collect();
        if let Some(idle) = (0..self.texts.len()).find(|pattern| !deciding.contains(pattern)) {
            return Err(blame(Some(idle), self.idle(idle, variables, &chosen)));
        }
        let decided = variables.iter().zip(chosen).map(|(variable, choice)| {
            let choice = choice.ok_or_else(|| blame(None, self.uncovered(variable.path())))?;
            match self.contradiction(choice, variable, &same) {
                Some((pattern, error)) => Err(blame(Some(pattern), error)),
                None => Ok(choice),
            }
        });
        decided.collect()
    }

    /// The pattern that contradicts `chosen`, if there is one: it decides otherwise for another path, and
    /// matches no path for which `chosen` decides.
    fn contradiction(
        &self,
        chosen: usize,
        variable: &Variable<'_>,
        same: impl Fn(usize, usize) -> bool,
    ) -> Option<(usize, Error)> {
        let firsts: Vec<_> =
            variable.paths.iter().filter_map(|path| Some((path, self.first(&[path])?))).collect();
        let own = || firsts.iter().filter(|(_, first)| *first == chosen).map(|(path, _)| *path);
        let gives_way = |pattern: usize| own().any(|path| self.matches(pattern, &[path]));
        let (other, pattern) = firsts
            .iter()
            .find(|&&(_, first)| first != chosen && !gives_way(first) && !same(chosen, first))?;
        let (chooses, chooses_too) = (&self.texts[chosen], &self.texts[*pattern]);
        let problem = format!(
            "it is tied to {other:?}, and the pattern {chooses:?} chooses for the one, {chooses_too:?} for \
             the other"
        );
        let error = Error::new(ErrorKind::Argument, problem)
            .with_remedy("let both choose the same, or one match both paths");
        Some((*pattern, error.at(own().next()?)))
    }

    /// Why a pattern decides for no variable.
    fn idle(&self, idle: usize, variables: &[Variable<'_>], chosen: &[Option<usize>]) -> Error {
        match variables.iter().zip(chosen).find(|(variable, _)| self.matches(idle, &variable.paths)) {
            Some((variable, Some(earlier))) => {
                let (pattern, earlier, path) = (&self.texts[idle], &self.texts[*earlier], variable.path());
                let problem = format!(
                    "the pattern {pattern:?} decides nothing: {earlier:?} comes first and matches {path:?} \
                     as well"
                );
                Error::new(ErrorKind::Argument, problem).with_remedy("put the narrower pattern first")
            }
            _ => self.unmatched(idle, variables.iter().map(Variable::path)),
        }
    }
}
