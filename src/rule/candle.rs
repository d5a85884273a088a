//! Conversions from candle's types: dtypes, parameters, and initial values of state tensors.

use candle_core::{DType, Tensor, Var};

use super::{Parameter, Setting, SlotFormat, State};
use crate::engine::Buffer;
use crate::error::Result;

impl From<DType> for Setting {
    fn from(dtype: DType) -> Self {
        crate::numbers::DType::from(dtype).into()
    }
}

impl From<DType> for SlotFormat {
    fn from(dtype: DType) -> Self {
        SlotFormat::Dtype(dtype.into())
    }
}

impl<'a> From<&'a Tensor> for Parameter<'a> {
    fn from(tensor: &'a Tensor) -> Self {
        Parameter::new(tensor)
    }
}

impl<'a> From<&'a Var> for Parameter<'a> {
    fn from(variable: &'a Var) -> Self {
        Parameter::new(variable.as_tensor())
    }
}

impl State {
    /// Adds a state tensor of any shape, with a copy of these values.
    ///
    /// For a tensor that is to start as the parameter, add a [`Slot::parameter`](crate::Slot::parameter) by
    /// [`State::with_slot`] instead, because no other tensor follows new weights.
    ///
    /// # Errors
    /// If the device has no memory left.
    pub fn with_tensor(self, name: &'static str, values: &Tensor) -> Result<Self> {
        Ok(self.with_buffer(name, Buffer::new(values)?))
    }
}
