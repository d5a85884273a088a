//! One pattern for each parameter of a model, or an error that names what contradicts or decides nothing.

use std::collections::HashSet;

use super::Patterns;
use crate::error::{Error, ErrorKind, Result};
use crate::model::{Variable, empty_model};

impl Patterns {
    /// The error that no pattern matches a path.
    pub(crate) fn uncovered(&self, path: &str) -> Error {
        let patterns = if self.texts.is_empty() { "none".to_string() } else { self.texts.join(", ") };
        Error::new(ErrorKind::Argument, "no pattern matches it; there are:")
            .with_got(patterns)
            .with_remedy("add one for it, or a last pattern \"*\"")
            .at(path)
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
