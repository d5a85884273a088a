//! The choice of an optimiser for each variable.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use crate::error::{Error, ErrorKind, Result};
use crate::model::Variable;
use crate::model::patterns::Patterns;
use crate::rule::{Adjust, IntoOptimiser, Optimiser, OptimiserRecord, Parameter};

/// Variables, each with the optimiser that was chosen for it. A variable with `None` is left out of the
/// state.
pub(crate) type ChosenOptimisers<'m> = Vec<(Variable<'m>, Option<Arc<Optimiser>>)>;

/// Calls `choose` for every path of every variable.
///
/// # Errors
/// If the answers for the paths of one variable differ.
pub(crate) fn choose_optimisers<'m, O: IntoOptimiser>(
    variables: Vec<Variable<'m>>,
    choose: &mut impl FnMut(&str, Parameter<'_>) -> Option<O>,
) -> Result<ChosenOptimisers<'m>> {
    let answer = |variable: Variable<'m>| {
        let x = Parameter::new(&*variable.x);
        let mut choose_for = |path: &str| choose(path, x).map(IntoOptimiser::into_optimiser);
        let optimiser = choose_for(variable.path());
        for other in variable.paths.iter().skip(1) {
            let record = |optimiser: &Optimiser| optimiser.description().record();
            let records = [
                optimiser.as_ref().map(record),
                choose_for(other).as_ref().map(record),
            ];
            if records[0] != records[1] {
                let ([first, second], path) = (choices_in_words(&records), variable.path());
                let problem = format!(
                    "{path:?} and {other:?} are one tied parameter, but {first} was chosen for {path:?} and \
                     {second} for {other:?}"
                );
                let remedy = "choose the same optimiser for all paths of a parameter";
                return Err(Error::new(ErrorKind::Model, problem).at(path).with_remedy(remedy));
            }
        }
        Ok((variable, optimiser.map(Arc::new)))
    };
    variables.into_iter().map(answer).collect()
}

/// Refuses optimisers that decide by a pattern which no path of the model matches.
pub(crate) fn check_patterns(choices: &ChosenOptimisers<'_>) -> Result<()> {
    let paths = choices
        .iter()
        .flat_map(|(variable, _)| &variable.paths)
        .map(String::as_str);
    let (mut last, mut checked) = (None, HashSet::new());
    for optimiser in choices.iter().filter_map(|(_, optimiser)| optimiser.as_ref()) {
        // Variables in a row usually share one `Arc`, and other variables often have the same patterns.
        if last.replace(Arc::as_ptr(optimiser)) == Some(Arc::as_ptr(optimiser)) {
            continue;
        }
        let patterns = optimiser.description().patterns();
        if !patterns.is_empty() && checked.insert(patterns.clone()) {
            Patterns::new(patterns).check_matched(paths.clone())?;
        }
    }
    Ok(())
}

/// Optimisers whose rules are chosen for each parameter, by patterns of paths. Parameters for which the same
/// optimiser has chosen the same rules share one `Arc`.
#[derive(Default)]
pub(crate) struct ChoiceCache {
    /// By the address of the optimiser before the choice, and the fingerprint of the optimiser after it. The
    /// addresses stay valid, because all optimisers before the choice live while the map is filled.
    optimisers: HashMap<(*const (), u64), Arc<Optimiser>>,
}

impl ChoiceCache {
    /// Chooses the rules for all variables.
    pub(crate) fn resolve_all<'m>(choices: ChosenOptimisers<'m>) -> Result<ChosenOptimisers<'m>> {
        let mut cache = ChoiceCache::default();
        let resolve = |(variable, optimiser): (Variable<'m>, Option<Arc<Optimiser>>)| {
            let resolved = optimiser
                .map(|optimiser| cache.resolve(&optimiser, &variable.paths, Parameter::new(&*variable.x)))
                .transpose()?;
            Ok((variable, resolved))
        };
        choices.into_iter().map(resolve).collect()
    }

    /// The optimiser of one parameter, with all its rules chosen. Parameters with the same choice share the
    /// optimiser.
    ///
    /// # Errors
    /// If a chosen rule does not go with the rules around it.
    pub(crate) fn resolve(
        &mut self,
        optimiser: &Arc<Optimiser>,
        paths: &[String],
        x: Parameter<'_>,
    ) -> Result<Arc<Optimiser>> {
        if !optimiser.description().has_choice() {
            return Ok(optimiser.clone());
        }
        let mut resolved = Optimiser::clone(optimiser);
        resolved.choose(paths, x);
        // Checked for each parameter, because the rule that is chosen for this parameter can be wrong while
        // the rules for others are right.
        resolved
            .check()
            .map_err(|error| error.at(paths.first().map_or("", String::as_str)))?;
        let key = (
            Arc::as_ptr(optimiser).cast(),
            resolved.description().fingerprint(),
        );
        Ok(self
            .optimisers
            .entry(key)
            .or_insert_with(|| Arc::new(resolved))
            .clone())
    }
}

/// Two choices in words: name and hyper-parameters, or, if these are equal, the whole descriptions.
fn choices_in_words(records: &[Option<OptimiserRecord>; 2]) -> [String; 2] {
    let describe = |words: fn(&OptimiserRecord) -> String| {
        records
            .each_ref()
            .map(|record| record.as_ref().map_or("no optimiser".to_string(), words))
    };
    let short = describe(OptimiserRecord::name_with_fields);
    if short[0] == short[1] {
        describe(|record| record.words().join(", "))
    } else {
        short
    }
}
