//! Writing optimisers as configurations, from the records that checkpoints have.
//!
//! The optimisers of a state are written by path:
//!
//! 1. If all parameters have the same optimiser and none is left out, that optimiser is written alone.
//! 2. Otherwise the optimiser that occurs most often gets the last pattern, `*`, if it occurs more than once.
//! 3. Every other parameter gets a pattern that is the parameter's first path.
//! 4. A path with a `*` or `?` is refused if the path as a pattern matches a parameter with another
//!    optimiser.

use std::collections::HashMap;

use super::form::{FALLBACK, INNER, MEMBERS, OFFLOAD, by_path_data, make_table};
use crate::error::{Error, ErrorKind, Result};
use crate::model::patterns::Patterns;
use crate::rule::field::Data;
use crate::rule::{Description, Optimiser, OptimiserRecord, Setting};
use crate::tree::StateTree;

/// The kind that is written as a list.
const CHAIN: &str = "OptimiserChain";

/// The kind whose two rules are under two keys, `inner` and `fallback`.
const FALLBACK_KIND: &str = "Fallback";

/// The parameters of a state, grouped by optimiser.
struct OptimiserGroups<'s> {
    /// The different optimisers; `None` for parameters that were left out.
    optimisers: Vec<Option<OptimiserRecord>>,
    /// The paths of each parameter, with the index of its optimiser.
    parameters: Vec<(usize, Vec<&'s str>)>,
}

/// The optimisers of all leaves as data, by path if there are several or parameters were left out.
pub(super) fn state_data(state: &StateTree) -> Result<Data> {
    let mut groups = OptimiserGroups::new(state);
    let to_data = |record: &Option<OptimiserRecord>| record.as_ref().map(optimiser_data).transpose();
    let data: Vec<Option<Data>> = groups.optimisers.iter().map(to_data).collect::<Result<_>>()?;
    if let [Some(only)] = &data[..] {
        return Ok(only.clone());
    }
    state.check_names()?;
    let last = groups.most_frequent();
    groups.parameters.sort_by_key(|(optimiser, _)| *optimiser);
    let patterns = groups.patterns(last)?;
    let entries = patterns.into_iter().chain(last.map(|last| ("*", last)));
    Ok(by_path_data(
        entries.map(|(pattern, optimiser)| (pattern, data[optimiser].clone())),
    ))
}

impl<'s> OptimiserGroups<'s> {
    fn new(state: &'s StateTree) -> Self {
        let leaves = state
            .leaves()
            .map(|leaf| (Some(leaf.optimiser()), leaf.paths().collect()));
        let left_out = state
            .left_out
            .iter()
            .map(|variable| (None, variable.paths.iter().map(String::as_str).collect()));
        let mut groups = OptimiserGroups {
            optimisers: Vec::new(),
            parameters: Vec::new(),
        };
        // Indices of optimisers by a hash, because each parameter may have a different optimiser.
        let mut indices: HashMap<Option<u64>, Vec<usize>> = HashMap::new();
        for (optimiser, paths) in leaves.chain(left_out) {
            let description = optimiser.map(Optimiser::description);
            let record = description.map(Description::record);
            let same_hash = indices
                .entry(description.map(Description::fingerprint))
                .or_default();
            let earlier_index = same_hash
                .iter()
                .copied()
                .find(|index| groups.optimisers[*index] == record);
            let index = earlier_index.unwrap_or_else(|| {
                same_hash.push(groups.optimisers.len());
                groups.optimisers.push(record);
                groups.optimisers.len() - 1
            });
            groups.parameters.push((index, paths));
        }
        groups
    }

    /// The first optimiser with the most parameters, if the optimiser has more than one parameter.
    fn most_frequent(&self) -> Option<usize> {
        let mut counts = vec![0; self.optimisers.len()];
        self.parameters
            .iter()
            .for_each(|(optimiser, _)| counts[*optimiser] += 1);
        // Reversed, because `max_by_key` takes the last of several maxima.
        let most = (0..counts.len()).rev().max_by_key(|optimiser| counts[*optimiser]);
        most.filter(|optimiser| counts[*optimiser] > 1)
    }

    /// The patterns of all parameters without the optimiser `last`, each with the index of the optimiser.
    fn patterns(&self, last: Option<usize>) -> Result<Vec<(&'s str, usize)>> {
        let (mut entries, mut wild_patterns) = (Vec::new(), Vec::<Patterns>::new());
        for (optimiser, paths) in self
            .parameters
            .iter()
            .filter(|(optimiser, _)| Some(*optimiser) != last)
        {
            let path = paths[0];
            // An earlier pattern chooses for this parameter. A second pattern would choose nothing, and
            // `Patterns::choose` refuses such a pattern.
            if wild_patterns
                .iter()
                .any(|pattern| pattern.first_match(paths).is_some())
            {
                continue;
            }
            if path.contains(['*', '?']) {
                wild_patterns.push(self.wild_pattern(path, *optimiser)?);
            }
            entries.push((path, *optimiser));
        }
        Ok(entries)
    }

