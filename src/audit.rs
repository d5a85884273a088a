//! Which variables of a model a loss reaches.

use std::collections::HashSet;
use std::fmt;

use candle_core::{DType, Device, Shape, Tensor, TensorId};

use crate::cuts::advice;
use crate::error::{Error, Result};
use crate::model::{Model, Variable, in_path_order};
use crate::tree::is_trainable;

/// Finds out which variables of `model` the loss reaches, before anything is trained: by one backward pass, without a state.
///
/// What it returns prints as a table, and has the data behind it. The parameters stay as they are, and the loss can be used again. Every
/// gradient is brought to the CPU and looked at, one after another.
///
/// The model is the one that the loss was computed with: of a [`Twin`](crate::Twin) the low-precision one.
///
/// A zero gradient is no mistake by itself: of LoRA's two factors one has it in the first step, where the other is zero.
///
/// # Errors
/// If the model has no trainable variable, two variables have one path, or the backward pass fails.
///
/// ```
/// use candle_core::{DType, Device, Module, Tensor};
/// use candle_nn::{VarBuilder, VarMap, linear, rms_norm};
/// use optimisers::{Reach, audit};
///
/// let variables = VarMap::new();
/// let builder = VarBuilder::from_varmap(&variables, DType::F32, &Device::Cpu);
/// let (hidden, norm) = (linear(4, 8, builder.pp("hidden"))?, rms_norm(8, 1e-5, builder.pp("norm"))?);
/// let output = linear(8, 1, builder.pp("output"))?;
///
/// let x = hidden.forward(&Tensor::ones((2, 4), DType::F32, &Device::Cpu)?)?;
/// let cut = audit(&variables, &output.forward(&norm.forward(&x)?)?.mean_all()?)?;
/// println!("{cut}");
/// assert_eq!(cut.unreached().collect::<Vec<_>>(), ["hidden.bias", "hidden.weight", "norm.weight"]);
///
/// let whole = audit(&variables, &output.forward(&norm.forward_diff(&x)?)?.mean_all()?)?;
/// assert_eq!(whole.unreached().count(), 0, "{whole}");
/// assert!(matches!(whole.variables()[0].reach, Reach::Gradient { norm } if norm > 0.0));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// The first table:
///
/// ```text
/// variable       shape   dtype  gradient
/// hidden.bias    [8]     F32    none
/// hidden.weight  [8, 4]  F32    none
/// norm.weight    [8]     F32    none
/// output.bias    [1]     F32    norm 1.000e0
/// output.weight  [1, 8]  F32    norm 2.828e0
/// ```
pub fn audit<M: Model + ?Sized>(model: &M, loss: &Tensor) -> Result<Audit> {
    let variables = in_path_order(model, is_trainable)?;
    if variables.is_empty() {
        return Err(Error::EmptyModel);
    }
    let known: HashSet<TensorId> = variables.iter().map(|variable| variable.tensor.id()).collect();
    let outside = loss.sorted_nodes().into_iter().filter(|node| node.is_variable() && !known.contains(&node.id()));
    let outside = outside.map(|variable| (variable.shape().clone(), variable.dtype())).collect();
    let gradients = loss.backward()?;
    let audited = |Variable { paths, tensor }| {
        let reach = gradients.get(&tensor).map_or(Ok(Reach::Unreached), Reach::of)?;
        Ok(Audited { paths, shape: tensor.shape().clone(), dtype: tensor.dtype(), reach })
    };
    Ok(Audit { variables: variables.into_iter().map(audited).collect::<Result<_>>()?, outside })
}

/// What [`audit`] has found. It prints as a table with remarks.
#[must_use = "an audit says what it has found: print it"]
#[derive(Clone, Debug, PartialEq)]
pub struct Audit {
    variables: Vec<Audited>,
    outside: Vec<(Shape, DType)>,
}

/// A variable of the model, and how the loss depends on it.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct Audited {
    /// Its path; more than one where it is tied to several places of the model.
    pub paths: Vec<String>,
    /// Its shape.
    pub shape: Shape,
    /// Its dtype.
    pub dtype: DType,
    /// Its gradient.
    pub reach: Reach,
}

