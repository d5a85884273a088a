//! Writing the optimisers of a state as a configuration by path.

use std::collections::HashSet;

use super::data::Data;
use super::form::{BY_PATH, LEAVE_OUT, OPTIMISER, OptimiserForm, PATTERN, PatternEntry};
use super::place::Place;
use super::written::written_optimiser;
use crate::error::{Error, ErrorKind, Result};
use crate::model::Variable;
use crate::model::patterns::Patterns;
use crate::tree::StateTree;

/// The parameters that share an optimiser, or are left out.
struct PathGroup<'s> {
    optimiser: Data,
    /// The paths of each parameter.
    parameters: Vec<Vec<&'s str>>,
}

/// A pattern that may match several parameters.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
enum Candidate<'s> {
    /// `.bias` for the pattern `*.bias`.
    EndsWith(&'s str),
    /// `encoder.` for the pattern `encoder.*`.
    StartsWith(&'s str),
}

impl Candidate<'_> {
    fn matches(self, path: &str) -> bool {
        match self {
            Candidate::EndsWith(end) => path.ends_with(end),
            Candidate::StartsWith(start) => path.starts_with(start),
        }
    }

    fn pattern(self) -> String {
        match self {
            Candidate::EndsWith(end) => format!("*{end}"),
            Candidate::StartsWith(start) => format!("{start}*"),
        }
    }
}

/// The optimiser of each leaf: one for all, or by path, with few patterns.
///
/// # Errors
/// If a path has a `*` or `?` that would match others.
pub(super) fn by_path(state: &StateTree) -> Result<Data> {
    let mut groups = groups(state)?;
    if let [only] = &mut groups[..] {
        return Ok(std::mem::replace(&mut only.optimiser, Data::Nothing));
    }
    state.check_names()?;
    // The optimiser of most parameters gets the last pattern, `*`.
    let most = groups.iter().map(|group| group.parameters.len()).max().unwrap_or_default();
    let last = groups.iter().position(|group| group.parameters.len() == most).filter(|_| most > 1);
    let mut choices = Vec::new();
    for (i, group) in groups.iter().enumerate().filter(|(i, _)| Some(*i) != last) {
        let others = groups.iter().enumerate().filter(|(other, _)| *other != i);
        let others: Vec<&str> =
            others.flat_map(|(_, other)| other.parameters.iter().flatten().copied()).collect();
        let patterns = patterns(&group.parameters, &others)?;
        choices.extend(patterns.into_iter().map(|pattern| choice(pattern, &group.optimiser)));
    }
    choices.extend(last.map(|last| choice("*".to_string(), &groups[last].optimiser)));
    Ok(Data::table([(BY_PATH, Data::List(choices.into()))]))
}

fn choice(pattern: String, optimiser: &Data) -> Data {
    Data::table([(PATTERN, Data::Text(pattern.into())), (OPTIMISER, optimiser.clone())])
}

/// The parameters of each optimiser, and those that are left out.
fn groups(state: &StateTree) -> Result<Vec<PathGroup<'_>>> {
    let mut groups: Vec<PathGroup<'_>> = Vec::new();
    for leaf in state.leaves() {
        let optimiser = written_optimiser(leaf.optimiser().description())?;
        let paths = leaf.paths().collect();
        match groups.iter_mut().find(|group| group.optimiser == optimiser) {
            Some(group) => group.parameters.push(paths),
            None => groups.push(PathGroup { optimiser, parameters: vec![paths] }),
        }
    }
    let left_out: Vec<Vec<&str>> =
        state.left_out().map(|paths| paths.iter().map(String::as_str).collect()).collect();
    if !left_out.is_empty() {
        groups.push(PathGroup { optimiser: Data::Text(LEAVE_OUT.into()), parameters: left_out });
    }
    Ok(groups)
}

/// Patterns that match these parameters, and none of the others.
fn patterns(parameters: &[Vec<&str>], others: &[&str]) -> Result<Vec<String>> {
    let mut left: Vec<&Vec<&str>> = parameters.iter().collect();
    let mut patterns = Vec::new();
    for candidate in candidates(parameters) {
        let is_matched = |paths: &&Vec<&str>| paths.iter().any(|path| candidate.matches(path));
        if left.iter().filter(|paths| is_matched(paths)).count() > 1
            && !others.iter().any(|path| candidate.matches(path))
        {
            left.retain(|paths| !is_matched(paths));
            patterns.push(candidate.pattern());
        }
    }
    let mut wild: Vec<Patterns> = Vec::new();
    for paths in left {
        if wild.iter().any(|pattern| pattern.first(paths).is_some()) {
            continue;
        }
        // `?` matches the star of the path, and the fewest other texts.
        let pattern = paths[0].replace('*', "?");
        if pattern.contains('?') {
            let matching = Patterns::new(vec![pattern.clone()]);
            if let Some(other) = others.iter().find(|path| matching.first(&[path]).is_some()) {
                let problem = "in a pattern * and ? stand for other characters, so that no pattern tells it \
                               from a parameter with another optimiser:";
                return Err(Error::new(ErrorKind::Argument, problem)
                    .with_got(other)
                    .with_remedy("rename the one, or choose optimisers in code with `setup_with`")
                    .at(paths[0]));
            }
            wild.push(matching);
        }
        patterns.push(pattern);
    }
    Ok(patterns)
}

/// Patterns by last names, then by modules from the outermost on; paths with `*` or `?` give none.
fn candidates<'s>(parameters: &[Vec<&'s str>]) -> Vec<Candidate<'s>> {
    let paths = || parameters.iter().flatten().copied().filter(|path| !path.contains(['*', '?']));
    let ends = paths().filter_map(|path| path.rfind('.').map(|dot| Candidate::EndsWith(&path[dot..])));
    let mut starts: Vec<&str> =
        paths().flat_map(|path| path.match_indices('.').map(move |(dot, _)| &path[..=dot])).collect();
    starts.sort_by_key(|start| (start.len(), *start));
    let mut seen = HashSet::new();
    ends.chain(starts.into_iter().map(Candidate::StartsWith))
        .filter(|candidate| seen.insert(*candidate))
        .collect()
}

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
