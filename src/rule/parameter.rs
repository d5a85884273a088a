//! A parameter as a rule sees it: without its values.

use std::fmt;

use crate::error::{Error, ErrorKind, Result};
use crate::model::lent::Lend;
use crate::numbers::{DType, elem_count};
use crate::tensors::{Device, Tensor};

/// Shape, dtype and device of a parameter, or of its master, without the values.
///
/// [`Rule::init`](crate::Rule::init) and [`Rule::apply`](crate::Rule::apply) get a `Parameter`, and so does a
/// function that chooses an optimiser for each parameter, as for [`setup_with`](crate::setup_with). A rule
/// that needs values plans [arithmetic](crate::Gradient::map), [norms](crate::Gradient::scale_by_norm) or a
/// [function of tensors](crate::Gradient::with_tensors). A state tensor that starts as a copy of the values
/// is a [`Slot::parameter`](crate::Slot::parameter).
///
/// A test that calls a rule by hand makes a `Parameter` from a tensor or a variable:
///
/// ```
/// use candle_core::{Device, Tensor};
/// use optimisers::{Adam, DType::F32, Parameter, Rule};
///
/// let x = Tensor::zeros((2, 3), F32.into(), &Device::Cpu)?;
/// let parameter = Parameter::from(&x);
/// assert_eq!((parameter.shape(), parameter.dtype()), (&[2, 3][..], F32));
/// assert!(Adam::new(1e-3).init(parameter).is_ok());
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Copy)]
pub struct Parameter<'a> {
    shape: &'a [usize],
    dtype: DType,
    device: &'a Device,
    /// The values, for state tensors that start as a copy. `None` for the master in a step.
    values: Option<&'a dyn Lend>,
}

impl<'a> Parameter<'a> {
    /// The size of each dimension.
    pub fn shape(self) -> &'a [usize] {
        self.shape
    }

    /// The dtype in which the parameter, or its master, is stored.
    pub fn dtype(self) -> DType {
        self.dtype
    }

    /// The number of dimensions.
    pub fn rank(self) -> usize {
        self.shape.len()
    }

    /// The number of elements.
    pub fn elem_count(self) -> usize {
        elem_count(self.shape)
    }

    /// The device of the parameter, or of its master.
    pub fn device(self) -> &'a Device {
        self.device
    }

    pub(crate) fn new(x: &'a dyn Lend) -> Self {
        let device = x.tensor().map_or(&Device::Cpu, Tensor::device);
        Parameter {
            shape: x.shape(),
            dtype: x.dtype(),
            device,
            values: Some(x),
        }
    }

    /// The master of this parameter in a step: of this `dtype`, on the CPU or on the parameter's device.
    pub(crate) fn as_master(self, dtype: DType, is_on_cpu: bool) -> Self {
        let device = if is_on_cpu { &Device::Cpu } else { self.device };
        Parameter {
            dtype,
            device,
            values: None,
            ..self
        }
    }

    /// The values as a tensor. An error for the master in a step.
    pub(super) fn values(self) -> Result<Tensor> {
        let absent_error = || {
            Error::new(
                ErrorKind::Contract,
                "a rule reads the values of its parameter in a step, but only `Rule::init` has these values",
            )
            .with_remedy("in `Rule::init`, make a state tensor of the values")
        };
        self.values.ok_or_else(absent_error)?.tensor_or_copy()
    }
}

impl fmt::Debug for Parameter<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Parameter")
            .field("shape", &self.shape)
            .field("dtype", &self.dtype)
            .field("device", self.device)
            .finish()
    }
}
