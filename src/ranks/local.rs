//! Ranks that are threads of one process.
//!
//! The ranks meet at a board, which has one lock. In each call, every rank
//!
//! 1. copies the bytes that it sends into letters, before it locks the board,
//! 2. puts the letters on the board, with the lengths that it expects from others. The last rank compares all
//!    lengths, and puts up an answer for each rank: the letters to it, or the same error for all,
//! 3. waits for its answer, unlocks the board, and copies the letters out of the answer.
//!
//! A rank with wrong arguments puts up its error instead of letters, so that all ranks get the error and no
//! rank waits. A rank brings nothing to the next call before it has its answer, so no answer is ever
//! overwritten.

use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

use super::CommunicationError;
use super::{Communicator, check_entries, fill, total_length};

/// Makes the `size` ranks of a job in one process, in rank order.
///
/// Move each rank into its thread, and make a model of its own there: ranks that shared variables would wait
/// for each other's locks. A rank leaves when its last handle is dropped, or when its thread panics
/// and drops a handle. Calls of the other ranks then return [`CommunicationError::Gone`]. If a thread only
/// borrows its handle, the end of the thread drops nothing, and others wait as long as the handle lives.
///
/// ```
/// use optimisers::{CommunicationError, Communicator, ranks};
///
/// /// The sum of what all ranks bring.
/// fn sum(world: &impl Communicator, own: u64) -> Result<u64, CommunicationError> {
///     let mut others = vec![[0; 8]; world.size()];
///     let mut from: Vec<Vec<&mut [u8]>> = others.iter_mut().map(|bytes| vec![&mut bytes[..]]).collect();
///     from[world.rank()].clear();
///     world.gather(&[&own.to_le_bytes()], &mut from)?;
///     Ok(own + others.into_iter().map(u64::from_le_bytes).sum::<u64>())
/// }
///
/// let threads: Vec<_> = ranks(2)
///     .into_iter()
///     .map(|world| std::thread::spawn(move || sum(&world, 20 + world.rank() as u64)))
///     .collect();
/// for thread in threads {
///     assert_eq!(thread.join().expect("no panic")?, 41);
/// }
/// # Ok::<(), CommunicationError>(())
/// ```
pub fn ranks(size: usize) -> Vec<LocalRank> {
    let empty = CallState {
        messages: (0..size).map(|_| None).collect(),
        answers: (0..size).map(|_| None).collect(),
        first_left: None,
    };
    let meeting = Arc::new(MeetingPlace {
        board: Mutex::new(empty),
        changed: Condvar::new(),
    });
    (0..size)
        .map(|rank| LocalRank {
            handle: Arc::new(RankHandle {
                rank,
                size,
                meeting: meeting.clone(),
                turn: Mutex::new(()),
            }),
        })
        .collect()
}

/// A rank that is a thread of this process, from [`ranks`]. Clones are handles of the same rank.
#[derive(Clone)]
pub struct LocalRank {
    handle: Arc<RankHandle>,
}

/// The data that all handles of a rank share. When this data is dropped, the rank leaves.
struct RankHandle {
    rank: usize,
    size: usize,
    meeting: Arc<MeetingPlace>,
    /// Held during a call, so that calls of one rank do not overlap.
    turn: Mutex<()>,
}

/// Where all ranks meet.
struct MeetingPlace {
    board: Mutex<CallState>,
    /// Notified when a call is complete, and when a rank leaves.
    changed: Condvar,
}

/// The board: the call that is under way, and the answers of the last call.
struct CallState {
    /// By rank: its messages for the call, or the error with which it cannot take part.
    messages: Vec<Option<Result<RankMessages, CommunicationError>>>,
    /// By rank: its answer of the last call in which all took part, until it is fetched.
    answers: Vec<Option<Result<Vec<Letter>, CommunicationError>>>,
    /// The first rank that has left.
    first_left: Option<usize>,
}

/// The bytes from one rank to another. All receivers of a `gather` share one allocation.
type Letter = Arc<Vec<u8>>;

/// The letters that a rank brings to a call, and the lengths that it expects.
struct RankMessages {
    function: &'static str,
    /// By receiver.
    letters: Vec<Letter>,
    /// By sender, the number of bytes that it has to send.
    expected: Vec<usize>,
}

impl Communicator for LocalRank {
    fn rank(&self) -> usize {
        self.handle.rank
    }

    fn size(&self) -> usize {
        self.handle.size
    }

    fn exchange(&self, to: &[Vec<&[u8]>], from: &mut [Vec<&mut [u8]>]) -> Result<(), CommunicationError> {
        self.handle.call("exchange", from, || {
            check_entries(
                "to",
                [self.handle.rank, self.handle.size],
                to.iter().map(|slices| total_length(slices)),
            )?;
            Ok(to.iter().map(|slices| Letter::new(slices.concat())).collect())
        })
    }

