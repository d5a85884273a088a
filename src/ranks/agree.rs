//! Agreements: before a call does anything, all ranks find out whether all of them go on.
//!
//! If a rank that fails left the call alone, the others would wait for messages that never come. So every
//! rank takes part in the agreement, and sends two messages to all others:
//!
//! 1. An [`Opening`] of fixed length: the call, the state, the state's count of agreements, whether the rank
//!    refuses, and the length of the second message. If the openings do not fit together, all ranks return
//!    the same error, and nobody sends the second message.
//! 2. The rank's bytes, or if the rank refuses, the text of its error.
//!
//! The count guards against ranks that have made different calls before. After an error all ranks must have
//! equal counts again, otherwise every later call would fail: see `AgreementCount::catch_up`.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use super::opening::{Call, Opening, check_openings};
use super::{CommunicationError, Communicator, without_empty};
use crate::error::{Error, ErrorKind, Result};
use crate::tensors::Device;

/// The ranks among which a state is divided; by default this process alone. Clones count agreements together.
#[derive(Debug, Clone, Default)]
pub(crate) struct StateWorld(Option<Arc<SharedWorld>>);

/// The data that the clones of a world share.
#[derive(Debug)]
struct SharedWorld {
    communicator: Box<dyn Communicator>,
    count: Mutex<AgreementCount>,
}

/// The name of a state, and the count of its agreements. After the first agreement name and count are the
/// same on all ranks.
#[derive(Debug)]
struct AgreementCount {
    /// The name of the state in the job, a number. Before the first agreement each rank has a number of its
    /// own. In the first agreement all ranks take over the number of rank 0.
    state: u64,
    agreements: u64,
}

impl StateWorld {
    /// This process alone.
    pub(crate) const ALONE: StateWorld = StateWorld(None);

    /// The world of a new state, without agreements.
    pub(crate) fn over<C: Communicator + Clone + 'static>(communicator: &C) -> Self {
        static STATES: AtomicU64 = AtomicU64::new(0);
        let count = AgreementCount {
            state: STATES.fetch_add(1, Ordering::Relaxed),
            agreements: 0,
        };
        StateWorld(Some(Arc::new(SharedWorld {
            communicator: Box::new(communicator.clone()),
            count: Mutex::new(count),
        })))
    }

    /// The transport between the ranks, unless the state was made for this process alone.
    pub(crate) fn communicator(&self) -> Option<&dyn Communicator> {
        self.0.as_ref().map(|shared| &*shared.communicator)
    }

    /// The transport, if there are several ranks.
    pub(crate) fn communicator_to_others(&self) -> Option<&dyn Communicator> {
        self.communicator().filter(|_| self.is_divided())
    }

    /// Whether there are several ranks.
    pub(crate) fn is_divided(&self) -> bool {
        self.size() > 1
    }

    /// This process's rank; 0 without other ranks.
    pub(crate) fn rank(&self) -> usize {
        self.communicator().map_or(0, |communicator| communicator.rank())
    }

    /// The number of ranks, at least 1.
    pub(crate) fn size(&self) -> usize {
        self.communicator().map_or(1, |communicator| communicator.size())
    }

    /// If the transport has a device, refuses a tensor on any other device.
    pub(crate) fn check_device(&self, path: &str, device: &Device) -> Result<()> {
        match self
            .communicator()
            .and_then(|communicator| communicator.device())
            .filter(|expected| !expected.same_device(device))
        {
            Some(expected) => {
                let remedy = "the transport moves tensors of no other device: make the model on a clone of \
                              the transport's device (each `Device::new_cuda` is a device of its own), or \
                              divide the model over a transport for the host, such as MPI or `ranks`";
                Err(Error::device("it", device, expected).at(path).with_remedy(remedy))
            }
            None => Ok(()),
        }
    }

    /// Agrees on a call or on a stage of a call. `prepared` has a value for this rank and the bytes that this
    /// rank sends to the others, or the error with which this rank refuses. Returns the value, and the bytes
    /// of all ranks in rank order.
    ///
    /// # Errors
    /// If a rank refuses or makes another call, on every rank. A rank that refuses gets its own error, unless
    /// another rank has left. The others get an error of the kind [`Ranks`](ErrorKind::Ranks) with the text
    /// of that error. In the next call all ranks have the same count.
    pub(crate) fn agree<T>(&self, call: Call, prepared: Result<(T, Vec<u8>)>) -> Result<(T, Vec<Vec<u8>>)> {
        let Some(shared) = self.0.as_ref().filter(|_| self.is_divided()) else {
            return prepared.map(|(value, bytes)| (value, vec![bytes]));
        };
        let (value, bytes) = match prepared {
            Ok((value, bytes)) => (Ok(value), bytes),
            Err(error) => {
                let text = error.to_string().into_bytes();
                (Err(error), text)
            }
        };
        let exchanged = shared.exchange_messages(call, value.is_err(), bytes);
        let (value, openings, messages) = match (value, exchanged) {
            (Ok(value), Ok((openings, messages))) => (value, openings, messages),
            // The own error of a rank is the reason for what follows, unless another rank has left: then that
            // may be why this rank refuses.
            (Err(_), Err(error)) if is_gone(&error) => return Err(error),
            (Err(error), _) | (_, Err(error)) => return Err(error),
        };
        match openings.iter().position(|opening| opening.refuses != 0) {
            Some(rank) => {
                let error = Error::new(ErrorKind::Ranks, format!("rank {rank} refused")).of_rank(rank);
                Err(error.caused_by(String::from_utf8_lossy(&messages[rank])))
            }
            None => Ok((value, messages)),
        }
    }

    /// [`StateWorld::agree`] without bytes: returns the value of `result` if no rank refuses.
    ///
    /// # Errors
    /// As [`StateWorld::agree`].
    pub(crate) fn settle<T>(&self, call: Call, result: Result<T>) -> Result<T> {
        if !self.is_divided() {
            return result;
        }
        let (value, _) = self.agree(call, result.map(|value| (value, Vec::new())))?;
        Ok(value)
    }
}

