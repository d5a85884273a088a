//! State tensors.
//!
//! On the CPU a state tensor is plain memory without a lock, because only its tree accesses the tensor. The
//! exception is the copy of a parameter that [`Offload`](crate::Offload) uploads from another thread: that
//! copy is a variable, which has a lock.

use std::borrow::Cow;
use std::io::{self, Write};

use super::values::{on_host, rounded, set_part};
use crate::error::Result;
use crate::model::lent::{Lend, MemoryMut, MemoryRef, View, defect, read_only_error, write_tensor};
use crate::numbers::low_bits::LowBits;
use crate::numbers::{Code, DType, Records, elem_count, is_supported};
use crate::tensors::{
    CpuStorage, Device, Shape, Tensor, Var, allocate, bytes, bytes_mut, copy_elements, cpu_numbers, dtype_of,
    dtype_of_numbers, failure, in_dtype, tensor_of, write_values, zero_storage, zeros,
};

/// One tensor of a rule's state: plain memory on the CPU, a candle variable elsewhere.
#[derive(Debug)]
pub(crate) struct Buffer {
    shape: Shape,
    memory: Memory,
    /// The kind of records (128 numbers each), if the numbers are stored in records.
    records: Option<Records>,
    /// Whether the numbers are squares of gradients.
    is_of_squares: bool,
}

pub(crate) enum Memory {
    /// Values of a supported dtype, U8 or I16, each value once and in row-major order.
    Host(CpuStorage),
    Variable(Var),
}

/// Shows the dtype without the numbers.
impl std::fmt::Debug for Memory {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Memory::Host(storage) => write!(f, "Host({:?})", dtype_of_numbers(storage)),
            Memory::Variable(variable) => write!(f, "Variable({:?})", variable.dtype()),
        }
    }
}

/// The values as records, on the device of the values.
fn to_records(records: Records, values: &Tensor) -> crate::tensors::Result<Tensor> {
    let bytes = records.encode(&on_host::<f32>(&in_dtype(values, DType::F32)?)?);
    Tensor::from_vec(bytes, records.shape(values.elem_count()), &Device::Cpu)?.to_device(values.device())
}

fn length_error(length: usize, values: &Tensor) -> crate::tensors::TensorError {
    failure(format!(
        "a state tensor of {length} elements cannot take values of shape {:?}",
        values.shape()
    ))
}

impl Buffer {
    /// Copies the values of a tensor.
    pub(crate) fn new(values: &Tensor) -> Result<Self> {
        let (shape, dtype) = (values.shape().clone(), dtype_of(values));
        if !values.device().is_cpu() || !(is_supported(dtype) || matches!(dtype, DType::U8 | DType::I16)) {
            return Buffer::shared(values);
        }
        let mut buffer = Buffer::of_zeros(shape, dtype, None, &Device::Cpu)?;
        buffer.set(values)?;
        Ok(buffer)
    }

    /// A variable with a copy of these values. One thread can write it while another reads it.
    pub(crate) fn shared(values: &Tensor) -> Result<Self> {
        let copy = || Var::from_tensor(&values.detach());
        let variable = allocate(values.elem_count(), dtype_of(values), values.device(), copy)?;
        let memory = Memory::Variable(variable);
        Ok(Buffer {
            shape: values.shape().clone(),
            memory,
            records: None,
            is_of_squares: false,
        })
    }

    pub(crate) fn variable(&self) -> Option<&Var> {
        if let Memory::Variable(variable) = &self.memory {
            Some(variable)
        } else {
            None
        }
    }

    /// The variable. If the buffer has no variable, the buffer itself.
    pub(in crate::engine) fn as_shared(&mut self) -> std::result::Result<&Var, &mut Self> {
        match self {
            Buffer {
                memory: Memory::Variable(variable),
                ..
            } => Ok(variable),
            buffer => Err(buffer),
        }
    }

    /// Copies the values of a tensor as codes of 8 bits.
    pub(crate) fn coded(values: &Tensor, code: Code) -> Result<Self> {
        let records = Records::Codes(code);
        Ok(Buffer {
            shape: values.shape().clone(),
            records: Some(records),
            ..Buffer::new(&to_records(records, values)?)?
        })
    }

