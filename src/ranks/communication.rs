//! The error of a transport between ranks.

use std::fmt;

use crate::error::{Error, ErrorKind};

/// An error of a [`Communicator`](crate::Communicator), the transport between the ranks of a job.
///
/// All ranks get the same error from the same call. The error converts to an [`Error`] of the kind
/// [`Communication`](ErrorKind::Communication).
#[derive(Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum CommunicationError {
    /// A rank has left. Every later call fails with this error as well.
    Gone {
        /// The rank, or if several have left, the first.
        rank: usize,
    },

    /// A rank sent another number of bytes than the receiver waited for.
    Length {
        /// The rank that sent the bytes.
        rank: usize,
        /// The number of bytes that the receiver waited for.
        expected: usize,
        /// The number of bytes that were sent.
        got: usize,
    },

    /// The transport failed for any other reason.
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

/// Prints the text of `Display`, as [`Error`] does.
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
