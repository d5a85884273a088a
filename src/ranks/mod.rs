//! The ranks of a data-parallel job: how bytes get from one to another, and how all agree on each call.

use crate::tensors::{Device, Tensor};

mod agree;
mod agreement;
mod communication;
mod inbox;
mod local;
#[cfg(feature = "mpi")]
pub mod mpi;
#[cfg(feature = "nccl")]
pub mod nccl;
mod opening;
mod parts;
mod rounds;
mod share;

pub(crate) use agree::StateWorld;
pub(crate) use agreement::{Agreement, Aspect, differs, unreadable};
pub use communication::CommunicationError;
pub(crate) use inbox::{ExpectedTensors, Inbox, KeptSums};
pub use local::{LocalRank, ranks};
pub(crate) use opening::Call;
pub(crate) use parts::{Divisible, Held, LeafParts, divide};
pub(crate) use rounds::{Round, Run, rounds};
pub(crate) use share::share;

/// The transport between the ranks of a data-parallel job.
///
/// All ranks call the same functions in the same order. A transport carries bytes and knows no dtypes: the
/// receiver adds up. [`ranks`] makes ranks of the threads of one process.
///
/// # Implementing it
/// - Both calls return when the own bytes are sent and those of the others have arrived, or with an error.
/// - An error on one rank is an error on all, in the same call, so that nobody is left waiting. What `from`
///   holds then is not defined.
/// - After [`CommunicationError::Gone`] every call fails with it, at once.
/// - Calls come from any thread, but never from a pool whose threads are needed to answer them. Calls that
///   one rank makes at the same time run one after another.
pub trait Communicator: std::fmt::Debug + Send + Sync {
    /// Which rank this is, below [`size`](Communicator::size).
    fn rank(&self) -> usize;

    /// How many ranks there are, at least 1.
    fn size(&self) -> usize;

    /// Sends the slices in `to[r]`, one after another, to rank r, and fills those in `from[r]` with what rank
    /// r sends here.
    ///
    /// Both lists have an entry for each rank; that of the own rank is empty, as own data stays where it is.
    /// For each pair of ranks, both sides name the same number of bytes in sum; each cuts it into slices as
    /// it likes.
    ///
    /// # Errors
    /// If a rank has left, or sends another number of bytes than the receiver waits for.
    fn exchange(&self, to: &[Vec<&[u8]>], from: &mut [Vec<&mut [u8]>]) -> Result<(), CommunicationError>;

    /// Sends the slices in `own`, one after another, to all other ranks, and fills those in `from[r]` with
    /// what rank r sends.
    ///
    /// `from` has an entry for each rank; that of the own rank is empty.
    ///
    /// # Errors
    /// As [`exchange`](Communicator::exchange).
    fn gather(&self, own: &[&[u8]], from: &mut [Vec<&mut [u8]>]) -> Result<(), CommunicationError>;

    /// The device of this rank, if the transport moves tensors between the ranks' devices itself.
    ///
    /// All parameters have to be on it. By default there is none, and what is on a device goes through the
    /// host.
    fn device(&self) -> Option<&Device> {
        None
    }

    /// Sends the tensors in `to[r]` to rank r, and fills those in `from[r]` with what rank r sends, in order.
    ///
    /// All are contiguous and on the [`device`](Communicator::device). The tensors in `from` are views of
    /// memory that nothing else uses; they may be filled later, in the order of the caller's stream. Those in
    /// `to` may be dropped or written in that order, too.
    ///
    /// Both lists have an entry for each rank; that of the own rank is empty. Both sides of a pair name
    /// tensors of the same dtypes and lengths, one by one. Those without elements need not be sent.
    ///
    /// # Errors
    /// As [`exchange`](Communicator::exchange); by default always.
    fn exchange_tensors(&self, _to: &[Vec<Tensor>], _from: &[Vec<Tensor>]) -> Result<(), CommunicationError> {
        Err(CommunicationError::Other { reason: format!("{self:?} does not move tensors; give it bytes") })
    }
}

/// The slices that are not empty. The address of an empty one is made up, and some transports give it a
/// meaning (`MPI_IN_PLACE`).
pub(crate) fn not_empty<B: AsRef<[u8]>>(slices: impl IntoIterator<Item = B>) -> Vec<B> {
    slices.into_iter().filter(|slice| !slice.as_ref().is_empty()).collect()
}

/// Refuses a list, given by the lengths of its entries, that lacks an entry for a rank or has bytes from a
/// rank to itself.
pub(crate) fn check_of_others(
    list: &str,
    [rank, size]: [usize; 2],
    lengths: impl ExactSizeIterator<Item = usize>,
) -> Result<(), CommunicationError> {
    let entries = lengths.len();
    let reason = match lengths.enumerate().find(|(other, length)| *other == rank && *length > 0) {
        _ if entries != size => {
            format!("rank {rank} gave `{list}` {entries} entries; give it one for each of the {size} ranks")
        }
        Some((_, own)) => {
            format!(
                "rank {rank} gave `{list}` {own} bytes of its own; leave its own entry empty, as own data \
                 stays where it is"
            )
        }
        None => return Ok(()),
    };
    Err(CommunicationError::Other { reason })
}

/// How many bytes there are in all slices.
pub(crate) fn length<S: AsRef<[u8]>>(slices: &[S]) -> usize {
    slices.iter().map(|slice| slice.as_ref().len()).sum()
}

/// Fills the slices, one after another, with as many bytes as they hold.
pub(crate) fn fill(slices: &mut [&mut [u8]], bytes: &[u8]) {
    let mut rest = bytes;
    for slice in slices {
        let (first, others) = rest.split_at(slice.len());
        slice.copy_from_slice(first);
        rest = others;
    }
}
