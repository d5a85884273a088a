//! The ranks of a data-parallel job: transports between them, and how all ranks agree on each call.
//!
//! From the wire upwards: a [`Communicator`] carries bytes (`local`, `mpi`, `nccl`). Through a `StateWorld`
//! the ranks agree on each call before it does anything (`agree`, `opening`, `agreement`). `parts` divides
//! the state among ranks. Elements travel in `rounds`, and arrive in an `inbox`.

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
pub(crate) use agreement::{Agreement, Aspect, difference_error, unreadable_error};
pub use communication::CommunicationError;
pub(crate) use inbox::{ExpectedTensors, Inbox, KeptSums};
pub use local::{LocalRank, ranks};
pub(crate) use opening::Call;
pub(crate) use parts::{Divisible, Held, LeafParts, divide};
pub(crate) use rounds::{Round, Run, rounds};
pub(crate) use share::share;

/// The transport between the ranks of a data-parallel job.
///
/// All ranks call the same functions in the same order. A transport carries bytes without a dtype, and never
/// adds up numbers, because the receiver adds them up. [`ranks`] makes the ranks for threads of one process.
///
/// # Implementing it
/// - `exchange` and `gather` return when the own bytes are sent and the bytes of the others have arrived, or
///   with an error.
/// - An error on one rank has to be an error on all ranks, in the same call, so that no rank is left waiting.
///   After an error the content of `from` is not defined.
/// - After [`CommunicationError::Gone`] every call has to fail with that error, at once.
/// - Calls come from any thread, but never from a pool whose threads are needed to answer them. If one rank
///   makes several calls at the same time, they have to run one after another.
pub trait Communicator: std::fmt::Debug + Send + Sync {
    /// The index of this rank, below [`size`](Communicator::size).
    fn rank(&self) -> usize;

    /// The number of ranks, at least 1.
    fn size(&self) -> usize;

    /// Sends the slices in `to[r]`, one after another, to rank r, and fills the slices in `from[r]` with the
    /// bytes that rank r sends here.
    ///
    /// Both lists have an entry for each rank. The entry of the own rank is empty, because own data stays
    /// where it is. Sender and receiver give the same number of bytes in total, but may cut them into
    /// different slices.
    ///
    /// # Errors
    /// If a rank has left, or sends another number of bytes than the receiver waits for.
    fn exchange(&self, to: &[Vec<&[u8]>], from: &mut [Vec<&mut [u8]>]) -> Result<(), CommunicationError>;

    /// Sends the slices in `own`, one after another, to all other ranks, and fills the slices in `from[r]`
    /// with the bytes that rank r sends.
    ///
    /// `from` has an entry for each rank. The entry of the own rank is empty.
    ///
    /// # Errors
    /// As [`exchange`](Communicator::exchange).
    fn gather(&self, own: &[&[u8]], from: &mut [Vec<&mut [u8]>]) -> Result<(), CommunicationError>;

    /// The device of this rank, if the transport moves tensors between the ranks' devices itself.
    ///
    /// All parameters have to be on that device. By default `None`: tensors on a device go through the host.
    fn device(&self) -> Option<&Device> {
        None
    }

    /// Sends the tensors in `to[r]` to rank r, and fills the tensors in `from[r]` with those that rank r
    /// sends, in order.
    ///
    /// All tensors are contiguous and on the [`device`](Communicator::device). The tensors in `from` are
    /// views of memory that nothing else uses. The transport may fill them later, in the order of the
    /// caller's stream. In that order the caller may also drop or write the tensors in `to`.
    ///
    /// Both lists have an entry for each rank. The entry of the own rank is empty. Sender and receiver give
    /// tensors of the same dtypes and lengths, one by one. Tensors without elements need not be sent.
    ///
    /// # Errors
    /// As [`exchange`](Communicator::exchange). The default implementation always returns an error.
    fn exchange_tensors(&self, _to: &[Vec<Tensor>], _from: &[Vec<Tensor>]) -> Result<(), CommunicationError> {
        Err(CommunicationError::Other {
            reason: format!("{self:?} does not move tensors; give it bytes"),
        })
    }
}

/// The slices that are not empty. The address of an empty slice is arbitrary, and a transport may give that
/// address a meaning (`MPI_IN_PLACE`).
pub(crate) fn without_empty<B: AsRef<[u8]>>(slices: impl IntoIterator<Item = B>) -> Vec<B> {
    slices
        .into_iter()
        .filter(|slice| !slice.as_ref().is_empty())
        .collect()
}

/// Refuses a list without exactly one entry for each rank, or with bytes from a rank to itself. `lengths` has
/// the number of bytes in each entry.
pub(crate) fn check_entries(
    list: &str,
    [rank, size]: [usize; 2],
    lengths: impl ExactSizeIterator<Item = usize>,
) -> Result<(), CommunicationError> {
    let entries = lengths.len();
    let reason = match lengths
        .enumerate()
        .find(|(other, length)| *other == rank && *length > 0)
    {
        _ if entries != size => {
            format!("rank {rank} gave `{list}` {entries} entries; give it one for each of the {size} ranks")
        }
        Some((_, length)) => {
            format!(
                "rank {rank} gave `{list}` {length} bytes of its own; leave its own entry empty, as own data \
                 stays where it is"
            )
        }
        None => return Ok(()),
    };
    Err(CommunicationError::Other { reason })
}

/// The number of bytes in all slices.
pub(crate) fn total_length<S: AsRef<[u8]>>(slices: &[S]) -> usize {
    slices.iter().map(|slice| slice.as_ref().len()).sum()
}

/// Fills the slices, one after another. `bytes` has at least the length of all slices.
pub(crate) fn fill(slices: &mut [&mut [u8]], bytes: &[u8]) {
    let mut rest = bytes;
    for slice in slices {
        let (first, others) = rest.split_at(slice.len());
        slice.copy_from_slice(first);
        rest = others;
    }
}
