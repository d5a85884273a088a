//! State tensors.

use std::io::{self, Write};

use candle_core::{DType, Device, Shape, Storage, Tensor, Var, WithDType};
use half::{bf16, f16};

use super::bytes::{write_tensor, write_values};
use super::values::{owned_on, rounded, set_part};
use crate::error::Result;

/// One tensor of a rule's state. On the CPU it is plain memory that nobody else can see, so that an update needs no lock for it; on other
/// devices it is a candle variable.
#[derive(Debug)]
pub(crate) struct Buffer {
    shape: Shape,
    memory: Memory,
}

#[derive(Debug)]
pub(crate) enum Memory {
    F16(Vec<f16>),
    Bf16(Vec<bf16>),
    F32(Vec<f32>),
    F64(Vec<f64>),
    I16(Vec<i16>),
    Device(Var),
}

/// Copies the values of a tensor, wherever it is, into memory for as many.
fn overwrite<T: WithDType>(memory: &mut [T], values: &Tensor) -> candle_core::Result<()> {
    let values = values.to_device(&Device::Cpu)?.contiguous()?;
    let (storage, layout) = values.storage_and_layout();
    match (&*storage, layout.contiguous_offsets()) {
        (Storage::Cpu(storage), Some((start, end))) if end - start == memory.len() => {
            memory.copy_from_slice(&storage.as_slice()?[start..end]);
            Ok(())
        }
        _ => Err(other_length(memory.len(), &values)),
    }
}

fn other_length(length: usize, values: &Tensor) -> candle_core::Error {
    candle_core::Error::msg(format!("a state tensor of {length} elements cannot take values of shape {:?}", values.shape()))
}

impl Buffer {
    /// A copy of a tensor's values.
    pub(crate) fn new(values: &Tensor) -> Result<Self> {
        let flat = values.flatten_all()?;
        let memory = match (values.device(), values.dtype()) {
            (Device::Cpu, DType::F16) => Memory::F16(flat.to_vec1()?),
            (Device::Cpu, DType::BF16) => Memory::Bf16(flat.to_vec1()?),
            (Device::Cpu, DType::F32) => Memory::F32(flat.to_vec1()?),
            (Device::Cpu, DType::F64) => Memory::F64(flat.to_vec1()?),
            (Device::Cpu, DType::I16) => Memory::I16(flat.to_vec1()?),
            _ => Memory::Device(Var::from_tensor(&owned_on(values.device(), values)?)?),
        };
        Ok(Buffer { shape: values.shape().clone(), memory })
    }

    /// A copy of the values as a tensor.
    pub(crate) fn tensor(&self) -> candle_core::Result<Tensor> {
        match &self.memory {
            Memory::F16(values) => Tensor::from_slice(values, &self.shape, &Device::Cpu),
            Memory::Bf16(values) => Tensor::from_slice(values, &self.shape, &Device::Cpu),
            Memory::F32(values) => Tensor::from_slice(values, &self.shape, &Device::Cpu),
            Memory::F64(values) => Tensor::from_slice(values, &self.shape, &Device::Cpu),
            Memory::I16(values) => Tensor::from_slice(values, &self.shape, &Device::Cpu),
            Memory::Device(variable) => variable.as_detached_tensor().copy(),
        }
    }

    /// A copy on the same device.
    pub(crate) fn copy(&self) -> Result<Self> {
        let memory = match &self.memory {
            Memory::F16(values) => Memory::F16(values.clone()),
            Memory::Bf16(values) => Memory::Bf16(values.clone()),
            Memory::F32(values) => Memory::F32(values.clone()),
            Memory::F64(values) => Memory::F64(values.clone()),
            Memory::I16(values) => Memory::I16(values.clone()),
            Memory::Device(_) => return Buffer::new(&self.tensor()?),
        };
        Ok(Buffer { shape: self.shape.clone(), memory })
    }

    /// Writes the values as little-endian bytes.
    pub(crate) fn write_to(&self, out: &mut dyn Write) -> io::Result<()> {
        match &self.memory {
            Memory::F16(values) => write_values(bytemuck::cast_slice(values), 2, out),
            Memory::Bf16(values) => write_values(bytemuck::cast_slice(values), 2, out),
            Memory::F32(values) => write_values(bytemuck::cast_slice(values), 4, out),
            Memory::F64(values) => write_values(bytemuck::cast_slice(values), 8, out),
            Memory::I16(values) => write_values(bytemuck::cast_slice(values), 2, out),
            Memory::Device(variable) => write_tensor(variable, out),
        }
    }

    /// Overwrites the values with those of a tensor of the same shape, rounded to this buffer's dtype.
    pub(crate) fn set(&mut self, values: &Tensor) -> candle_core::Result<()> {
        match &self.memory {
            Memory::Device(variable) => variable.set(&rounded(values, variable.dtype())?.to_device(variable.device())?),
            _ if values.elem_count() == self.shape.elem_count() => self.set_part(0, values),
            _ => Err(other_length(self.shape.elem_count(), values)),
        }
    }