    /// Zeros, of this dtype or in records. In both formats all bytes are 0.
    ///
    /// On the CPU, zeros take memory only when they are first written. So a format that is replaced before
    /// the first write costs nothing.
    pub(crate) fn of_zeros(
        shape: Shape,
        dtype: DType,
        records: Option<Records>,
        device: &Device,
    ) -> Result<Self> {
        let (stored_shape, stored_dtype) = match records {
            Some(records) => (records.shape(shape.elem_count()).into(), DType::U8),
            None => (shape.clone(), dtype),
        };
        let elements = stored_shape.elem_count();
        if device.is_cpu() {
            let memory = Memory::Host(allocate(elements, stored_dtype, device, || {
                zero_storage(&stored_shape, stored_dtype)
            })?);
            return Ok(Buffer {
                shape,
                memory,
                records,
                is_of_squares: false,
            });
        }
        let values = allocate(elements, stored_dtype, device, || {
            zeros(stored_shape, stored_dtype, device)
        })?;
        Ok(Buffer {
            shape,
            records,
            ..Buffer::new(&values)?
        })
    }

    /// Whether all bytes are 0. `false` for a variable, which would have to be read from its device.
    pub(crate) fn is_zero(&self) -> bool {
        matches!(&self.memory, Memory::Host(values) if bytes(values).is_ok_and(|bytes| bytes.iter().all(|byte| *byte == 0)))
    }

    /// Sets whether the numbers are squares of gradients.
    pub(crate) fn of_squares(self, is_of_squares: bool) -> Self {
        Buffer {
            is_of_squares,
            ..self
        }
    }

    pub(crate) fn is_of_squares(&self) -> bool {
        self.is_of_squares
    }

    /// A copy of the values as a tensor.
    pub(crate) fn tensor(&self) -> crate::tensors::Result<Tensor> {
        let Some(records) = self.records else {
            return self.stored_tensor();
        };
        let numbers = records.decode(&on_host::<u8>(&self.stored_tensor()?)?, self.shape.elem_count());
        Tensor::from_vec(numbers, &self.shape, &Device::Cpu)?.to_device(self.device())
    }

    /// A copy of the stored numbers or records. Records are rows of bytes, one row for each block of numbers.
    pub(crate) fn stored_tensor(&self) -> crate::tensors::Result<Tensor> {
        match &self.memory {
            Memory::Host(values) => Ok(tensor_of(values.clone(), self.stored_shape())),
            Memory::Variable(variable) => variable.detach().copy(),
        }
    }

    /// A copy on `device`.
    pub(crate) fn copy_on(&self, device: &Device) -> Result<Self> {
        let memory = match &self.memory {
            Memory::Host(values) if device.is_cpu() => {
                let copy = || Ok(values.clone());
                let elements = self.stored_shape().elem_count();
                Memory::Host(allocate(elements, self.stored_dtype(), device, copy)?)
            }
            Memory::Variable(variable) if device.same_device(variable.device()) => {
                Buffer::shared(variable)?.memory
            }
            _ => Buffer::new(&self.stored_tensor()?.to_device(device)?)?.memory,
        };
        Ok(Buffer {
            shape: self.shape.clone(),
            memory,
            ..*self
        })
    }

    /// Writes the stored numbers or records as little-endian bytes.
    pub(crate) fn write_to(&self, out: &mut dyn Write) -> io::Result<()> {
        match &self.memory {
            Memory::Host(values) => write_values(
                bytes(values).map_err(io::Error::other)?,
                dtype_of_numbers(values).size_in_bytes(),
                out,
            ),
            Memory::Variable(variable) => write_tensor(variable, out),
        }
    }

