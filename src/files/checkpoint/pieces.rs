//! Pieces of a file, which several processes write in any order, and the checksum of the whole file.
//!
//! 1. [`PieceWriter`] computes the CRC-32 of a piece during the write, so that no byte is read again.
//! 2. [`join`] sorts the pieces of all processes, refuses gaps and overlaps, and combines the CRC-32s.
//! 3. [`join`] then writes the result over the zeros in the head, which the sum includes.

use std::fs::File;
use std::io::{self, BufWriter, Seek, SeekFrom, Write};
use std::ops::Range;

use serde::{Deserialize, Serialize};

use super::layout::FileLayout;
use super::replace::io_failure;
use crate::error::Result;
use crate::numbers::Watch;

/// A piece that has been written.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub(super) struct FilePiece {
    start: u64,
    length: u64,
    crc: u32,
}

/// Writes pieces into a file that was just opened.
#[derive(Debug)]
pub(super) struct PieceWriter<'f> {
    out: BufWriter<&'f File>,
    /// The position of the next byte.
    position: u64,
    pieces: Vec<FilePiece>,
}

impl<'f> PieceWriter<'f> {
    pub(super) fn new(file: &'f File) -> Self {
        PieceWriter {
            out: BufWriter::new(file),
            position: 0,
            pieces: Vec::new(),
        }
    }

    /// Writes the bytes of `place` by `fill`. Refuses a `fill` that writes more or fewer bytes.
    pub(super) fn write(
        &mut self,
        place: Range<u64>,
        fill: impl FnOnce(&mut dyn Write) -> io::Result<()>,
    ) -> io::Result<()> {
        self.write_watched(place, None, fill)
    }

    /// [`PieceWriter::write`], with a watch over the bytes.
    pub(super) fn write_watched(
        &mut self,
        place: Range<u64>,
        watch: Option<&mut Watch>,
        fill: impl FnOnce(&mut dyn Write) -> io::Result<()>,
    ) -> io::Result<()> {
        // No seek between neighbours, because a seek flushes the buffer.
        if place.start != self.position {
            self.out.seek(SeekFrom::Start(place.start))?;
            self.position = place.start;
        }
        let mut summed = SummingWriter {
            out: &mut self.out,
            sum: crc32fast::Hasher::new(),
            watch,
            length: 0,
        };
        fill(&mut summed)?;
        let SummingWriter { sum, length, .. } = summed;
        self.position += length;
        if self.position != place.end {
            return Err(io::Error::other(format!(
                "{length} bytes were written to the place {place:?}"
            )));
        }
        self.pieces.push(FilePiece {
            start: place.start,
            length,
            crc: sum.finalize(),
        });
        Ok(())
    }

    /// Flushes, and returns the pieces.
    pub(super) fn finish(mut self) -> io::Result<Vec<FilePiece>> {
        self.out.flush()?;
        Ok(self.pieces)
    }
}

/// Checks that the pieces are the whole file, and writes the checksum if the layout has one.
pub(super) fn join(mut file: &File, layout: &FileLayout, pieces: Vec<FilePiece>) -> Result<()> {
    let sum =
        whole_checksum(pieces, layout.length).map_err(io_failure("put the pieces of the file together"))?;
    let Some(place) = layout.checksum else {
        return Ok(());
    };
    file.seek(SeekFrom::Start(place))
        .and_then(|_| write!(file, "{sum:08x}"))
        .map_err(io_failure("write the checksum"))
}

/// The checksum of the file that these pieces make up.
fn whole_checksum(mut pieces: Vec<FilePiece>, length: u64) -> io::Result<u32> {
    pieces.sort_unstable();
    let mut sum = crc32fast::Hasher::new();
    let mut end = 0;
    for piece in pieces {
        if piece.start != end {
            return Err(io::Error::other(format!(
                "a piece begins at byte {}, and the one before it ends at {end}",
                piece.start
            )));
        }
        sum.combine(&crc32fast::Hasher::new_with_initial_len(piece.crc, piece.length));
        end += piece.length;
    }
    if end == length {
        Ok(sum.finalize())
    } else {
        Err(io::Error::other(format!("they end at byte {end} of {length}")))
    }
}

