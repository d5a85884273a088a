//! The container of a file's numbers, in either format.

use std::io;

use candle_core::{DType, Tensor};

use super::archive::Archive;
use super::content::StoredTensor;
use crate::files::tensor_file::{Entry, TensorFile};
use crate::numbers::{elem_count, ranges};

/// A file of either format.
#[derive(Debug)]
pub(super) enum Container {
    Flat(TensorFile),
    Archive(Archive),
}

impl Container {
    fn entry<'f>(&'f self, stored: &'f StoredTensor) -> io::Result<Entry<'f>> {
        let gone = || io::Error::new(io::ErrorKind::InvalidData, format!("no tensor {:?}", stored.place));
        match (self, &stored.strided) {
            (Container::Flat(file), _) => file.entry(&stored.place).ok_or_else(gone),
            (Container::Archive(archive), Some(strided)) => archive.entry(stored, strided),
            (Container::Archive(_), None) => Err(gone()),
        }
    }

    /// A tensor, on the CPU.
    pub(super) fn tensor(&self, stored: &StoredTensor) -> io::Result<Tensor> {
        match (self, &stored.strided) {
            (Container::Archive(archive), Some(strided)) => archive.tensor(stored, strided),
            _ => self.entry(stored)?.tensor(),
        }
    }

    /// The one number of a tensor, if it has one.
    pub(super) fn number(&self, stored: &StoredTensor) -> io::Result<Option<f64>> {
        if elem_count(&stored.shape) != 1 {
            return Ok(None);
        }
        self.verify(stored)?;
        let number =
            self.tensor(stored)?.to_dtype(DType::F64).and_then(|number| number.reshape(())?.to_scalar());
        number.map(Some).map_err(io::Error::other)
    }

    /// The first number that `find` finds the place of among some, with its index among the stored numbers.
    pub(super) fn first(
        &self,
        stored: &StoredTensor,
        find: impl Fn(&[f64]) -> Option<usize>,
    ) -> io::Result<Option<(usize, f64)>> {
        self.verify(stored)?;
        let entry = self.entry(stored)?;
        for window in ranges(0..entry.elements()) {
            let numbers: Vec<f64> = entry
                .part(window.clone())?
                .to_dtype(DType::F64)
                .and_then(|part| part.to_vec1())
                .map_err(io::Error::other)?;
            if let Some(index) = find(&numbers) {
                return Ok(Some((window.start + index, numbers[index])));
            }
        }
        Ok(None)
    }

    /// Refuses a record whose checksum is wrong.
    fn verify(&self, stored: &StoredTensor) -> io::Result<()> {
        if let Container::Archive(archive) = self { archive.verify(&stored.place) } else { Ok(()) }
    }

    /// Refuses a file that was changed in its place after it was opened.
    pub(super) fn check_unchanged(&self) -> io::Result<()> {
        match self {
            Container::Flat(file) => file.check_unchanged(),
            Container::Archive(archive) => archive.source().check_unchanged(),
        }
    }
}
