//! Writing a file: all ranks write their parts, then rank 0 renames it into place.
//!
//! 1. Rank 0 makes a temporary file. All ranks compare tensors and head, and get the file's name
//!    (`Call::File`; in `save_masters`, whose first agreement this is, `Call::SaveMasters`).
//! 2. Each rank writes its parts, and sends checksums and numbers that are not finite to all
//!    (`Call::Pieces`).
//! 3. Rank 0 joins the checksums and renames the file (`Call::Saved`).
//!
//! A rank that fails passes its error to the next agreement, because other ranks wait there for this rank.

use std::io;
use std::path::Path;

use super::layout::{EntryInfo, FileLayout, Remarks, SavedTensor};
use super::pieces::{FilePiece, PieceWriter, join};
use super::replace::{NewFile, io_failure, open_shared};
use crate::error::{Error, Result};
use crate::numbers::Watch;
use crate::ranks::{Agreement, Aspect, Call, StateWorld};
use crate::rule::field::Number;

/// Writes a file with this content. Each rank of the world writes its parts. `first_call` is the first
/// agreement.
///
/// Returns, on all ranks, the first number of each tensor that is infinite or NaN. If several ranks have such
/// a number, the tensor has several entries.
///
/// # Errors
/// If one rank fails, all ranks get an error. The old file is still at `path`, unless only the flush of the
/// folder failed.
pub(crate) fn write(
    world: &StateWorld,
    first_call: Call,
    path: &Path,
    content: Result<FileContent<'_>>,
) -> Result<Vec<NonFiniteEntry>> {
    let with_path = |error: Error| error.in_file("checkpoint", path);
    let proposal = content.and_then(|content| NewCheckpoint::new(world, path, content).map_err(with_path));
    let (checkpoint, names) = world.agree_on(first_call, proposal)?;
    let name = std::str::from_utf8(&names[0]).map_err(Error::other)?;
    let message = checkpoint.write_parts(path, name).map_err(with_path);
    let ((), messages) = world.agree(Call::Pieces, message.map(|bytes| ((), bytes)))?;
    let parse = |message: &Vec<u8>| serde_json::from_slice(message).map_err(Error::other);
    let parts: Result<Vec<(Vec<NonFiniteEntry>, Vec<FilePiece>)>> = messages.iter().map(parse).collect();
    let non_finite = parts.and_then(|parts| {
        let (non_finite, pieces): (Vec<_>, Vec<_>) = parts.into_iter().unzip();
        checkpoint.finish(pieces.concat()).map(|()| non_finite.concat())
    });
    world.settle(Call::Saved, non_finite.map_err(with_path))
}

/// The name of a tensor, and the index and value of its first number that is not finite.
pub(crate) type NonFiniteEntry = (String, usize, Number);

/// The content of a file: its tensors in file order, and the layout.
pub(crate) struct FileContent<'s> {
    pub(super) tensors: Vec<SavedTensor<'s>>,
    pub(super) layout: FileLayout,
}

impl<'s> FileContent<'s> {
    /// The content of a file for `path`.
    pub(crate) fn new(path: &Path, mut tensors: Vec<SavedTensor<'s>>, remarks: Remarks<'_>) -> Result<Self> {
        tensors.sort_by(|a, b| a.entry.compare(&b.entry));
        let layout = FileLayout::new(tensors.iter().map(|tensor| &tensor.entry), remarks)
            .map_err(|error| error.in_file("checkpoint", path))?;
        Ok(FileContent { tensors, layout })
    }

    /// The bytes of the file, and the first number of each tensor that is infinite or NaN.
    pub(super) fn to_bytes(&self) -> Result<(Vec<u8>, Vec<NonFiniteEntry>)> {
        let FileContent { tensors, layout } = self;
        let (mut bytes, mut non_finite) = (Vec::new(), Vec::new());
        bytes
            .try_reserve_exact(layout.length as usize)
            .map_err(io::Error::from)
            .map_err(io_failure("make room for the file"))?;
        bytes.extend_from_slice(&layout.head);
        for tensor in tensors {
            let (start, mut watch) = (bytes.len(), Watch::new(tensor.encoding(), tensor.part.start));
            tensor
                .write_to(&mut bytes)
                .map_err(io_failure("copy the tensors"))?;
            watch.add(&bytes[start..]);
            non_finite.extend(non_finite_entry(tensor, &watch));
        }
        if let Some(start) = layout.checksum {
            let sum = format!("{:08x}", crc32fast::hash(&bytes));
            bytes[start as usize..][..sum.len()].copy_from_slice(sum.as_bytes());
        }
        Ok((bytes, non_finite))
    }
}

