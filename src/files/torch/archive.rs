//! The container of `torch.save`: a zip archive whose records are not compressed.
//!
//! ```text
//! for each record:  header (30 bytes, name, extra field), bytes
//! directory         for each record: checksum, length, place of its header
//! end record        place of the directory; with ZIP64 a record with 64-bit numbers comes before it
//! ```
//!
//! An archive is therefore opened from its end: end record, then directory. Records are read later and by
//! position, because a state may be larger than memory. Places and lengths come from the file, so each is
//! compared with the length of the file before memory is allocated or bytes are read.

use std::collections::HashMap;
use std::io;
use std::sync::atomic::{AtomicBool, Ordering};

use candle_core::Tensor;

use super::content::{StoredTensor, StridedRun};
use crate::files::tensor_file::{Entry, Source};

/// The first bytes of a zip archive.
pub(super) const MAGIC: &[u8] = b"PK\x03\x04";

/// An open archive and its directory.
#[derive(Debug)]
pub(super) struct Archive {
    source: Source,
    records: HashMap<String, ArchiveRecord>,
    /// `false` if all checksums are 0, which is what `torch.serialization.set_crc32_options(False)` writes.
    has_checksums: bool,
}

#[derive(Debug)]
struct ArchiveRecord {
    /// Where the header begins in the file.
    header: u64,
    length: u64,
    crc: u32,
    /// Whether the bytes have this checksum. Kept, because thousands of tensors may be views of one record.
    is_verified: AtomicBool,
}

/// The `N` bytes of the number at `at`.
fn number<const N: usize>(bytes: &[u8], at: usize) -> io::Result<[u8; N]> {
    bytes
        .get(at..)
        .and_then(|rest| rest.first_chunk().copied())
        .ok_or_else(|| io::ErrorKind::UnexpectedEof.into())
}

fn u16_at(bytes: &[u8], at: usize) -> io::Result<usize> {
    Ok(u16::from_le_bytes(number(bytes, at)?).into())
}

fn u32_at(bytes: &[u8], at: usize) -> io::Result<u32> {
    Ok(u32::from_le_bytes(number(bytes, at)?))
}

fn u64_at(bytes: &[u8], at: usize) -> io::Result<u64> {
    Ok(u64::from_le_bytes(number(bytes, at)?))
}

fn damaged(reason: impl Into<String>) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, reason.into())
}

/// `length` bytes from `start` on. Both come from the file, so they may lie outside of it.
fn bytes_at(source: &Source, start: u64, length: u64) -> io::Result<Vec<u8>> {
    if start.checked_add(length).is_none_or(|end| end > source.length()) {
        return Err(damaged("it ends before what its directory names"));
    }
    let length =
        usize::try_from(length).map_err(|_| damaged("it has a record that is larger than memory"))?;
    let mut buffer = Vec::new();
    Ok(source.read(start, length, &mut buffer)?.to_vec())
}

impl Archive {
    pub(super) fn read(source: Source) -> io::Result<Self> {
        let (start, length) = directory(&source)?;
        let bytes = bytes_at(&source, start, length)?;
        let (mut records, mut rest) = (HashMap::new(), &bytes[..]);
        // An entry of the directory has 46 bytes, the name, the extra field and a comment.
        while rest.starts_with(b"PK\x01\x02") {
            let [name, extra, comment] = [28, 30, 32].map(|at| u16_at(rest, at));
            let (name_end, extra_end) = (46 + name?, 46 + u16_at(rest, 28)? + extra?);
            let (Some(name), Some(extra)) = (rest.get(46..name_end), rest.get(name_end..extra_end)) else {
                return Err(damaged("its directory is cut"));
            };
            let name = String::from_utf8_lossy(name).into_owned();
            if u16_at(rest, 10)? != 0 {
                return Err(damaged(format!(
                    "its record {name:?} is compressed, which `torch.save` does not do"
                )));
            }
            let record = ArchiveRecord::of(rest, extra)?;
            if records.insert(name.clone(), record).is_some() {
                return Err(damaged(format!("it has two records {name:?}")));
            }
            rest = rest.get(extra_end + comment?..).ok_or_else(|| damaged("its directory is cut"))?;
        }
        let has_checksums = records.values().any(|record| record.crc != 0);
        Ok(Archive { source, records, has_checksums })
    }

