//! What a rule is: from a gradient to a gradient. And what an optimiser is: where the result goes.

mod copies;
mod decay;
mod elementwise;
mod fields;
mod foreign;
mod format;
mod gradient;
mod kind;
mod parts;
mod planned;
mod reductions;
mod slot;
mod state;
mod storage;
mod stored;
mod target;
mod traits;
mod transfer;

pub(crate) use crate::engine::{Epilogue, Norms, Resolved};
pub use crate::field::{Average, Choice, Choices, Field, FieldValue, NonFinite, Sizes, Summation, range};
pub(crate) use crate::value::Arithmetic;
pub(crate) use decay::decay_rate;
pub use elementwise::Elementwise;
pub(crate) use elementwise::arithmetic_at;
pub use fields::Adjust;
pub(crate) use fields::{adjust_by, available, in_member, names, reached};
#[doc(hidden)]
pub use fields::{check, set, wrong_type};
pub(crate) use foreign::{counting, foreign};
pub(crate) use format::Meaning;
pub use format::SlotFormat;
pub(crate) use gradient::Windows;
pub use gradient::{Flow, Gradient};
pub use kind::Kind;
pub use parts::{Counters, Numbers, Parts, Slots};
pub(crate) use planned::{Planned, Progress};
pub use reductions::{Norm, Sums};
pub use slot::Slot;
pub use state::State;
pub(crate) use state::{Child, OwnCounters, OwnTensors, StateParts, StateTensor};
pub(crate) use storage::{Storage, StorageKind};
pub(crate) use target::Target;
pub(crate) use traits::rule_by;
pub use traits::{Optimiser, Rule};
pub(crate) use transfer::Transfer;
