//! Writing optimisers as configurations, from the records that checkpoints have.

use super::data::Data;
use super::form::{FALLBACK, INNER, MEMBERS, OFFLOAD};
use crate::error::{Error, ErrorKind, Result};
use crate::rule::field::Literal;
use crate::rule::{OptimiserRecord, Setting};

/// The kind that is written as a list.
const CHAIN: &str = "OptimiserChain";

/// The kind whose two rules are under keys of their own, `inner` and `fallback`.
const CHOICE: &str = "Fallback";

/// [`written`] for an optimiser that was built in code.
pub(super) fn written_optimiser(record: &OptimiserRecord) -> Result<Data> {
    if !record.storage().everywhere {
        return Ok(written(record));
    }
    let problem = "no configuration has `Offload::everywhere`, which is for tests";
    let remedy = "write the inner optimiser, and put `Offload::new(..).everywhere()` around the optimiser \
                  that is built from the configuration";
    Err(Error::new(ErrorKind::Unsupported, problem).with_remedy(remedy))
}

/// The optimiser with all values. Switches that are off and empty lists are left out, which means the same.
fn written(record: &OptimiserRecord) -> Data {
    match (&*record.kind, record.inner.as_deref()) {
        (CHAIN, _) => Data::List(record.members.iter().map(written).collect()),
        (OFFLOAD, Some(inner)) => Data::table([(OFFLOAD, written(inner))]),
        (kind, _) => match table(record, written) {
            Data::Table(entries) if entries.is_empty() => Data::text(kind),
            table => Data::table([(kind, table)]),
        },
    }
}

/// The table of an optimiser, with only the names of the rules inside.
pub(super) fn example(record: &OptimiserRecord) -> Data {
    table(record, |part| Data::text(&part.kind))
}

fn table(record: &OptimiserRecord, part: impl Fn(&OptimiserRecord) -> Data) -> Data {
    let is_said = |setting: &Setting| match setting {
        Setting::Flag(is_on) => *is_on,
        Setting::Texts(texts) => !texts.is_empty(),
        _ => true,
    };
    let settings = record.settings.iter().filter(|(_, setting)| is_said(setting));
    let settings = settings.map(|(name, setting)| (name.as_str(), Data::from(setting)));
    let fields = record.fields.iter().map(|(name, value)| (name.as_str(), Data::from(value)));
    let parts = parts(record).into_iter().map(|(key, held)| match held {
        [one] if key != MEMBERS => (key, part(one)),
        several => (key, Data::List(several.iter().map(&part).collect())),
    });
    Data::table(settings.chain(fields).chain(parts))
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
            Setting::Table(rows) => Data::table(rows.iter().map(|(name, row)| (&**name, Data::text(row)))),
        }
    }
}

impl From<&Literal> for Data {
    fn from(literal: &Literal) -> Self {
        match literal {
            Literal::Flag(flag) => Data::Flag(*flag),
            Literal::Count(count) => Data::Count(*count),
            Literal::Real(number) => Data::Real(*number),
            Literal::List(numbers) => Data::List(numbers.iter().copied().map(Data::Real).collect()),
            Literal::Text(text) => Data::text(text),
        }
    }
}
