use super::Error;
use super::shown::errors;
use crate::field::FieldValue;

errors! {
/// Why a [`Scheduler`](crate::Scheduler) does not set a hyper-parameter. Nothing has changed then.
#[derive(thiserror::Error)]
#[non_exhaustive]
pub enum ScheduleError {
    /// One value for leaves with different ones.
    #[error(
        "one schedule would make the {field} of {:?} ({}) and of {:?} ({}) equal: make it a factor of each leaf's own with `Schedule::relative`, give parts of the model schedules of their own with `Schedule::below` or `Schedule::select_where`, or `adjust` the leaves to one value first",
        first.0, first.1, other.0, other.1
    )]
    Flattened {
        /// The hyper-parameter.
        field: String,
        /// The first leaf and its value.
        first: (String, f64),
        /// The first that differs, and its value.
        other: (String, f64),
    },

    /// Several members of a chain that have the field, and it is not their learning rate.
    #[error(
        "parameter {path:?} has {field} in several members of its chain ({}); a schedule drives one of them: name it with its place, as in `Schedule::field({:?})` (or `ReduceOnPlateau::field`)",
        members.iter().map(|(place, value)| format!("{place} = {value}")).collect::<Vec<_>>().join(", "),
        members.first().map_or("", |(place, _)| place)
    )]
    SeveralMembers {
        /// The parameter.
        path: String,
        /// The name that several members have.
        field: String,
        /// Their places, and the values.
        members: Vec<(String, FieldValue)>,
    },

    /// A field that is no real number.
    #[error("parameter {path:?}: {field} is {value}, and a schedule gives real numbers")]
    NotReal {
        /// The parameter.
        path: String,
        /// The field.
        field: String,
        /// Its value.
        value: FieldValue,
    },

    /// A schedule that is a factor, and no value is known that it is a factor of.
    #[error(
        "no leaf knows which {field} a relative schedule started from: the state was never driven by one. Set the values of step 0 with `adjust`, make the scheduler with `new`, and `go_to` the step"
    )]
    NoBase {
        /// The hyper-parameter.
        field: String,
    },

    /// A relative schedule that begins anew on values that a schedule has made, and would multiply those.
    #[error(
        "{field} of {path:?} is {value} because a schedule drives it, and a new relative schedule would multiply that: `Scheduler::resume(.., steps, ..)` goes on (this state counts {steps} steps). For a new schedule that is meant, set what it starts from with `adjust` before `Scheduler::new`"
    )]
    BegunAnew {
        /// The hyper-parameter.
        field: String,
        /// The first parameter.
        path: String,
        /// Its value.
        value: f64,
        /// The steps that the parameters have made.
        steps: u64,
    },

    /// A schedule that comes to a value out of range in a later step.
    #[error("in step {step} the schedule leaves the range: {source}")]
    LeavesRange {
        /// The index of the step.
        step: u64,
        /// The parameter, the value and the range.
        source: Box<Error>,
    },

    /// A schedule that drives nothing.
    #[error(
        "the schedule with the index {schedule} drives nothing: {field} of {path:?}, and of every other leaf it selects, is driven by one before it"
    )]
    Idle {
        /// The index of what drives nothing.
        schedule: usize,
        /// The hyper-parameter.
        field: String,
        /// The first leaf that it selects.
        path: String,
    },
}
}
