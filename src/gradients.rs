//! Where gradients come from: candle's `GradStore`, or a map by path.

use std::collections::{BTreeMap, HashMap};

use candle_core::Tensor;
use candle_core::backprop::GradStore;

/// Gradients of a model's parameters.
///
/// Implemented for candle's `GradStore` (found by the variable; what else the store holds is ignored) and for maps from paths to tensors,
/// where a name that the state does not know is an error.
///
/// A variable with several paths (a tied weight) may have a part of its gradient under each; they are added up. The same tensor under several
/// is the whole gradient and counts once, so a map can be made by visiting a model: `grads.insert(path, store.get(x))`.
pub trait Gradients: Sync {
    /// The gradient of the parameter `x` at `path`, if it has one.
    fn gradient(&self, path: &str, x: &Tensor) -> Option<&Tensor>;

    /// The paths of all gradients, where gradients have paths.
    fn paths(&self) -> impl Iterator<Item = &str>;

    /// Whether a variable with several paths can have a gradient under each.
    fn by_path(&self) -> bool;
}

impl Gradients for GradStore {
    fn gradient(&self, _path: &str, x: &Tensor) -> Option<&Tensor> {
        self.get(x)
    }

    fn paths(&self) -> impl Iterator<Item = &str> {
        std::iter::empty()
    }

    fn by_path(&self) -> bool {
        false
    }
}

macro_rules! maps {
    ($([$($generics:tt)*] $Map:ty;)*) => {$(
        impl<$($generics)*> Gradients for $Map {
            fn gradient(&self, path: &str, _x: &Tensor) -> Option<&Tensor> {
                self.get(path)
            }

            fn paths(&self) -> impl Iterator<Item = &str> {
                self.keys().map(|path| AsRef::<str>::as_ref(path))
            }

            fn by_path(&self) -> bool {
                true
            }
        }
    )*};
}

maps! {
    [S: std::hash::BuildHasher + Sync] HashMap<String, Tensor, S>;
    [S: std::hash::BuildHasher + Sync] HashMap<&str, Tensor, S>;
    [] BTreeMap<String, Tensor>;
    [] BTreeMap<&str, Tensor>;
}
