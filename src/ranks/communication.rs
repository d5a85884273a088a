//! What can go wrong between ranks.

use std::fmt;

use crate::error::{Error, ErrorKind};

/// What went wrong between the ranks of a job, as their [`Communicator`](crate::Communicator) reports it.
///
/// All ranks get the same error, and those still there are in step. It becomes an [`Error`] of the kind
/// [`Communication`](ErrorKind::Communication).
#[derive(Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum CommunicationError {
    /// A rank has left. Every later call fails with this too.
    Gone {
        /// The rank, or the first of several.
        rank: usize,
    },

    /// A rank sent another number of bytes than the receiver waited for.
    Length {
        /// The rank that sent them.
        rank: usize,
        /// How many bytes the receiver had asked for.
        expected: usize,
        /// How many were sent.
        got: usize,
    },

    /// The transport failed at something else.
    Other {
        /// What went wrong, and the remedy.
        reason: String,
    },
}

impl fmt::Display for CommunicationError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            CommunicationError::Gone { rank } => write!(
                f,
                "rank {rank} has left: it returned, failed or panicked before the others had finished. Look \
                 for its own error, and start all ranks anew from the last checkpoint"
            ),
            CommunicationError::Length { rank, expected, got } => write!(
                f,
                "rank {rank} sent {got} bytes where {expected} were expected; run one program on all ranks, \
                 with one model and the same options"
            ),
            CommunicationError::Other { reason } => write!(f, "the ranks cannot communicate: {reason}"),
        }
    }
}

/// The text, as [`Error`] has it.
impl fmt::Debug for CommunicationError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl std::error::Error for CommunicationError {}

impl From<CommunicationError> for Error {
    fn from(error: CommunicationError) -> Self {
        let rank = match &error {
            CommunicationError::Gone { rank } | CommunicationError::Length { rank, .. } => Some(*rank),
            CommunicationError::Other { .. } => None,
        };
        let error = Error::new(ErrorKind::Communication, "").caused_by(error);
        match rank {
            Some(rank) => error.of_rank(rank),
            None => error,
        }
    }
}
