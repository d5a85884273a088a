//! The bytes between two ranks, in pieces as MPI takes them: less than 2 GiB each, and none empty.

use std::borrow::Cow;

use crate::ranks::{fill, total_length};

/// The length of the longest piece in bytes. MPI counts in 32 bits.
const LARGEST: usize = 1 << 30;

/// The bytes of slices, one after another: borrowed from a single slice, otherwise copied into one vector.
pub(super) fn join<'s>(slices: &[&'s [u8]]) -> Cow<'s, [u8]> {
    if let [only] = slices {
        Cow::Borrowed(only)
    } else {
        Cow::Owned(slices.concat())
    }
}

/// The pieces of `bytes`, each for one message. Without bytes there is no piece.
pub(super) fn pieces(bytes: &[u8]) -> impl Iterator<Item = &[u8]> {
    bytes.chunks(LARGEST)
}

/// The memory into which MPI receives the bytes for some slices.
pub(super) enum Incoming<'s, 'b> {
    InPlace(&'s mut [u8]),
    Copied(Vec<u8>, &'s mut [&'b mut [u8]]),
}

impl<'s, 'b> Incoming<'s, 'b> {
    pub(super) fn new(slices: &'s mut [&'b mut [u8]]) -> Self {
        match slices {
            [only] => Incoming::InPlace(only),
            _ => Incoming::Copied(vec![0; total_length(slices)], slices),
        }
    }

    pub(super) fn pieces(&mut self) -> impl Iterator<Item = &mut [u8]> {
        let bytes = match self {
            Incoming::InPlace(bytes) => bytes,
            Incoming::Copied(bytes, _) => &mut bytes[..],
        };
        bytes.chunks_mut(LARGEST)
    }

    /// Copies the received bytes to the slices, unless MPI has received the bytes into a slice directly.
    pub(super) fn finish(self) {
        if let Incoming::Copied(bytes, slices) = self {
            fill(slices, &bytes);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_slice_stays_where_it_is() {
        let bytes = [1u8, 2, 3];
        assert!(matches!(join(&[&bytes]), Cow::Borrowed(place) if std::ptr::eq(place, &bytes)));
        assert_eq!(
            pieces(&join(&[])).count(),
            0,
            "nothing is sent where there is nothing to send"
        );
        assert_eq!(
            pieces(&join(&[&bytes, &bytes[1..]])).collect::<Vec<_>>(),
            [[1, 2, 3, 2, 3]]
        );
    }

    #[test]
    fn what_arrives_is_handed_out() {
        let (mut a, mut b) = ([0u8; 2], [0u8; 3]);
        let mut slices = [&mut a[..], &mut b[..]];
        let mut incoming = Incoming::new(&mut slices);
        incoming
            .pieces()
            .for_each(|piece| piece.copy_from_slice(&[1, 2, 3, 4, 5]));
        incoming.finish();
        assert_eq!((a, b), ([1, 2], [3, 4, 5]));
        assert_eq!(Incoming::new(&mut []).pieces().count(), 0);
    }
}