/// A writer that counts the bytes, and also passes them to checksum and watch.
struct SummingWriter<'w, W> {
    out: W,
    sum: crc32fast::Hasher,
    watch: Option<&'w mut Watch>,
    length: u64,
}

impl<W: Write> Write for SummingWriter<'_, W> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        // At most 256 KiB, which stay in the cache, because checksum and watch read the bytes again.
        let length = self.out.write(&bytes[..bytes.len().min(1 << 18)])?;
        self.sum.update(&bytes[..length]);
        if let Some(watch) = &mut self.watch {
            watch.add(&bytes[..length]);
        }
        self.length += length as u64;
        Ok(length)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.out.flush()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Writes a file of these bytes in pieces with these ends. `order` changes the order of the pieces.
    fn write_pieces(
        bytes: &[u8],
        ends: &[usize],
        order: impl Fn(&mut Vec<Range<usize>>),
    ) -> (Vec<u8>, Vec<FilePiece>) {
        let starts = [0].iter().chain(ends);
        let mut places: Vec<Range<usize>> = starts.zip(ends).map(|(start, end)| *start..*end).collect();
        order(&mut places);
        let file = tempfile::NamedTempFile::new().expect("a file");
        // Two writers, because several processes may write.
        let (first_half, second_half) = places.split_at(places.len() / 2);
        let pieces = [first_half, second_half].map(|places| {
            let file = File::options().write(true).open(file.path()).expect("the file");
            let mut writer = PieceWriter::new(&file);
            for place in places {
                let range = place.start as u64..place.end as u64;
                writer
                    .write(range, |out| out.write_all(&bytes[place.clone()]))
                    .expect("a piece");
            }
            writer.finish().expect("all of it")
        });
        (std::fs::read(file.path()).expect("the file"), pieces.concat())
    }

    #[test]
    fn pieces_in_any_order_are_the_file() {
        let bytes: Vec<u8> = (0..1_000_000u32)
            .map(|i| (i.wrapping_mul(2_654_435_761) >> 24) as u8)
            .collect();
        let ends = [1, 8, 8, 300_000, 300_001, 999_999, 1_000_000];
        let orders: [fn(&mut Vec<Range<usize>>); 3] =
            [|_| (), |places| places.reverse(), |places| places.rotate_left(3)];
        for order in orders {
            let (file, pieces) = write_pieces(&bytes, &ends, order);
            assert!(file == bytes);
            assert_eq!(
                whole_checksum(pieces, 1_000_000).expect("all pieces"),
                crc32fast::hash(&bytes)
            );
        }
    }

    #[test]
    fn pieces_that_are_not_the_file() {
        let error = |pieces: &[FilePiece], length| {
            whole_checksum(pieces.to_vec(), length)
                .expect_err("an error")
                .to_string()
        };
        let (_, pieces) = write_pieces(&[7; 30], &[10, 20, 30], |_| ());
        assert_eq!(
            error(&[pieces[0], pieces[2]], 30),
            "a piece begins at byte 20, and the one before it ends at 10"
        );
        assert_eq!(
            error(&[pieces[0], pieces[1], pieces[1], pieces[2]], 30),
            "a piece begins at byte 10, and the one before it ends at 20"
        );
        assert_eq!(error(&pieces[..2], 30), "they end at byte 20 of 30");
        let file = tempfile::tempfile().expect("a file");
        let short = PieceWriter::new(&file)
            .write(5..10, |out| out.write_all(&[0; 4]))
            .expect_err("a byte too few");
        assert_eq!(short.to_string(), "4 bytes were written to the place 5..10");
    }
}
