//! The container of a file's numbers, in either format.

use std::io;

use candle_core::{DType, Device, Tensor};

use super::archive::Archive;
use super::content::StoredTensor;
use crate::error::{Error, ErrorKind, Result};
use crate::files::tensor_file::{Entry, TensorFile};
use crate::model::lent::{Lend, MemoryMut, View, read_only};
use crate::numbers::elem_count;

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
        Ok(self.numbers(stored)?.first().copied())
    }

    /// All numbers of a tensor.
    pub(super) fn numbers(&self, stored: &StoredTensor) -> io::Result<Vec<f64>> {
        let numbers = self.tensor(stored)?.to_dtype(DType::F64).and_then(|tensor| tensor.flatten_all());
        numbers.and_then(|numbers| numbers.to_vec1()).map_err(io::Error::other)
    }

    /// Refuses a record whose checksum is wrong, or that is shorter than the tensor.
    pub(super) fn verify(&self, stored: &StoredTensor) -> io::Result<()> {
        self.entry(stored)?;
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

/// A tensor of the file as a state takes it, in the state's scale. It is read each time that it is lent.
pub(super) struct FileTensor<'c> {
    container: &'c Container,
    /// The place in the file; `None` for zeros.
    stored: Option<&'c StoredTensor>,
    /// The factor of its numbers.
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

    /// The numbers; without a factor in their own dtype.
    fn values(&self) -> io::Result<Tensor> {
        self.container.check_unchanged()?;
        let Some(stored) = self.stored else {
            return Tensor::zeros(&self.shape[..], DType::F32, &Device::Cpu).map_err(io::Error::other);
        };
        let tensor = self.container.tensor(stored)?;
        if self.scale == 1.0 {
            return Ok(tensor);
        }
        tensor.to_dtype(DType::F64).and_then(|tensor| tensor * self.scale).map_err(io::Error::other)
    }
}

impl Lend for FileTensor<'_> {
    fn lent_shape(&self) -> &[usize] {
        &self.shape
    }

    fn lent_dtype(&self) -> crate::numbers::DType {
        match self.stored {
            None => DType::F32,
            Some(stored) if self.scale == 1.0 => stored.dtype,
            Some(_) => DType::F64,
        }
        .into()
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

/// The error of reading: the file has changed or is damaged, or the file system fails.
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
        safetensors::serialize_to_file(&tensors, None, &path).expect("a file");
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
