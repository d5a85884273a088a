//! Sources of gradients: candle's `GradStore`, or a map or list by path, and these with their loss scale.

use std::borrow::Borrow;
use std::collections::{BTreeMap, HashMap};
use std::hash::{BuildHasher, Hash};

use super::lent::Lend;
use crate::error::{Error, ErrorKind, Result};
use crate::tensors::Tensor;

/// Gradients of a model's parameters.
///
/// Implemented for
/// - candle's `GradStore`, in which a gradient is found by its variable. Gradients of other tensors are
///   ignored. Most such tensors are constants, such as the targets of a loss. The store does not tell
///   constants from variables that the state lacks, but [`audit`](crate::audit) does;
/// - maps from paths to tensors, and slices, arrays and vectors of pairs of path and tensor.
///
/// Paths and tensors may be owned or borrowed: `HashMap<String, Tensor>`, `BTreeMap<&str, &Tensor>`,
/// `Vec<(String, Tensor)>`, `[(&str, Tensor); 2]`. A path that the state does not have is an error, and so is
/// a path that a list has twice.
///
/// A variable with several paths (a tied weight) may have a part of its gradient under each path, and an
/// update adds up these parts. If one tensor is under several paths, the tensor is the whole gradient and
/// counts once. So a program can fill a map while it visits all paths of a model:
/// `grads.insert(path, store.get(x))`.
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
    label = "not gradients: write `update(&mut state, &model, &loss.backward()?)`",
    note = "or pass a map from paths to tensors, or a list of pairs: `&[(\"weight\", gradient)]`; for memory \
            of your own, such as a `Vec<f32>`, write `GradientSlices`"
)]
pub trait Gradients: Sync {
    /// The gradient of the parameter `x` at `path`, if the parameter has one.
    ///
    /// The gradient has the parameter's shape. A gradient that is no tensor of candle's may also be a vector
    /// with the parameter's number of elements.
    fn gradient(&self, path: &str, x: &dyn Lend) -> Option<&dyn Lend>;

    /// The paths of all gradients, if gradients have paths.
    fn paths(&self) -> impl Iterator<Item = &str>;

    /// Whether a variable with several paths can have a gradient under each path.
    fn by_path(&self) -> bool;

    /// The same gradients as a map. If there is a map, an update searches the map instead of the collection.
    ///
    /// Implement this for collections that are slow to search, such as lists. The default is `None`.
    ///
    /// # Errors
    /// If two gradients have the same path.
    fn indexed(&self) -> Result<Option<GradientMap<'_>>> {
        Ok(None)
    }

    /// The factor by which the loss of these gradients was scaled, if the collection records that factor.
    ///
    /// An update with the [`LossScaler`](crate::LossScaler) that scaled the loss divides the gradients by
    /// this factor. An update without that scaler refuses such gradients. The default is `None`: no scale is
    /// recorded.
    fn loss_scale(&self) -> Option<f64> {
        None
    }
}

/// Gradients that carry the scale of their loss. An update accepts them only with the scaler.
///
/// `ScaledLoss::backward` returns such gradients, and [`Accumulator::take`](crate::Accumulator::take) returns
/// their mean. [`update`](crate::update) refuses them, because without the scaler it would not divide them by
/// the scale. If the loss was not scaled, there is no scale, and `update` accepts the gradients.
///
/// ```
/// use candle_core::{Device, Var};
/// use optimisers::{ErrorKind, Descent, LossScaler, Update, setup, update};
///
/// let x = Var::new(1f32, &Device::Cpu)?;
/// let mut state = setup(Descent::new(0.5), &x)?;
/// let mut scaler = LossScaler::fixed(1024.0);
/// let grads = scaler.scale(&x.sqr()?)?.backward()?;
/// let refused = update(&mut state, &x, &grads).unwrap_err();
/// assert_eq!((refused.kind(), refused.got()), (ErrorKind::LossScale, Some("1024")));
///
/// Update::new(&mut state).scaler(&mut scaler).apply(&x, &grads)?;
/// assert_eq!(x.to_vec0::<f32>()?, 0.0);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct ScaledGradients<G> {
    gradients: G,
    scale: Option<f64>,
}

impl<G> ScaledGradients<G> {
    pub(crate) fn new(gradients: G, scale: Option<f64>) -> Self {
        ScaledGradients { gradients, scale }
    }

    /// The collection, a `GradStore` or a map, which carries no scale.
    pub fn inner(&self) -> &G {
        &self.gradients
    }

    /// The collection, which carries no scale.
    pub fn into_inner(self) -> G {
        self.gradients
    }
}

impl<G: Gradients> Gradients for ScaledGradients<G> {
    fn gradient(&self, path: &str, x: &dyn Lend) -> Option<&dyn Lend> {
        self.gradients.gradient(path, x)
    }

    fn paths(&self) -> impl Iterator<Item = &str> {
        self.gradients.paths()
    }

    fn by_path(&self) -> bool {
        self.gradients.by_path()
    }

    fn indexed(&self) -> Result<Option<GradientMap<'_>>> {
        self.gradients.indexed()
    }

    fn loss_scale(&self) -> Option<f64> {
        self.scale
    }
}

/// Gradients by path.
pub type GradientMap<'g> = HashMap<&'g str, &'g dyn Lend>;

/// The part of [`Gradients`] that an update needs, as a trait object: otherwise the whole update would be
/// compiled again for each collection.
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

/// No gradients.
impl GradientLookUp for () {
    fn find(&self, _path: &str, _x: &dyn Lend) -> Option<&dyn Lend> {
        None
    }

    fn has_paths(&self) -> bool {
        false
    }
}

/// The error for two gradients with one path.
pub(crate) fn duplicate_gradient(path: &str) -> Error {
    Error::new(
        ErrorKind::Contract,
        "the list has two gradients for this parameter",
    )
    .with_remedy("add the two up, or leave one out")
    .at(path)
}

/// The collection in which an update looks gradients up. If `grads` has a map, stores the map in `map` and
/// returns the map; otherwise returns `grads`.
pub(crate) fn look_up<'m, 'g, G: Gradients + ?Sized>(
    grads: &'m &'g G,
    map: &'m mut Option<GradientMap<'g>>,
) -> Result<&'m dyn GradientLookUp> {
    *map = grads.indexed()?;
    Ok(map.as_ref().map_or(grads as &dyn GradientLookUp, |map| map))
}

/// Runs a function on the collection that [`look_up`] returns.
pub(crate) fn with_look_up<G: Gradients + ?Sized, T>(
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
                self.iter().find_map(|(own_path, gradient)| (own_path.borrow() == path).then(|| gradient.borrow() as &dyn Lend))
            }

            fn paths(&self) -> impl Iterator<Item = &str> {
                self.iter().map(|(path, _)| path.borrow())
            }

            fn by_path(&self) -> bool {
                true
            }

            fn indexed(&self) -> Result<Option<GradientMap<'_>>> {
                // A search in the list would find only the first of two gradients with one path.
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
