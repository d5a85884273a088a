//! The opening of an agreement: the message by which ranks find out whether all make the same call.

use super::CommunicationError;
use crate::error::{Error, ErrorKind, Result};

/// The first word of every opening. Its last byte is the version of the words after it.
const FORMAT: u64 = u64::from_le_bytes(*b"optimis\x01");

/// Declares `Call`. The number of a call is sent to other ranks, so it must never change. Its name is for
/// errors.
macro_rules! calls {
    ($($call:ident = $number:literal $name:literal,)*) => {
        /// The calls that all ranks make together.
        // Without the feature `mpi` no code makes `End`, and without `nccl` no code makes `Nccl`. The
        // compiler would warn of such dead code.
        #[cfg_attr(not(all(feature = "mpi", feature = "nccl")), allow(dead_code))]
        #[derive(Debug, Clone, Copy, PartialEq, Eq)]
        pub(crate) enum Call {
            $(#[doc = $name] $call = $number,)*
        }

        impl Call {
            /// The name of the call with this number.
            pub(super) fn name(number: u64) -> &'static str {
                match number {
                    $($number => $name,)*
                    _ => "an unknown call",
                }
            }
        }
    };
}

calls! {
    Setup = 1 "setup",
    Update = 2 "update",
    Reduce = 3 "the sums of an update",
    Commit = 4 "the end of an update",
    Plan = 5 "the plan of an update",
    Masters = 6 "`masters`",
    Save = 7 "the save of a checkpoint",
    SaveMasters = 8 "`save_masters`",
    File = 9 "the file of a save",
    Pieces = 10 "the pieces of a save",
    Saved = 11 "the end of a save",
    Restore = 12 "the restore of a checkpoint",
    Restored = 13 "the end of a restore",
    NewMasters = 14 "`set_masters`",
    Averages = 15 "`averages`",
    End = 16 "the end of the program",
    Broadcast = 17 "`broadcast`",
    Nccl = 18 "the start of NCCL",
    Torch = 19 "the restore of torch's state",
    TorchSave = 20 "`save_torch`",
    Differ = 21 "the report of a difference between ranks",
    CheckMasters = 22 "`check_masters`",
    RefreshMasters = 23 "`refresh_masters`",
    MastersRefreshed = 24 "the end of `refresh_masters`",
    WithAverages = 25 "`with_averages`",
    AveragesPut = 26 "the write of averages into parameters",
    SetEntries = 27 "`set_entries`",
    EntriesSet = 28 "the end of `set_entries`",
    MastersSet = 29 "the end of `set_masters`",
    Rebind = 30 "`rebind`",
    Replace = 31 "`replace`",
}

/// The opening of a rank, as words of 8 bytes.
#[derive(Clone, Copy)]
pub(super) struct Opening {
    format: u64,
    call: u64,
    /// The number that names the state. If `agreements` is 0, each rank may have another number.
    pub(super) state: u64,
    /// The count of the state's agreements.
    pub(super) agreements: u64,
    /// 1 if the rank refuses, else 0.
    pub(super) refuses: u64,
    /// The number of bytes in the message that this rank sends after its opening.
    pub(super) length: u64,
}

impl Opening {
    /// The opening of a rank of this build.
    pub(super) fn new(call: Call, [state, agreements, refuses, length]: [u64; 4]) -> Self {
        Opening {
            format: FORMAT,
            call: call as u64,
            state,
            agreements,
            refuses,
            length,
        }
    }

    pub(super) fn to_bytes(self) -> Vec<u8> {
        let Opening {
            format,
            call,
            state,
            agreements,
            refuses,
            length,
        } = self;
        [format, call, state, agreements, refuses, length]
            .iter()
            .flat_map(|word| word.to_le_bytes())
            .collect()
    }

    pub(super) fn from_bytes(bytes: &[u8]) -> Self {
        let mut words = bytes.as_chunks().0.iter().map(|word| u64::from_le_bytes(*word));
        // `agree.rs` receives exactly the bytes of an opening, so no word is missing. The default avoids a
        // panic.
        let mut next = || words.next().unwrap_or_default();
        Opening {
            format: next(),
            call: next(),
            state: next(),
            agreements: next(),
            refuses: next(),
            length: next(),
        }
    }

