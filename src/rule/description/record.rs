//! The description of an optimiser in files, names and errors: texts, settings, and untyped values.

use std::fmt::{self, Display};

use serde::{Deserialize, Serialize};

use crate::numbers::DType;
use crate::rule::field::Data;

/// An optimiser in a file: its kind, settings and fields, and the rules inside.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct OptimiserRecord {
    pub(crate) kind: String,
    /// How the optimiser stores the parameter. `None` for a bare rule.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) storage: Option<StorageRecord>,
    /// Values that distinguish the optimiser and cannot be adjusted.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(crate) settings: Vec<(String, Setting)>,
    /// The hyper-parameters.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(crate) fields: Vec<(String, Data)>,
    /// The inner rule of a store or wrapper.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) inner: Option<Box<OptimiserRecord>>,
    /// The members of a chain or the alternatives, in order.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(crate) members: Vec<OptimiserRecord>,
}

/// The value of a setting, such as the dtype of masters.
///
/// A setting cannot be [adjusted](crate::Adjust), because it decides the layout of a rule's state.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum Setting {
    /// A switch.
    Flag(bool),
    /// A count.
    Count(u64),
    /// A word, such as a dtype.
    Text(String),
    /// Several texts, such as patterns of paths.
    Texts(Vec<String>),
    /// Pairs of a name and a word, such as the dtypes of state tensors.
    Table(Vec<(String, String)>),
}

impl From<bool> for Setting {
    fn from(flag: bool) -> Self {
        Setting::Flag(flag)
    }
}

impl From<u64> for Setting {
    fn from(count: u64) -> Self {
        Setting::Count(count)
    }
}

impl From<&str> for Setting {
    fn from(text: &str) -> Self {
        Setting::Text(text.to_string())
    }
}

impl From<DType> for Setting {
    fn from(dtype: DType) -> Self {
        Setting::Text(dtype.to_string())
    }
}

impl fmt::Display for Setting {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Setting::Flag(flag) => write!(f, "{flag}"),
            Setting::Count(count) => write!(f, "{count}"),
            Setting::Text(text) => f.write_str(text),
            Setting::Texts(texts) => write!(f, "{texts:?}"),
            Setting::Table(rows) => f.write_str(&print_table(rows)),
        }
    }
}

/// Prints the rows of a table: `m: BF16, v: Q8`.
fn print_table(rows: &[(String, String)]) -> String {
    rows.iter()
        .map(|(name, text)| format!("{name}: {text}"))
        .collect::<Vec<_>>()
        .join(", ")
}

impl Setting {
    /// The setting in the name of a rule: `F32`, `24 bits`, `cautious`, `m: BF16, v: Q8`. `None` if names
    /// leave the setting out.
    pub(crate) fn words(&self, name: &str) -> Option<String> {
        match self {
            Setting::Flag(is_on) => is_on.then(|| name.to_string()),
            Setting::Count(count) => Some(format!("{count} {name}")),
            Setting::Text(text) => Some(text.clone()),
            Setting::Texts(_) => None,
            Setting::Table(rows) => Some(print_table(rows)),
        }
    }
}

/// How an optimiser stores a parameter, and where the state is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct StorageRecord {
    pub(crate) kind: StorageKind,
    /// Whether the state of a parameter on another device is on the CPU, with a copy of the parameter.
    pub(crate) offloaded: bool,
    /// Whether a parameter on the CPU has a copy in the state, too. The field is not in files, because files
    /// are equal for all devices.
    #[serde(skip)]
    pub(crate) everywhere: bool,
}

/// The kind of a store, by the content of its state besides a low-precision parameter.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum StorageKind {
    /// Nothing: steps are rounded to the dtype of the parameter.
    Rounded,
    /// A precise copy.
    Master,
    /// Low bits of an f32.
    Split,
    /// The digits that the last rounding lost.
    Compensated,
    /// A counter for random rounding.
    Stochastic,
}

impl StorageRecord {
    /// Storage of this kind, with the state on the device of the parameter.
    pub(crate) fn with_parameter(kind: StorageKind) -> Self {
        StorageRecord {
            kind,
            offloaded: false,
            everywhere: false,
        }
    }

    /// Whether the state can be converted to another precision or device.
    ///
    /// Each state tensor then is either a tensor of the rule or a complete copy of the parameter.
    pub(crate) fn is_convertible(self) -> bool {
        matches!(self.kind, StorageKind::Rounded | StorageKind::Master)
    }

    /// Whether a state tensor named `master` may be the copy of the parameter, and not a tensor of the rule.
    pub(crate) fn may_have_master(self) -> bool {
        self.offloaded || self.kind == StorageKind::Master
    }
}

/// The first place at which two optimisers have different rules or settings.
#[derive(Debug, PartialEq)]
pub(crate) struct RecordDifference {
    /// The indices of the members that contain the difference, outermost first.
    members: Vec<usize>,
    /// The two different rules or settings in words.
    sides: [String; 2],
}

