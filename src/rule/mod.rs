//! Rules turn a gradient into a step; optimisers decide how the step is stored in the parameter.

#[cfg(feature = "candle")]
mod candle;
pub(crate) mod description;
mod evaluation;
pub(crate) mod field;
mod gradient;
mod optimiser;
mod parameter;
mod state;
mod traits;

pub(crate) use crate::engine::{Norms, Resolved};
pub(crate) use crate::numbers::value::Arithmetic;
pub(crate) use description::Description;
pub use description::adjust::Adjust;
pub(crate) use description::adjust::Described;
pub(crate) use description::order::order_faults;
pub(crate) use description::rates::{
    RATE, RateField, Rates, conflicting_rates_error, is_same_rate, unreachable_rate_error,
};
pub(crate) use description::record::OptimiserRecord;
pub use description::record::Setting;
pub use description::role::Role;
pub(crate) use description::{FieldDescription, FieldValues, out_of_range, unknown_name_error};
pub use evaluation::Evaluation;
pub use field::{Average, Choice, FieldValue, NonFinite, Sizes, range};
pub(crate) use gradient::LeafNorms;
pub use gradient::elementwise::Elementwise;
pub(crate) use gradient::elementwise::arithmetic_at;
pub use gradient::reductions::{Norm, Sums};
pub use gradient::{Flow, Gradient};
pub(crate) use optimiser::consistency::{
    Difference, Extent, check_rounded, copy_difference, difference, first_non_finite, sample_checksum,
};
pub(crate) use optimiser::store::Store;
pub use optimiser::{IntoOptimiser, Optimiser};
pub use parameter::Parameter;
pub use state::State;
pub use state::parts::{Counters, HeldStates, Numbers, Parts, Slots};
pub(crate) use state::rows::RowSources;
pub(crate) use state::slot::EntryTraits;
pub use state::slot::Slot;
pub use state::slot::SlotFormat;
pub(crate) use state::transfer::Transfer;
pub(crate) use state::{Child, StateValues, entry, state_of_another_rule};
pub use traits::{Describe, Describer, Kind, Rule};
