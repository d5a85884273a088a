//! Writing optimisers as configurations, from the records that checkpoints have.
//!
//! The optimisers of a state are written by path:
//!
//! 1. If all parameters have the same optimiser and none is left out, that optimiser is written alone.
//! 2. Else the optimiser of most parameters gets the last pattern, `*`, if it has more than one parameter.
//! 3. Every other parameter gets a pattern that is its first path.
//! 4. A path with a `*` or `?` is refused if, as a pattern, it matches a parameter with another optimiser.

use std::collections::HashMap;

use super::form::{FALLBACK, INNER, MEMBERS, OFFLOAD, choices, table};
use crate::error::{Error, ErrorKind, Result};
use crate::model::patterns::Patterns;
use crate::rule::field::Data;
use crate::rule::{Description, Optimiser, OptimiserRecord, Setting};
use crate::tree::StateTree;

/// The kind that is written as a list.
const CHAIN: &str = "OptimiserChain";

/// The kind whose two rules are under keys of their own, `inner` and `fallback`.
const CHOICE: &str = "Fallback";

/// The optimisers of all leaves, and which parameters were left out.
pub(super) fn by_path(state: &StateTree) -> Result<Data> {
    let leaves = state.leaves();
    let leaves = leaves.map(|leaf| (Some(leaf.optimiser()), leaf.paths().collect()));
    let left_out =
        state.left_out.iter().map(|variable| (None, variable.paths.iter().map(String::as_str).collect()));
    let mut optimisers: Vec<Option<OptimiserRecord>> = Vec::new();
    // Their indices by a hash, because each parameter may have an optimiser of its own.
    let mut indices: HashMap<Option<u64>, Vec<usize>> = HashMap::new();
    // The paths of each parameter, with the index of its optimiser.
    let mut parameters: Vec<(usize, Vec<&str>)> = Vec::new();
    for (optimiser, paths) in leaves.chain(left_out) {
        let description = optimiser.map(Optimiser::description);
        let record = description.map(Description::record);
        let same_hash = indices.entry(description.map(Description::fingerprint)).or_default();
        let own =
            same_hash.iter().copied().find(|own| optimisers[*own] == record).unwrap_or(optimisers.len());
        if own == optimisers.len() {
            same_hash.push(own);
            optimisers.push(record);
        }
        parameters.push((own, paths));
    }
    let data = optimisers.iter().map(|own| own.as_ref().map(optimiser_data).transpose());
    let data: Vec<Option<Data>> = data.collect::<Result<_>>()?;
    if let [Some(only)] = &data[..] {
        return Ok(only.clone());
    }
    state.check_names()?;
    let mut counts = vec![0; data.len()];
    parameters.iter().for_each(|(own, _)| counts[*own] += 1);
    // Reversed, because `max_by_key` takes the last of several.
    let last = (0..data.len()).rev().max_by_key(|own| counts[*own]).filter(|last| counts[*last] > 1);
    parameters.sort_by_key(|(own, _)| *own);
    let (mut entries, mut wild) = (Vec::new(), Vec::<Patterns>::new());
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
        entries.push((path, data[*own].clone()));
    }
    entries.extend(last.map(|last| ("*", data[last].clone())));
    Ok(choices(entries.into_iter()))
}

/// An optimiser as data. Refuses `Offload::everywhere`, which can be outermost only.
pub(super) fn optimiser_data(record: &OptimiserRecord) -> Result<Data> {
    if !record.storage().everywhere {
        return Ok(inner_data(record));
    }
    let problem = "no configuration has `Offload::everywhere`, which is for tests";
    let remedy = "write the inner optimiser, and put `Offload::new(..).everywhere()` around the optimiser \
                  that is built from the configuration";
    Err(Error::new(ErrorKind::Unsupported, problem).with_remedy(remedy))
}

/// The optimiser with all values. Switches that are off and empty lists are left out, which means the same.
fn inner_data(record: &OptimiserRecord) -> Data {
    match (&*record.kind, record.inner.as_deref()) {
        (CHAIN, _) => Data::List(record.members.iter().map(inner_data).collect()),
        (OFFLOAD, Some(inner)) => table([(OFFLOAD, inner_data(inner))]),
        (kind, _) => match optimiser_table(record, inner_data) {
            Data::Table(entries) if entries.is_empty() => Data::text(kind),
            entries => table([(kind, entries)]),
        },
    }
}

/// The table of an optimiser, with only the names of the rules inside.
pub(super) fn example(record: &OptimiserRecord) -> Data {
    optimiser_table(record, |part| Data::text(&part.kind))
}

fn optimiser_table(record: &OptimiserRecord, part: impl Fn(&OptimiserRecord) -> Data) -> Data {
    let is_written = |setting: &Setting| match setting {
        Setting::Flag(is_on) => *is_on,
        Setting::Texts(texts) => !texts.is_empty(),
        _ => true,
    };
    let settings = record.settings.iter().filter(|(_, setting)| is_written(setting));
    let settings = settings.map(|(name, setting)| (name.as_str(), Data::from(setting)));
    let fields = record.fields.iter().map(|(name, value)| (name.as_str(), value.clone()));
    let parts = parts(record).into_iter().map(|(key, held)| match held {
        [one] if key != MEMBERS => (key, part(one)),
        several => (key, Data::List(several.iter().map(&part).collect())),
    });
    table(settings.chain(fields).chain(parts))
}

/// The rules inside of a rule, by key. Several are under [`MEMBERS`], except those of [`CHOICE`].
pub(super) fn parts(record: &OptimiserRecord) -> Vec<(&'static str, &[OptimiserRecord])> {
    let inner = record.inner.as_deref().map(|inner| (INNER, std::slice::from_ref(inner)));
    let members = match &record.members[..] {
        [] => vec![],
        members @ [_, _] if record.kind == CHOICE => vec![(INNER, &members[..1]), (FALLBACK, &members[1..])],
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
            Setting::Table(rows) => table(rows.iter().map(|(name, row)| (&**name, Data::text(row)))),
        }
    }
}
