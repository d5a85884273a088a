//! What one rank sends another in a call, as MPI takes it: in pieces of less than 2 GiB, none of them empty.

/// MPI counts in 32 bits.
const LARGEST: usize = 1 << 30;

/// The bytes of slices, one after another: in place where there is one slice only, else copied together.
pub(super) enum Outgoing<'s> {
    InPlace(&'s [u8]),
    Copied(Vec<u8>),
}

impl<'s> Outgoing<'s> {
    pub(super) fn new(slices: &[&'s [u8]]) -> Self {
        match slices {
            [only] => Outgoing::InPlace(only),
            _ => Outgoing::Copied(slices.concat()),
        }
    }

    pub(super) fn pieces(&self) -> impl Iterator<Item = &[u8]> {
        let bytes = match self {
            Outgoing::InPlace(bytes) => bytes,
            Outgoing::Copied(bytes) => &bytes[..],
        };
        bytes.chunks(LARGEST)
    }
}

/// Where the bytes for slices arrive.
pub(super) enum Incoming<'s, 'b> {
    InPlace(&'s mut [u8]),
    Copied(Vec<u8>, &'s mut [&'b mut [u8]]),
}

impl<'s, 'b> Incoming<'s, 'b> {
    pub(super) fn new(slices: &'s mut [&'b mut [u8]]) -> Self {
        match slices {
            [only] => Incoming::InPlace(only),
            _ => Incoming::Copied(vec![0; slices.iter().map(|slice| slice.len()).sum()], slices),
        }
    }

    pub(super) fn pieces(&mut self) -> impl Iterator<Item = &mut [u8]> {
        let bytes = match self {
            Incoming::InPlace(bytes) => bytes,
            Incoming::Copied(bytes, _) => &mut bytes[..],
        };
        bytes.chunks_mut(LARGEST)
    }

    /// Hands out what has arrived.
    pub(super) fn finish(self) {
        if let Incoming::Copied(bytes, slices) = self {
            let mut left = &bytes[..];
            for slice in slices {
                let (own, others) = left.split_at(slice.len());
                slice.copy_from_slice(own);
                left = others;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_slice_stays_where_it_is() {
        let bytes = [1u8, 2, 3];
        assert!(matches!(Outgoing::new(&[&bytes]), Outgoing::InPlace(place) if std::ptr::eq(place, &bytes)));
        assert_eq!(Outgoing::new(&[]).pieces().count(), 0, "nothing is sent where there is nothing to send");
        assert_eq!(Outgoing::new(&[&bytes, &bytes[1..]]).pieces().collect::<Vec<_>>(), [[1, 2, 3, 2, 3]]);
    }

    #[test]
    fn what_arrives_is_handed_out() {
        let (mut a, mut b) = ([0u8; 2], [0u8; 3]);
        let mut slices = [&mut a[..], &mut b[..]];
        let mut incoming = Incoming::new(&mut slices);
        incoming.pieces().for_each(|piece| piece.copy_from_slice(&[1, 2, 3, 4, 5]));
        incoming.finish();
        assert_eq!((a, b), ([1, 2], [3, 4, 5]));
        assert_eq!(Incoming::new(&mut []).pieces().count(), 0);
    }
}
