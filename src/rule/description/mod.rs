//! What an optimiser is made of, as data: what files hold, and what is compared.

pub(crate) mod adjust;
pub(crate) mod describe;
pub(crate) mod fields;
pub(crate) mod order;
pub(crate) mod rates;
pub(crate) mod role;
pub(crate) mod setting;

use std::fmt::{self, Display, Write};

use serde::{Deserialize, Serialize};

use crate::numbers::Fingerprint;
use crate::rule::Describe;
use crate::rule::field::{FieldValue, Literal};
use crate::rule::state::ChildPlace;
use crate::rule::state::storage::{StorageKind, StorageScheme};
use crate::rule::traits::{Event, visit};
use setting::Setting;

/// An optimiser as data: its kind, settings and fields, and what it holds.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Description {
    pub(crate) kind: String,
    /// How it stores the parameter, if it decides that.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    storage: Option<StorageScheme>,
    /// What decides on the layout of its state.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(crate) settings: Vec<(String, Setting)>,
    /// Its hyper-parameters.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(crate) fields: Vec<(String, Literal)>,
    /// The inner rule, if it is around one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) inner: Option<Box<Description>>,
    /// The rules that it holds by index.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(crate) members: Vec<Description>,
}

/// The first place at which two optimisers are of different rules.
#[derive(Debug, PartialEq)]
pub(crate) struct DescriptionDifference {
    /// The indices of the members that it is in, outermost first.
    members: Vec<usize>,
    /// What each of the two has there.
    sides: [String; 2],
}

impl DescriptionDifference {
    /// The end of an error's sentence: what is here, what in the file, in which member. Empty if the whole
    /// differs.
    pub(crate) fn in_file(&self) -> String {
        let [here, file] = &self.sides;
        self.place().map_or_else(String::new, |place| format!(" (here: {here}, file: {file}, at {place})"))
    }

    /// Where it is, as `member 1.0`; `None` for the whole.
    fn place(&self) -> Option<String> {
        let numbers: Vec<String> = self.members.iter().map(usize::to_string).collect();
        (!numbers.is_empty()).then(|| format!("member {}", numbers.join(".")))
    }
}

impl Description {
    /// What a rule or optimiser says of itself.
    pub(crate) fn of(rule: &mut dyn Describe) -> Self {
        let (mut now, mut around) = (Description::default(), Vec::new());
        visit(rule, |position, event| match event {
            Event::Begin => around.push(std::mem::take(&mut now)),
            Event::End => {
                let part = std::mem::replace(&mut now, around.pop().unwrap_or_default());
                match position.held {
                    Some(ChildPlace::Member(_) | ChildPlace::Alternative(_)) => now.members.push(part),
                    _ => now.inner = Some(Box::new(part)),
                }
            }
            Event::Kind => now.kind = position.kind.to_string(),
            Event::Storage(storage) => now.storage = Some(storage),
            Event::Setting(name, setting) => now.settings.push((name.to_string(), setting)),
            Event::Field(name, field) => now.fields.push((name.to_string(), field.value().into())),
            Event::Held(..) | Event::Role(_) | Event::Fixed(_) | Event::Require(_) | Event::Choice(_) => {}
        });
        now
    }

    /// This and all that it holds, in order.
    pub(crate) fn all(&self) -> Vec<&Description> {
        let parts = self.inner.as_deref().into_iter().chain(&self.members);
        std::iter::once(self).chain(parts.flat_map(Description::all)).collect()
    }

    /// This, its inner rule, the inner rule of that, and so on.
    #[cfg(feature = "config")]
    pub(crate) fn spine(&self) -> Vec<&Description> {
        std::iter::successors(Some(self), |around| around.inner.as_deref()).collect()
    }

    /// How the parameter is stored.
    pub(crate) fn storage(&self) -> StorageScheme {
        self.storage.unwrap_or(StorageScheme::on_device(StorageKind::Rounded))
    }

    /// The rule without how the parameter is stored.
    pub(crate) fn rule(&self) -> &Description {
        match &self.inner {
            Some(inner) if self.storage.is_some() => inner.rule(),
            _ => self,
        }
    }

    /// The first rule or setting in which the two differ. Values of hyper-parameters are not compared.
    pub(crate) fn difference(&self, other: &Self) -> Option<DescriptionDifference> {
        self.compare(other, &mut Vec::new())
    }

