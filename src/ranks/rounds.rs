//! Rounds: how the elements of a divided state travel between ranks, with small buffers and busy links.
//!
//! Elements belong to ranks in the order of leaves, so sending leaf after leaf would keep only the links of
//! one rank busy. Instead each round takes the next elements of the parts of every rank:
//!
//! ```text
//! for each rank:  room = room_per_rank
//!                 while room is left: the next run of the rank's parts, cut to fit
//! until no rank has a run
//! ```
//!
//! All ranks compute the same rounds without a message, because they have the same leaves and parts.

use std::ops::Range;

use super::parts::LeafParts;

/// The number of elements in a round, over the parts of all ranks.
const ROUND_ELEMENTS: usize = 1 << 19;

/// The least room for a rank in a round, in elements. Smaller messages would take mostly latency.
const LEAST_PER_RANK: usize = 1 << 14;

/// Parts are cut at multiples of this length, counted from their first element. So runs begin where records
/// of state do (128 elements in 8 bits), and cut no vector of the engine, which would be slow.
const ALIGNED: usize = 1 << 10;

/// Neighbouring elements of a leaf (a parameter of the state).
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Run {
    pub(crate) leaf: usize,
    pub(crate) elements: Range<usize>,
}

/// The runs that travel at once, by the rank whose parts they belong to.
pub(crate) type Round = Vec<Vec<Run>>;

/// The room for each rank in a round, in elements.
fn room_per_rank(ranks: usize) -> usize {
    ROUND_ELEMENTS
        .div_ceil(ranks)
        .max(LEAST_PER_RANK)
        .next_multiple_of(ALIGNED)
}

/// The rounds of these leaves. In each round the parts of all ranks have equally many elements until they run
/// out, up to cuts at `ALIGNED`, so every link is busy in both directions.
pub(crate) fn rounds<'p>(
    leaves: &'p [usize],
    ranks: usize,
    parts: impl Fn(usize) -> &'p LeafParts,
) -> impl Iterator<Item = Round> {
    let part = move |leaf: usize, rank: usize| parts(leaf).all()[rank].clone();
    // For each rank: the leaves that are not begun, and the rest of the leaf that is begun.
    let mut remaining: Vec<(&[usize], Run)> = vec![
        (
            leaves,
            Run {
                leaf: 0,
                elements: 0..0
            }
        );
        ranks
    ];
    std::iter::from_fn(move || {
        let runs = remaining.iter_mut().enumerate().map(|(rank, (leaves, run))| {
            let (mut runs, mut room) = (Vec::new(), room_per_rank(ranks));
            loop {
                let (start, length) = (run.elements.start, run.elements.len());
                let count = if length <= room {
                    length
                } else {
                    room / ALIGNED * ALIGNED
                };
                if count > 0 {
                    runs.push(Run {
                        leaf: run.leaf,
                        elements: start..start + count,
                    });
                    (run.elements.start, room) = (start + count, room - count);
                }
                let (true, Some((leaf, others))) = (count == length, leaves.split_first()) else {
                    return runs;
                };
                (*leaves, *run) = (
                    others,
                    Run {
                        leaf: *leaf,
                        elements: part(*leaf, rank),
                    },
                );
            }
        });
        let round: Round = runs.collect();
        round.iter().any(|runs| !runs.is_empty()).then_some(round)
    })
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::ranks::parts::{Divisible, divide};

    proptest! {
        #[test]
        fn every_element_travels_once_and_in_order(
            lengths in prop::collection::vec((prop_oneof![0usize..5, 10_000usize..40_000, 1usize << 20..1 << 22], any::<bool>()), 0..12),
            ranks in 1usize..9,
        ) {
            let parameters: Vec<_> = lengths.iter().map(|&(length, can_be_cut)| Divisible { length, can_be_cut }).collect();
            let parts = divide(&parameters, 0, ranks);
            let leaves: Vec<usize> = (0..parts.len()).filter(|leaf| leaf % 5 != 3).collect();
            let rounds: Vec<Round> = rounds(&leaves, ranks, |leaf| &parts[leaf]).collect();
            for rank in 0..ranks {
                let mut runs = rounds.iter().flat_map(|round| &round[rank]).peekable();
                for &leaf in &leaves {
                    let part = parts[leaf].all()[rank].clone();
                    let mut next = part.start;
                    while let Some(run) = runs.next_if(|run| run.leaf == leaf) {
                        prop_assert_eq!(run.elements.start, next);
                        prop_assert!(!run.elements.is_empty());
                        prop_assert!(run.elements.end == part.end || (run.elements.end - part.start).is_multiple_of(ALIGNED));
                        next = run.elements.end;
                    }
                    prop_assert!(next == part.end || part.is_empty());
                }
                prop_assert!(runs.next().is_none());
                let elements = |round: &Round| round[rank].iter().map(|run| run.elements.len()).sum::<usize>();
                let travelling: Vec<usize> = rounds.iter().map(elements).collect();
                let length = room_per_rank(ranks);
                prop_assert!(travelling.iter().all(|elements| *elements <= length));
                prop_assert!(travelling.iter().rev().skip_while(|elements| **elements == 0).skip(1).all(|elements| *elements > length / 2));
            }
        }
    }
}
