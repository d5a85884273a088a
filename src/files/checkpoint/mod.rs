//! A state tree, and the model with it, in one safetensors file.
//!
//! The file has an entry for each state tensor, named by the parameter's path and the tensor's name:
//! `encoder.0.weight/1.m` is the first moment of the second rule of a chain, `encoder.0.weight/master` a
//! master copy. A model that is saved along has its variables under their own paths, so `VarMap::load` and
//! other tools can read them. Bytes of the program are entries too. Everything else (counters,
//! hyper-parameters, notes) is JSON in the file's metadata, under the key `optimisers`.

mod agreement;
mod assign;
mod defaults;
mod file;
mod finite;
mod layout;
mod pieces;
mod record;
mod replace;
mod restoration;
mod restore;
mod save;
mod saved;
mod saver;
mod series;
mod snapshot;
mod write;

use std::path::Path;

pub use defaults::{DefaultTaken, Restored};
pub use file::CheckpointFile;
#[cfg(feature = "torch")]
pub(crate) use layout::Remarks;
pub use save::Checkpoint;
#[cfg(feature = "torch")]
pub(crate) use save::warned;
#[cfg(feature = "torch")]
pub(crate) use saved::{SavedTensor, entry_name};
pub use saver::{CheckpointSaver, NewestCheckpoint};
#[cfg(feature = "torch")]
pub(crate) use write::{FileContent, write};

use crate::error::Result;
use crate::error::warning::Warning;
use crate::ranks::Call;
use crate::tree::StateTree;

impl StateTree {
    /// Saves the state to a file, see [`Checkpoint`]; with the model:
    /// `Checkpoint::new(&state).model(&model).save(path)`.
    ///
    /// # Errors
    /// As [`Checkpoint::save`], which also says what is returned.
    ///
    /// ```
    /// use candle_core::{DType, Device, Var};
    /// use optimisers::{Adam, setup, update};
    ///
    /// # let folder = tempfile::tempdir()?;
    /// # let path = folder.path().join("state.safetensors");
    /// let x = Var::ones(3, DType::F32, &Device::Cpu)?;
    /// let mut state = setup(Adam::new(0.1), &x)?;
    /// update(&mut state, &x, &x.sqr()?.sum_all()?.backward()?)?;
    /// state.save(&path)?;
    ///
    /// let mut resumed = setup(Adam::default(), &x)?;
    /// resumed.load(&path)?;
    /// let leaf = resumed.leaf("").expect("the leaf of a lone variable");
    /// assert_eq!((leaf.steps(), leaf.learning_rate()), (1, Some(0.1)));
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn save(&self, path: impl AsRef<Path>) -> Result<Vec<Warning>> {
        Checkpoint::new(self).save(path)
    }

    /// Takes over a saved state, strictly: see [`CheckpointFile::restore`].
    ///
    /// # Errors
    /// If the file cannot be read or does not fit; nothing changes then. Over [ranks](crate::Setup::over) an
    /// error on one is an error on all.
    pub fn load(&mut self, path: impl AsRef<Path>) -> Result<Restored> {
        self.settle(Call::Load, CheckpointFile::open(path))?.restore(self)
    }
}
