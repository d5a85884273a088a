//! Writing optimisers as configurations.

use super::data::{Data, Entries};
use super::form::{FALLBACK, INNER, MEMBERS, OFFLOAD};
use crate::error::{Error, ErrorKind, Result};
use crate::rule::field::{Literal, Number};
use crate::rule::{Description, OptimiserRecord, Setting};

/// The kind of chains, which are lists.
const CHAIN: &str = "OptimiserChain";

/// The kind whose rules have keys of their own: `inner`, `fallback` and `except`.
const CHOICE: &str = "Fallback";

/// [`written`] for an optimiser that was built in code.
pub(super) fn written_optimiser(optimiser: &Description) -> Result<Data> {
    let record = optimiser.record();
    if record.storage().everywhere {
        let remedy = "write the optimiser inside, and put `Offload::new(..).everywhere()` around what is \
                      built of that";
        return Err(Error::new(
            ErrorKind::Unsupported,
            "no configuration has `Offload::everywhere`, which is for tests",
        )
        .with_remedy(remedy));
    }
    Ok(written(&record))
}

/// The optimiser with all its values, except switches that are off and empty lists.
pub(super) fn written(record: &OptimiserRecord) -> Data {
    let inner = record.inner.as_deref();
    match (&*record.kind, inner) {
        (CHAIN, _) => Data::List(record.members.iter().map(written).collect()),
        (OFFLOAD, Some(inner)) => Data::table([(OFFLOAD, written(inner))]),
        (kind, _) => {
            let table = entries(record, written);
            if table.is_empty() { Data::Text(kind.into()) } else { Data::table([(kind, Data::Table(table))]) }
        }
    }
}

/// The table under its name, with only the names of the rules inside.
pub(super) fn example(record: &OptimiserRecord) -> Data {
    Data::Table(entries(record, |part| Data::Text(part.kind.as_str().into())))
}

fn entries(record: &OptimiserRecord, part: impl Fn(&OptimiserRecord) -> Data) -> Entries {
    let is_said = |setting: &Setting| match setting {
        Setting::Flag(is_on) => *is_on,
        Setting::Texts(texts) => !texts.is_empty(),
        _ => true,
    };
    let settings = record.settings.iter().filter(|(_, setting)| is_said(setting));
    let settings = settings.map(|(name, setting)| (name.as_str().into(), Data::from(setting)));
    let fields = record.fields.iter().map(|(name, value)| (name.as_str().into(), Data::from(value)));
    let parts = parts(record).into_iter().map(|(key, held)| match held {
        HeldRules::One(held) => (key.into(), part(held)),
        HeldRules::Several(held) => (key.into(), Data::List(held.iter().map(&part).collect())),
    });
    settings.chain(fields).chain(parts).collect()
}

/// Rules that stand under one key.
enum HeldRules<'d> {
    One(&'d OptimiserRecord),
    Several(&'d [OptimiserRecord]),
}

/// The rules that a rule holds, by key.
fn parts(record: &OptimiserRecord) -> Vec<(&'static str, HeldRules<'_>)> {
    use HeldRules::{One, Several};
    let members = match &record.members[..] {
        [] => vec![],
        [rule, other] if record.kind == CHOICE => vec![(INNER, One(rule)), (FALLBACK, One(other))],
        members => vec![(MEMBERS, Several(members))],
    };
    record.inner.as_deref().map(|inner| (INNER, One(inner))).into_iter().chain(members).collect()
}

/// The keys of the table under its name.
pub(super) fn keys(record: &OptimiserRecord) -> Vec<String> {
    let values =
        record.settings.iter().map(|(name, _)| name).chain(record.fields.iter().map(|(name, _)| name));
    let parts = parts(record).into_iter().map(|(key, _)| key.to_string());
    values.cloned().chain(parts).collect()
}

impl From<&Setting> for Data {
    fn from(setting: &Setting) -> Self {
        let text = |text: &String| Data::Text(text.as_str().into());
        match setting {
            Setting::Flag(flag) => Data::Flag(*flag),
            Setting::Count(count) => Data::Count(*count),
            Setting::Text(one) => text(one),
            Setting::Texts(several) => Data::List(several.iter().map(text).collect()),
            Setting::Table(rows) => Data::table(rows.iter().map(|(name, row)| (name.as_str(), text(row)))),
        }
    }
}

impl From<&Literal> for Data {
    fn from(literal: &Literal) -> Self {
        match literal {
            Literal::Flag(flag) => Data::Flag(*flag),
            Literal::Count(count) => Data::Count(*count),
            Literal::Real(number) => Data::from(*number),
            Literal::List(numbers) => Data::List(numbers.iter().copied().map(Data::from).collect()),
            Literal::Text(text) => Data::Text(text.as_str().into()),
        }
    }
}

/// A number, or the text for it (`"inf"`).
impl From<Number> for Data {
    fn from(Number(value): Number) -> Self {
        let word = match value {
            _ if value.is_finite() => return Data::Real(Number(value)),
            _ if value.is_nan() => "nan",
            _ if value > 0.0 => "inf",
            _ => "-inf",
        };
        Data::Text(word.into())
    }
}
