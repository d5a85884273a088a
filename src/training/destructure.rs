//! A model's parameters by path, and as one flat vector.

use std::collections::BTreeMap;

use candle_core::{Device, Shape, Tensor, Var};

use crate::error::{Error, ErrorKind, FLOATS, Result};
use crate::model::candle::{CandleVariable, candle_variables};
use crate::model::lent::check_parameter;
use crate::model::{Model, empty_model_error};
use crate::numbers::{DType, is_supported};
use crate::tree::is_trainable;

/// The trainable floating-point variables of `model`, by path.
///
/// A tied variable is in the map once, under the first of its paths in sorted order.
///
/// The tensors are the variables themselves, not copies, so they change with every update.
/// [`Var::from_tensor`] makes a [`Var`] of such a tensor that writes to the model.
///
/// # Errors
/// If two different variables have one path. A model without trainable variables has an empty map.
///
/// ```
/// use candle_core::{DType, Device};
/// use candle_nn::{VarBuilder, VarMap, linear};
/// use optimisers::trainables;
///
/// let variables = VarMap::new();
/// let _layer = linear(4, 2, VarBuilder::from_varmap(&variables, DType::F32, &Device::Cpu).pp("layer"))?;
/// let parameters = trainables(&variables)?;
/// assert_eq!(parameters.keys().collect::<Vec<_>>(), ["layer.bias", "layer.weight"]);
/// assert_eq!(parameters["layer.weight"].dims(), [2, 4]);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// # Departures
/// Optimisers.jl's `trainables` lists arrays in the order of the model's fields. This map has the order of
/// paths, which does not depend on the order of fields or on the hashes of a `VarMap`. In Optimisers.jl
/// `trainable` and `isnumeric` decide what is trainable, here [`Model`] and `is_variable`.
pub fn trainables<M: Model + ?Sized>(model: &M) -> Result<BTreeMap<String, Tensor>> {
    let variables = candle_variables(model, is_trainable)?.into_iter();
    let under_first_path = |CandleVariable { paths, tensor }| Some((paths.into_iter().next()?, tensor));
    Ok(variables.filter_map(under_first_path).collect())
}

/// All trainable parameters of `model` in one new vector, and the [`Structure`] to go back.
///
/// The parameters are in the order of [`trainables`], each in row-major order. The dtype of the vector is the
/// widest of all parameters (F32 for F16 together with BF16), so every value is exact. The device is that of
/// the first parameter. The vector is a copy, and differentiable: `backward` of a function of the vector
/// returns gradients of the model's variables.
///
/// # Errors
/// If the model has no trainable parameter, a parameter of a dtype other than F16, BF16, F32 and F64, or two
/// parameters with one path. If a device fails.
///
/// ```
/// use candle_core::{DType, Device, Var};
/// use optimisers::destructure;
/// use std::collections::BTreeMap;
///
/// let a = Var::new(&[[1f32, 2.0], [3.0, 4.0]], &Device::Cpu)?;
/// let model = BTreeMap::from([("a", a.clone()), ("b", Var::zeros(1, DType::BF16, &Device::Cpu)?)]);
/// let (flat, structure) = destructure(&model)?;
/// assert_eq!(flat.to_vec1::<f32>()?, [1.0, 2.0, 3.0, 4.0, 0.0]);
///
/// // A weight decay of the whole model.
/// let gradients = flat.sqr()?.sum_all()?.backward()?;
/// assert_eq!(gradients.get(&a).unwrap().to_vec2::<f32>()?, [[2.0, 4.0], [6.0, 8.0]]);
///
/// // Back to tensors by path, or into the model.
/// let moved = (flat + 0.5)?;
/// assert_eq!(structure.rebuild(&moved)?["b"].dtype(), DType::BF16);
/// structure.assign(&moved, &model)?;
/// assert_eq!(a.to_vec2::<f32>()?, [[1.5, 2.5], [3.5, 4.5]]);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// # Departures
/// Optimisers.jl's `destructure` returns a function that makes a new model. A model of candle is code around
/// its tensors, so [`Structure::rebuild`] makes a map of tensors by path. [`Structure::assign`] corresponds
/// to the function that `destructure!` returns. In Optimisers.jl the parameters are in the order of the
/// model's fields, arrays are column-major, and the vector may have any number type. For Optimisers.jl,
/// parameters on several devices are undefined behaviour, and a model without parameters has an empty vector.
pub fn destructure<M: Model + ?Sized>(model: &M) -> Result<(Tensor, Structure)> {
    let variables = candle_variables(model, is_trainable)?;
    let first = variables.first().ok_or_else(empty_model_error)?;
    let device = first.tensor.device().clone();
    let mut dtype = DType::from(first.tensor.dtype());
    for variable in &variables {
        let own_dtype = DType::from(variable.tensor.dtype());
        if !is_supported(own_dtype) {
            return Err(Error::dtype("it", own_dtype, FLOATS)
                .at(variable.path())
                .with_remedy("convert it"));
        }
        dtype = wider(dtype, own_dtype);
    }
    let flatten = |x: &Tensor| {
        x.reshape(x.elem_count())?
            .to_dtype(dtype.into())?
            .to_device(&device)
    };
    let parts = variables
        .iter()
        .map(|variable| flatten(&variable.tensor))
        .collect::<candle_core::Result<Vec<_>>>()?;
    let flat = match &parts[..] {
        [only] => only.force_contiguous()?, // `cat` would return a view of the variable.
        parts => Tensor::cat(parts, 0)?,
    };
    let elements = flat.elem_count();
    let parameters = variables.into_iter().map(StructurePart::from).collect();
    Ok((
        flat,
        Structure {
            parameters,
            dtype,
            elements,
        },
    ))
}

