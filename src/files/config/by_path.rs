//! Writing the optimisers of a state as a configuration by path:
//!
//! 1. If all parameters have the same optimiser and none is left out, that optimiser is written alone.
//! 2. Else the optimiser of most parameters gets the last pattern, `*`, if it has more than one parameter.
//! 3. Every other parameter gets a pattern that is its first path.
//! 4. A path with a `*` or `?` is refused if, as a pattern, it matches a parameter with another optimiser.

use std::collections::HashMap;

use super::data::Data;
use super::form::{Form, PatternEntry};
use super::written::written_optimiser;
use crate::error::{Error, ErrorKind, Result};
use crate::model::patterns::Patterns;
use crate::rule::{Description, Optimiser, OptimiserRecord};
use crate::tree::StateTree;

/// The optimisers of all leaves, and which parameters were left out.
pub(super) fn by_path(state: &StateTree) -> Result<Form> {
    let leaves = state.leaves();
    let leaves = leaves.map(|leaf| (Some(leaf.optimiser()), leaf.paths().collect()));
    let left_out =
        state.left_out.iter().map(|variable| (None, variable.paths.iter().map(String::as_str).collect()));
    let mut optimisers: Vec<Option<OptimiserRecord>> = Vec::new();
    // Their indices by a hash, because each parameter may have an optimiser of its own.
    let mut known: HashMap<Option<u64>, Vec<usize>> = HashMap::new();
    // The paths of each parameter, with the index of its optimiser.
    let mut parameters: Vec<(usize, Vec<&str>)> = Vec::new();
    for (optimiser, paths) in leaves.chain(left_out) {
        let description = optimiser.map(Optimiser::description);
        let record = description.map(Description::record);
        let known = known.entry(description.map(Description::fingerprint)).or_default();
        let own = known.iter().copied().find(|own| optimisers[*own] == record).unwrap_or(optimisers.len());
        if own == optimisers.len() {
            known.push(own);
            optimisers.push(record);
        }
        parameters.push((own, paths));
    }
    let written = optimisers.iter().map(|own| own.as_ref().map(written_optimiser).transpose());
    let written: Vec<Option<Data>> = written.collect::<Result<_>>()?;
    if let [Some(only)] = &written[..] {
        return Ok(Form::Single(only.clone()));
    }
    state.check_names()?;
    let mut counts = vec![0; written.len()];
    parameters.iter().for_each(|(own, _)| counts[*own] += 1);
    // Reversed, because `max_by_key` takes the last of several.
    let last = (0..written.len()).rev().max_by_key(|own| counts[*own]).filter(|last| counts[*last] > 1);
    parameters.sort_by_key(|(own, _)| *own);
    let (mut choices, mut wild) = (Vec::new(), Vec::<Patterns>::new());
    for (own, paths) in parameters.iter().filter(|(own, _)| Some(*own) != last) {
        let path = paths[0];
        // An own pattern would decide for no parameter, and `Patterns::choose` refuses such a pattern.
        if wild.iter().any(|pattern| pattern.first(paths).is_some()) {
            continue;
        }
        if path.contains(['*', '?']) {
            let pattern = Patterns::new(vec![path.to_string()]);
            let others = parameters.iter().filter(|(other, _)| other != own);
            let mut others = others.flat_map(|(_, paths)| paths);
            if let Some(other) = others.find(|other| pattern.first(&[other]).is_some()) {
                let problem = "its path contains * or ?, which match any characters in a pattern, so no \
                               pattern separates this parameter from one with another optimiser:";
                return Err(Error::new(ErrorKind::Argument, problem)
                    .with_got(other)
                    .with_remedy("rename one of the two, or choose optimisers in code with `setup_with`")
                    .at(path));
            }
            wild.push(pattern);
        }
        choices.push(PatternEntry { pattern: path.to_string(), optimiser: written[*own].clone() });
    }
    let last = last.map(|last| written[last].clone());
    choices.extend(last.map(|optimiser| PatternEntry { pattern: "*".to_string(), optimiser }));
    Ok(Form::ByPath(choices))
}
