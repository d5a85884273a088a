//! The source of a file's bytes, read by position.

use std::fs::{File, Metadata};
use std::io::{self, Read, Seek, SeekFrom};
use std::ops::Range;
use std::path::Path;
use std::sync::{Mutex, PoisonError};
use std::time::SystemTime;

/// A file, or the bytes of a file.
#[derive(Debug)]
pub(crate) enum Source {
    Memory(Vec<u8>),
    /// An open file, which stays the same file if another file gets its name.
    File {
        file: Mutex<File>,
        /// The stamp at the time of opening.
        stamp: Stamp,
    },
}

/// Facts about an open file that change if its content is modified.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Stamp {
    length: u64,
    /// `None` if the file system does not store this time.
    modified: Option<SystemTime>,
}

impl Stamp {
    fn from_metadata(metadata: &Metadata) -> Self {
        Stamp {
            length: metadata.len(),
            modified: metadata.modified().ok(),
        }
    }
}

impl Source {
    /// Opens the file at a path.
    pub(crate) fn open(path: &Path) -> io::Result<Self> {
        let mut file = File::open(path)?;
        let metadata = file.metadata()?;
        if metadata.is_file() {
            return Ok(Source::File {
                file: Mutex::new(file),
                stamp: Stamp::from_metadata(&metadata),
            });
        }
        // Read at once, because a pipe has no positions.
        let mut bytes = Vec::new();
        file.read_to_end(&mut bytes)?;
        Ok(Source::Memory(bytes))
    }

    /// The number of bytes, for a file at the time of opening.
    pub(crate) fn length(&self) -> u64 {
        match self {
            Source::Memory(bytes) => bytes.len() as u64,
            Source::File { stamp, .. } => stamp.length,
        }
    }

    /// `length` bytes from `start` on. The bytes of a file are read into `buffer`. Refuses a file whose
    /// length or time of modification has changed since it was opened.
    pub(crate) fn read<'b>(
        &'b self,
        start: u64,
        length: usize,
        buffer: &'b mut Vec<u8>,
    ) -> io::Result<&'b [u8]> {
        match self {
            Source::Memory(bytes) => {
                let rest = usize::try_from(start).ok().and_then(|start| bytes.get(start..));
                rest.and_then(|rest| rest.get(..length))
                    .ok_or_else(|| io::ErrorKind::UnexpectedEof.into())
            }
            Source::File { file, stamp } => {
                buffer.resize(length, 0);
                // The lock is held for both calls, because all readers share one position.
                let mut file = file.lock().unwrap_or_else(PoisonError::into_inner);
                let result = file
                    .seek(SeekFrom::Start(start))
                    .and_then(|_| file.read_exact(buffer));
                // The stamps are compared after the read, because the file may change during the read.
                if Stamp::from_metadata(&file.metadata()?) != *stamp {
                    let changed = "it was changed after it had been opened; open it again";
                    return Err(io::Error::new(io::ErrorKind::InvalidData, changed));
                }
                result.map(|()| &**buffer)
            }
        }
    }

    /// Calls `visit` with all bytes from a position on, piece by piece.
    pub(super) fn stream(&self, start: u64, mut visit: impl FnMut(&[u8])) -> io::Result<()> {
        /// The number of bytes of a piece, few enough to stay in the cache.
        const PIECE: usize = 1 << 20;
        let mut buffer = Vec::new();
        let Range { mut start, end } = start..self.length();
        while start < end {
            let length = usize::try_from(end - start).map_or(PIECE, |rest| rest.min(PIECE));
            visit(self.read(start, length, &mut buffer)?);
            start += length as u64;
        }
        Ok(())
    }
}