    /// Overwrites as many elements as there are values, from `start` on in row-major order, rounded to this buffer's dtype.
    pub(crate) fn set_part(&mut self, start: usize, values: &Tensor) -> candle_core::Result<()> {
        let values = rounded(values, self.dtype())?;
        let part = start..start + values.elem_count();
        match &mut self.memory {
            Memory::F16(memory) => overwrite(memory.get_mut(part).unwrap_or_default(), &values),
            Memory::Bf16(memory) => overwrite(memory.get_mut(part).unwrap_or_default(), &values),
            Memory::F32(memory) => overwrite(memory.get_mut(part).unwrap_or_default(), &values),
            Memory::F64(memory) => overwrite(memory.get_mut(part).unwrap_or_default(), &values),
            Memory::I16(memory) => overwrite(memory.get_mut(part).unwrap_or_default(), &values),
            Memory::Device(variable) => set_part(variable, start, &values),
        }
    }

    /// Sets every value to 0.
    pub(crate) fn fill_zero(&mut self) -> candle_core::Result<()> {
        match &mut self.memory {
            Memory::F16(values) => values.fill(f16::ZERO),
            Memory::Bf16(values) => values.fill(bf16::ZERO),
            Memory::F32(values) => values.fill(0.0),
            Memory::F64(values) => values.fill(0.0),
            Memory::I16(values) => values.fill(0),
            Memory::Device(variable) if variable.elem_count() == 0 => {}
            Memory::Device(variable) => variable.set(&variable.zeros_like()?)?,
        }
        Ok(())
    }

    pub(crate) fn dtype(&self) -> DType {
        match &self.memory {
            Memory::F16(_) => DType::F16,
            Memory::Bf16(_) => DType::BF16,
            Memory::F32(_) => DType::F32,
            Memory::F64(_) => DType::F64,
            Memory::I16(_) => DType::I16,
            Memory::Device(variable) => variable.dtype(),
        }
    }

    pub(crate) fn shape(&self) -> &Shape {
        &self.shape
    }

    /// Where it is.
    pub(crate) fn device(&self) -> &Device {
        match &self.memory {
            Memory::Device(variable) => variable.device(),
            _ => &Device::Cpu,
        }
    }

    pub(crate) fn memory(&self) -> &Memory {
        &self.memory
    }

    pub(in crate::engine) fn memory_mut(&mut self) -> &mut Memory {
        &mut self.memory
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn address(buffer: &Buffer) -> *const u8 {
        match buffer.memory() {
            Memory::F16(values) => values.as_ptr().cast(),
            Memory::Bf16(values) => values.as_ptr().cast(),
            Memory::F32(values) => values.as_ptr().cast(),
            Memory::F64(values) => values.as_ptr().cast(),
            Memory::I16(values) => values.as_ptr().cast(),
            Memory::Device(_) => panic!("plain memory on the CPU"),
        }
    }

    #[test]
    fn values_are_set_in_place() -> candle_core::Result<()> {
        let whole = Tensor::new(&[[1f64, 2.0], [3.0, 4.0], [5.0, 6.0]], &Device::Cpu)?;
        // Contiguous, at an offset, by columns, and one number for all.
        let layouts =
            [whole.narrow(0, 0, 2)?, whole.narrow(0, 1, 2)?, whole.narrow(0, 0, 2)?.t()?, whole.narrow(1, 1, 1)?.narrow(0, 2, 1)?];
        for dtype in [DType::F16, DType::BF16, DType::F32, DType::F64, DType::I16] {
            let mut buffer = Buffer::new(&Tensor::zeros((2, 2), dtype, &Device::Cpu)?).map_err(candle_core::Error::wrap)?;
            let before = address(&buffer);
            for values in &layouts {
                let values = values.broadcast_as((2, 2))?;
                buffer.set(&values)?;
                assert_eq!(buffer.tensor()?.to_dtype(DType::F64)?.to_vec2::<f64>()?, values.to_vec2::<f64>()?, "{dtype:?}");
                assert_eq!(address(&buffer), before, "{dtype:?}");
            }
            buffer.set_part(1, &Tensor::new(&[7f64, 8.0], &Device::Cpu)?)?;
            assert_eq!(buffer.tensor()?.to_dtype(DType::F64)?.to_vec2::<f64>()?.concat()[1..3], [7.0, 8.0], "{dtype:?}");
            assert!(buffer.set_part(3, &Tensor::new(&[7f64, 8.0], &Device::Cpu)?).is_err(), "{dtype:?}");
            let error = buffer.set(&whole).expect_err("six values for four elements").to_string();
            assert!(error.contains("4 elements") && error.contains("[3, 2]"), "{error}");
        }
        Ok(())
    }
}