    /// The call of this rank in words, with the first difference from the call of `other`.
    fn call_text(&self, other: &Opening) -> String {
        let name = Call::name(self.call);
        if self.call != other.call {
            name.to_string()
        } else if self.agreed_state() != other.agreed_state() {
            format!(
                "{name} of {}",
                if self.has_new_state() {
                    "a new state".to_string()
                } else {
                    format!("the state {}", self.state)
                }
            )
        } else {
            format!("{name} after {} agreements among ranks", self.agreements)
        }
    }

    /// The name of the state, if the ranks have agreed on one.
    fn agreed_state(&self) -> Option<u64> {
        (!self.has_new_state()).then_some(self.state)
    }

    pub(super) fn has_new_state(&self) -> bool {
        self.agreements == 0
    }
}

/// Refuses openings that differ in version, call, state or count of agreements. All ranks compare the same
/// openings, so all get the same error.
pub(super) fn check_openings(openings: &[Opening]) -> Result<()> {
    // The version is compared first, because the words of another version mean something else.
    let formats: Vec<u64> = openings.iter().map(|opening| opening.format).collect();
    if let Some(OddRank { rank, usual }) = odd_rank(&formats) {
        let reason = format!(
            "rank {rank} runs another version of optimisers than rank {usual}; run one build on all ranks"
        );
        return Err(Error::from(CommunicationError::Other { reason }).of_rank(rank));
    }
    let calls: Vec<_> = openings
        .iter()
        .map(|opening| (opening.call, opening.agreements, opening.agreed_state()))
        .collect();
    if let Some(OddRank { rank, usual }) = odd_rank(&calls) {
        let (odd_opening, usual_opening) = (&openings[rank], &openings[usual]);
        let problem = format!(
            "rank {rank} called {}, and rank {usual} {}",
            odd_opening.call_text(usual_opening),
            usual_opening.call_text(odd_opening)
        );
        let order = "make the same calls in the same order on all ranks: look for a call that only some of \
                     them reach";
        // If a rank fails between two agreements, it sends its error in the next one, and the other ranks may
        // already be in a later one.
        let failed = openings.iter().position(|opening| opening.refuses != 0);
        let remedy = failed.map_or_else(
            || order.to_string(),
            |failed| format!("look first for the error that rank {failed} returned; then {order}"),
        );
        return Err(Error::new(ErrorKind::Ranks, problem)
            .of_rank(rank)
            .with_remedy(remedy));
    }
    Ok(())
}

/// A rank whose value differs from the most frequent value.
pub(super) struct OddRank {
    pub(super) rank: usize,
    /// The first rank with the most frequent value.
    pub(super) usual: usize,
}

/// Finds the first rank whose value differs from the most frequent value. If several values are equally
/// frequent, the value of the lowest rank counts as the most frequent. Returns `None` if all are equal.
pub(super) fn odd_rank<T: PartialEq>(values: &[T]) -> Option<OddRank> {
    let count = |rank: &usize| values.iter().filter(|value| **value == values[*rank]).count();
    // In reverse, because `max_by_key` returns the last of equal maxima.
    let usual = (0..values.len()).rev().max_by_key(count)?;
    let rank = values.iter().position(|value| *value != values[usual])?;
    Some(OddRank { rank, usual })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn calls_have_names() {
        let names = [Call::Reduce as u64, 99].map(Call::name);
        assert_eq!(names, ["the sums of an update", "an unknown call"]);
    }

    #[test]
    fn the_odd_rank_is_the_one_that_differs_from_most() {
        let odd = |values: &[u64]| odd_rank(values).map(|odd| (odd.rank, odd.usual));
        assert_eq!(odd(&[]), None);
        assert_eq!(odd(&[5, 5]), None);
        assert_eq!(odd(&[5, 6]), Some((1, 0)));
        assert_eq!(odd(&[6, 5, 5, 5]), Some((0, 1)));
        assert_eq!(odd(&[5, 5, 6, 5]), Some((2, 0)));
        assert_eq!(odd(&[5, 6, 6, 5]), Some((1, 0)));
    }
}
