//! What a rule is: from a gradient to a gradient. And what an optimiser is: where the result goes.

mod copies;
mod elementwise;
mod fields;
mod foreign;
mod gradient;
mod kind;
mod planned;
mod state;
mod storage;
mod target;
mod traits;
mod transfer;

pub(crate) use crate::engine::{Arithmetic, Epilogue, Norms, Reducer, Resolved, Scope, erased, gaussian, random_key};
pub use crate::field::{Average, Field, FieldValue, NonFinite, range};
pub use elementwise::Elementwise;
pub use fields::Adjust;
pub(crate) use fields::{adjust_by, available, in_member, names, reached};
#[doc(hidden)]
pub use fields::{check, set, wrong_type};
pub(crate) use foreign::{counting, foreign};
pub use gradient::{Flow, Gradient};
pub(crate) use gradient::{Sums, Windows};
pub use kind::Kind;
pub(crate) use planned::{Planned, Progress};
pub(crate) use state::{Child, OwnCounters, OwnNumbers, OwnTensors, StateParts, StateTensor, expect_dtype};
pub use state::{Slot, State};
pub(crate) use storage::{Storage, StorageKind};
pub(crate) use target::Target;
pub(crate) use traits::rule_by;
pub use traits::{Optimiser, Rule};
pub(crate) use transfer::Transfer;