    pub(super) fn source(&self) -> &Source {
        &self.source
    }

    /// The first record name, in sorted order, that ends with `end`. Sorted, because a map has no order.
    pub(super) fn find(&self, end: &str) -> Option<&str> {
        self.records.keys().map(String::as_str).filter(|name| name.ends_with(end)).min()
    }

    fn record(&self, name: &str) -> io::Result<&ArchiveRecord> {
        self.records.get(name).ok_or_else(|| damaged(format!("it has no record {name:?}")))
    }

    /// Where a record begins in the file, and its length in bytes.
    pub(super) fn place(&self, name: &str) -> io::Result<(u64, u64)> {
        let record = self.record(name)?;
        let head = bytes_at(&self.source, record.header, 30)?;
        if !head.starts_with(MAGIC) {
            return Err(damaged(format!("its record {name:?} is not at the place that its directory names")));
        }
        // These lengths are not those in the directory, because torch aligns records by this extra field.
        let start = record.header + 30 + (u16_at(&head, 26)? + u16_at(&head, 28)?) as u64;
        match start.checked_add(record.length) {
            Some(end) if end <= self.source.length() => Ok((start, record.length)),
            _ => Err(damaged(format!("it ends within its record {name:?}"))),
        }
    }

    /// The run of numbers from the first element of a tensor to the last.
    pub(super) fn entry<'f>(
        &'f self,
        stored: &StoredTensor,
        strided: &'f StridedRun,
    ) -> io::Result<Entry<'f>> {
        let (start, length) = self.place(&stored.place)?;
        let width = stored.dtype.size_in_bytes();
        let end = strided.offset.checked_add(strided.span[0]).and_then(|end| end.checked_mul(width));
        if end.is_none_or(|end| end as u64 > length) {
            return Err(damaged(format!("its record {:?} is shorter than a tensor in it", stored.place)));
        }
        Entry::at(&self.source, start + (strided.offset * width) as u64, stored.dtype, &strided.span)
    }

    /// A tensor, in row-major order.
    pub(super) fn tensor(&self, stored: &StoredTensor, strided: &StridedRun) -> io::Result<Tensor> {
        let run = self.entry(stored, strided)?.tensor()?;
        strided.of(&run, &stored.shape).map_err(io::Error::other)
    }

    /// The bytes of a record, whose checksum is verified.
    pub(super) fn bytes(&self, name: &str) -> io::Result<Vec<u8>> {
        self.verify(name)?;
        let (start, length) = self.place(name)?;
        bytes_at(&self.source, start, length)
    }

    /// Refuses a record whose checksum is wrong.
    pub(super) fn verify(&self, name: &str) -> io::Result<()> {
        /// The bytes of a piece, few enough to stay in the cache.
        const PIECE: u64 = 1 << 20;
        let record = self.record(name)?;
        // `Relaxed`, because the flag guards no other memory: at worst two threads verify one record.
        if record.is_verified.load(Ordering::Relaxed) {
            return Ok(());
        }
        let (start, length) = self.place(name)?;
        let (mut sum, mut buffer) = (crc32fast::Hasher::new(), Vec::new());
        for done in (0..length).step_by(PIECE as usize) {
            sum.update(self.source.read(start + done, (length - done).min(PIECE) as usize, &mut buffer)?);
        }
        let (found, expected) = (sum.finalize(), record.crc);
        if found == expected || !self.has_checksums {
            record.is_verified.store(true, Ordering::Relaxed);
            return Ok(());
        }
        Err(damaged(format!("its record {name:?} has the checksum {found:08x}, expected {expected:08x}")))
    }
}

