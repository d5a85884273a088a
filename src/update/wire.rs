//! How tensors travel between ranks: in windows of a few hundred thousand elements, so that buffers stay small.

use std::ops::Range;

use candle_core::Tensor;

use crate::engine::write_tensor;
use crate::error::{Error, Result};
use crate::tree::Leaf;

/// How many elements of a part are on their way at once, so that buffers stay small.
const WINDOW: usize = 1 << 18;

/// Elements of one leaf: the same window of each rank's part.
#[derive(Clone, Copy)]
pub(super) struct Window {
    pub(super) leaf: usize,
    pub(super) index: usize,
}

impl Window {
    /// The elements of a rank's part.
    pub(super) fn of(self, part: &Range<usize>) -> Range<usize> {
        let start = part.end.min(part.start + self.index * WINDOW);
        start..part.end.min(start + WINDOW)
    }
}

/// The windows of these leaves, as many together as fit into one.
pub(super) fn rounds(leaves: &[Leaf], chosen: &[usize]) -> Vec<Vec<Window>> {
    let mut rounds: Vec<Vec<Window>> = Vec::new();
    let mut filled = 0;
    for &leaf in chosen {
        let longest = leaves[leaf].parts.iter().flat_map(|parts| parts.all()).map(Range::len).max().unwrap_or(0);
        for index in 0..longest.div_ceil(WINDOW) {
            let length = WINDOW.min(longest - index * WINDOW);
            filled += length;
            match rounds.last_mut() {
                Some(round) if filled <= WINDOW => round.push(Window { leaf, index }),
                _ => {
                    filled = length;
                    rounds.push(vec![Window { leaf, index }]);
                }
            }
        }
    }
    rounds
}

/// The values of these elements of a tensor, at the end of `bytes`.
pub(super) fn append(tensor: &Tensor, elements: Range<usize>, bytes: &mut Vec<u8>) -> Result<()> {
    if elements.is_empty() {
        return Ok(());
    }
    let values = tensor.detach().flatten_all()?.narrow(0, elements.start, elements.len())?;
    write_tensor(&values, bytes).map_err(Error::other)
}

/// What all ranks send in a round, aligned for every dtype.
pub(super) struct Received {
    words: Vec<Vec<u64>>,
    /// The bytes of each rank's windows, in words and in bytes.
    places: Vec<Vec<(Range<usize>, usize)>>,
}

impl Received {
    /// Room for windows of these lengths, of each rank.
    pub(super) fn new(lengths: Vec<Vec<usize>>) -> Self {
        let places = |lengths: Vec<usize>| {
            let mut start = 0;
            let place = |length: usize| {
                let place = start..start + length.div_ceil(size_of::<u64>());
                start = place.end;
                (place, length)
            };
            lengths.into_iter().map(place).collect::<Vec<_>>()
        };
        let places: Vec<Vec<(Range<usize>, usize)>> = lengths.into_iter().map(places).collect();
        let words = places.iter().map(|places| vec![0; places.last().map_or(0, |(place, _)| place.end)]).collect();
        Received { words, places }
    }

    /// The bytes of a rank's window.
    pub(super) fn of(&self, rank: usize, window: usize) -> &[u8] {
        let (place, length) = &self.places[rank][window];
        &bytemuck::cast_slice(&self.words[rank][place.clone()])[..*length]
    }

    /// Where the bytes go, by rank.
    pub(super) fn slices(&mut self) -> Vec<Vec<&mut [u8]>> {
        fn of_rank<'w>(mut rest: &'w mut [u64], places: &[(Range<usize>, usize)]) -> Vec<&'w mut [u8]> {
            let mut slices: Vec<&mut [u8]> = Vec::with_capacity(places.len());
            for (place, length) in places {
                let (here, after) = std::mem::take(&mut rest).split_at_mut(place.len());
                rest = after;
                slices.push(&mut bytemuck::cast_slice_mut(here)[..*length]);
            }
            // No transport gets an empty slice, whose address may have a meaning of its own.
            slices.retain(|slice| !slice.is_empty());
            slices
        }
        self.words.iter_mut().zip(&self.places).map(|(words, places)| of_rank(words, places)).collect()
    }

    /// The same without those of one rank.
    pub(super) fn slices_but(&mut self, rank: usize) -> Vec<Vec<&mut [u8]>> {
        let mut slices = self.slices();
        slices[rank].clear();
        slices
    }

    /// Puts the bytes of one rank in their places.
    pub(super) fn set(&mut self, rank: usize, mut bytes: &[u8]) {
        for slice in &mut self.slices()[rank] {
            let (here, after) = bytes.split_at(slice.len());
            slice.copy_from_slice(here);
            bytes = after;
        }
    }
}
