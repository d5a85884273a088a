//! Settings: values of a rule that cannot be adjusted.

use std::fmt;

use crate::numbers::DType;
use serde::{Deserialize, Serialize};

/// The value of a setting, such as the dtype of masters. It cannot be [adjusted](crate::Adjust), because it
/// decides the layout of a rule's state.
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
            Setting::Table(rows) => f.write_str(&of_table(rows)),
        }
    }
}

/// Prints the rows of a table: `m: BF16, v: Q8`.
fn of_table(rows: &[(String, String)]) -> String {
    rows.iter().map(|(name, text)| format!("{name}: {text}")).collect::<Vec<_>>().join(", ")
}

impl Setting {
    /// The text in the name of a rule, if there is one: `F32`, `24 bits`, `cautious`, `m: BF16, v: Q8`.
    pub(crate) fn words(&self, name: &str) -> Option<String> {
        match self {
            Setting::Flag(is_on) => is_on.then(|| name.to_string()),
            Setting::Count(count) => Some(format!("{count} {name}")),
            Setting::Text(text) => Some(text.clone()),
            Setting::Texts(_) => None,
            Setting::Table(rows) => Some(of_table(rows)),
        }
    }
}