/// Where the directory begins in the file, and its length in bytes.
fn directory(source: &Source) -> io::Result<(u64, u64)> {
    /// The length of the end record of a directory, without and with the longest comment.
    const END: (u64, u64) = (22, 22 + 65535);
    let tail = source.length().min(END.1);
    let start = source.length() - tail;
    let bytes = bytes_at(source, start, tail)?;
    let last = bytes.len().checked_sub(END.0 as usize).ok_or_else(|| damaged("it is cut"))?;
    // Searched from the back, because a comment of unknown length may follow the end record.
    let end = (0..=last)
        .rev()
        .find(|at| bytes[*at..].starts_with(b"PK\x05\x06"))
        .ok_or_else(|| damaged("it is cut"))?;
    // The ZIP64 locator, if any, lies directly before the end record.
    let locator = end.checked_sub(20).filter(|at| bytes[*at..].starts_with(b"PK\x06\x07"));
    match locator {
        Some(at) => {
            let large = bytes_at(source, u64_at(&bytes, at + 8)?, 56)?;
            if !large.starts_with(b"PK\x06\x06") {
                return Err(damaged("its directory is not at the place that its end names"));
            }
            Ok((u64_at(&large, 48)?, u64_at(&large, 40)?))
        }
        None => Ok((u32_at(&bytes, end + 16)?.into(), u32_at(&bytes, end + 12)?.into())),
    }
}

impl ArchiveRecord {
    /// A record, from its entry in the directory and the extra fields there.
    fn of(entry: &[u8], mut extra: &[u8]) -> io::Result<Self> {
        let [stored, length, header] = [u32_at(entry, 20)?, u32_at(entry, 24)?, u32_at(entry, 42)?];
        let mut wide: &[u8] = &[];
        while extra.len() >= 4 {
            let end = 4 + u16_at(extra, 2)?;
            if u16_at(extra, 0)? == 1 {
                wide = extra.get(4..end).unwrap_or_default();
            }
            extra = extra.get(end..).unwrap_or_default();
        }
        // A number that does not fit 32 bits is `u32::MAX` here and the next of the ZIP64 field. So `whole`
        // must be called in the order of that field: the length, the stored length, the header.
        let mut at = 0;
        let mut whole = |short: u32| -> io::Result<u64> {
            if short != u32::MAX {
                return Ok(short.into());
            }
            at += 8;
            u64_at(wide, at - 8)
        };
        let length = whole(length)?;
        whole(stored)?;
        Ok(ArchiveRecord {
            length,
            header: whole(header)?,
            crc: u32_at(entry, 16)?,
            is_verified: AtomicBool::new(false),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// An archive of one record.
    fn archive(name: &str, record: &[u8]) -> Vec<u8> {
        let [length, named] = [record.len() as u32, name.len() as u32];
        let crc = crc32fast::hash(record).to_le_bytes();
        let sizes = [crc, length.to_le_bytes(), length.to_le_bytes()].concat();
        let head = [MAGIC, &[0; 10], &sizes, &named.to_le_bytes(), name.as_bytes(), record].concat();
        let entry =
            [&b"PK\x01\x02"[..], &[0; 12], &sizes, &named.to_le_bytes(), &[0; 14], name.as_bytes()].concat();
        let places = [entry.len() as u32, head.len() as u32].map(u32::to_le_bytes).concat();
        [&head[..], &entry, b"PK\x05\x06", &[0; 8], &places, &[0; 2]].concat()
    }

    /// A file may have thousands of tensors in one record of gigabytes.
    #[test]
    fn a_record_is_read_once_for_its_checksum() {
        let bytes = archive("a/data/0", &[7; 100]);
        let other = bytes.iter().map(|byte| if *byte == 7 { 8 } else { *byte }).collect::<Vec<u8>>();
        let read = |bytes: &[u8]| Archive::read(Source::Memory(bytes.to_vec())).expect("an archive");
        let mut archive = read(&bytes);
        archive.verify("a/data/0").expect("its checksum");
        archive.source = Source::Memory(other.clone());
        archive.verify("a/data/0").expect("nothing is read");
        let error = read(&other).verify("a/data/0").expect_err("another checksum");
        assert!(error.to_string().contains("has the checksum"), "{error}");
        assert!(archive.verify("a/data/1").is_err());
    }
}
