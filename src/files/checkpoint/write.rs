//! Writing a file: all ranks write their parts, then rank 0 renames it into place.
//!
//! 1. Rank 0 makes a temporary file. All ranks compare tensors and head, and get its name (`Call::File`).
//! 2. Each rank writes its parts, and sends checksums and findings to all (`Call::Pieces`).
//! 3. Rank 0 joins the checksums and renames the file (`Call::Saved`).
//!
//! A rank that fails passes its error to the next agreement, because the others wait for it there.

use std::io;
use std::path::Path;

use super::agreement::same_path;
use super::finite::Watch;
use super::layout::{EntryInfo, FileLayout, Remarks, SavedTensor};
use super::pieces::{FilePiece, PieceWriter, join};
use super::replace::{NewFile, failed, open_shared};
use crate::error::{Error, Result};
use crate::ranks::{Agreement, Aspect, Call, StateWorld};
use crate::rule::field::Number;

/// Writes a file with this content. Each rank of the world writes its parts.
///
/// Returns, on all ranks, the first number of each tensor that is infinite or NaN; several if several ranks
/// have found one.
///
/// # Errors
/// On all ranks. The old file is still at `path`, unless only the flush of the folder failed.
pub(crate) fn write(
    world: Option<&StateWorld>,
    path: &Path,
    content: Result<FileContent<'_>>,
) -> Result<Vec<NonFiniteEntry>> {
    let with_path = |error: Error| error.in_file("checkpoint", path);
    let begun = content.and_then(|content| NewCheckpoint::new(world, path, content).map_err(with_path));
    let (begun, said) = StateWorld::all_agree_on(world, Call::File, begun)?;
    let name = said.first().map_or(Ok(""), |name| std::str::from_utf8(name)).map_err(Error::other)?;
    let pieces = begun.write_parts(path, name).map_err(with_path);
    let said = match world {
        Some(world) => world.agree(Call::Pieces, pieces)?,
        None => vec![pieces?],
    };
    let read = |said: &Vec<u8>| serde_json::from_slice(said).map_err(Error::other);
    let said: Result<Vec<(Vec<NonFiniteEntry>, Vec<FilePiece>)>> = said.iter().map(read).collect();
    let finished = said.and_then(|said| {
        let (found, pieces): (Vec<_>, Vec<_>) = said.into_iter().unzip();
        begun.finish(pieces.concat()).map(|()| found.concat())
    });
    StateWorld::settle(world, Call::Saved, finished.map_err(with_path))
}

/// The name of a tensor that is not finite, and the first number that is not.
pub(crate) type NonFiniteEntry = (String, usize, Number);

/// The content of a file: its tensors in file order, and the layout.
pub(crate) struct FileContent<'s> {
    pub(super) tensors: Vec<SavedTensor<'s>>,
    pub(super) layout: FileLayout,
}

impl<'s> FileContent<'s> {
    /// The content of a file for `path`.
    pub(crate) fn new(path: &Path, mut tensors: Vec<SavedTensor<'s>>, remarks: Remarks<'_>) -> Result<Self> {
        tensors.sort_by(|a, b| a.entry.in_file_order(&b.entry));
        let layout = FileLayout::new(tensors.iter().map(|tensor| &tensor.entry), remarks);
        Ok(FileContent { tensors, layout: layout.map_err(|error| error.in_file("checkpoint", path))? })
    }

