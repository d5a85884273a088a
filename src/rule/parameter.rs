//! What a rule sees of a parameter while it plans.

use std::fmt;

use candle_core::{DType, Device, Shape, Tensor, Var};

/// A parameter, or its master, as a rule sees it: its shape, dtype and device, without its values.
///
/// [`Rule::init`](crate::Rule::init) and [`Rule::apply`](crate::Rule::apply) get one, and so do functions that choose
/// something for each parameter, as for [`setup_with`](crate::setup_with). A rule that needs values plans
/// [arithmetic](crate::Gradient::map), [norms](crate::Gradient::scale_by_norm) or a
/// [function of tensors](crate::Gradient::with_tensors), and has a [`Slot::parameter`](crate::Slot::parameter) for
/// state that starts as a copy of them.
///
/// A test that calls a rule by hand makes one from a tensor or a variable:
///
/// ```
/// use candle_core::{DType::F32, Device, Tensor};
/// use optimisers::{Adam, Parameter, Rule};
///
/// let x = Tensor::zeros((2, 3), F32, &Device::Cpu)?;
/// let parameter = Parameter::from(&x);
/// assert_eq!((parameter.dims(), parameter.dtype()), (&[2, 3][..], F32));
/// assert!(Adam::new(1e-3).init(parameter).is_ok());
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Copy)]
pub struct Parameter<'a>(&'a Tensor);

impl<'a> Parameter<'a> {
    /// The size of each dimension.
    pub fn dims(self) -> &'a [usize] {
        self.0.dims()
    }

    /// The sizes of all dimensions, as candle has them.
    pub fn shape(self) -> &'a Shape {
        self.0.shape()
    }

    /// The dtype in which the parameter, or its master, is stored.
    pub fn dtype(self) -> DType {
        self.0.dtype()
    }

    /// How many dimensions there are.
    pub fn rank(self) -> usize {
        self.0.rank()
    }

    /// How many elements there are.
    pub fn elem_count(self) -> usize {
        self.0.elem_count()
    }

    /// Where the parameter, or its master, is.
    pub fn device(self) -> &'a Device {
        self.0.device()
    }

    /// The values, for state that starts as a copy of them.
    pub(super) fn values(self) -> &'a Tensor {
        self.0
    }
}

impl<'a> From<&'a Tensor> for Parameter<'a> {
    fn from(tensor: &'a Tensor) -> Self {
        Parameter(tensor)
    }
}

impl<'a> From<&'a Var> for Parameter<'a> {
    fn from(variable: &'a Var) -> Self {
        Parameter(variable)
    }
}

impl fmt::Debug for Parameter<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Parameter(x) = self;
        f.debug_struct("Parameter").field("shape", x.shape()).field("dtype", &x.dtype()).field("device", x.device()).finish()
    }
}
