//! Chooses one pattern for each parameter of a model, or names the pattern that is at fault.
//!
//! A parameter with one path takes the first pattern that matches. For a tied parameter, different patterns
//! may decide for its paths. The earliest of these patterns is chosen. Each later pattern must choose the
//! same or give way. A later pattern gives way if it also matches a path for which the chosen pattern
//! decides, because the user has then placed it last on purpose, like `*` after `head.*`. Otherwise it is
//! unknown which of the two patterns the user means, and the call is refused.

use std::collections::HashSet;

use super::Patterns;
use crate::error::{Error, ErrorKind, Result};
use crate::model::{Variable, empty_model_error};

impl Patterns {
    /// The error for a path that no pattern matches.
    pub(crate) fn uncovered_error(&self, path: &str) -> Error {
        let patterns = if self.texts.is_empty() {
            "none".to_string()
        } else {
            self.texts.join(", ")
        };
        Error::new(
            ErrorKind::Argument,
            "no pattern matches this parameter; the patterns are:",
        )
        .with_got(patterns)
        .with_remedy("add a pattern for it, or a last pattern \"*\"")
        .at(path)
    }

    /// [`Patterns::first_match`] for each variable. `chooses_same` returns whether two patterns choose the
    /// same. `blame` adds to an error the pattern at fault.
    ///
    /// # Errors
    /// If there are no variables; if no pattern matches a variable; if two patterns contradict each other for
    /// a variable; if a pattern decides for no path, because a mistyped pattern must not go unnoticed.
    pub(crate) fn choose(
        &self,
        variables: &[Variable<'_>],
        chooses_same: impl Fn(usize, usize) -> bool,
        blame: impl Fn(Option<usize>, Error) -> Error,
    ) -> Result<Vec<usize>> {
        if variables.is_empty() {
            return Err(empty_model_error());
        }
        let chosen: Vec<Option<usize>> = variables
            .iter()
            .map(|variable| self.first_match(&variable.paths))
            .collect();
        let deciding_by_path = variables
            .iter()
            .flat_map(|variable| &variable.paths)
            .filter_map(|path| self.first_match(&[path]));
        let deciding: HashSet<usize> = deciding_by_path.collect();
        if let Some(idle) = (0..self.texts.len()).find(|pattern| !deciding.contains(pattern)) {
            return Err(blame(Some(idle), self.idle_error(idle, variables, &chosen)));
        }
        let choices = variables.iter().zip(chosen).map(|(variable, choice)| {
            let choice = choice.ok_or_else(|| blame(None, self.uncovered_error(variable.path())))?;
            match self.contradiction(choice, variable, &chooses_same) {
                Some((pattern, error)) => Err(blame(Some(pattern), error)),
                None => Ok(choice),
            }
        });
        choices.collect()
    }

    /// The first pattern that contradicts `chosen` for a tied variable, with the error.
    fn contradiction(
        &self,
        chosen: usize,
        variable: &Variable<'_>,
        chooses_same: impl Fn(usize, usize) -> bool,
    ) -> Option<(usize, Error)> {
        let firsts: Vec<_> = variable
            .paths
            .iter()
            .filter_map(|path| Some((path, self.first_match(&[path])?)))
            .collect();
        let chosen_paths = || {
            firsts
                .iter()
                .filter(|(_, first)| *first == chosen)
                .map(|(path, _)| *path)
        };
        let gives_way = |pattern: usize| chosen_paths().any(|path| self.matches(pattern, &[path]));
        let (other, pattern) = firsts
            .iter()
            .find(|&&(_, first)| first != chosen && !gives_way(first) && !chooses_same(chosen, first))?;
        let (path, chooses, chooses_too) =
            (chosen_paths().next()?, &self.texts[chosen], &self.texts[*pattern]);
        let problem = format!(
            "{path:?} and {other:?} are one tied parameter, but the pattern {chooses:?} chooses for \
             {path:?}, and {chooses_too:?} for {other:?}"
        );
        let error = Error::new(ErrorKind::Argument, problem)
            .with_remedy("let both patterns choose the same, or let one pattern match both paths");
        Some((*pattern, error.at(path)))
    }

    /// The error for a pattern that decides for no variable, with the reason.
    fn idle_error(&self, idle: usize, variables: &[Variable<'_>], chosen: &[Option<usize>]) -> Error {
        match variables
            .iter()
            .zip(chosen)
            .find(|(variable, _)| self.matches(idle, &variable.paths))
        {
            Some((variable, Some(earlier))) => {
                let (pattern, earlier, path) = (&self.texts[idle], &self.texts[*earlier], variable.path());
                let problem = format!(
                    "the pattern {pattern:?} decides nothing: {earlier:?} comes first and matches {path:?} \
                     as well"
                );
                Error::new(ErrorKind::Argument, problem).with_remedy("put the narrower pattern first")
            }
            _ => self.unmatched_error(
                idle,
                variables
                    .iter()
                    .flat_map(|variable| &variable.paths)
                    .map(String::as_str),
            ),
        }
    }
}
