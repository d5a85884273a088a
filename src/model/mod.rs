//! What can be trained: anything that can show its tensors under their paths.

mod candle;
mod containers;
mod variables;

pub(crate) use variables::{Variable, by_first_path, in_path_order, to_read};

use candle_core::Tensor;

use crate::error::{Result, SliceError};
use crate::lent::{INSIDE, Inside, LentParameters};

/// Something with trainable tensors: a `VarMap`, a layer, a struct of layers, a collection of these.
///
/// It shows each tensor under its path, such as `encoder.0.weight`. Tensors that are not variables, and variables of integer dtype, are
/// passed over, so a model may show all it has.
///
/// Implemented for `VarMap`, `Var`, a `Tensor` (trained if it is a variable), the candle-nn layers that expose their tensors (`Linear`,
/// `Embedding`, `LayerNorm`, `RmsNorm`, `Conv1d`, `Conv2d` and their transposes, `BatchNorm`'s weight and bias, `PReLU`), references and
/// boxes, slices, `Vec`, arrays, tuples, `Option`, and maps by name. Layers that keep their tensors to themselves (`GroupNorm`, `LSTM`, `GRU`,
/// `Sequential`) cannot be visited: pass the `VarMap` that their variables came from.
///
/// A struct needs one line, [`model!`](crate::model).
#[diagnostic::on_unimplemented(
    message = "`{Self}` does not show its tensors",
    label = "not a model",
    note = "for a struct write `optimisers::model!(Net {{ hidden, output }});` with its fields, or pass the `VarMap` that its variables came from"
)]
pub trait Model {
    /// Shows every tensor to the visitor.
    fn visit(&self, visitor: &mut Visitor<'_>);

    /// The parameters, if they lie in memory that a caller owns. Then nothing is shown.
    #[doc(hidden)]
    fn lent(&self, _: &Inside) -> Option<&LentParameters<'_>> {
        None
    }
}

/// Receives a model's tensors, and knows the path of where it is.
pub struct Visitor<'v> {
    path: String,
    see: &'v mut dyn FnMut(&str, &Tensor),
    see_twin: Option<SeeTwin<'v>>,
    /// Where the first slices are, of which nothing can be shown.
    slices: Option<String>,
}

/// Receives a tensor and its low-precision twin.
type SeeTwin<'v> = &'v mut dyn FnMut(&Tensor, &Tensor);

impl std::fmt::Debug for Visitor<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Visitor").field("path", &self.path).finish_non_exhaustive()
    }
}

impl<'v> Visitor<'v> {
    /// A visitor at the root that calls `see` with each path and tensor.
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
    pub fn new(see: &'v mut dyn FnMut(&str, &Tensor)) -> Self {
        Visitor { path: String::new(), see, see_twin: None, slices: None }
    }

    /// Shows a part of the model under its name.
    pub fn child(&mut self, name: &str, part: &(impl Model + ?Sized)) {
        let length = self.path.len();
        if length > 0 {
            self.path.push('.');
        }
        self.path.push_str(name);
        part.visit(self);
        self.path.truncate(length);
    }

    /// A visitor that also calls `see_twin` with each tensor that has a low-precision twin, and this.
    pub(crate) fn with_twins(see: &'v mut dyn FnMut(&str, &Tensor), see_twin: SeeTwin<'v>) -> Self {
        Visitor { see_twin: Some(see_twin), ..Visitor::new(see) }
    }

    /// Shows the tensor at this place.
    pub fn tensor(&mut self, tensor: &Tensor) {
        (self.see)(&self.path, tensor);
    }

    /// Notes that slices are at this place, which shows nothing of them.
    pub(crate) fn slices(&mut self) {
        if self.slices.is_none() {
            self.slices = Some(self.path.clone());
        }
    }

    /// Shows what computes in the place of a tensor that was shown.
    pub(crate) fn twin(&mut self, precise: &Tensor, low: &Tensor) {
        if let Some(see) = &mut self.see_twin {
            see(precise, low);
        }
    }
}

/// Shows every tensor of a model of variables.
///
/// # Errors
/// If the model is slices, or has them as a part: they would be passed over.
pub(crate) fn show<M: Model + ?Sized>(model: &M, see: &mut dyn FnMut(&str, &Tensor)) -> Result<()> {
    show_pairs(model, see, &mut |_, _| {})
}

/// [`show`], and each tensor that has a low-precision twin with this.
pub(crate) fn show_pairs<M>(model: &M, see: &mut dyn FnMut(&str, &Tensor), see_twin: SeeTwin<'_>) -> Result<()>
where
    M: Model + ?Sized,
{
    if model.lent(INSIDE).is_some() {
        return Err(SliceError::NeedsVariables.into());
    }
    let mut visitor = Visitor::with_twins(see, see_twin);
    model.visit(&mut visitor);
    visitor.slices.map_or(Ok(()), |path| Err(SliceError::Part { path }.into()))
}

/// A field's name in paths: `type` for the raw identifier `r#type`; for [`model!`](crate::model).
#[doc(hidden)]
pub fn field_name(identifier: &'static str) -> &'static str {
    identifier.strip_prefix("r#").unwrap_or(identifier)
}

/// Implements [`Model`](crate::Model) for a struct by the names of its fields (a raw identifier `r#type` is `type` in paths).
///
/// A field that is not named is not trained, so one that is missing from the list does not compile. `..` at
/// the end says that the others are left out on purpose: those that hold no variables, or variables that are
/// not to be trained.
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
    // The pattern is the caller's own, so that an error about a field that was forgotten is, too.
    (@visits [$($generics:tt)*] [$Model:ty] [$($field:ident)*] $made:expr, $all:pat) => {
        impl<$($generics)*> $crate::Model for $Model {
            fn visit(&self, visitor: &mut $crate::Visitor<'_>) {
                #[allow(unused_variables, unreachable_code, clippy::diverging_sub_expression)]
                let (_, $all) = ($made, self);
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
