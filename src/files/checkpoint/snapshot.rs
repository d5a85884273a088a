//! A copy of a checkpoint's content, which a thread writes while the training changes the originals.

use std::io;
use std::path::Path;

use super::layout::FileLayout;
use super::replace::failed;
use super::save::{Checkpoint, warned};
use super::saved::CopiedTensor;
use super::write::{FileContent, NonFiniteEntry, write};
use crate::error::Result;
use crate::error::warning::Warning;

/// The content of a file, without borrows.
#[derive(Debug)]
pub(super) struct Snapshot {
    layout: FileLayout,
    tensors: Vec<CopiedTensor>,
    /// The bytes of all tensors.
    room: Vec<u8>,
    /// The numbers of leaves that are not finite. They are in the description and not among the tensors.
    numbers: Vec<NonFiniteEntry>,
    /// The calls in open windows.
    calls: u64,
}

impl Snapshot {
    /// Copies a checkpoint for `path` into `room`. That is the memory of the copy before, because memory that
    /// is new to the process takes several times as long to fill.
    pub(super) fn new(checkpoint: Checkpoint<'_>, path: &Path, mut room: Vec<u8>) -> Result<Self> {
        let calls = checkpoint.state().calls;
        checkpoint.with_content(path, |content, numbers| {
            let FileContent { tensors, layout } = content?;
            room.clear();
            // Reserved here, so that too little memory is an error of the save and does not end the process.
            let reserved =
                room.try_reserve_exact(layout.length as usize - layout.head.len()).map_err(io::Error::from);
            let copied =
                reserved.and_then(|()| tensors.into_iter().map(|tensor| tensor.copy_to(&mut room)).collect());
            let tensors =
                copied.map_err(|error| failed("copy the tensors")(error).in_file("checkpoint", path))?;
            Ok(Snapshot { layout, tensors, room, numbers, calls })
        })
    }

    /// Writes the file as [`Checkpoint::save`] does. Returns its memory for the next copy.
    pub(super) fn write(self, path: &Path) -> (Result<Vec<Warning>>, Vec<u8>) {
        let Snapshot { layout, tensors, room, numbers, calls } = self;
        let tensors = tensors.into_iter().map(|tensor| tensor.in_room(&room)).collect();
        let written = write(None, path, Ok(FileContent { tensors, layout }));
        (written.map(|found| warned(path, calls, found.into_iter().chain(numbers).collect())), room)
    }
}
