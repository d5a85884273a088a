use candle_core::DType;

use super::shown::errors;

errors! {
/// What went wrong between the ranks of a job. It is the same error on all ranks, and those that are still there are in step.
#[derive(Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum CommunicationError {
    /// A rank that has left. Every later call fails with this too.
    #[error(
        "rank {rank} has left: it returned, failed or panicked before the others had finished. Look for its own error, and start all ranks anew from the last checkpoint"
    )]
    Gone {
        /// The rank, or the first of several.
        rank: usize,
    },

    /// A rank that sent another number of bytes than the receiver waited for.
    #[error(
        "rank {rank} sent {got} bytes where {expected} were expected; run one program on all ranks, with one model and the same options"
    )]
    Length {
        /// The rank that sent them.
        rank: usize,
        /// How many bytes the receiver had asked for.
        expected: usize,
        /// How many were sent.
        got: usize,
    },

    /// Anything else that a transport may fail at.
    #[error("the ranks cannot communicate: {reason}")]
    Other {
        /// What went wrong, and the remedy.
        reason: String,
    },
}
}

errors! {
/// What the ranks of a job cannot do together. It is the same error on all ranks, and nothing has changed on any of them.
#[derive(Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum RanksError {
    /// What another rank of the job refused.
    #[error("rank {rank} refused: {reason}")]
    Refused {
        /// The rank, or the first of several.
        rank: usize,
        /// Its error.
        reason: String,
    },

    /// Ranks of a job that called different things. The next call works if it is the same on all.
    #[error(
        "rank {rank} called {theirs}, and rank 0 {ours}: all ranks have to make the same calls in the same order. Look for a call that only some of them reach"
    )]
    OutOfStep {
        /// The first rank that called something else than rank 0.
        rank: usize,
        /// What it called.
        theirs: String,
        /// What rank 0 called.
        ours: String,
    },

    /// Ranks that bring different things to a call.
    #[error("rank {rank} differs in {what}; all ranks need the same")]
    Differ {
        /// The first rank that differs from rank 0.
        rank: usize,
        /// In what, and what which rank has.
        what: String,
    },

    /// A rule that works on whole parameters, for one that is cut among ranks.
    #[error(
        "parameter {path:?} is cut among ranks, and {rule} needs it whole: save a checkpoint, set up anew with this rule, and restore what fits"
    )]
    Cut {
        /// The parameter's path.
        path: String,
        /// The rule.
        rule: String,
    },

    /// What needs the whole state, where each rank has a part of it.
    #[error(
        "{call} needs the whole state, which is divided among {ranks} ranks; that is not done over ranks yet, so do it in a run of one process"
    )]
    Divided {
        /// What was called.
        call: &'static str,
        /// How many ranks there are.
        ranks: usize,
    },

    /// A number of a gradient that is infinite in the dtype in which it [travels](crate::Setup::wire).
    #[error(
        "element {index} of the gradient of {path:?} is {number}, which is infinite in {dtype:?}, the dtype in which it is sent to other ranks: send it as BF16, or skip such calls (`Update::finite_only`, `LossScaler`)"
    )]
    Overflow {
        /// The parameter's path.
        path: String,
        /// The first such element, in row-major order.
        index: usize,
        /// The number.
        number: String,
        /// The dtype in which it is sent.
        dtype: DType,
    },

    /// A parameter that is not on the [device](crate::Communicator::device) between whose memories the transport moves tensors.
    #[error(
        "parameter {path:?} is on {got}, and the transport moves tensors of {expected}: make the model on a clone of the transport's device (each `Device::new_cuda` is a device of its own), or divide it over a transport for the host, such as MPI or `ranks`"
    )]
    OtherDevice {
        /// The parameter's path.
        path: String,
        /// The transport's device.
        expected: String,
        /// The parameter's device.
        got: String,
    },

    /// No rank counts in the mean of the gradients.
    #[error("the weights of all {ranks} ranks are 0: say by `Update::weight` how much at least one of them counts")]
    Weightless {
        /// How many ranks there are.
        ranks: usize,
    },
}
}
