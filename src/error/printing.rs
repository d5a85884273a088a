use super::shown::errors;

errors! {
/// Why a step cannot be printed as one kernel over the elements of a parameter.
#[derive(thiserror::Error)]
#[non_exhaustive]
pub enum PrintingError {
    /// A rule whose step of an element depends on more than that element.
    #[error("{rule} needs {needs}, which is no part of one kernel over the elements of a parameter: {remedy}")]
    NotElementwise {
        /// The rule, or the rules of a chain.
        rule: String,
        /// What the step depends on.
        needs: &'static str,
        /// What to do instead.
        remedy: &'static str,
    },

    /// A state tensor that has not one number for each element, or that starts as neither one number nor the parameter.
    #[error("{rule}: the state tensor {slot:?} starts as neither one number nor the parameter, so no buffer can be described for it")]
    Start {
        /// The optimiser.
        rule: String,
        /// The tensor.
        slot: String,
    },

    /// Counters or numbers of another optimiser.
    #[error(
        "{rule} has {expected:?}, but the progress to resume has {got:?}: pass what `Printed::progress` returned for an optimiser of this form"
    )]
    Progress {
        /// The optimiser.
        rule: String,
        /// The names of its counters and numbers.
        expected: Vec<String>,
        /// Those that were given.
        got: Vec<String>,
    },
}
}
