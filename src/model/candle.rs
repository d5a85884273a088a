//! [`Model`] and [`Lend`] for candle's types, [`Gradients`] for candle's `GradStore`, and functions for
//! models that consist of candle variables only.

use candle_core::backprop::GradStore;
use candle_core::{Tensor, Var};
use candle_nn::{
    BatchNorm, Conv1d, Conv2d, ConvTranspose1d, ConvTranspose2d, Embedding, LayerNorm, Linear, PReLU,
    RmsNorm, VarMap,
};

use super::gradients::Gradients;
use super::lent::{Lend, Lent, MemoryMut, View, copy_of};
use super::{Model, Variable, Visitor, in_path_order};
use crate::error::{Error, ErrorKind, Result};
use crate::numbers::DType;
use crate::tensors::dtype_of;

/// Shows every variable under its name. The map is locked during the visit.
impl Model for VarMap {
    fn visit<'m>(&'m self, visitor: &mut Visitor<'m, '_>) {
        let variables = self
            .data()
            .lock()
            .unwrap_or_else(std::sync::PoisonError::into_inner);
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

weight_and_bias!(
    Linear,
    LayerNorm,
    Conv1d,
    Conv2d,
    ConvTranspose1d,
    ConvTranspose2d
);

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

/// Shows the weight and the bias. Leaves out the running statistics, because the forward pass moves them.
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
    /// Copies the lent memory into a tensor of candle's, on the device of the memory.
    ///
    /// # Errors
    /// If the owner does not lend the memory, or the device fails.
    ///
    /// ```
    /// use optimisers::{Lend, TensorSlice};
    ///
    /// let lent: &dyn Lend = &TensorSlice::new((1, 2), &[0.5f32, 2.0])?;
    /// assert_eq!(lent.to_tensor()?.to_vec2::<f32>()?, [[0.5, 2.0]]);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn to_tensor(&self) -> Result<Tensor> {
        Ok(copy_of("tensor", self)?.detach())
    }
}

/// Finds gradients by variable, as a backward pass returns them, and ignores the paths.
impl Gradients for GradStore {
    fn gradient(&self, _path: &str, x: &dyn Lend) -> Option<&dyn Lend> {
        self.get(x.tensor()?).map(|gradient| gradient as &dyn Lend)
    }

    /// Empty, because the store finds gradients by variable and has no paths.
    fn paths(&self) -> impl Iterator<Item = &str> {
        std::iter::empty()
    }

    /// `false`, because a variable has one gradient, whatever the number of its paths.
    fn by_path(&self) -> bool {
        false
    }
}

/// A candle variable and all its paths, sorted.
pub(crate) struct CandleVariable {
    pub(crate) paths: Vec<String>,
    pub(crate) tensor: Tensor,
}

impl CandleVariable {
    pub(crate) fn path(&self) -> &str {
        self.paths.first().map_or("", String::as_str)
    }
}

/// The tensors that [`in_path_order`] returns, for functions that need candle's tensors.
///
/// # Errors
/// Those of [`in_path_order`], and if the model lends memory that is no tensor of candle's.
pub(crate) fn candle_variables<M: Model + ?Sized>(
    model: &M,
    is_selected: impl Fn(&Tensor) -> bool,
) -> Result<Vec<CandleVariable>> {
    let to_candle = |Variable { paths, x }: Variable<'_>| match x {
        Lent::Tensor(tensor) => Ok(CandleVariable { paths, tensor }),
        x => Err(not_candle_variable(Variable { paths, x }.path())),
    };
    in_path_order(model, is_selected)?
        .into_iter()
        .map(to_candle)
        .collect()
}

/// The error for a parameter that is not a variable of candle's.
pub(crate) fn not_candle_variable(path: &str) -> Error {
    let problem = "this call needs candle variables, but the parameter is memory of another kind";
    Error::new(ErrorKind::Unsupported, problem)
        .with_remedy("make a model of `Var`s for this call")
        .at(path)
}
