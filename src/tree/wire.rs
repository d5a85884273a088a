//! How tensors travel between ranks: in windows, so that buffers stay small.

use std::ops::Range;

use candle_core::{DType, Tensor};

use super::parts::LeafParts;
use crate::engine::{batches, rounded, write_tensor};
use crate::error::{Error, Result};

/// How many elements are on their way at once, of the parts of all ranks together.
const AT_ONCE: usize = 1 << 19;

/// Elements of one leaf: the same window of each rank's part.
#[derive(Clone, Copy)]
pub(crate) struct Window {
    pub(crate) leaf: usize,
    pub(crate) index: usize,
    /// How many elements of each part.
    length: usize,
}

impl Window {
    /// The elements of a rank's part.
    pub(crate) fn of(self, part: &Range<usize>) -> Range<usize> {
        let start = part.end.min(part.start + self.index * self.length);
        start..part.end.min(start + self.length)
    }
}

/// The windows of these leaves, as many together as fit into one.
pub(crate) fn rounds<'p>(leaves: &[usize], ranks: usize, parts: impl Fn(usize) -> &'p LeafParts) -> Vec<Vec<Window>> {
    let length = AT_ONCE.div_ceil(ranks);
    let longest = |leaf: usize| parts(leaf).all().iter().map(Range::len).max().unwrap_or(0);
    let windows = leaves.iter().flat_map(|&leaf| {
        let count = longest(leaf).div_ceil(length).max(1);
        (0..count).map(move |index| Window { leaf, index, length })
    });
    batches(windows, |window| window.of(&(0..longest(window.leaf))).len(), length)
}

/// The values of these elements of a flat tensor, rounded to a dtype, at the end of `bytes`.
pub(crate) fn append(tensor: &Tensor, elements: Range<usize>, dtype: DType, bytes: &mut Vec<u8>) -> Result<()> {
    if elements.is_empty() {
        return Ok(());
    }
    write_tensor(&rounded(&tensor.narrow(0, elements.start, elements.len())?, dtype)?, bytes).map_err(Error::other)
}

/// The bytes as a transport takes them: it gets no empty slice, whose address may have a meaning of its own.
pub(crate) fn slices(bytes: &[u8]) -> Vec<&[u8]> {
    Some(bytes).filter(|bytes| !bytes.is_empty()).into_iter().collect()
}

/// What a rank sends in a round.
pub(crate) struct Parcel {
    bytes: Vec<u8>,
    /// Where each window ends.
    ends: Vec<usize>,
}

impl Parcel {
    /// Room for windows of these lengths in bytes.
    pub(crate) fn new(lengths: impl Iterator<Item = usize>) -> Self {
        let ends: Vec<usize> = lengths
            .scan(0, |end, length| {
                *end += length;
                Some(*end)
            })
            .collect();
        Parcel { bytes: vec![0; ends.last().copied().unwrap_or(0)], ends }
    }

    /// Where the bytes go, see [`slices`].
    pub(crate) fn slices(&mut self) -> Vec<&mut [u8]> {
        Some(&mut self.bytes[..]).filter(|bytes| !bytes.is_empty()).into_iter().collect()
    }

    /// The bytes of a window.
    pub(crate) fn get(&self, window: usize) -> &[u8] {
        let start = window.checked_sub(1).map_or(0, |before| self.ends[before]);
        &self.bytes[start..self.ends[window]]
    }
}
