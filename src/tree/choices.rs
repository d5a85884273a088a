//! Which optimiser each variable gets.

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
pub(crate) fn chosen<'m, O: IntoOptimiser>(
    variables: Vec<Variable<'m>>,
    choose: &mut impl FnMut(&str, Parameter<'_>) -> Option<O>,
) -> Result<ChosenOptimisers<'m>> {
    let answer = |variable: Variable<'m>| {
        let x = Parameter::new(&*variable.x);
        let mut choose = |path: &str| choose(path, x).map(IntoOptimiser::into_optimiser);
        let optimiser = choose(variable.path());
        for other in variable.paths.iter().skip(1) {
            let record = |chosen: &Optimiser| chosen.description().record();
            let chosen = [optimiser.as_ref().map(record), choose(other).as_ref().map(record)];
            if chosen[0] != chosen[1] {
                let ([own, others], path) = (words(&chosen), variable.path());
                let problem = format!(
                    "{path:?} and {other:?} are one tied parameter, but {own} was chosen for {path:?} and \
                     {others} for {other:?}"
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
    let paths = choices.iter().flat_map(|(variable, _)| &variable.paths).map(String::as_str);
    let (mut last, mut checked) = (None, HashSet::new());
    for optimiser in choices.iter().filter_map(|(_, optimiser)| optimiser.as_ref()) {
        // Variables in a row usually share one `Arc`, and others often have the same patterns.
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
    /// By the optimiser before the choice (its address) and the fingerprint of what it has chosen: only
    /// choices that agree in both are shared. All optimisers before the choice live while the map is filled.
    known: HashMap<(*const (), u64), Arc<Optimiser>>,
}

impl ChoiceCache {
    pub(crate) fn all<'m>(choices: ChosenOptimisers<'m>) -> Result<ChosenOptimisers<'m>> {
        let mut settled = ChoiceCache::default();
        let of = |(variable, optimiser): (Variable<'m>, Option<Arc<Optimiser>>)| {
            let optimiser = optimiser
                .map(|optimiser| settled.of(&optimiser, &variable.paths, Parameter::new(&*variable.x)))
                .transpose()?;
            Ok((variable, optimiser))
        };
        choices.into_iter().map(of).collect()
    }

    /// The optimiser of one parameter, with all its rules chosen. Parameters with the same choice share it.
    ///
    /// # Errors
    /// If the chosen rule does not go with the rules around it.
    pub(crate) fn of(
        &mut self,
        optimiser: &Arc<Optimiser>,
        paths: &[String],
        x: Parameter<'_>,
    ) -> Result<Arc<Optimiser>> {
        if !optimiser.description().has_choice() {
            return Ok(optimiser.clone());
        }
        let mut own = Optimiser::clone(optimiser);
        own.choose(paths, x);
        // Checked for each parameter, because its chosen rule can be wrong here while those of other
        // parameters are right.
        own.check().map_err(|error| error.at(paths.first().map_or("", String::as_str)))?;
        let key = (Arc::as_ptr(optimiser).cast(), own.description().fingerprint());
        Ok(self.known.entry(key).or_insert_with(|| Arc::new(own)).clone())
    }
}

/// Two choices in words: name and hyper-parameters, or, if these are equal, the whole descriptions.
fn words(chosen: &[Option<OptimiserRecord>; 2]) -> [String; 2] {
    let words = |words: fn(&OptimiserRecord) -> String| {
        chosen.each_ref().map(|chosen| chosen.as_ref().map_or("no optimiser".to_string(), words))
    };
    let short = words(OptimiserRecord::with_fields);
    if short[0] == short[1] { words(|record| record.words().join(", ")) } else { short }
}