/// Whether an error is that a rank has left.
fn is_gone(error: &Error) -> bool {
    let cause = std::error::Error::source(error).and_then(|cause| cause.downcast_ref());
    matches!(cause, Some(CommunicationError::Gone { .. }))
}

impl SharedWorld {
    /// Sends this rank's messages to all ranks. Returns the openings and the bytes of all ranks.
    fn exchange_messages(
        &self,
        call: Call,
        refuses: bool,
        own_bytes: Vec<u8>,
    ) -> Result<(Vec<Opening>, Vec<Vec<u8>>)> {
        // The count is locked until both messages are through, because agreements of two clones must not
        // interleave.
        let mut count = self.count.lock().unwrap_or_else(PoisonError::into_inner);
        let AgreementCount { state, agreements } = *count;
        let openings = self.gather_openings(Opening::new(
            call,
            [state, agreements, refuses.into(), own_bytes.len() as u64],
        ))?;
        check_openings(&openings).inspect_err(|_| count.catch_up(&openings))?;
        // Refusals are counted as well, because all ranks have taken part.
        *count = AgreementCount {
            state: openings[0].state,
            agreements: agreements + 1,
        };
        let messages = self.gather_bytes(own_bytes, |rank| openings[rank].length as usize)?;
        Ok((openings, messages))
    }

    /// The openings of all ranks.
    fn gather_openings(&self, own_opening: Opening) -> Result<Vec<Opening>> {
        let messages = self.gather_bytes(own_opening.to_bytes(), |_| size_of::<Opening>())?;
        Ok(messages.iter().map(|bytes| Opening::from_bytes(bytes)).collect())
    }

    /// Sends this rank's bytes to all ranks, and returns the bytes of all ranks. `length_of` returns the
    /// number of a rank's bytes.
    fn gather_bytes(&self, own_bytes: Vec<u8>, length_of: impl Fn(usize) -> usize) -> Result<Vec<Vec<u8>>> {
        let (rank, size) = (self.communicator.rank(), self.communicator.size());
        let mut messages: Vec<Vec<u8>> = (0..size)
            .map(|other| vec![0; if other == rank { 0 } else { length_of(other) }])
            .collect();
        let mut from: Vec<Vec<&mut [u8]>> = messages
            .iter_mut()
            .map(|bytes| without_empty([&mut bytes[..]]))
            .collect();
        let to = without_empty([&own_bytes[..]]);
        // If nobody has bytes, no rank calls the transport: all ranks have the same lengths.
        if !to.is_empty() || from.iter().any(|slices| !slices.is_empty()) {
            self.communicator.gather(&to, &mut from)?;
        }
        messages[rank] = own_bytes;
        Ok(messages)
    }
}

