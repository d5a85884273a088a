//! The numbers of a file, read when a tensor is needed.

use std::io;

use candle_core::{Device, Tensor};

use crate::error::Result;
use crate::files::tensor_file::{Entry, read_error};
use crate::model::lent::{Lend, MemoryMut, View, read_only_error};
use crate::numbers::DType;
use crate::tensors::zeros;

/// All numbers of a tensor, in row-major order.
pub(super) fn numbers(entry: &Entry<'_>) -> io::Result<Vec<f64>> {
    let numbers = entry
        .tensor()?
        .to_dtype(DType::F64.into())
        .and_then(|tensor| tensor.flatten_all());
    numbers
        .and_then(|numbers| numbers.to_vec1())
        .map_err(io::Error::other)
}

/// A tensor of the file, times a factor, as `StateTree::assign_entries` takes it.
///
/// The tensor is read again each time that it is lent, so that a restore has one tensor in memory at a time.
pub(super) struct FileTensor<'c> {
    /// The tensor in the file and its dtype; `None` for zeros, because the file has no such tensor.
    pub(super) source: Option<(Entry<'c>, DType)>,
    /// The factor of the numbers.
    pub(super) scale: f64,
    pub(super) shape: Vec<usize>,
}

impl FileTensor<'_> {
    /// The numbers, in the dtype of the file if the factor is 1, otherwise in F64.
    fn values(&self) -> io::Result<Tensor> {
        let Some((entry, _)) = &self.source else {
            return zeros(&self.shape[..], DType::F32, &Device::Cpu).map_err(io::Error::other);
        };
        let tensor = entry.tensor()?;
        if self.scale == 1.0 {
            return Ok(tensor);
        }
        // The product is in F64, so that only the conversion to the dtype of the state rounds.
        tensor
            .to_dtype(DType::F64.into())
            .and_then(|tensor| tensor * self.scale)
            .map_err(io::Error::other)
    }
}

impl Lend for FileTensor<'_> {
    fn lent_shape(&self) -> &[usize] {
        &self.shape
    }

    fn lent_dtype(&self) -> DType {
        match &self.source {
            None => DType::F32,
            Some((_, dtype)) if self.scale == 1.0 => *dtype,
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
        Err(read_only_error())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::files::tensor_file::TensorFile;

    /// A file that changes after it was opened is refused whenever a tensor is lent.
    #[test]
    fn a_file_that_changes_is_not_lent() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("state");
        let numbers = Tensor::from_vec(vec![1f32, 2.0], 2, &Device::Cpu).expect("a tensor");
        let tensors = std::collections::HashMap::from([("x/exp_avg", numbers)]);
        candle_core::safetensors::save(&tensors, &path).expect("a file");
        let open = TensorFile::open(&path).expect("the file").0;
        let entry = open.entry("x/exp_avg").expect("the tensor");
        let tensor = FileTensor {
            source: Some((entry, DType::F32)),
            scale: 0.5,
            shape: vec![2],
        };
        let read = || {
            let mut numbers = Vec::new();
            crate::model::lent::read("value", &tensor, &mut |view| {
                numbers = view.numbers();
                Ok(())
            })
            .map(|()| numbers)
        };
        assert_eq!(read().expect("numbers"), [0.5, 1.0]);
        let length = std::fs::metadata(&path).expect("the file").len();
        let file = std::fs::File::options()
            .write(true)
            .open(&path)
            .expect("the file");
        file.set_len(length + 8).expect("a length");
        let error = read().expect_err("another file");
        assert_eq!(error.kind(), crate::ErrorKind::Io, "{error}");
        assert!(
            error
                .to_string()
                .starts_with("cannot read the file: it was changed after"),
            "{error}"
        );
    }
}
