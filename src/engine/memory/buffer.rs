//! State tensors.

use std::io::{self, Write};

use candle_core::backend::{BackendDevice, BackendStorage};
use candle_core::cpu_backend::CpuDevice;
use candle_core::op::BackpropOp;
use candle_core::{CpuStorage, DType, Device, Shape, Storage, Tensor, Var};

use super::bytes::{bytes, bytes_mut, write_tensor, write_values};
use super::values::{is_supported, owned_on, rounded, set_part};
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
    /// Of a supported dtype or I16, each value once and in row-major order.
    Host(CpuStorage),
    Device(Var),
}

fn other_length(length: usize, values: &Tensor) -> candle_core::Error {
    candle_core::Error::msg(format!("a state tensor of {length} elements cannot take values of shape {:?}", values.shape()))
}

impl Buffer {
    /// A copy of a tensor's values.
    pub(crate) fn new(values: &Tensor) -> Result<Self> {
        let (shape, dtype) = (values.shape().clone(), values.dtype());
        if !values.device().is_cpu() || !(is_supported(dtype) || dtype == DType::I16) {
            return Ok(Buffer { shape, memory: Memory::Device(Var::from_tensor(&owned_on(values.device(), values)?)?) });
        }
        let mut buffer = Buffer { memory: Memory::Host(CpuDevice.zeros_impl(&shape, dtype)?), shape };
        buffer.set(values)?;
        Ok(buffer)
    }

    /// A copy of the values as a tensor.
    pub(crate) fn tensor(&self) -> candle_core::Result<Tensor> {
        match &self.memory {
            Memory::Host(values) => Ok(Tensor::from_storage(Storage::Cpu(values.clone()), &self.shape, BackpropOp::none(), false)),
            Memory::Device(variable) => variable.as_detached_tensor().copy(),
        }
    }

    /// A copy on the same device.
    pub(crate) fn copy(&self) -> Result<Self> {
        match &self.memory {
            Memory::Host(values) => Ok(Buffer { shape: self.shape.clone(), memory: Memory::Host(values.clone()) }),
            Memory::Device(_) => Buffer::new(&self.tensor()?),
        }
    }

    /// Writes the values as little-endian bytes.
    pub(crate) fn write_to(&self, out: &mut dyn Write) -> io::Result<()> {
        match &self.memory {
            Memory::Host(values) => write_values(bytes(values).map_err(io::Error::other)?, self.dtype().size_in_bytes(), out),
            Memory::Device(variable) => write_tensor(variable, out),
        }
    }

    /// Overwrites the values with those of a tensor of the same shape, rounded to this buffer's dtype.
    pub(crate) fn set(&mut self, values: &Tensor) -> candle_core::Result<()> {
        match &self.memory {
            Memory::Device(variable) => variable.set(&rounded(values, variable.dtype())?.to_device(variable.device())?),
            Memory::Host(_) if values.elem_count() == self.shape.elem_count() => self.set_part(0, values),
            Memory::Host(_) => Err(other_length(self.shape.elem_count(), values)),
        }
    }

    /// Overwrites as many elements as there are values, from `start` on in row-major order, rounded to this buffer's dtype.
    pub(crate) fn set_part(&mut self, start: usize, values: &Tensor) -> candle_core::Result<()> {
        let values = rounded(values, self.dtype())?;
        let memory = match &mut self.memory {
            Memory::Host(memory) => memory,
            Memory::Device(variable) => return set_part(variable, start, &values),
        };
        let values = values.to_device(&Device::Cpu)?;
        let (storage, layout) = values.storage_and_layout();
        match &*storage {
            Storage::Cpu(storage) if start + values.elem_count() <= self.shape.elem_count() => {
                storage.copy_strided_src(memory, start, layout)
            }
            _ => Err(other_length(self.shape.elem_count(), &values)),
        }
    }

    /// Sets every value to 0.
    pub(crate) fn fill_zero(&mut self) -> candle_core::Result<()> {
        match &mut self.memory {
            // All bytes of the number 0 are 0, in every dtype.
            Memory::Host(values) => bytes_mut(values)?.fill(0),
            Memory::Device(variable) if variable.elem_count() == 0 => {}
            Memory::Device(variable) => variable.set(&variable.zeros_like()?)?,
        }
        Ok(())
    }

    pub(crate) fn dtype(&self) -> DType {
        match &self.memory {
            Memory::Host(values) => values.dtype(),
            Memory::Device(variable) => variable.dtype(),
        }
    }

    pub(crate) fn shape(&self) -> &Shape {
        &self.shape
    }

    /// Where it is.
    pub(crate) fn device(&self) -> &Device {
        match &self.memory {
            Memory::Host(_) => &Device::Cpu,
            Memory::Device(variable) => variable.device(),
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
        let Memory::Host(values) = buffer.memory() else { panic!("plain memory on the CPU") };
        bytes(values).expect("bytes").as_ptr()
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