impl RecordDifference {
    /// The part of an error that names the member and both sides.
    pub(crate) fn details(&self) -> String {
        // The error names both optimisers completely, which is enough if the outermost rules differ.
        if self.members.is_empty() {
            return String::new();
        }
        let numbers: Vec<String> = self.members.iter().map(usize::to_string).collect();
        let ([here, file], member) = (&self.sides, numbers.join("."));
        format!(" (here: {here}, file: {file}, at member {member})")
    }
}

impl OptimiserRecord {
    /// This record and all records inside, in depth-first order.
    pub(crate) fn all(&self) -> Vec<&OptimiserRecord> {
        let parts = self.inner.as_deref().into_iter().chain(&self.members);
        std::iter::once(self)
            .chain(parts.flat_map(OptimiserRecord::all))
            .collect()
    }

    /// How the parameter is stored.
    pub(crate) fn storage(&self) -> StorageRecord {
        self.storage
            .unwrap_or(StorageRecord::with_parameter(StorageKind::Rounded))
    }

    /// The rule inside all stores.
    pub(crate) fn rule(&self) -> &OptimiserRecord {
        match &self.inner {
            Some(inner) if self.storage.is_some() => inner.rule(),
            _ => self,
        }
    }

    /// The first rule or setting in which two optimisers differ. Hyper-parameters are not compared.
    pub(crate) fn difference(&self, other: &Self) -> Option<RecordDifference> {
        self.compare(other, &mut Vec::new())
    }

    /// All kinds, settings and fields as short texts: `OptimiserChain`, `0: ClipNorm`, `0.omega = 1`.
    pub(crate) fn words(&self) -> Vec<String> {
        let mut words = Vec::new();
        self.add_words("", &mut words);
        words
    }

    /// The name, followed by all hyper-parameters.
    pub(crate) fn name_with_fields(&self) -> String {
        let fields = self
            .all()
            .into_iter()
            .flat_map(|part| &part.fields)
            .map(|(name, value)| format!("{name}: {}", value.words()));
        format!("{self} {{ {} }}", fields.collect::<Vec<_>>().join(", "))
    }

    fn add_words(&self, prefix: &str, words: &mut Vec<String>) {
        let name = if prefix.is_empty() {
            self.kind.clone()
        } else {
            format!("{}: {}", prefix.trim_end_matches('.'), self.kind)
        };
        words.push(name);
        words.extend(
            self.settings
                .iter()
                .map(|(name, setting)| format!("{prefix}{name} = {setting}")),
        );
        words.extend(
            self.fields
                .iter()
                .map(|(name, value)| format!("{prefix}{name} = {}", value.words())),
        );
        self.inner.iter().for_each(|inner| inner.add_words(prefix, words));
        self.members
            .iter()
            .enumerate()
            .for_each(|(i, member)| member.add_words(&format!("{prefix}{i}."), words));
    }

    fn compare(&self, other: &Self, members: &mut Vec<usize>) -> Option<RecordDifference> {
        let difference_at = |members: &[usize], sides| {
            Some(RecordDifference {
                members: members.to_vec(),
                sides,
            })
        };
        let sides = [self, other];
        if self.kind != other.kind || self.inner.is_some() != other.inner.is_some() {
            return difference_at(members, sides.map(|side| side.kind.clone()));
        }
        let names = sides
            .iter()
            .flat_map(|side| side.settings.iter().map(|(name, _)| name));
        let setting =
            |side: &Self, name: &str| side.settings.iter().find(|(other, _)| other == name).cloned();
        if let Some(name) = names
            .into_iter()
            .find(|name| setting(self, name) != setting(other, name))
        {
            let words = |side: &Self| setting(side, name).and_then(|(name, setting)| setting.words(&name));
            return difference_at(
                members,
                sides.map(|side| {
                    words(side).map_or_else(|| side.kind.clone(), |words| format!("{}({words})", side.kind))
                }),
            );
        }
        if self.members.len() != other.members.len() {
            return difference_at(
                members,
                sides.map(|side| format!("{} of {} members", side.kind, side.members.len())),
            );
        }
        if let (Some(inner), Some(other)) = (&self.inner, &other.inner)
            && let Some(difference) = inner.compare(other, members)
        {
            return Some(difference);
        }
        self.members
            .iter()
            .zip(&other.members)
            .enumerate()
            .find_map(|(i, (member, other))| {
                members.push(i);
                let difference = member.compare(other, members);
                members.pop();
                difference
            })
    }
}

/// Writes the name in messages: the kind, with settings and held rules in brackets.
impl Display for OptimiserRecord {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let settings = self
            .settings
            .iter()
            .filter_map(|(name, setting)| setting.words(name));
        let parts = self
            .inner
            .as_deref()
            .into_iter()
            .chain(&self.members)
            .map(OptimiserRecord::to_string);
        let in_brackets: Vec<String> = settings.chain(parts).collect();
        f.write_str(&self.kind)?;
        if in_brackets.is_empty() {
            Ok(())
        } else {
            write!(f, "({})", in_brackets.join(", "))
        }
    }
}
