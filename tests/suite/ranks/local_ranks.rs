//! Ranks that are threads: bytes arrive whole, and whatever one of them does wrong, nobody waits for ever.

use optimisers::{CommunicationError, Communicator, LocalRank, ranks};

use support::random_programs::{call, draw};
use support::threads::together;

use CommunicationError::{Gone, Length, Other};

type Outcome = Result<(), CommunicationError>;

/// An exchange in which rank r sends `sent(r, s)` bytes to rank s, and expects `expected(s, r)` from it. The
/// second result says whether `from` has changed.
fn exchanged(
    world: &LocalRank,
    sent: fn(usize, usize) -> usize,
    expected: fn(usize, usize) -> usize,
) -> (Outcome, bool) {
    let (rank, size) = (world.rank(), world.size());
    let own: Vec<Vec<u8>> = (0..size).map(|other| vec![1; sent(rank, other)]).collect();
    let mut got: Vec<Vec<u8>> = (0..size).map(|other| vec![0; expected(other, rank)]).collect();
    let to: Vec<Vec<&[u8]>> = own.iter().map(|bytes| vec![&bytes[..]]).collect();
    let mut from: Vec<Vec<&mut [u8]>> = got.iter_mut().map(|bytes| vec![&mut bytes[..]]).collect();
    let outcome = world.exchange(&to, &mut from);
    (outcome, got.concat().contains(&1))
}

/// Four bytes to each other rank.
fn four(sender: usize, receiver: usize) -> usize {
    if sender == receiver { 0 } else { 4 }
}

fn other(reason: &str) -> Outcome {
    Err(Other {
        reason: reason.to_string(),
    })
}

#[test]
fn bytes_arrive_whole_whatever_their_lengths() {
    for size in [1, 2, 3, 4, 8] {
        let outcomes = together(ranks(size), move |world| {
            (0..60).map(|at| call(&world, size, at)).collect::<Vec<_>>()
        });
        assert_eq!(outcomes, vec![Some(vec![Ok(()); 60]); size]);
    }
}

/// In a thousand programs one rank leaves, by returning or by a panic, before a random call: all calls before
/// it succeed, and that one fails on all others, as does every later one.
#[test]
fn a_rank_that_leaves_at_a_random_place_is_missed_by_all_others_in_the_same_call() {
    for program in 0..1000 {
        let size = 2 + program % 3;
        let (rank, last) = (draw((program, "who"), size), draw((program, "when"), 12));
        let outcomes = together(ranks(size), move |world| {
            let calls = if world.rank() == rank { last } else { last + 3 };
            let outcomes: Vec<Outcome> = (0..calls).map(|at| call(&world, program, at)).collect();
            if world.rank() == rank && program % 2 == 0 {
                std::panic::resume_unwind(Box::new("as a failing assertion, but without a message"));
            }
            outcomes
        });
        for (other, outcomes) in outcomes.into_iter().enumerate() {
            let (successes, failures) = if other == rank { (last, 0) } else { (last, 3) };
            let expected = [vec![Ok(()); successes], vec![Err(Gone { rank }); failures]].concat();
            let has_panicked = other == rank && program % 2 == 0;
            assert_eq!(
                outcomes,
                (!has_panicked).then_some(expected),
                "rank {other} of {size}, program {program}"
            );
        }
    }
}

#[test]
fn several_ranks_that_leave_are_one_story_for_the_others() {
    for program in 0..100 {
        let outcomes = together(ranks(4), move |world| {
            let calls = if world.rank() < 2 { 5 } else { 8 };
            (0..calls)
                .map(|at| call(&world, program, at))
                .collect::<Vec<Outcome>>()
        });
        let [second, third] = [2, 3].map(|rank| outcomes[rank].clone().expect("no panic"));
        assert_eq!(second, third);
        assert_eq!(second[..5], vec![Ok(()); 5]);
        assert!(
            [0, 1]
                .iter()
                .any(|rank| second[5..] == vec![Err(Gone { rank: *rank }); 3]),
            "{second:?}"
        );
    }
}

#[test]
fn a_panic_is_noticed_although_another_handle_of_the_rank_lies_elsewhere() {
    let world = ranks(3);
    let elsewhere = world.clone();
    let outcomes = together(world, |world| {
        call(&world, 0, 0).expect("all are here");
        if world.rank() == 1 {
            std::panic::resume_unwind(Box::new("as a failing assertion, but without a message"));
        }
        call(&world, 0, 1)
    });
    assert_eq!(
        outcomes,
        [Some(Err(Gone { rank: 1 })), None, Some(Err(Gone { rank: 1 }))]
    );
    assert_eq!(call(&elsewhere[1], 0, 2), Err(Gone { rank: 1 }));
}

#[test]
fn a_rank_has_left_when_its_last_handle_is_dropped() {
    let mut world = ranks(2);
    let own = world.remove(0);
    let clone = world[0].clone();
    drop(world);
    let waiting = std::thread::spawn(move || [call(&own, 0, 0), call(&own, 0, 1)]);
    assert_eq!(call(&clone, 0, 0), Ok(()), "a clone is the rank");
    drop(clone);
    assert_eq!(waiting.join().expect("no panic"), [Ok(()), Err(Gone { rank: 1 })]);
}

