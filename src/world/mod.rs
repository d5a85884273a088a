//! The ranks of a data-parallel job: how bytes get from one to another, and how they agree before a call does anything.

mod agree;
mod local;
mod opening;

pub(crate) use agree::World;
pub use local::{LocalRank, ranks};
pub(crate) use opening::Call;

use crate::error::CommunicationError;

/// The transport between the ranks of a data-parallel job, which call the same functions in the same order.
///
/// It carries bytes and knows no dtypes: what is added up, its owner adds up. [`ranks`] makes ranks of the threads of one process.
///
/// # Implementing it
/// - Both calls return when the own bytes are on their way and those of the others have arrived, or with an error.
/// - An error on one rank is an error on all, in the same call: whoever returns one leaves nobody waiting. What `from` holds then is not defined.
/// - After [`CommunicationError::Gone`] every call fails with it, at once.
/// - Calls come from any thread, but never from a pool whose threads are needed to answer them; calls that one rank makes at the same time
///   run one after another.
pub trait Communicator: std::fmt::Debug + Send + Sync {
    /// Which rank this is, below [`size`](Communicator::size).
    fn rank(&self) -> usize;

    /// How many ranks there are, at least 1.
    fn size(&self) -> usize;

    /// Sends the slices in `to[r]`, one after another, to rank r, and fills those in `from[r]` with what rank r sends here.
    ///
    /// Both lists have an entry for each rank. The slices of a pair have the same length in sum on both sides; how that is cut into slices is each
    /// side's own affair. The entries of the own rank are empty: own data stays where it is.
    ///
    /// # Errors
    /// Where a rank has left, or sends another number of bytes than is waited for.
    fn exchange(&self, to: &[Vec<&[u8]>], from: &mut [Vec<&mut [u8]>]) -> Result<(), CommunicationError>;

    /// Sends the slices in `own`, one after another, to all other ranks, and fills those in `from[r]` with what rank r sends.
    ///
    /// `from` has an entry for each rank; that of the own rank is empty.
    ///
    /// # Errors
    /// As [`exchange`](Communicator::exchange).
    fn gather(&self, own: &[&[u8]], from: &mut [Vec<&mut [u8]>]) -> Result<(), CommunicationError>;
}