    /// The stored numbers or records as little-endian bytes. Bytes in plain memory are borrowed.
    pub(crate) fn to_bytes(&self) -> io::Result<Cow<'_, [u8]>> {
        if let Memory::Host(CpuStorage::U8(values)) = &self.memory {
            return Ok(Cow::Borrowed(values));
        }
        let mut bytes = Vec::new();
        self.write_to(&mut bytes).map(|()| Cow::Owned(bytes))
    }

    /// Whether numbers are stored, neither records nor low bits of other numbers.
    pub(crate) fn has_numbers(&self) -> bool {
        self.records.is_none() && is_supported(self.stored_dtype())
    }

    /// Overwrites the values with those of a tensor of this shape, rounded to the stored format.
    pub(crate) fn set(&mut self, values: &Tensor) -> crate::tensors::Result<()> {
        let values = &self
            .records
            .map_or_else(|| Ok(values.clone()), |records| to_records(records, values))?;
        if values.elem_count() != self.stored_shape().elem_count() {
            return Err(length_error(self.shape.elem_count(), values));
        }
        match &self.memory {
            // Whole storages are copied, because candle writes parts of fewer dtypes. Without elements candle
            // would launch a kernel without threads, which CUDA refuses.
            Memory::Variable(variable) if variable.elem_count() > 0 => {
                variable.set(&rounded(values, variable.dtype())?.to_device(variable.device())?)
            }
            _ => self.set_stored(0, values),
        }
    }

    /// Overwrites stored elements from `start` on, in row-major order, with rounded `values`.
    pub(crate) fn set_stored(&mut self, start: usize, values: &Tensor) -> crate::tensors::Result<()> {
        let values = rounded(values, self.stored_dtype())?;
        let stored_length = self.stored_shape().elem_count();
        let memory = match &mut self.memory {
            Memory::Host(memory) => memory,
            Memory::Variable(variable) => return set_part(variable, start, &values),
        };
        let values = values.to_device(&Device::Cpu)?;
        let (storage, layout) = values.storage_and_layout();
        match cpu_numbers(&storage) {
            Some(numbers) if start + values.elem_count() <= stored_length => {
                copy_elements(numbers, layout, memory, start)
            }
            _ => Err(length_error(self.shape.elem_count(), &values)),
        }
    }

    /// Sets every value to 0.
    pub(crate) fn fill_zero(&mut self) -> crate::tensors::Result<()> {
        match &mut self.memory {
            // In every dtype all bytes of the number 0 are 0.
            Memory::Host(values) => bytes_mut(values)?.fill(0),
            Memory::Variable(variable) if variable.elem_count() == 0 => {}
            Memory::Variable(variable) => {
                variable.set(&zeros(variable.shape(), dtype_of(variable), variable.device())?)?
            }
        }
        Ok(())
    }

    /// How many bytes are stored.
    pub(crate) fn bytes(&self) -> usize {
        self.stored_shape().elem_count() * self.stored_dtype().size_in_bytes()
    }

    /// The dtype of the numbers, which is F32 for records.
    pub(crate) fn dtype(&self) -> DType {
        if self.records.is_some() {
            DType::F32
        } else {
            self.stored_dtype()
        }
    }

    pub(crate) fn stored_dtype(&self) -> DType {
        match &self.memory {
            Memory::Host(values) => dtype_of_numbers(values),
            Memory::Variable(variable) => dtype_of(variable),
        }
    }

    pub(crate) fn shape(&self) -> &[usize] {
        self.shape.dims()
    }

    /// The shape in which this buffer stores numbers of `shape`.
    pub(crate) fn shape_of(&self, shape: &[usize]) -> Shape {
        self.records
            .map_or_else(|| shape.into(), |records| records.shape(elem_count(shape)).into())
    }

    pub(in crate::engine) fn stored_shape(&self) -> Shape {
        self.shape_of(self.shape.dims())
    }

    pub(crate) fn code(&self) -> Option<Code> {
        if let Some(Records::Codes(code)) = self.records {
            Some(code)
        } else {
            None
        }
    }

    /// The kind of low bits. The buffer must have low bits.
    pub(in crate::engine) fn low_bits_kind(&self) -> LowBits {
        if self.records == Some(Records::LowBits) {
            LowBits::All
        } else {
            LowBits::Byte
        }
    }

    pub(crate) fn records(&self) -> Option<Records> {
        self.records
    }

    pub(crate) fn device(&self) -> &Device {
        match &self.memory {
            Memory::Host(_) => &Device::Cpu,
            Memory::Variable(variable) => variable.device(),
        }
    }

    pub(crate) fn memory(&self) -> &Memory {
        &self.memory
    }

    pub(in crate::engine) fn memory_mut(&mut self) -> &mut Memory {
        &mut self.memory
    }
}