#[test]
fn another_length_is_an_error_on_all_ranks_and_nothing_arrives() {
    let outcomes = together(ranks(4), |world| {
        let sent = |sender, receiver| {
            if (sender, receiver) == (1, 2) {
                5
            } else {
                four(sender, receiver)
            }
        };
        let expected = |sender, receiver| {
            if (sender, receiver) == (3, 0) {
                0
            } else {
                four(sender, receiver)
            }
        };
        [
            exchanged(&world, sent, four),
            exchanged(&world, four, expected),
            exchanged(&world, four, four),
        ]
    });
    let error = |rank, expected, got| (Err(Length { rank, expected, got }), false);
    assert_eq!(
        outcomes,
        vec![Some([error(1, 4, 5), error(3, 0, 4), (Ok(()), true)]); 4]
    );
    let outcomes = together(ranks(3), |world| {
        let mut others = [[0; 4]; 3];
        let mut from: Vec<Vec<&mut [u8]>> = others.iter_mut().map(|bytes| vec![&mut bytes[..]]).collect();
        from[world.rank()].clear();
        let own: &[&[u8]] = if world.rank() == 2 {
            &[&[1], &[1]]
        } else {
            &[&[1; 4]]
        };
        let outcome = world.gather(own, &mut from);
        (outcome, others.concat().contains(&1))
    });
    assert_eq!(
        outcomes,
        vec![
            Some((
                Err(Length {
                    rank: 2,
                    expected: 4,
                    got: 2
                }),
                false
            ));
            3
        ]
    );
}

#[test]
fn wrong_lists_on_one_rank_are_an_error_on_all() {
    let outcomes = together(ranks(3), |world| {
        let rank = world.rank();
        let empty = |_| Vec::<&mut [u8]>::new();
        let mut from: Vec<_> = (0..3).map(empty).collect();
        let few = world.exchange(&vec![vec![]; if rank == 1 { 2 } else { 3 }], &mut from);
        let many = world.gather(
            &[],
            &mut (0..if rank == 2 { 4 } else { 3 }).map(empty).collect::<Vec<_>>(),
        );
        let own = exchanged(
            &world,
            |sender, receiver| usize::from((sender, receiver) == (1, 1)),
            |_, _| 0,
        )
        .0;
        let mut byte = [0];
        if rank == 0 {
            from[0] = vec![&mut byte];
        }
        [
            few,
            many,
            own,
            world.gather(&[], &mut from),
            exchanged(&world, four, four).0,
        ]
    });
    let expected = [
        other("rank 1 gave `to` 2 entries; give it one for each of the 3 ranks"),
        other("rank 2 gave `from` 4 entries; give it one for each of the 3 ranks"),
        other(
            "rank 1 gave `to` 1 bytes of its own; leave its own entry empty, as own data stays where it is",
        ),
        other(
            "rank 0 gave `from` 1 bytes of its own; leave its own entry empty, as own data stays where it is",
        ),
        Ok(()),
    ];
    assert_eq!(outcomes, vec![Some(expected); 3]);
}

#[test]
fn ranks_that_call_different_functions_are_told() {
    let outcomes = together(ranks(3), |world| {
        let mut from: Vec<Vec<&mut [u8]>> = (0..3).map(|_| Vec::new()).collect();
        let different = if world.rank() == 1 {
            world.gather(&[], &mut from)
        } else {
            world.exchange(&vec![vec![]; 3], &mut from)
        };
        [different, exchanged(&world, four, four).0]
    });
    let told =
        "rank 1 called `gather`, and rank 0 `exchange`; make the same calls in the same order on all ranks";
    assert_eq!(outcomes, vec![Some([other(told), Ok(())]); 3]);
}

#[test]
fn calls_of_one_rank_in_two_threads_run_one_after_another() {
    let outcomes = together(ranks(2), |world| {
        let calls = || (0..200).all(|_| exchanged(&world, four, four) == (Ok(()), true));
        std::thread::scope(|scope| {
            [scope.spawn(calls), scope.spawn(calls)].map(|thread| thread.join().expect("no panic"))
        })
    });
    assert_eq!(outcomes, vec![Some([true; 2]); 2]);
}

#[test]
fn ranks_know_their_place() {
    assert_eq!(
        ranks(3)
            .iter()
            .map(|world| (world.rank(), world.size()))
            .collect::<Vec<_>>(),
        [(0, 3), (1, 3), (2, 3)]
    );
    assert_eq!(format!("{:?}", ranks(2)[1]), "LocalRank { rank: 1, size: 2 }");
    assert!(ranks(0).is_empty());
}

#[test]
fn errors_of_communication_say_what_to_do() {
    let told = [
        Gone { rank: 1 },
        Length {
            rank: 2,
            expected: 4,
            got: 5,
        },
        Other {
            reason: "no network".to_string(),
        },
    ]
    .map(|error| optimisers::Error::from(error).to_string());
    assert_eq!(
        told,
        [
            "rank 1 has left: it returned, failed or panicked before the others had finished. Look for its \
             own error, and start all ranks anew from the last checkpoint",
            "rank 2 sent 5 bytes where 4 were expected; run one program on all ranks, with one model and \
             the same options",
            "the ranks cannot communicate: no network",
        ]
    );
}
