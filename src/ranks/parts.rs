//! Parts: the elements whose state each rank of a job has.
//!
//! `divide` gives all ranks about equally many elements:
//!
//! 1. Each parameter that cannot be cut goes whole to the rank with the smallest load, the largest first.
//! 2. All other parameters are one line of elements, in path order. Each rank takes from the line as many
//!    elements as its load lacks of the mean load. If a rank has more than the mean already, the others take
//!    less in proportion.
//! 3. The end of a part moves to the nearest chunk of a norm (`chunk_length`). So the chunks of each rank are
//!    chunks of the whole parameter, and norms have the bits of a single process.
//!
//! Every rank computes the division by itself, without a message. So the division must depend on nothing that
//! may differ between ranks.

use std::ops::Range;
use std::sync::Arc;

use crate::engine::chunk_length;
use crate::numbers::DType;

/// For one parameter, the range of elements whose state each rank has. The ranges follow each other in rank
/// order and cover the parameter. Most of them are empty.
#[derive(Clone, Debug)]
pub(crate) struct LeafParts {
    rank: usize,
    /// The ranges of all ranks.
    by_rank: Arc<[Range<usize>]>,
    /// The dtype in which gradients travel; `None` for their own.
    pub(crate) wire: Option<DType>,
}

impl LeafParts {
    /// This rank's range.
    pub(crate) fn own(&self) -> Range<usize> {
        self.by_rank[self.rank].clone()
    }

    /// How much of the state this rank has.
    pub(crate) fn held(&self) -> Held {
        let length = self.by_rank.last().map_or(0, |last| last.end);
        let owner = self.by_rank.iter().position(|part| !part.is_empty()).unwrap_or(0);
        match (self.own(), owner == self.rank) {
            (own, true) if own.len() == length => Held::All,
            _ if self.by_rank[owner].len() == length => Held::Nothing,
            (own, _) => Held::Part(own),
        }
    }

    /// Whether several ranks have elements.
    pub(crate) fn are_cut(&self) -> bool {
        self.by_rank.iter().filter(|part| !part.is_empty()).count() > 1
    }

    /// The ranges of all ranks.
    pub(crate) fn all(&self) -> &[Range<usize>] {
        &self.by_rank
    }
}

/// How much of a leaf's state a rank has.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Held {
    /// All of the state; no other rank has any of it. Rank 0 has the state of a leaf without elements.
    All,
    /// A range of elements, maybe empty. Every state tensor has one number for each element of the range.
    Part(Range<usize>),
    /// Nothing, because another rank has all of the state.
    Nothing,
}

/// A parameter that is to be divided.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Divisible {
    /// The number of elements.
    pub(crate) length: usize,
    /// Whether the rule can work on a part of the elements.
    pub(crate) can_be_cut: bool,
}

/// Divides parameters, given in path order, among `size` ranks, for use on `rank`.
pub(crate) fn divide(parameters: &[Divisible], rank: usize, size: usize) -> Vec<LeafParts> {
    let mut whole_on = vec![0; parameters.len()];
    let mut loads = vec![0; size];
    let mut uncut: Vec<usize> = (0..parameters.len())
        .filter(|&index| !parameters[index].can_be_cut)
        .collect();
    uncut.sort_by_key(|&index| std::cmp::Reverse(parameters[index].length));
    for index in uncut {
        let owner = (0..size).min_by_key(|&rank| loads[rank]).unwrap_or_default();
        (whole_on[index], loads[owner]) = (owner, loads[owner] + parameters[index].length);
    }

    let total: usize = parameters.iter().map(|parameter| parameter.length).sum();
    let room: Vec<usize> = loads
        .iter()
        .map(|load| (total / size + 1).saturating_sub(*load))
        .collect();
    let line_length: usize = parameters
        .iter()
        .filter(|parameter| parameter.can_be_cut)
        .map(|parameter| parameter.length)
        .sum();
    let total_room: usize = room.iter().sum();
    // Where each rank ends in the line of all elements that can be cut. The product of two counts of elements
    // may not fit 64 bits, so the product is in u128. The division by `total_room` is needed because the
    // rooms may exceed the line.
    let ends = room.iter().scan(0, |filled, room| {
        *filled += room;
        Some((line_length as u128 * *filled as u128 / total_room.max(1) as u128) as usize)
    });
    let ends: Vec<usize> = ends.collect();

    let mut start = 0;
    let leaf_parts = |(index, &Divisible { length, can_be_cut }): (usize, &Divisible)| {
        let end = |rank: usize| match can_be_cut {
            false => {
                if rank < whole_on[index] {
                    0
                } else {
                    length
                }
            }
            true if rank + 1 == size => length,
            true => nearest_chunk(ends[rank].saturating_sub(start).min(length), length),
        };
        let by_rank = (0..size)
            .map(|rank| if rank == 0 { 0 } else { end(rank - 1) }..end(rank))
            .collect();
        if can_be_cut {
            start += length;
        }
        LeafParts {
            rank,
            by_rank,
            wire: None,
        }
    };
    parameters.iter().enumerate().map(leaf_parts).collect()
}