    fn gather(&self, own: &[&[u8]], from: &mut [Vec<&mut [u8]>]) -> Result<(), CommunicationError> {
        self.handle.call("gather", from, || {
            let letter = Letter::new(own.concat());
            let to = |rank| {
                if rank == self.handle.rank {
                    Letter::default()
                } else {
                    letter.clone()
                }
            };
            Ok((0..self.handle.size).map(to).collect())
        })
    }
}

impl RankHandle {
    /// Makes a call: brings letters, and fills `from` with the answer. Wrong arguments are an error on all
    /// ranks.
    fn call(
        &self,
        function: &'static str,
        from: &mut [Vec<&mut [u8]>],
        letters: impl FnOnce() -> Result<Vec<Letter>, CommunicationError>,
    ) -> Result<(), CommunicationError> {
        let _turn = self.turn.lock().unwrap_or_else(PoisonError::into_inner);
        self.meeting.board().check_present()?;
        let expected: Vec<usize> = from.iter().map(|slices| total_length(slices)).collect();
        let checked = check_entries("from", [self.rank, self.size], expected.iter().copied());
        let messages = checked.and_then(|()| {
            Ok(RankMessages {
                function,
                letters: letters()?,
                expected,
            })
        });
        for (slices, letter) in from.iter_mut().zip(self.meeting.take_part(self.rank, messages)?) {
            fill(slices, &letter);
        }
        Ok(())
    }
}

impl MeetingPlace {
    fn board(&self) -> MutexGuard<'_, CallState> {
        self.board.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Puts the messages of a rank on the board, and waits until all ranks have done so or a rank has left.
    fn take_part(
        &self,
        rank: usize,
        messages: Result<RankMessages, CommunicationError>,
    ) -> Result<Vec<Letter>, CommunicationError> {
        let mut board = self.board();
        board.check_present()?;
        board.messages[rank] = Some(messages);
        if board.messages.iter().all(Option::is_some) {
            board.hand_out();
            self.changed.notify_all();
        }
        loop {
            // A call in which all ranks took part is complete, even if one of them has left since.
            if let Some(answer) = board.answers[rank].take() {
                return answer;
            }
            board.check_present()?;
            board = self.changed.wait(board).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Notes that a rank will make no more calls.
    fn leave(&self, rank: usize) {
        let mut board = self.board();
        board.first_left.get_or_insert(rank);
        // No rank can complete the call, so its letters are freed.
        board.messages.fill_with(|| None);
        self.changed.notify_all();
    }
}

impl CallState {
    /// Returns an error if a rank has left.
    fn check_present(&self) -> Result<(), CommunicationError> {
        self.first_left
            .map_or(Ok(()), |rank| Err(CommunicationError::Gone { rank }))
    }

    /// Answers all ranks, once all have put messages on the board.
    fn hand_out(&mut self) {
        // All messages are taken from the board for the next call, before the second `collect` stops at the
        // first error.
        let messages: Vec<_> = self.messages.iter_mut().filter_map(Option::take).collect();
        match messages
            .into_iter()
            .collect::<Result<_, _>>()
            .and_then(check_messages)
        {
            Ok(messages) => {
                for (rank, answer) in self.answers.iter_mut().enumerate() {
                    *answer = Some(Ok(messages
                        .iter()
                        .map(|sender| sender.letters[rank].clone())
                        .collect()));
                }
            }
            Err(error) => self.answers.fill_with(|| Some(Err(error.clone()))),
        }
    }
}

/// Refuses messages that do not fit together, because functions differ or lengths are not as expected.
fn check_messages(messages: Vec<RankMessages>) -> Result<Vec<RankMessages>, CommunicationError> {
    for (rank, sender) in messages.iter().enumerate() {
        if sender.function != messages[0].function {
            let reason = format!(
                "rank {rank} called `{}`, and rank 0 `{}`",
                sender.function, messages[0].function
            );
            return Err(CommunicationError::Other {
                reason: reason + "; make the same calls in the same order on all ranks",
            });
        }
        for (letter, receiver) in sender.letters.iter().zip(&messages) {
            let (expected, got) = (receiver.expected[rank], letter.len());
            if expected != got {
                return Err(CommunicationError::Length { rank, expected, got });
            }
        }
    }
    Ok(messages)
}

impl Drop for RankHandle {
    fn drop(&mut self) {
        self.meeting.leave(self.rank);
    }
}

impl Drop for LocalRank {
    fn drop(&mut self) {
        // The rank leaves although other handles may be alive: outside of its thread nobody makes calls, so
        // the other ranks would wait for ever.
        if std::thread::panicking() {
            self.handle.meeting.leave(self.handle.rank);
        }
    }
}

impl std::fmt::Debug for LocalRank {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("LocalRank")
            .field("rank", &self.handle.rank)
            .field("size", &self.handle.size)
            .finish()
    }
}