/// What kind of gradient a variable has.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Reach {
    /// No gradient: the loss does not depend on it, or the graph is cut.
    Unreached,
    /// A gradient that is zero in every element.
    Zero,
    /// A gradient with numbers that are infinite or NaN.
    NonFinite {
        /// How many of its elements.
        count: usize,
    },
    /// A finite gradient.
    Gradient {
        /// Its 2-norm.
        norm: f64,
    },
}

impl Reach {
    fn of(gradient: &Tensor) -> Result<Self> {
        let numbers: Vec<f64> = gradient.to_device(&Device::Cpu)?.to_dtype(DType::F64)?.flatten_all()?.to_vec1()?;
        let count = numbers.iter().filter(|number| !number.is_finite()).count();
        let largest = numbers.iter().fold(0.0, |largest: f64, number| largest.max(number.abs()));
        Ok(match () {
            () if count > 0 => Reach::NonFinite { count },
            () if largest > 0.0 => {
                // Squares of what is very large or small are no f64.
                let sum: f64 = numbers.iter().map(|number| (number / largest).powi(2)).sum();
                Reach::Gradient { norm: largest * sum.sqrt() }
            }
            () if numbers.is_empty() => Reach::Gradient { norm: 0.0 },
            () => Reach::Zero,
        })
    }
}

impl Audit {
    /// Every trainable variable of the model, in the order of their paths.
    pub fn variables(&self) -> &[Audited] {
        &self.variables
    }

    /// The paths of the variables that the loss does not reach.
    pub fn unreached(&self) -> impl Iterator<Item = &str> {
        self.with(|reach| reach == Reach::Unreached)
    }

    /// The paths of the variables with a gradient that is zero in every element.
    pub fn zero(&self) -> impl Iterator<Item = &str> {
        self.with(|reach| reach == Reach::Zero)
    }

    /// The paths of the variables with a gradient that has numbers that are infinite or NaN.
    pub fn non_finite(&self) -> impl Iterator<Item = &str> {
        self.with(|reach| matches!(reach, Reach::NonFinite { .. }))
    }

    /// The variables that the loss reaches and the model does not show, by shape and dtype: no optimiser of this model trains them. A struct's
    /// field that is not in its [`model!`](crate::model) line is here.
    pub fn outside(&self) -> &[(Shape, DType)] {
        &self.outside
    }

    fn with(&self, wanted: impl Fn(Reach) -> bool) -> impl Iterator<Item = &str> {
        self.variables.iter().filter(move |variable| wanted(variable.reach)).map(Audited::path)
    }
}

impl Audited {
    fn path(&self) -> &str {
        self.paths.first().map_or("", String::as_str)
    }
}

impl fmt::Display for Reach {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Reach::Unreached => write!(f, "none"),
            Reach::Zero => write!(f, "zero"),
            Reach::NonFinite { count } => write!(f, "not finite in {count} elements"),
            Reach::Gradient { norm } => write!(f, "norm {norm:.3e}"),
        }
    }
}

impl fmt::Display for Audit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let row = |variable: &Audited| {
            let Audited { paths, shape, dtype, reach } = variable;
            [paths.join(" = "), format!("{:?}", shape.dims()), format!("{dtype:?}"), reach.to_string()]
        };
        let header = ["variable", "shape", "dtype", "gradient"].map(str::to_string);
        let rows: Vec<[String; 4]> = std::iter::once(header).chain(self.variables.iter().map(row)).collect();
        let width = |column: usize| rows.iter().map(|row| row[column].chars().count()).max().unwrap_or(0);
        let widths = [width(0), width(1), width(2)];
        for [path, shape, dtype, reach] in &rows {
            writeln!(f, "{path:<0$}  {shape:<1$}  {dtype:<2$}  {reach}", widths[0], widths[1], widths[2])?;
        }
        let unreached = self.unreached().count();
        if unreached > 0 {
            writeln!(f, "The loss does not reach {unreached} of {} variables. {}.", self.variables.len(), advice())?;
        }
        for (shape, dtype) in &self.outside {
            writeln!(f, "The loss reaches a variable that the model does not show: {:?} of {dtype:?}.", shape.dims())?;
        }
        Ok(())
    }
}
