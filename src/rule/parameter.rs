//! What a rule sees of a parameter while it plans.

use std::fmt;

use crate::error::{Error, ErrorKind, Result};
use crate::model::lent::Lend;
use crate::numbers::{DType, elem_count};
use crate::tensors::{Device, Tensor};

/// A parameter, or its master, as a rule sees it: shape, dtype and device, without the values.
///
/// [`Rule::init`](crate::Rule::init) and [`Rule::apply`](crate::Rule::apply) get one, and so do functions
/// that choose something for each parameter, as for [`setup_with`](crate::setup_with). A rule that needs
/// values plans [arithmetic](crate::Gradient::map), [norms](crate::Gradient::scale_by_norm) or a
/// [function of tensors](crate::Gradient::with_tensors). State that starts as a copy of the values is a
/// [`Slot::parameter`](crate::Slot::parameter).
///
/// A test that calls a rule by hand makes one from a tensor or a variable:
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
    /// The values, for state that starts as a copy of them; `None` in a step.
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

    /// How many dimensions there are.
    pub fn rank(self) -> usize {
        self.shape.len()
    }

    /// How many elements there are.
    pub fn elem_count(self) -> usize {
        elem_count(self.shape)
    }

    /// Where the parameter, or its master, is.
    pub fn device(self) -> &'a Device {
        self.device
    }

    /// The parameter whose values this lends.
    pub(crate) fn new(x: &'a dyn Lend) -> Self {
        let device = x.tensor().map_or(&Device::Cpu, Tensor::device);
        Parameter { shape: x.shape(), dtype: x.dtype(), device, values: Some(x) }
    }

    /// The master of this parameter in a step: in its own dtype, on the CPU or on the parameter's device.
    pub(crate) fn as_master(self, dtype: DType, is_on_cpu: bool) -> Self {
        let device = if is_on_cpu { &Device::Cpu } else { self.device };
        Parameter { dtype, device, values: None, ..self }
    }

    /// A tensor with the values.
    pub(super) fn values(self) -> Result<Tensor> {
        let absent = || {
            Error::new(ErrorKind::Contract, "a rule asks for the values of its parameter in a step")
                .with_remedy("make state of them in `Rule::init`, which alone has them")
        };
        self.values.ok_or_else(absent)?.tensor_or_copy()
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