    /// The bytes of the file, and the first number of each tensor that is infinite or NaN.
    pub(super) fn to_bytes(&self) -> Result<(Vec<u8>, Vec<NonFiniteEntry>)> {
        let FileContent { tensors, layout } = self;
        let (mut bytes, mut found) = (Vec::new(), Vec::new());
        let room = bytes.try_reserve_exact(layout.length as usize).map_err(io::Error::from);
        room.map_err(failed("make room for the file"))?;
        bytes.extend_from_slice(&layout.head);
        for tensor in tensors {
            let (start, mut watch) = (bytes.len(), Watch::new(tensor.encoding(), tensor.part.start));
            tensor.write_to(&mut bytes).map_err(failed("copy the tensors"))?;
            watch.see(&bytes[start..]);
            found.extend(watch.found.map(|(index, value)| (tensor.entry.name.clone(), index, Number(value))));
        }
        if let Some(start) = layout.checksum {
            let sum = format!("{:08x}", crc32fast::hash(&bytes));
            bytes[start as usize..][..sum.len()].copy_from_slice(sum.as_bytes());
        }
        Ok((bytes, found))
    }
}

/// A new file, and what goes into it.
struct NewCheckpoint<'s> {
    content: FileContent<'s>,
    /// The file itself; `None` on other ranks than 0.
    new: Option<NewFile>,
}

impl<'s> NewCheckpoint<'s> {
    /// Makes the file on rank 0. Also returns what the ranks compare, and the file's name for the others.
    fn new(
        world: Option<&StateWorld>,
        path: &Path,
        content: FileContent<'s>,
    ) -> Result<(Self, Agreement<'static>, Vec<u8>)> {
        let FileContent { tensors, layout } = &content;
        let is_divided = StateWorld::several(world).is_some();
        let new = (world.map_or(0, StateWorld::rank) == 0).then(|| NewFile::at(path)).transpose()?;
        let entry = |EntryInfo { name, dtype, shape }: &EntryInfo| {
            format!("{name:?} of shape {shape:?} in {dtype:?}")
        };
        let words = tensors.iter().filter(|_| is_divided).map(|tensor| entry(&tensor.entry));
        let same_tensors = Aspect::of_words("the tensors to save", words.collect());
        let same_head =
            Aspect::new("the head of the file", format!("checksum {:08x}", crc32fast::hash(&layout.head)));
        let name = new.iter().filter(|_| is_divided).flat_map(|new| new.shared_name().into_bytes()).collect();
        Ok((
            NewCheckpoint { content, new },
            Agreement::on(vec![same_path(path), same_tensors, same_head]),
            name,
        ))
    }

    /// Writes this rank's parts. Returns findings and pieces as bytes for the other ranks.
    fn write_parts(&self, path: &Path, name: &str) -> Result<Vec<u8>> {
        let NewCheckpoint { content: FileContent { tensors, layout }, new } = self;
        let opened;
        let file = match new {
            Some(new) => new.file(),
            None => {
                opened = open_shared(path, name)?;
                &opened
            }
        };
        let mut out = PieceWriter::new(file);
        if new.is_some() {
            out.write(0..layout.head.len() as u64, |out| out.write_all(&layout.head))
                .map_err(failed("write the header"))?;
        }
        let tensors = tensors.iter().enumerate().filter(|(_, tensor)| !tensor.part.is_empty());
        let mut found: Vec<NonFiniteEntry> = Vec::new();
        for (entry, tensor) in tensors {
            let mut watch = Watch::new(tensor.encoding(), tensor.part.start);
            let place = layout.place(entry, &tensor.part);
            out.write_watched(place, Some(&mut watch), |out| tensor.write_to(out))
                .map_err(failed("write the tensors"))?;
            found.extend(watch.found.map(|(index, value)| (tensor.entry.name.clone(), index, Number(value))));
        }
        let pieces = out.finish().map_err(failed("write the tensors"))?;
        if new.is_none() {
            // Rank 0 may be on another machine, where it cannot flush this rank's writes.
            file.sync_all().map_err(failed("flush the file to the disk"))?;
        }
        serde_json::to_vec(&(found, pieces)).map_err(Error::other)
    }

    /// Rank 0 joins the checksums and renames the file into place.
    fn finish(self, pieces: Vec<FilePiece>) -> Result<()> {
        let Some(new) = self.new else { return Ok(()) };
        join(new.file(), &self.content.layout, pieces)?;
        new.put()
    }
}
