//! The model that is trained: a type that implements [`Model`] and shows its tensors under their paths.
//!
//! `Model::visit` calls [`Visitor::child`] for parts, which builds the path, and [`Visitor::tensor`] or
//! [`Visitor::lend`] for tensors. The visitor passes path and tensor on to a [`TensorReceiver`]. The receiver
//! of [`in_path_order`] collects a model's parameters. The receiver in `tree/parameters.rs` finds the
//! parameters of a state again in each update.

#[cfg(feature = "candle")]
pub(crate) mod candle;
mod containers;
pub(crate) mod cuts;
pub(crate) mod gradients;
#[cfg(feature = "candle")]
pub(crate) mod layer_dtypes;
pub(crate) mod lent;
pub(crate) mod patterns;
pub(crate) mod slices;
mod variables;

pub(crate) use variables::{
    Identity, Variable, duplicate_path_error, empty_model_error, identity, in_path_order, select_variables,
};

use lent::Lend;

use crate::tensors::Tensor;

/// Something with trainable tensors: a `VarMap`, a layer, a struct of layers, a collection of these.
///
/// A model shows each tensor under its path, such as `encoder.0.weight`. A model may show all its tensors:
/// those that are not variables, and variables of integer dtype, are ignored.
///
/// Implemented for `VarMap`, `Var`, `Tensor` (trained if the tensor is a variable), the candle-nn layers that
/// expose their tensors (`Linear`, `Embedding`, `LayerNorm`, `RmsNorm`, `Conv1d`, `Conv2d` and their
/// transposes, `BatchNorm`'s weight and bias, `PReLU`), references and boxes, slices, `Vec`, arrays, tuples,
/// `Option`, and maps by name. Layers that keep their tensors to themselves (`GroupNorm`, `LSTM`, `GRU`,
/// `Sequential`) cannot be visited: pass the `VarMap` that their variables came from.
///
/// A struct needs one line, [`model!`](crate::model).
///
/// In a list the paths are the indices: `0`, `1`, and so on. A checkpoint finds parameters by path, so the
/// list must have the same order in each run. `VarMap::all_vars` returns another order each time, so pass the
/// `VarMap` itself, which has names.
///
/// # Two candles
/// ```text
/// error[E0277]: `VarMap` does not show its tensors
/// error[E0277]: `candle_core::DType` is no dtype that this crate knows
/// error[E0308]: expected `candle_core::tensor::Tensor`, found `candle_core::Tensor`
/// note: there are multiple different versions of crate `candle_core` in the dependency graph
/// ```
///
/// The program and this crate have two versions of candle, whose types differ: `cargo tree -d` lists both.
/// This crate takes candle 0.10.2 to 0.11, and Cargo chooses the newest for this crate, whichever version the
/// program has.
///
/// | the program has | to make both use one candle |
/// | --- | --- |
/// | candle 0.10.2 | `cargo update candle-nn@0.11 --precise 0.10.2`, again after each `cargo update` |
/// | candle 0.11, and this crate still 0.10.2 | `cargo update candle-nn@0.10` |
/// | candle from git | the program's two lines for candle also under `[patch.crates-io]` |
#[diagnostic::on_unimplemented(
    message = "`{Self}` does not show its tensors",
    label = "not a model: for a struct write `optimisers::model!(Net {{ hidden, output }});`, with `..` for \
             fields without tensors",
    note = "or pass the `VarMap` that its variables came from: `update(&mut state, &variables, &grads)`; for \
            memory of your own, such as a `Vec<f32>`, write `ParameterSlices`",
    note = "if it is a type of candle's, the program and this crate have two candles: run \
            `cargo update candle-nn@0.11 --precise 0.10.2` if the program's is 0.10.2, or \
            `cargo update candle-nn@0.10` if it is 0.11"
)]
pub trait Model {
    /// Shows every tensor to the visitor.
    fn visit<'m>(&'m self, visitor: &mut Visitor<'m, '_>);
}

/// Receives a model's tensors, and knows the path of the part that is being visited.
///
/// `'m` is the borrow of the model, and of the memory that the model [lends](Visitor::lend).
pub struct Visitor<'m, 'v> {
    path: String,
    receiver: &'v mut dyn TensorReceiver<'m>,
}

/// Receives the tensors and the memory that a model shows to a [`Visitor`].
pub(crate) trait TensorReceiver<'m> {
    /// Takes a tensor of candle's and its path.
    fn tensor(&mut self, path: &str, tensor: &Tensor);

    /// Takes other memory and its path.
    fn lent(&mut self, path: &str, lender: &'m dyn Lend);
}

/// A function receives only candle's tensors, because [`Visitor::new`] is public with such a function.
impl<'m, F: FnMut(&str, &Tensor)> TensorReceiver<'m> for F {
    fn tensor(&mut self, path: &str, tensor: &Tensor) {
        self(path, tensor);
    }

    fn lent(&mut self, _: &str, _: &'m dyn Lend) {}
}

impl std::fmt::Debug for Visitor<'_, '_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Visitor")
            .field("path", &self.path)
            .finish_non_exhaustive()
    }
}

impl<'m, 'v> Visitor<'m, 'v> {
    /// A visitor at the root that calls `see` with each path and tensor of candle's.
    ///
    /// ```
    /// use candle_core::{DType, Device, Var};
    /// use optimisers::{Model, Visitor};
    ///
    /// let model = vec![Var::zeros(1, DType::F32, &Device::Cpu)?, Var::zeros(2, DType::F32, &Device::Cpu)?];
    /// let mut paths = Vec::new();
    /// model.visit(&mut Visitor::new(&mut |path, _| paths.push(path.to_string())));
    /// assert_eq!(paths, ["0", "1"]);
    /// # Ok::<(), candle_core::Error>(())
    /// ```
    pub fn new<F: FnMut(&str, &Tensor)>(see: &'v mut F) -> Self {
        Self::with_receiver(see)
    }