impl AgreementCount {
    /// Takes over the largest count of the ranks with the same state, so that the next call succeeds.
    fn catch_up(&mut self, openings: &[Opening]) {
        // The name of a new state is a number of this rank, which may name another state on another rank.
        if self.agreements > 0 {
            let same_state = openings
                .iter()
                .filter(|opening| opening.agreements > 0 && opening.state == self.state);
            self.agreements = same_state
                .map(|opening| opening.agreements)
                .max()
                .unwrap_or(self.agreements);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::channel;
    use std::time::Duration;

    use super::*;
    use crate::ranks::{LocalRank, ranks};

    /// Runs each rank in a thread, and returns the results in rank order. Fails instead of hanging.
    fn together<T: Send + 'static>(size: usize, work: fn(LocalRank) -> T) -> Vec<T> {
        let (sender, receiver) = channel();
        for own in ranks(size) {
            let sender = sender.clone();
            std::thread::spawn(move || {
                let rank = own.rank();
                // The receiver may have given up.
                let _ = sender.send((rank, work(own)));
            });
        }
        drop(sender);
        let next = |_| {
            receiver
                .recv_timeout(Duration::from_secs(60))
                .expect("no deadlock, and no panic")
        };
        let mut results: Vec<(usize, T)> = (0..size).map(next).collect();
        results.sort_by_key(|(rank, _)| *rank);
        results.into_iter().map(|(_, result)| result).collect()
    }

    fn world(own: &LocalRank) -> StateWorld {
        StateWorld::over(own)
    }

    /// The result as text: an error, or `fine`.
    fn result_text<T>(result: Result<T>) -> String {
        result.map_or_else(|error| error.to_string(), |_| "fine".to_string())
    }

    /// Agrees on a call, and returns the result as text.
    fn agree(world: &StateWorld, call: Call) -> String {
        result_text(world.agree(call, Ok(((), vec![7]))))
    }

    /// Sends bytes that are no opening.
    fn send_bytes(world: &dyn Communicator, bytes: &[u8]) -> std::result::Result<(), CommunicationError> {
        let mut openings = vec![[0; size_of::<Opening>()]; world.size()];
        let mut from: Vec<Vec<&mut [u8]>> = openings.iter_mut().map(|bytes| vec![&mut bytes[..]]).collect();
        from[world.rank()].clear();
        world.gather(&[bytes], &mut from)
    }

    const ADVICE: &str =
        "make the same calls in the same order on all ranks: look for a call that only some of them reach";

    #[test]
    fn every_rank_gets_the_bytes_of_all() {
        let all = together(3, |own| {
            let world = world(&own);
            let gather = |length: usize| {
                world
                    .agree(Call::Update, Ok(((), vec![world.rank() as u8; length])))
                    .unwrap()
                    .1
            };
            [gather(4), gather(world.rank()), gather(0)]
        });
        for answers in all {
            assert_eq!(answers[0], [[0; 4], [1; 4], [2; 4]]);
            assert_eq!(answers[1], [vec![], vec![1], vec![2, 2]]);
            assert_eq!(answers[2], [[0; 0]; 3]);
        }
    }

    #[test]
    fn a_refusal_is_an_error_on_all_and_the_next_call_works() {
        let all = together(4, |own| {
            let world = world(&own);
            let refused_by = |ranks: &[usize]| {
                let refuses = ranks.contains(&own.rank());
                let own_message = if refuses {
                    Err(Error::other(format!("no, says {}", own.rank())))
                } else {
                    Ok(((), vec![1; 9]))
                };
                world.agree(Call::Update, own_message)
            };
            let error = refused_by(&[2]).unwrap_err();
            let of_others = (ErrorKind::Ranks, Some(2));
            let expected = if own.rank() == 2 {
                (ErrorKind::Other, None)
            } else {
                of_others
            };
            assert_eq!(
                (error.kind(), error.rank()),
                expected,
                "its own error is as it was"
            );
            let refusals = [&[2][..], &[3, 1], &[0, 1, 2, 3]].map(|ranks| result_text(refused_by(ranks)));
            (refusals.to_vec(), agree(&world, Call::Plan))
        });
        let expected = [
            [
                "rank 2 refused: no, says 2",
                "rank 1 refused: no, says 1",
                "no, says 0",
            ],
            ["rank 2 refused: no, says 2", "no, says 1", "no, says 1"],
            ["no, says 2", "rank 1 refused: no, says 1", "no, says 2"],
            ["rank 2 refused: no, says 2", "no, says 3", "no, says 3"],
        ];
        assert_eq!(
            all,
            expected.map(|refusals| (refusals.map(str::to_string).to_vec(), "fine".to_string()))
        );
    }

    #[test]
    fn another_call_is_an_error_on_all_and_the_next_call_works() {
        let all = together(3, |own| {
            let world = world(&own);
            let one = |rank: usize, call| if own.rank() == rank { call } else { Call::Update };
            let unlike = [
                one(1, Call::Plan),
                one(0, Call::Commit),
                if own.rank() == 0 {
                    Call::Update
                } else {
                    Call::Reduce
                },
            ];
            let texts = unlike.map(|call| agree(&world, call)).to_vec();
            let result = world.agree(
                one(2, Call::Setup),
                if own.rank() == 1 {
                    Err(Error::other("no"))
                } else {
                    Ok(((), vec![1]))
                },
            );
            let text = match own.rank() {
                1 => "no".to_string(),
                _ => format!(
                    "rank 2 called setup, and rank 0 update; look first for the error that rank 1 returned; then \
                     {ADVICE}"
                ),
            };
            assert_eq!(
                result_text(result),
                text,
                "a rank that refuses gets its own error"
            );
            let failed = match own.rank() {
                1 => world.settle(Call::Plan, Err(Error::other("no memory"))),
                _ => world.settle(Call::Reduce, Ok(())),
            };
            let text = match own.rank() {
                1 => "no memory",
                _ => &format!(
                    "rank 1 called the plan of an update, and rank 0 the sums of an update; look first for the \
                     error that rank 1 returned; then {ADVICE}"
                ),
            };
            assert_eq!(result_text(failed), text);
            (texts, agree(&world, Call::Update))
        });
        let texts = [
            format!("rank 1 called the plan of an update, and rank 0 update; {ADVICE}"),
            format!("rank 0 called the end of an update, and rank 1 update; {ADVICE}"),
            format!("rank 0 called update, and rank 1 the sums of an update; {ADVICE}"),
        ];
        assert_eq!(all, vec![(texts.to_vec(), "fine".to_string()); 3]);
    }

    #[test]
    fn another_state_is_an_error_on_all_and_the_next_call_works_on_each() {
        let all = together(3, |own| {
            let [first, second] = [world(&own), world(&own)];
            let before = [&first, &second, &second].map(|world| agree(world, Call::Update));
            let (one, other) = if own.rank() == 2 {
                (&second, &first)
            } else {
                (&first, &second)
            };
            let new = world(&own);
            let swapped = [one, other, if own.rank() == 0 { one } else { &new }]
                .map(|world| world.agree(Call::Update, Ok(((), vec![]))));
            let swapped = swapped.map(|result| match result {
                Err(error) => (error.kind(), error.rank(), error.to_string()),
                Ok(messages) => panic!("{messages:?}"),
            });
            let states = [&first, &second].map(|world| {
                format!(
                    "update of the state {}",
                    world.0.as_ref().unwrap().count.lock().unwrap().state
                )
            });
            (
                before,
                swapped,
                states,
                [first, second].map(|world| agree(&world, Call::Update)),
            )
        });
        let [first, second] = all[0].2.clone();
        assert_ne!(first, second);
        let unlike = |(odd, theirs): (usize, &str), (usual, ours): (usize, &str)| {
            (
                ErrorKind::Ranks,
                Some(odd),
                format!("rank {odd} called {theirs}, and rank {usual} {ours}; {ADVICE}"),
            )
        };
        let swapped = [
            unlike((2, &second), (0, &first)),
            unlike((2, &first), (0, &second)),
            unlike((0, &first), (1, "update of a new state")),
        ];
        for (before, unlike, states, after) in &all {
            assert_eq!(
                (before, after),
                (&["fine"; 3].map(str::to_string), &["fine"; 2].map(str::to_string))
            );
            assert_eq!((unlike, states), (&swapped, &all[0].2));
        }
    }

    #[test]
    fn ranks_that_have_counted_differently_are_set_equal() {
        let all = together(3, |own| {
            let world = world(&own);
            let before = agree(&world, Call::Setup);
            world.0.as_ref().unwrap().count.lock().unwrap().agreements += own.rank() as u64;
            [
                before,
                agree(&world, Call::Update),
                agree(&world, Call::Update),
                world
                    .0
                    .as_ref()
                    .unwrap()
                    .count
                    .lock()
                    .unwrap()
                    .agreements
                    .to_string(),
            ]
        });
        let text = format!(
            "rank 1 called update after 2 agreements among ranks, and rank 0 update after 1 agreements among \
             ranks; {ADVICE}"
        );
        assert_eq!(
            all,
            vec![["fine".to_string(), text, "fine".to_string(), "4".to_string()]; 3]
        );
    }

    #[test]
    fn clones_count_together() {
        let all = together(2, |own| {
            let world = world(&own);
            let clone = world.clone();
            [if own.rank() == 0 { &world } else { &clone }, &world].map(|world| agree(world, Call::Setup))
        });
        assert_eq!(all, vec![["fine", "fine"]; 2]);
    }

    #[test]
    fn another_version_is_an_error_on_all() {
        let all = together(3, |own| {
            if own.rank() == 1 {
                send_bytes(&own, &[9; size_of::<Opening>()]).unwrap();
                return String::new();
            }
            agree(&world(&own), Call::Update)
        });
        let text = "the ranks cannot communicate: rank 1 runs another version of optimisers than rank 0; \
                    run one build on all ranks";
        assert_eq!(all, [text, "", text]);
    }

    #[test]
    fn other_lengths_and_ranks_that_have_left_are_errors_on_all() {
        let all = together(3, |own| {
            let world = world(&own);
            if own.rank() == 1 {
                return vec![
                    send_bytes(world.communicator().unwrap(), &[0; 5])
                        .unwrap_err()
                        .to_string(),
                    agree(&world, Call::Update),
                ];
            }
            (0..4).map(|_| agree(&world, Call::Update)).collect()
        });
        let length = "rank 1 sent 5 bytes where 48 were expected; run one program on all ranks, with one \
                      model and the same options";
        let gone = "rank 1 has left: it returned, failed or panicked before the others had finished. Look \
                    for its own error, and start all ranks anew from the last checkpoint";
        assert_eq!(
            all,
            [
                vec![length, "fine", gone, gone],
                vec![length, "fine"],
                vec![length, "fine", gone, gone]
            ]
        );
    }

    /// A transport that must not be called.
    #[derive(Clone, Debug)]
    struct Alone;

    impl Communicator for Alone {
        fn rank(&self) -> usize {
            0
        }

        fn size(&self) -> usize {
            1
        }

        fn exchange(
            &self,
            _: &[Vec<&[u8]>],
            _: &mut [Vec<&mut [u8]>],
        ) -> std::result::Result<(), CommunicationError> {
            unreachable!("there is nobody to talk to")
        }

        fn gather(
            &self,
            _: &[&[u8]],
            _: &mut [Vec<&mut [u8]>],
        ) -> std::result::Result<(), CommunicationError> {
            unreachable!("there is nobody to talk to")
        }
    }

    #[test]
    fn one_rank_does_not_talk() {
        let world = StateWorld::over(&Alone);
        assert_eq!(
            world.agree(Call::Setup, Ok((3, vec![1, 2]))).unwrap(),
            (3, vec![vec![1, 2]])
        );
        assert_eq!(
            world
                .settle(Call::Update, Err::<(), _>(Error::other("no")))
                .unwrap_err()
                .to_string(),
            "no"
        );
    }
}