    /// The pattern of a path with a `*` or `?`. Refuses a pattern that matches another optimiser's parameter.
    fn wild_pattern(&self, path: &str, optimiser: usize) -> Result<Patterns> {
        let pattern = Patterns::new(vec![path.to_string()]);
        let others = self.parameters.iter().filter(|(other, _)| *other != optimiser);
        let mut other_paths = others.flat_map(|(_, paths)| paths);
        match other_paths.find(|other| pattern.first_match(&[other]).is_some()) {
            None => Ok(pattern),
            Some(other) => {
                let problem = "its path contains * or ?, which match any characters in a pattern, so no \
                               pattern separates this parameter from one with another optimiser:";
                Err(Error::new(ErrorKind::Argument, problem)
                    .with_got(other)
                    .with_remedy("rename one of the two, or choose optimisers in code with `setup_with`")
                    .at(path))
            }
        }
    }
}

/// Whether some parameters have no rule but `None`, so that the gradient itself is the step.
pub(super) fn is_without_rule(record: &OptimiserRecord) -> bool {
    let rule = record.rule();
    let inner = rule.inner.as_deref().filter(|_| rule.kind == "StoreAs");
    let alternatives = if rule.kind == FALLBACK_KIND {
        &rule.members[..]
    } else {
        &[]
    };
    rule.kind == "None" || inner.into_iter().chain(alternatives).any(is_without_rule)
}

/// An optimiser as data. Refuses what cannot be read again: an optimiser without a rule, and
/// `Offload::everywhere`, which can only be outermost.
pub(super) fn optimiser_data(record: &OptimiserRecord) -> Result<Data> {
    if is_without_rule(record) {
        let problem =
            "no configuration has `None` as a whole optimiser, because the gradient itself is the step";
        return Err(Error::new(ErrorKind::Unsupported, problem)
            .with_remedy("to leave parameters as they are, freeze them; if the gradient is the step, use `Descent::new(1.0)`"));
    }
    if !record.storage().everywhere {
        return Ok(inner_data(record));
    }
    let problem = "no configuration has `Offload::everywhere`, which is for tests";
    let remedy = "write the inner optimiser, and put `Offload::new(..).everywhere()` around the optimiser \
                  that is built from the configuration";
    Err(Error::new(ErrorKind::Unsupported, problem).with_remedy(remedy))
}

/// The optimiser with all values. A switch that is off and an empty list are defaults, and are not written.
fn inner_data(record: &OptimiserRecord) -> Data {
    match (&*record.kind, record.inner.as_deref()) {
        (CHAIN, _) => Data::List(record.members.iter().map(inner_data).collect()),
        (OFFLOAD, Some(inner)) => make_table([(OFFLOAD, inner_data(inner))]),
        (kind, _) => match optimiser_table(record, inner_data) {
            Data::Table(entries) if entries.is_empty() => Data::text(kind),
            entries => make_table([(kind, entries)]),
        },
    }
}

/// The table of an optimiser, with only the names of the rules inside.
pub(super) fn example_table(record: &OptimiserRecord) -> Data {
    optimiser_table(record, |rule| Data::text(&rule.kind))
}

/// The settings and fields of an optimiser, and the rules inside, each as `rule_data` writes the rule.
fn optimiser_table(record: &OptimiserRecord, rule_data: impl Fn(&OptimiserRecord) -> Data) -> Data {
    let is_written = |setting: &Setting| match setting {
        Setting::Flag(is_on) => *is_on,
        Setting::Texts(texts) => !texts.is_empty(),
        _ => true,
    };
    let settings = record.settings.iter().filter(|(_, setting)| is_written(setting));
    let settings = settings.map(|(name, setting)| (name.as_str(), Data::from(setting)));
    let fields = record
        .fields
        .iter()
        .map(|(name, value)| (name.as_str(), value.clone()));
    let parts = parts(record).into_iter().map(|(key, rules)| match rules {
        [one] if key != MEMBERS => (key, rule_data(one)),
        several => (key, Data::List(several.iter().map(&rule_data).collect())),
    });
    make_table(settings.chain(fields).chain(parts))
}

/// The rules inside of a rule, by key. Several rules are under [`MEMBERS`], except those of
/// [`FALLBACK_KIND`].
pub(super) fn parts(record: &OptimiserRecord) -> Vec<(&'static str, &[OptimiserRecord])> {
    let inner = record
        .inner
        .as_deref()
        .map(|inner| (INNER, std::slice::from_ref(inner)));
    let members = match &record.members[..] {
        [] => vec![],
        members @ [_, _] if record.kind == FALLBACK_KIND => {
            vec![(INNER, &members[..1]), (FALLBACK, &members[1..])]
        }
        members => vec![(MEMBERS, members)],
    };
    inner.into_iter().chain(members).collect()
}

impl From<&Setting> for Data {
    fn from(setting: &Setting) -> Self {
        match setting {
            Setting::Flag(flag) => Data::Flag(*flag),
            Setting::Count(count) => Data::Count(*count),
            Setting::Text(text) => Data::text(text),
            Setting::Texts(texts) => Data::List(texts.iter().map(|text| Data::text(text)).collect()),
            Setting::Table(rows) => make_table(rows.iter().map(|(name, row)| (&**name, Data::text(row)))),
        }
    }
}