/// State is lent for reading only, because engines write state without a loan.
impl Lend for Buffer {
    fn lent_shape(&self) -> &[usize] {
        self.shape.dims()
    }

    fn lent_dtype(&self) -> DType {
        self.stored_dtype()
    }

    fn memory(&self) -> Option<usize> {
        // Plain memory has no lock.
        self.variable()
            .and_then(|variable| Lend::memory(variable.as_tensor()))
    }

    fn read(&self, run: &mut dyn FnMut(View<'_>) -> Result<()>) -> Result<()> {
        match &self.memory {
            Memory::Variable(variable) => Lend::read(&variable.as_tensor().to_device(&Device::Cpu)?, run),
            Memory::Host(values) => {
                let memory = MemoryRef::from_storage(values).filter(|_| self.records.is_none());
                run(View::new(memory.ok_or_else(|| {
                    defect("state in records is no array of numbers")
                })?))
            }
        }
    }

    fn write(&self, _: &mut dyn FnMut(MemoryMut<'_>) -> Result<()>) -> Result<()> {
        Err(read_only_error())
    }

    fn tensor(&self) -> Option<&Tensor> {
        self.variable().map(Var::as_tensor)
    }
}

#[cfg(test)]
mod tests {
    use candle_core::DType;

    use super::*;

    fn address(buffer: &Buffer) -> *const u8 {
        let Memory::Host(values) = buffer.memory() else {
            panic!("plain memory on the CPU")
        };
        bytes(values).expect("bytes").as_ptr()
    }

    #[test]
    fn values_are_set_in_place() -> candle_core::Result<()> {
        let whole = Tensor::new(&[[1f64, 2.0], [3.0, 4.0], [5.0, 6.0]], &Device::Cpu)?;
        // Contiguous, at an offset, by columns, and a single number for all elements.
        let layouts = [
            whole.narrow(0, 0, 2)?,
            whole.narrow(0, 1, 2)?,
            whole.narrow(0, 0, 2)?.t()?,
            whole.narrow(1, 1, 1)?.narrow(0, 2, 1)?,
        ];
        for dtype in [DType::F16, DType::BF16, DType::F32, DType::F64, DType::I16] {
            let mut buffer = Buffer::new(&Tensor::zeros((2, 2), dtype, &Device::Cpu)?)
                .map_err(candle_core::Error::wrap)?;
            let before = address(&buffer);
            for values in &layouts {
                let values = values.broadcast_as((2, 2))?;
                buffer.set(&values)?;
                assert_eq!(
                    buffer.tensor()?.to_dtype(DType::F64)?.to_vec2::<f64>()?,
                    values.to_vec2::<f64>()?,
                    "{dtype:?}"
                );
                assert_eq!(address(&buffer), before, "{dtype:?}");
            }
            buffer.set_stored(1, &Tensor::new(&[7f64, 8.0], &Device::Cpu)?)?;
            assert_eq!(
                buffer.tensor()?.to_dtype(DType::F64)?.to_vec2::<f64>()?.concat()[1..3],
                [7.0, 8.0],
                "{dtype:?}"
            );
            assert!(
                buffer
                    .set_stored(3, &Tensor::new(&[7f64, 8.0], &Device::Cpu)?)
                    .is_err(),
                "{dtype:?}"
            );
            let error = buffer
                .set(&whole)
                .expect_err("six values for four elements")
                .to_string();
            assert!(
                error.contains("4 elements") && error.contains("[3, 2]"),
                "{error}"
            );
        }
        Ok(())
    }
}
