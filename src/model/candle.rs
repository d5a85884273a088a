//! [`Model`] for candle's variables and layers, and [`Gradients`] for what its backward pass returns.

use candle_core::backprop::GradStore;
use candle_nn::{
    BatchNorm, Conv1d, Conv2d, ConvTranspose1d, ConvTranspose2d, Embedding, LayerNorm, Linear, PReLU,
    RmsNorm, VarMap,
};

use super::gradients::Gradients;
use super::lent::Lend;
use super::{Model, Visitor};

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
