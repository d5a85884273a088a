//! [`Model`] for candle's variables and layers, [`Gradients`] for what its backward pass returns, and the
//! models that have nothing but candle's variables.

use std::collections::BTreeMap;

use candle_core::backprop::GradStore;
use candle_core::{Tensor, Var};
use candle_nn::{
    BatchNorm, Conv1d, Conv2d, ConvTranspose1d, ConvTranspose2d, Embedding, LayerNorm, Linear, PReLU,
    RmsNorm, VarMap,
};

use super::gradients::Gradients;
use super::lent::{Lend, Lent, MemoryMut, View, copied};
use super::{Model, Variable, Visitor, in_path_order};
use crate::error::{Error, ErrorKind, Result};
use crate::numbers::DType;
use crate::tensors::dtype_of;

/// Every variable under its name. The map is locked while it is visited.
impl Model for VarMap {
    fn visit<'m>(&'m self, visitor: &mut Visitor<'m, '_>) {
        let variables = self.data().lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        for (name, variable) in variables.iter() {
            visitor.below(name, |visitor| visitor.tensor(variable));
        }
    }
}

macro_rules! weight_and_bias {
    ($($Layer:ty),*) => {$(
        impl Model for $Layer {
            fn visit<'m>(&'m self, visitor: &mut Visitor<'m, '_>) {
                visitor.child("weight", self.weight());
                if let Some(bias) = self.bias() {
                    visitor.child("bias", bias);
                }
            }
        }
    )*};
}

weight_and_bias!(Linear, LayerNorm, Conv1d, Conv2d, ConvTranspose1d, ConvTranspose2d);

macro_rules! weight_only {
    ($($Layer:ty),*) => {$(
        impl Model for $Layer {
            fn visit<'m>(&'m self, visitor: &mut Visitor<'m, '_>) {
                visitor.child("weight", self.weight());
            }
        }
    )*};
}

weight_only!(RmsNorm, PReLU);

impl Model for Embedding {
    fn visit<'m>(&'m self, visitor: &mut Visitor<'m, '_>) {
        visitor.child("weight", self.embeddings());
    }
}

/// The weight and the bias; the running statistics are not trained.
impl Model for BatchNorm {
    fn visit<'m>(&'m self, visitor: &mut Visitor<'m, '_>) {
        if let Some((weight, bias)) = self.weight_and_bias() {
            visitor.child("weight", weight);
            visitor.child("bias", bias);
        }
    }
}

impl Model for Var {
    fn visit<'m>(&'m self, visitor: &mut Visitor<'m, '_>) {
        visitor.tensor(self);
    }
}

impl Lend for Var {
    fn lent_shape(&self) -> &[usize] {
        self.dims()
    }

    fn lent_dtype(&self) -> DType {
        dtype_of(self)
    }

    fn memory(&self) -> Option<usize> {
        self.as_tensor().memory()
    }

    fn read(&self, run: &mut dyn FnMut(View<'_>) -> Result<()>) -> Result<()> {
        self.as_tensor().read(run)
    }

    fn write(&self, run: &mut dyn FnMut(MemoryMut<'_>) -> Result<()>) -> Result<()> {
        self.as_tensor().write(run)
    }

    fn tensor(&self) -> Option<&Tensor> {
        Some(self)
    }
}

impl dyn Lend + '_ {
    /// A tensor of candle's with a copy of what is lent, on the device where that is.
    ///
    /// # Errors
    /// If the memory cannot be had, or the device fails.
    ///
    /// ```
    /// use optimisers::{Lend, TensorSlice};
    ///
    /// let lent: &dyn Lend = &TensorSlice::new((1, 2), &[0.5f32, 2.0])?;
    /// assert_eq!(lent.to_tensor()?.to_vec2::<f32>()?, [[0.5, 2.0]]);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn to_tensor(&self) -> Result<Tensor> {
        Ok(copied("tensor", self)?.detach())
    }
}

/// Gradients by variable, as a backward pass returns them.
impl Gradients for GradStore {
    fn gradient(&self, _path: &str, x: &dyn Lend) -> Option<&dyn Lend> {
        self.get(x.tensor()?).map(|gradient| gradient as &dyn Lend)
    }

    fn paths(&self) -> impl Iterator<Item = &str> {
        std::iter::empty()
    }

    fn by_path(&self) -> bool {
        false
    }
}

/// One of candle's variables and all its paths, sorted.
pub(crate) struct CandleVariable {
    pub(crate) paths: Vec<String>,
    pub(crate) tensor: Tensor,
}

impl CandleVariable {
    /// The first path.
    pub(crate) fn path(&self) -> &str {
        self.paths.first().map_or("", String::as_str)
    }
}

/// The wanted tensors of a model, like [`in_path_order`], for functions that work with candle's alone.
///
/// # Errors
/// If the model lends other memory.
pub(crate) fn of_candle<M: Model + ?Sized>(
    model: &M,
    wanted: impl Fn(&Tensor) -> bool,
) -> Result<Vec<CandleVariable>> {
    let tensor = |Variable { paths, x }: Variable<'_>| match x {
        Lent::Tensor(tensor) => Ok(CandleVariable { paths, tensor }),
        x => Err(not_of_candle(Variable { paths, x }.path())),
    };
    in_path_order(model, wanted)?.into_iter().map(tensor).collect()
}

/// The error for a parameter that is no variable of candle's.
pub(crate) fn not_of_candle(path: &str) -> Error {
    let problem = "this needs candle variables, and it is memory of another kind";
    Error::new(ErrorKind::Unsupported, problem).with_remedy("make a model of `Var`s for this call").at(path)
}

/// Those of [`of_candle`], each under the first of its paths.
pub(crate) fn by_first_path<M: Model + ?Sized>(
    model: &M,
    wanted: impl Fn(&Tensor) -> bool,
) -> Result<BTreeMap<String, Tensor>> {
    let variables = of_candle(model, wanted)?.into_iter();
    Ok(variables
        .filter_map(|CandleVariable { paths, tensor }| Some((paths.into_iter().next()?, tensor)))
        .collect())
}