/// The narrowest dtype that holds all values of both dtypes.
fn wider(a: DType, b: DType) -> DType {
    match (a, b) {
        _ if a == b => a,
        (DType::F64, _) | (_, DType::F64) => DType::F64,
        _ => DType::F32,
    }
}

/// The places of parameters in a flat vector. [`destructure`] makes it, and has an example.
#[derive(Clone, Debug)]
pub struct Structure {
    parameters: Vec<StructurePart>,
    dtype: DType,
    elements: usize,
}

/// A parameter without its values.
#[derive(Clone, Debug)]
struct StructurePart {
    /// The sorted paths. A tied variable has several.
    paths: Vec<String>,
    shape: Shape,
    dtype: DType,
    device: Device,
}

impl From<CandleVariable> for StructurePart {
    fn from(CandleVariable { paths, tensor: x }: CandleVariable) -> Self {
        StructurePart {
            paths,
            shape: x.shape().clone(),
            dtype: x.dtype().into(),
            device: x.device().clone(),
        }
    }
}

impl Structure {
    /// The length of the flat vector.
    pub fn elements(&self) -> usize {
        self.elements
    }

    /// The dtype of the flat vector.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// The parts of `flat` as tensors of the parameters' shapes, dtypes and devices, by path.
    ///
    /// A tied variable is in the map under its first path. The tensors are copies, and differentiable:
    /// `backward` of a function of them reaches `flat` if `flat` is a variable or depends on variables.
    ///
    /// Values are rounded to a narrower dtype by candle's `to_dtype`. From F64 to F16 or BF16, the result may
    /// be the second nearest number if two numbers are almost equally near.
    ///
    /// # Errors
    /// If `flat` has another shape or dtype than the vector of [`destructure`], or a device fails. `flat` may
    /// be on any device.
    ///
    /// ```
    /// use candle_core::{Device, Var};
    /// use optimisers::destructure;
    /// use std::collections::BTreeMap;
    ///
    /// // The gradient in flat coordinates, of a model that is a function of its tensors.
    /// let model = BTreeMap::from([("scale", Var::new(3f64, &Device::Cpu)?), ("shift", Var::new(&[1f64, 2.0], &Device::Cpu)?)]);
    /// let (values, structure) = destructure(&model)?;
    /// let flat = Var::from_tensor(&values.detach())?;
    /// let tensors = structure.rebuild(&flat)?;
    /// let loss = tensors["shift"].broadcast_mul(&tensors["scale"])?.sum_all()?;
    /// assert_eq!(loss.backward()?.get(&flat).unwrap().to_vec1::<f64>()?, [3.0, 3.0, 3.0]);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn rebuild(&self, flat: &Tensor) -> Result<BTreeMap<String, Tensor>> {
        let tensors = self
            .parts(flat)?
            .into_iter()
            .zip(&self.parameters)
            .map(|(part, parameter)| {
                let tensor = part.reshape(&parameter.shape)?;
                // The part is copied even if the dtype is right, so that no tensor shares the memory of `flat`.
                let copy = if parameter.dtype == self.dtype {
                    tensor.force_contiguous()?
                } else {
                    tensor.to_dtype(parameter.dtype.into())?
                };
                Ok((
                    parameter.paths.first().cloned().unwrap_or_default(),
                    copy.to_device(&parameter.device)?,
                ))
            });
        tensors.collect()
    }

    /// Writes the parts of `flat` into the variables of `model`, rounded as by [`Structure::rebuild`].
    ///
    /// `model` is the model given to [`destructure`], or another model with the same paths, ties, shapes and
    /// dtypes, on any device.
    ///
    /// Numbers are not looked at: infinities and NaN are written, and a number that is too large for the
    /// dtype of its parameter becomes infinite. [`set_masters`](crate::StateTree::set_masters) refuses such
    /// numbers.
    ///
    /// Use this only for a model without optimiser state. If there is a state, call
    /// `state.set_masters(&model, &structure.rebuild(&flat)?)`, because a state may have values of the old
    /// parameters:
    /// - If there are masters, the next [`update`](crate::update) refuses a parameter that differs from its
    ///   rounded master.
    /// - The lost bits of [`SplitMaster`](crate::SplitMaster) and [`Kahan`](crate::Kahan), and the copies of
    ///   parameters in [`Lookahead`](crate::Lookahead) and [`ScheduleFree`](crate::ScheduleFree), would be
    ///   combined with the new values.
    ///
    /// If the dtypes of the parameters are too narrow, make variables of the
    /// [masters](crate::StateTree::masters), and [`destructure`] and rebuild those variables.
    ///
    /// # Errors
    /// As [`Structure::rebuild`], and if the model differs. All checks come before the first write.
    ///
    /// ```
    /// use candle_core::{DType, Device, Var};
    /// use optimisers::destructure;
    ///
    /// // A moving average of a model's parameters, beside the model.
    /// let (model, average) = (Var::ones(2, DType::F32, &Device::Cpu)?, Var::zeros(2, DType::F32, &Device::Cpu)?);
    /// let ((new, structure), (old, _)) = (destructure(&model)?, destructure(&average)?);
    /// structure.assign(&((old * 0.75)? + (new * 0.25)?)?, &average)?;
    /// assert_eq!(average.to_vec1::<f32>()?, [0.25, 0.25]);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn assign<M: Model + ?Sized>(&self, flat: &Tensor, model: &M) -> Result<()> {
        let variables = candle_variables(model, is_trainable)?;
        self.check_model(&variables)?;
        let tensors = self.rebuild(flat)?;
        let assignments = variables
            .iter()
            .zip(tensors.into_values())
            .map(|(variable, tensor)| {
                check_parameter("variable", &variable.tensor, true)
                    .map_err(|error| error.at(&variable.paths[0]))?;
                let tensor = tensor.to_device(variable.tensor.device())?;
                Ok((Var::from_tensor(&variable.tensor)?, tensor))
            });
        for (variable, tensor) in assignments.collect::<Result<Vec<_>>>()? {
            variable.set(&tensor)?;
        }
        Ok(())
    }

    /// The part of each parameter, which shares the storage of `flat`.
    fn parts(&self, flat: &Tensor) -> Result<Vec<Tensor>> {
        const WHAT: &str = "the flat vector";
        let expected = Shape::from(self.elements);
        if *flat.shape() != expected {
            return Err(Error::shape(WHAT, flat.shape(), expected)
                .with_remedy("pass a vector with the length of that from `destructure`"));
        }
        if flat.dtype() != self.dtype {
            let error = Error::dtype(WHAT, flat.dtype(), format_args!("{:?}", self.dtype));
            return Err(error.with_remedy("convert it with `to_dtype`"));
        }
        let lengths: Vec<usize> = self
            .parameters
            .iter()
            .map(|parameter| parameter.shape.elem_count())
            .collect();
        let mut parts = Vec::with_capacity(lengths.len());
        cut(flat, &lengths, &mut parts)?;
        Ok(parts)
    }

    /// Refuses variables that are not those of the structure.
    fn check_model(&self, variables: &[CandleVariable]) -> Result<()> {
        const REMEDY: &str = "pass the model that `destructure` saw, or its equal";
        for index in 0..self.parameters.len().max(variables.len()) {
            let expected = self
                .parameters
                .get(index)
                .map_or(&[][..], |parameter| &parameter.paths);
            let got = variables.get(index).map_or(&[][..], |variable| &variable.paths);
            if expected != got {
                let path = expected.first().into_iter().chain(got.first()).min();
                let at_path = |paths: &[String]| {
                    if paths.first() == path {
                        paths.to_vec()
                    } else {
                        Vec::new()
                    }
                };
                return Err(Error::new(ErrorKind::Model, "its paths in the model are")
                    .with_got(format_args!("{:?}", at_path(got)))
                    .with_expected(format_args!("{:?}", at_path(expected)))
                    .with_remedy(REMEDY)
                    .at(path.map_or("", String::as_str)));
            }
        }
        for (parameter, variable) in self.parameters.iter().zip(variables) {
            let (x, what) = (&variable.tensor, "its variable in the model");
            let error = if *x.shape() != parameter.shape {
                Error::shape(what, x.shape(), &parameter.shape)
            } else if x.dtype() != parameter.dtype {
                Error::dtype(what, x.dtype(), format_args!("{:?}", parameter.dtype))
            } else {
                continue;
            };
            return Err(error.with_remedy(REMEDY).at(variable.path()));
        }
        Ok(())
    }
}

/// Cuts a vector into parts of these lengths, by halves.
///
/// `backward` pads the gradient of a part to the length of the tensor from which the part is cut. If all
/// parts were cut from the whole vector, the padding would take quadratic time.
fn cut(flat: &Tensor, lengths: &[usize], parts: &mut Vec<Tensor>) -> candle_core::Result<()> {
    if lengths.len() < 2 {
        parts.push(flat.clone());
        return Ok(());
    }
    let (left, right) = lengths.split_at(lengths.len() / 2);
    let (middle, rest) = (left.iter().sum(), right.iter().sum());
    cut(&flat.narrow(0, 0, middle)?, left, parts)?;
    cut(&flat.narrow(0, middle, rest)?, right, parts)
}
