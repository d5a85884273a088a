//! The numbers of a file in either format, read when a tensor is needed.

use std::io;

use candle_core::{Device, Tensor};

use super::archive::Archive;
use super::content::StoredTensor;
use crate::error::{Error, ErrorKind, Result};
use crate::files::tensor_file::{Entry, TensorFile};
use crate::model::lent::{Lend, MemoryMut, View, read_only};
use crate::numbers::{DType, elem_count};
use crate::tensors::zeros;

/// An open file of either format.
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

    /// The number of a tensor with one element, `None` for any other tensor.
    pub(super) fn number(&self, stored: &StoredTensor) -> io::Result<Option<f64>> {
        if elem_count(&stored.shape) != 1 {
            return Ok(None);
        }
        self.verify(stored)?;
        Ok(self.numbers(stored)?.first().copied())
    }

    /// All numbers of a tensor, in row-major order.
    pub(super) fn numbers(&self, stored: &StoredTensor) -> io::Result<Vec<f64>> {
        let numbers =
            self.tensor(stored)?.to_dtype(DType::F64.into()).and_then(|tensor| tensor.flatten_all());
        numbers.and_then(|numbers| numbers.to_vec1()).map_err(io::Error::other)
    }

    /// Refuses a record whose checksum is wrong, or that is shorter than the tensor.
    pub(super) fn verify(&self, stored: &StoredTensor) -> io::Result<()> {
        // `entry` compares the lengths.
        self.entry(stored)?;
        if let Container::Archive(archive) = self { archive.verify(&stored.place) } else { Ok(()) }
    }

    /// Refuses a file whose content was modified after it was opened.
    pub(super) fn check_unchanged(&self) -> io::Result<()> {
        match self {
            Container::Flat(file) => file.check_unchanged(),
            Container::Archive(archive) => archive.source().check_unchanged(),
        }
    }
}

/// A tensor of the file, times a factor, as `StateTree::assign_entries` takes it.
///
/// The tensor is read again each time that it is lent, so that a restore has one tensor in memory at a time.
pub(super) struct FileTensor<'c> {
    container: &'c Container,
    /// The tensor in the file; `None` for zeros.
    stored: Option<&'c StoredTensor>,
    /// The factor of the numbers.
    scale: f64,
    shape: Vec<usize>,
}

impl<'c> FileTensor<'c> {
    pub(super) fn of(container: &'c Container, stored: &'c StoredTensor, scale: f64) -> Self {
        FileTensor { container, stored: Some(stored), scale, shape: stored.shape.clone() }
    }

    /// Zeros, because the file has no such tensor.
    pub(super) fn zeros(container: &'c Container, shape: &[usize]) -> Self {
        FileTensor { container, stored: None, scale: 1.0, shape: shape.to_vec() }
    }

    /// The numbers: in the dtype of the file if the factor is 1, else in F64.
    fn values(&self) -> io::Result<Tensor> {
        self.container.check_unchanged()?;
        let Some(stored) = self.stored else {
            return zeros(&self.shape[..], DType::F32, &Device::Cpu).map_err(io::Error::other);
        };
        let tensor = self.container.tensor(stored)?;
        if self.scale == 1.0 {
            return Ok(tensor);
        }
        // In F64, so that only the conversion to the dtype of the state rounds.
        tensor.to_dtype(DType::F64.into()).and_then(|tensor| tensor * self.scale).map_err(io::Error::other)
    }
}

impl Lend for FileTensor<'_> {
    fn lent_shape(&self) -> &[usize] {
        &self.shape
    }

    fn lent_dtype(&self) -> DType {
        match self.stored {
            None => DType::F32,
            Some(stored) if self.scale == 1.0 => stored.dtype,
            Some(_) => DType::F64,
        }
    }

    fn memory(&self) -> Option<usize> {
        None
    }

    fn read(&self, run: &mut dyn FnMut(View<'_>) -> Result<()>) -> Result<()> {
        self.values().map_err(read_error)?.read(run)
    }

    fn write(&self, _: &mut dyn FnMut(MemoryMut<'_>) -> Result<()>) -> Result<()> {
        Err(read_only("tensor"))
    }
}

/// The error that the file has changed, is damaged, or cannot be read.
pub(super) fn read_error(source: io::Error) -> Error {
    use std::io::ErrorKind::{InvalidData, UnexpectedEof};
    let kind =
        if matches!(source.kind(), InvalidData | UnexpectedEof) { ErrorKind::File } else { ErrorKind::Io };
    Error::new(kind, "cannot read the file").caused_by(source)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A file that changes after it was opened is refused whenever a tensor is lent.
    #[test]
    fn a_file_that_changes_is_not_lent() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("state");
        let numbers = Tensor::from_vec(vec![1f32, 2.0], 2, &Device::Cpu).expect("a tensor");
        let tensors = std::collections::HashMap::from([("x/exp_avg", numbers)]);
        candle_core::safetensors::save(&tensors, &path).expect("a file");
        let container = Container::Flat(TensorFile::open(&path).expect("the file").0);
        let place = "x/exp_avg".to_string();
        let stored = StoredTensor { place, strided: None, dtype: DType::F32, shape: vec![2] };
        let scaled = FileTensor::of(&container, &stored, 0.5);
        let read = || {
            let mut numbers = Vec::new();
            crate::model::lent::read("value", &scaled, &mut |view| {
                numbers = view.numbers();
                Ok(())
            })
            .map(|()| numbers)
        };
        assert_eq!(read().expect("numbers"), [0.5, 1.0]);
        let length = std::fs::metadata(&path).expect("the file").len();
        let file = std::fs::File::options().write(true).open(&path).expect("the file");
        file.set_len(length + 8).expect("a length");
        let error = read().expect_err("another file");
        assert_eq!(error.kind(), ErrorKind::File, "{error}");
        assert!(error.to_string().starts_with("cannot read the file: it was changed after"), "{error}");
    }
}
