//! Which choice each parameter gets.

use super::form::{BY_PATH, OptimiserForm, PatternEntry};
use super::place::Place;
use crate::error::Result;
use crate::model::Variable;
use crate::model::patterns::Patterns;

/// The index in `choices`, for each variable, of the first whose pattern matches one of its paths.
///
/// # Errors
/// As [`Patterns::choose`], with the part of the configuration.
pub(super) fn choose(choices: &[PatternEntry], variables: &[Variable<'_>]) -> Result<Vec<usize>> {
    let patterns = Patterns::new(choices.iter().map(|choice| choice.pattern.clone()).collect());
    let written = |choice: usize| choices[choice].optimiser.as_ref().map(OptimiserForm::write);
    let same = |one: usize, other: usize| written(one) == written(other);
    patterns.choose(variables, same, |pattern, error| match pattern {
        Some(pattern) => choices[pattern].place.error(error),
        None => Place::default().key(BY_PATH).error(error),
    })
}
