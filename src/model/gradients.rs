//! Where gradients come from: candle's `GradStore`, or a map or list by path.

use std::borrow::Borrow;
use std::collections::{BTreeMap, HashMap};
use std::hash::{BuildHasher, Hash};

use super::lent::Lend;
use crate::error::{Error, ErrorKind, Result};
use crate::tensors::Tensor;

/// Gradients of a model's parameters.
///
/// Implemented for candle's `GradStore` (found by the variable; what else the store holds is ignored), for
/// maps from paths to tensors, and for slices, arrays and vectors of pairs of both. Paths and tensors may be
/// owned or borrowed: `HashMap<String, Tensor>`, `BTreeMap<&str, &Tensor>`, `Vec<(String, Tensor)>`,
/// `[(&str, Tensor); 2]`. A name that the state does not know is an error, and so is a name that a list has
/// twice.
///
/// A variable with several paths (a tied weight) may have a part of its gradient under each; they are added
/// up. The same tensor under several is the whole gradient and counts once, so a map can be made by visiting
/// a model: `grads.insert(path, store.get(x))`.
///
/// ```
/// use candle_core::{Device, Tensor, Var};
/// use optimisers::{Descent, setup, update};
///
/// let (w, b) = (Var::new(&[1f32], &Device::Cpu)?, Var::new(&[2f32], &Device::Cpu)?);
/// let mut state = setup(Descent::new(0.5), &[&w, &b])?;
/// let [dw, db] = [Tensor::new(&[2f32], &Device::Cpu)?, Tensor::new(&[4f32], &Device::Cpu)?];
/// update(&mut state, &[&w, &b], &[("0", &dw), ("1", &db)])?;
/// assert_eq!((w.to_vec1::<f32>()?, b.to_vec1::<f32>()?), (vec![0.0], vec![0.0]));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[diagnostic::on_unimplemented(
    message = "`{Self}` is no collection of gradients",
    label = "not gradients",
    note = "pass what `loss.backward()?` returns, a map from paths to tensors, or a list of pairs: \
            `&[(\"weight\", gradient)]`; for memory of your own, such as a `Vec<f32>`, write \
            `GradientSlices`"
)]
pub trait Gradients: Sync {
    /// The gradient of the parameter `x` at `path`, if it has one.
    ///
    /// It has the parameter's shape. Memory that is no tensor of candle's may be a vector of as many
    /// elements.
    fn gradient(&self, path: &str, x: &dyn Lend) -> Option<&dyn Lend>;

    /// The paths of all gradients, if gradients have paths.
    fn paths(&self) -> impl Iterator<Item = &str>;

    /// Whether a variable with several paths can have a gradient under each.
    fn by_path(&self) -> bool;

    /// The same gradients as a map, which an update then uses instead.
    ///
    /// For gradients that are slow to find, such as those in a list. The default is `None`.
    ///
    /// # Errors
    /// If two gradients have the same path.
    fn indexed(&self) -> Result<Option<GradientMap<'_>>> {
        Ok(None)
    }

    /// The scale of the loss that these are the gradients of, if they know one.
    ///
    /// An update divides by it only with the [`LossScaler`](crate::LossScaler) that has scaled the loss, and
    /// refuses such gradients without. The default is `None`: they know nothing of a scale.
    fn loss_scale(&self) -> Option<f64> {
        None
    }
}

/// Gradients by path.
pub type GradientMap<'g> = HashMap<&'g str, &'g dyn Lend>;

/// What an update asks of any gradients, behind a pointer: so that little is compiled for each kind.
pub(crate) trait GradientLookUp: Sync {
    fn find(&self, path: &str, x: &dyn Lend) -> Option<&dyn Lend>;

    fn has_paths(&self) -> bool;
}

impl<G: Gradients + ?Sized> GradientLookUp for &G {
    fn find(&self, path: &str, x: &dyn Lend) -> Option<&dyn Lend> {
        self.gradient(path, x)
    }

    fn has_paths(&self) -> bool {
        self.by_path()
    }
}

impl GradientLookUp for GradientMap<'_> {
    fn find(&self, path: &str, _x: &dyn Lend) -> Option<&dyn Lend> {
        self.get(path).copied()
    }

    fn has_paths(&self) -> bool {
        true
    }
}

/// The error for two gradients with one path.
pub(crate) fn duplicate_gradient(path: &str) -> Error {
    Error::new(ErrorKind::Contract, "there are two gradients for it in the list")
        .with_remedy("add them up, or leave one out")
        .at(path)
}

/// Gradients in the form in which an update looks them up: these, or their map, which is kept in `map`.
pub(crate) fn look_up<'m, 'g, G: Gradients + ?Sized>(
    grads: &'m &'g G,
    map: &'m mut Option<GradientMap<'g>>,
) -> Result<&'m dyn GradientLookUp> {
    *map = grads.indexed()?;
    Ok(map.as_ref().map_or(grads as &dyn GradientLookUp, |map| map))
}

/// Runs a function on gradients in the form in which an update looks them up.
pub(crate) fn looked_up<G: Gradients + ?Sized, T>(
    grads: &G,
    run: impl FnOnce(&dyn GradientLookUp) -> Result<T>,
) -> Result<T> {
    run(look_up(&grads, &mut None)?)
}

macro_rules! maps {
    ($([$($generics:tt)*] $Map:ty;)*) => {$(
        impl<$($generics)*> Gradients for $Map {
            fn gradient(&self, path: &str, _x: &dyn Lend) -> Option<&dyn Lend> {
                self.get(path).map(|gradient| gradient.borrow() as &dyn Lend)
            }

            fn paths(&self) -> impl Iterator<Item = &str> {
                self.keys().map(|path| path.borrow())
            }

            fn by_path(&self) -> bool {
                true
            }
        }
    )*};
}

maps! {
    [P: Borrow<str> + Eq + Hash + Sync, T: Borrow<Tensor> + Sync, S: BuildHasher + Sync] HashMap<P, T, S>;
    [P: Borrow<str> + Ord + Sync, T: Borrow<Tensor> + Sync] BTreeMap<P, T>;
}

macro_rules! lists {
    ($([$($generics:tt)*] $List:ty;)*) => {$(
        impl<P: Borrow<str> + Sync, T: Borrow<Tensor> + Sync, $($generics)*> Gradients for $List {
            fn gradient(&self, path: &str, _x: &dyn Lend) -> Option<&dyn Lend> {
                self.iter().find_map(|(known, gradient)| (known.borrow() == path).then(|| gradient.borrow() as &dyn Lend))
            }

            fn paths(&self) -> impl Iterator<Item = &str> {
                self.iter().map(|(path, _)| path.borrow())
            }

            fn by_path(&self) -> bool {
                true
            }

            fn indexed(&self) -> Result<Option<GradientMap<'_>>> {
                let mut map = GradientMap::with_capacity(self.len());
                for (path, gradient) in self {
                    if map.insert(path.borrow(), gradient.borrow()).is_some() {
                        return Err(duplicate_gradient(path.borrow()));
                    }
                }
                Ok(Some(map))
            }
        }
    )*};
}

lists! {
    [] [(P, T)];
    [] Vec<(P, T)>;
    [const N: usize] [(P, T); N];
}