    pub(crate) fn with_receiver(receiver: &'v mut dyn TensorReceiver<'m>) -> Self {
        Visitor {
            path: String::new(),
            receiver,
        }
    }

    /// Shows a part of the model under its name.
    pub fn child(&mut self, name: &str, part: &'m (impl Model + ?Sized)) {
        self.below(name, |visitor| part.visit(visitor));
    }

    /// Runs a function with `name` appended to the visitor's path.
    ///
    /// Use this for tensors that can be borrowed only for a moment, such as those in a `Mutex`.
    ///
    /// ```
    /// use std::sync::Mutex;
    ///
    /// use candle_core::{DType, Device, Var};
    /// use optimisers::{Descent, Model, Visitor, setup};
    ///
    /// struct Shared(Mutex<Var>);
    ///
    /// impl Model for Shared {
    ///     fn visit<'m>(&'m self, visitor: &mut Visitor<'m, '_>) {
    ///         visitor.below("weight", |visitor| visitor.tensor(&self.0.lock().unwrap()));
    ///     }
    /// }
    ///
    /// let model = Shared(Mutex::new(Var::zeros(2, DType::F32, &Device::Cpu)?));
    /// assert!(setup(Descent::new(0.1), &model)?.leaf("weight").is_some());
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn below(&mut self, name: &str, show: impl FnOnce(&mut Self)) {
        let length = self.path.len();
        if length > 0 {
            self.path.push('.');
        }
        self.path.push_str(name);
        show(self);
        self.path.truncate(length);
    }

    /// Shows a tensor at the visitor's path.
    pub fn tensor(&mut self, tensor: &Tensor) {
        self.receiver.tensor(&self.path, tensor);
    }

    /// Shows memory that the model lends, at the visitor's path. Such memory is trained, unless it is a
    /// tensor of candle's that is not a variable.
    pub fn lend(&mut self, lender: &'m dyn Lend) {
        match lender.tensor() {
            Some(tensor) => self.receiver.tensor(&self.path, tensor),
            None => self.receiver.lent(&self.path, lender),
        }
    }
}

impl Model for Tensor {
    fn visit<'m>(&'m self, visitor: &mut Visitor<'m, '_>) {
        visitor.tensor(self);
    }
}

/// A field's name in paths: `type` for the raw identifier `r#type`. [`model!`](crate::model) uses it.
#[doc(hidden)]
pub fn field_name(identifier: &'static str) -> &'static str {
    identifier.strip_prefix("r#").unwrap_or(identifier)
}

/// Implements [`Model`](crate::Model) for a struct by the names of its fields.
///
/// A raw identifier `r#type` is `type` in paths. Only the listed fields are trained. A list that lacks a
/// field does not compile, so that no field is forgotten. To leave out fields on purpose (fields without
/// variables, or with variables that are not trained), end the list with `..`.
///
/// ```
/// use candle_nn::{Embedding, Linear};
/// use optimisers::{Model, model};
///
/// struct Block {
///     attention: Linear,
///     heads: usize,
///     feed_forward: Vec<Linear>,
/// }
/// model!(Block { attention, feed_forward, .. });
///
/// /// Type parameters go in brackets, with the bounds that the struct has.
/// struct Classifier<E, H> {
///     encoder: E,
///     head: H,
/// }
/// model!([E: Model, H: Model] Classifier<E, H> { encoder, head });
/// # fn trains(_: &impl Model) {}
/// # fn check(x: &Block, y: &Classifier<Embedding, Block>) { trains(x); trains(y); let _ = x.heads; }
/// ```
#[macro_export]
macro_rules! model {
    // `let` with the pattern `$all` makes the compiler check that no field is forgotten. The pattern consists
    // of the caller's own tokens, so that the error points at the call.
    (@visits [$($generics:tt)*] [$Model:ty] [$($field:ident)*] $construction:expr, $all:pat) => {
        impl<$($generics)*> $crate::Model for $Model {
            fn visit<'m>(&'m self, visitor: &mut $crate::Visitor<'m, '_>) {
                #[allow(unused_variables, unreachable_code, clippy::diverging_sub_expression)]
                let (_, $all) = ($construction, self);
                $(visitor.child($crate::__private::field_name(stringify!($field)), &self.$field);)*
            }
        }
    };
    (@named { $Model:ident { $($field:ident),* $(,)? } } $($all:tt)*) => {
        $crate::model!(@visits [] [$Model] [$($field)*] (), $($all)*);
    };
    (@named { $Model:ident { $($field:ident,)* .. } } $($all:tt)*) => {
        $crate::model!(@visits [] [$Model] [$($field)*] (), $($all)*);
    };
    (@ $($other:tt)*) => {
        compile_error!("expected a struct with its fields: `model!(Net { hidden, output })`, or `model!(Net { hidden, .. })`");
    };
    // A type with parameters cannot be a pattern. A closure that is never called constructs the struct
    // instead, which does not compile either if a field is forgotten.
    ([$($generics:tt)*] $Model:ty { $($field:ident),* $(,)? }) => {
        $crate::model!(@visits [$($generics)*] [$Model] [$($field)*] || -> Self { Self { $($field: unreachable!()),* } }, _);
    };
    ([$($generics:tt)*] $Model:ty { $($field:ident,)* .. }) => {
        $crate::model!(@visits [$($generics)*] [$Model] [$($field)*] (), _);
    };
    ($($all:tt)*) => {
        $crate::model!(@named { $($all)* } $($all)*);
    };
}
