//! Which choice each parameter gets.

use wildmatch::WildMatch;

use super::form::{BY_PATH, Choice};
use super::place::Place;
use crate::error::{Error, Result, listed};
use crate::model::Variable;

/// For each variable the place in `choices` of the first whose pattern matches one of its paths.
///
/// # Errors
/// If a variable has none, or a choice decides for no variable: a mistyped pattern must not go unnoticed.
pub(super) fn choose(choices: &[Choice], variables: &[Variable]) -> Result<Vec<usize>> {
    if variables.is_empty() {
        return Err(Error::EmptyModel);
    }
    let patterns: Vec<WildMatch> = choices.iter().map(|choice| WildMatch::new(&choice.pattern)).collect();
    let matches = |choice: usize, variable: &Variable| variable.paths.iter().any(|path| patterns[choice].matches(path));
    let chosen: Vec<Option<usize>> =
        variables.iter().map(|variable| (0..choices.len()).find(|&choice| matches(choice, variable))).collect();
    for (i, Choice { place, pattern, .. }) in choices.iter().enumerate() {
        if chosen.contains(&Some(i)) {
            continue;
        }
        let pattern = pattern.clone();
        let taken = variables.iter().zip(&chosen).find(|(variable, _)| matches(i, variable));
        return Err(place.error(match taken {
            Some((variable, Some(earlier))) => {
                Error::ShadowedPattern { pattern, earlier: choices[*earlier].pattern.clone(), path: variable.path().to_string() }
            }
            _ => Error::UnmatchedPattern { pattern, available: listed(variables.iter().map(|variable| variable.path())) },
        }));
    }
    let uncovered = |variable: &Variable| {
        let patterns = choices.iter().map(|choice| choice.pattern.clone()).collect();
        Place::default().key(BY_PATH).error(Error::UncoveredParameter { path: variable.path().to_string(), patterns })
    };
    variables.iter().zip(chosen).map(|(variable, choice)| choice.ok_or_else(|| uncovered(variable))).collect()
}
