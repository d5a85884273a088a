//! State tensors.

use std::io::{self, Write};

use candle_core::{DType, Device, Shape, Tensor, Var};
use half::{bf16, f16};

use super::bytes::{write_tensor, write_values};
use super::tensor::rounded;
use crate::error::Result;

/// One tensor of a rule's state. On the CPU it is plain memory that nobody else can see, so that an update needs no lock for it; on other
/// devices it is a candle variable.
#[derive(Debug)]
pub(crate) struct Buffer {
    shape: Shape,
    memory: Memory,
}

#[derive(Debug)]
pub(super) enum Memory {
    F16(Vec<f16>),
    Bf16(Vec<bf16>),
    F32(Vec<f32>),
    F64(Vec<f64>),
    I16(Vec<i16>),
    Device(Var),
}

/// The values on a device, in storage that nothing else shares.
pub(crate) fn owned_on(device: &Device, values: &Tensor) -> candle_core::Result<Tensor> {
    let values = values.detach();
    if device.same_device(values.device()) { values.copy() } else { values.to_device(device) }
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
            Memory::F16(values) => write_values(values, out),
            Memory::Bf16(values) => write_values(values, out),
            Memory::F32(values) => write_values(values, out),
            Memory::F64(values) => write_values(values, out),
            Memory::I16(values) => write_values(values, out),
            Memory::Device(variable) => write_tensor(variable, out),
        }
    }

    /// Overwrites the values with those of a tensor of the same shape, rounded to this buffer's dtype.
    pub(crate) fn set(&mut self, values: &Tensor) -> candle_core::Result<()> {
        let values = rounded(values, self.dtype())?;
        match &mut self.memory {
            Memory::F16(old) => *old = values.flatten_all()?.to_vec1()?,
            Memory::Bf16(old) => *old = values.flatten_all()?.to_vec1()?,
            Memory::F32(old) => *old = values.flatten_all()?.to_vec1()?,
            Memory::F64(old) => *old = values.flatten_all()?.to_vec1()?,
            Memory::I16(old) => *old = values.flatten_all()?.to_vec1()?,
            Memory::Device(variable) => variable.set(&values.to_device(variable.device())?)?,
        }
        Ok(())
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

    pub(super) fn memory(&self) -> &Memory {
        &self.memory
    }

    pub(super) fn memory_mut(&mut self) -> &mut Memory {
        &mut self.memory
    }
}