/// The first number of a tensor that is not finite, if there is one.
fn non_finite_entry(tensor: &SavedTensor<'_>, watch: &Watch) -> Option<NonFiniteEntry> {
    watch
        .first_unfit
        .map(|(index, value)| (tensor.entry.name.clone(), index, Number(value)))
}

/// A new file, and its content.
struct NewCheckpoint<'s> {
    content: FileContent<'s>,
    /// `None` on other ranks than 0.
    file: Option<NewFile>,
}

impl<'s> NewCheckpoint<'s> {
    /// Makes the file on rank 0. Also returns the aspects to compare, and the file's name for other ranks.
    fn new(
        world: &StateWorld,
        path: &Path,
        content: FileContent<'s>,
    ) -> Result<(Self, Agreement<'static>, Vec<u8>)> {
        let FileContent { tensors, layout } = &content;
        let file = (world.rank() == 0).then(|| NewFile::create(path)).transpose()?;
        let entry = |EntryInfo { name, dtype, shape }: &EntryInfo| {
            format!("{name:?} of shape {shape:?} in {dtype:?}")
        };
        // A process alone compares nothing.
        let compared = tensors.iter().filter(|_| world.is_divided());
        let words = compared.map(|tensor| entry(&tensor.entry));
        let tensors_aspect = Aspect::of_words("the tensors to save", words.collect());
        let head_aspect = Aspect::new(
            "the head of the file",
            format!("checksum {:08x}", crc32fast::hash(&layout.head)),
        );
        let name = file
            .iter()
            .filter(|_| world.is_divided())
            .flat_map(|file| file.share().into_bytes())
            .collect();
        let path_aspect = Aspect::new("the path to save at", format!("{path:?}"));
        let agreement = Agreement::new(vec![path_aspect, tensors_aspect, head_aspect]);
        Ok((NewCheckpoint { content, file }, agreement, name))
    }

    /// Writes this rank's parts. Returns pieces, and numbers that are not finite, as a message for all ranks.
    fn write_parts(&self, path: &Path, name: &str) -> Result<Vec<u8>> {
        let NewCheckpoint {
            content: FileContent { tensors, layout },
            file: new_file,
        } = self;
        let shared_file;
        let file = match new_file {
            Some(new_file) => new_file.file(),
            None => {
                shared_file = open_shared(path, name)?;
                &shared_file
            }
        };
        let mut out = PieceWriter::new(file);
        if new_file.is_some() {
            out.write(0..layout.head.len() as u64, |out| out.write_all(&layout.head))
                .map_err(io_failure("write the header"))?;
        }
        let tensors = tensors
            .iter()
            .enumerate()
            .filter(|(_, tensor)| !tensor.part.is_empty());
        let mut non_finite: Vec<NonFiniteEntry> = Vec::new();
        for (index, tensor) in tensors {
            let mut watch = Watch::new(tensor.encoding(), tensor.part.start);
            let place = layout.place(index, &tensor.part);
            out.write_watched(place, Some(&mut watch), |out| tensor.write_to(out))
                .map_err(io_failure("write the tensors"))?;
            non_finite.extend(non_finite_entry(tensor, &watch));
        }
        let pieces = out.finish().map_err(io_failure("write the tensors"))?;
        if new_file.is_none() {
            // Rank 0 may be on another machine, where it cannot flush this rank's writes.
            file.sync_all()
                .map_err(io_failure("flush the file to the disk"))?;
        }
        serde_json::to_vec(&(non_finite, pieces)).map_err(Error::other)
    }

    /// Rank 0 joins the checksums and renames the file into place.
    fn finish(self, pieces: Vec<FilePiece>) -> Result<()> {
        let Some(file) = self.file else { return Ok(()) };
        join(file.file(), &self.content.layout, pieces)?;
        file.persist()
    }
}