    /// A hash of all that a rule says of itself, made without a copy of it.
    pub(crate) fn fingerprint(rule: &mut dyn Describe) -> u64 {
        let mut print = Fingerprint::new();
        visit(rule, |position, event| {
            print = match event {
                Event::Begin => print.number(1),
                Event::End => print.number(2),
                Event::Kind => print.bytes(position.kind.as_bytes()),
                Event::Setting(name, setting) => {
                    let mut print = print.bytes(name.as_bytes());
                    // `Fingerprint` never fails as a writer.
                    let _ = write!(print, "{setting}");
                    print
                }
                Event::Field(name, field) => with_value(print.bytes(name.as_bytes()), field.value()),
                Event::Storage(_)
                | Event::Held(..)
                | Event::Role(_)
                | Event::Fixed(_)
                | Event::Require(_)
                | Event::Choice(_) => print,
            };
        });
        print.finish()
    }

    /// All that it says, as short texts: `OptimiserChain`, `0: ClipNorm`, `0.omega = 1`.
    pub(crate) fn words(&self) -> Vec<String> {
        let mut words = Vec::new();
        self.say("", &mut words);
        words
    }

    /// The name, and the hyper-parameters of this and of all that it holds.
    pub(crate) fn with_fields(&self) -> String {
        let fields = self
            .all()
            .into_iter()
            .flat_map(|part| &part.fields)
            .map(|(name, value)| format!("{name}: {value}"));
        format!("{self} {{ {} }}", fields.collect::<Vec<_>>().join(", "))
    }

    fn say(&self, place: &str, words: &mut Vec<String>) {
        let name = if place.is_empty() {
            self.kind.clone()
        } else {
            format!("{}: {}", place.trim_end_matches('.'), self.kind)
        };
        words.push(name);
        words.extend(self.settings.iter().map(|(name, setting)| format!("{place}{name} = {setting}")));
        words.extend(self.fields.iter().map(|(name, value)| format!("{place}{name} = {value}")));
        self.inner.iter().for_each(|inner| inner.say(place, words));
        self.members.iter().enumerate().for_each(|(i, member)| member.say(&format!("{place}{i}."), words));
    }

    fn compare(&self, other: &Self, members: &mut Vec<usize>) -> Option<DescriptionDifference> {
        let differ =
            |members: &[usize], sides| Some(DescriptionDifference { members: members.to_vec(), sides });
        let sides = [self, other];
        if self.kind != other.kind || self.inner.is_some() != other.inner.is_some() {
            return differ(members, sides.map(|side| side.kind.clone()));
        }
        let names = sides.iter().flat_map(|side| side.settings.iter().map(|(name, _)| name));
        let setting = |side: &Self, name: &str| side.settings.iter().find(|(own, _)| own == name).cloned();
        if let Some(name) = names.into_iter().find(|name| setting(self, name) != setting(other, name)) {
            let words = |side: &Self| setting(side, name).and_then(|(name, setting)| setting.words(&name));
            return differ(
                members,
                sides.map(|side| {
                    words(side).map_or_else(|| side.kind.clone(), |words| format!("{}({words})", side.kind))
                }),
            );
        }
        if self.members.len() != other.members.len() {
            return differ(
                members,
                sides.map(|side| format!("{} of {} members", side.kind, side.members.len())),
            );
        }
        if let (Some(own), Some(other)) = (&self.inner, &other.inner)
            && let Some(found) = own.compare(other, members)
        {
            return Some(found);
        }
        self.members.iter().zip(&other.members).enumerate().find_map(|(i, (own, other))| {
            members.push(i);
            let found = own.compare(other, members);
            members.pop();
            found
        })
    }
}

fn with_value(print: Fingerprint, value: FieldValue) -> Fingerprint {
    match value {
        FieldValue::Real(a) => print.real(a),
        FieldValue::Pair(a, b) => print.real(a).real(b),
        FieldValue::Triple(a, b, c) => print.real(a).real(b).real(c),
        FieldValue::Count(count) => print.number(count),
        FieldValue::Sizes(sizes) => sizes.iter().fold(print, |print, size| print.number(size as u64)),
        FieldValue::Flag(flag) => print.number(flag.into()),
        FieldValue::Choice(choice) => print.bytes(choice.name().as_bytes()),
    }
}

/// The name in messages: the kind, and in brackets its settings and what it holds.
impl Display for Description {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let settings = self.settings.iter().filter_map(|(name, setting)| setting.words(name));
        let parts = self.inner.as_deref().into_iter().chain(&self.members).map(Description::to_string);
        let inside: Vec<String> = settings.chain(parts).collect();
        f.write_str(&self.kind)?;
        if inside.is_empty() { Ok(()) } else { write!(f, "({})", inside.join(", ")) }
    }
}