/// The beginning of a chunk, or the end of the leaf, whichever is nearest to an element.
fn nearest_chunk(element: usize, length: usize) -> usize {
    let chunk = chunk_length(length);
    if element == length {
        length
    } else {
        ((element + chunk / 2) / chunk * chunk).min(length)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn every_element_is_on_one_rank(
            lengths in prop::collection::vec((prop_oneof![0usize..5, 10_000usize..40_000, 1usize << 20..1 << 23], any::<bool>()), 0..12),
            size in 1usize..9,
        ) {
            let parameters: Vec<_> = lengths.iter().map(|&(length, can_be_cut)| Divisible { length, can_be_cut }).collect();
            let parts = divide(&parameters, 0, size);
            let mut loads = vec![0; size];
            for (parts, parameter) in parts.iter().zip(&parameters) {
                prop_assert_eq!(parts.all().len(), size);
                let mut next = 0;
                for (rank, part) in parts.all().iter().enumerate() {
                    prop_assert_eq!(part.start, next, "parts are in order and leave nothing out");
                    prop_assert!(part.end >= part.start);
                    let chunk = chunk_length(parameter.length);
                    prop_assert!(part.end == parameter.length || part.end.is_multiple_of(chunk));
                    prop_assert!(parameter.can_be_cut || part.is_empty() || part.len() == parameter.length);
                    (next, loads[rank]) = (part.end, loads[rank] + part.len());
                }
                prop_assert_eq!(next, parameter.length);
            }
            let largest = |can_be_cut: bool| parameters.iter().filter(|parameter| parameter.can_be_cut == can_be_cut).map(|parameter| parameter.length).max().unwrap_or(0);
            let chunk = parameters.iter().map(|parameter| chunk_length(parameter.length)).max().unwrap_or(0);
            let total: usize = loads.iter().sum();
            for load in loads {
                prop_assert!(load <= total / size + 1 + largest(false) + chunk, "{load} of {total}");
            }
        }
    }

    #[test]
    fn neighbours_are_neighbours() {
        let parameter = |length| Divisible {
            length,
            can_be_cut: true,
        };
        let parts = divide(&[parameter(1 << 15), parameter(100), parameter(1 << 15)], 1, 2);
        let all: Vec<_> = parts.iter().map(|parts| parts.all().to_vec()).collect();
        assert_eq!(
            all,
            [
                vec![0..1 << 15, 1 << 15..1 << 15],
                vec![0..0, 0..100],
                vec![0..0, 0..1 << 15]
            ]
        );
        assert_eq!(parts[2].own(), 0..1 << 15);
        let held = |length, rank| divide(&[parameter(length)], rank, 2)[0].held();
        assert_eq!(
            [held(1 << 15, 0), held(1 << 15, 1)],
            [Held::Part(0..1 << 14), Held::Part(1 << 14..1 << 15)]
        );
        assert_eq!([held(100, 0), held(100, 1)], [Held::Nothing, Held::All]);
        assert_eq!([held(0, 0), held(0, 1)], [Held::All, Held::Nothing]);
    }
}
