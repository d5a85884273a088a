//! The state of a whole model: a leaf per trainable parameter, by path.

mod edit;
mod leaf;
mod replace;
mod selection;
mod twins;
mod weights;

use std::collections::{HashMap, HashSet};
use std::sync::OnceLock;

use candle_core::{Tensor, TensorId};

pub use leaf::Leaf;
pub use replace::Replaced;
pub use selection::Selection;
pub(crate) use twins::Twins;
pub(crate) use weights::{History, Reached, expect_twin};

use crate::engine::{Tickets, prefetch_line};
use crate::error::{Error, Result, listed};
use crate::model::{Model, Visitor};
use crate::rule::FieldValue;

/// The optimiser state of a model: one [`Leaf`] per trainable parameter, in the order of their paths.
///
/// Made by [`setup`](crate::setup), moved by [`update`](crate::update). Adjusting, freezing and reading need only this tree;
/// [`at`](StateTree::at) and [`select_where`](StateTree::select_where) restrict them to a part of it.
///
/// ```
/// use candle_core::{DType, Device, Var};
/// use optimisers::{Adam, setup};
///
/// let model = ("a", [Var::zeros(2, DType::F32, &Device::Cpu)?, Var::zeros(3, DType::F32, &Device::Cpu)?]).1;
/// let mut state = setup(Adam::new(1e-3), &model)?;
/// state.adjust(5e-4)?;
/// state.at("1")?.adjust_field("beta", (0.8, 0.99))?;
/// state.at("0")?.freeze();
///
/// assert_eq!(state.leaf("1").map(|leaf| leaf.learning_rate()), Some(Some(5e-4)));
/// assert_eq!(state.bytes(), 2 * 4 * (2 + 3));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// A clone has storage of its own. It belongs to the same model; [`rebind`](StateTree::rebind) gives it to another.
#[derive(Debug)]
pub struct StateTree {
    /// In the order of paths.
    pub(crate) leaves: Vec<Leaf>,
    /// Variables that updates pass over.
    left_out: Vec<LeftOut>,
    /// The leaf of each variable; none for one that was left out.
    by_id: HashMap<TensorId, Option<usize>>,
    /// All paths, including further names of one variable and names of variables that were left out.
    by_path: HashMap<String, Option<usize>>,
    /// The storages that an update may write.
    pub(crate) storages: HashSet<usize>,
    /// The leaves in the order in which the model shows their variables.
    shown: OnceLock<Vec<Shown>>,
    pub(crate) tickets: Tickets,
}

/// A leaf whose variable the model has shown.
#[derive(Debug)]
struct Shown {
    id: TensorId,
    leaf: usize,
    /// Where the variable was.
    address: usize,
}

/// A variable of the model without a leaf.
#[derive(Clone, Debug)]
pub(crate) struct LeftOut {
    pub(crate) id: TensorId,
    pub(crate) paths: Vec<String>,
}

/// How many variables ahead one is fetched.
const AHEAD: usize = 8;

impl StateTree {
    pub(crate) fn new(mut leaves: Vec<Leaf>, left_out: Vec<LeftOut>) -> Self {
        leaves.sort_by(|a, b| a.path.cmp(&b.path));
        let mut by_id: HashMap<_, _> = left_out.iter().map(|variable| (variable.id, None)).collect();
        by_id.extend(leaves.iter().enumerate().map(|(i, leaf)| (leaf.id, Some(i))));
        let mut by_path: HashMap<_, _> = left_out.iter().flat_map(|variable| &variable.paths).map(|path| (path.clone(), None)).collect();
        for (i, leaf) in leaves.iter().enumerate() {
            by_path.extend(leaf.paths().map(|path| (path.to_string(), Some(i))));
        }
        let storages = leaves.iter().map(|leaf| leaf.addresses.storage).collect();
        StateTree { leaves, left_out, by_id, by_path, storages, shown: OnceLock::new(), tickets: Tickets::default() }
    }

    /// The leaves in the order of their paths.
    pub fn leaves(&self) -> impl ExactSizeIterator<Item = &Leaf> {
        self.leaves.iter()
    }

    /// The leaf of the parameter with this path (any of its paths, if it has several).
    pub fn leaf(&self, path: &str) -> Option<&Leaf> {
        self.by_path.get(path).copied().flatten().map(|i| &self.leaves[i])
    }

    /// How many leaves there are.
    pub fn len(&self) -> usize {
        self.leaves.len()
    }

    /// Whether there are no leaves. `setup` makes no such tree, unless every parameter was left out.
    pub fn is_empty(&self) -> bool {
        self.leaves.is_empty()
    }

    /// How many numbers the parameters of all leaves have together.
    pub fn elements(&self) -> usize {
        self.leaves.iter().map(|leaf| leaf.shape.elem_count()).sum()
    }

    /// The bytes that all state tensors take on their devices.
    pub fn bytes(&self) -> usize {
        self.leaves.iter().map(Leaf::bytes).sum()
    }

    /// Sets the learning rate of every leaf.
    ///
    /// # Errors
    /// As [`StateTree::adjust_field`].
    pub fn adjust(&mut self, eta: f64) -> Result<()> {
        self.all().adjust(eta)
    }

    /// Sets a hyper-parameter of every leaf that has it, through chains and wrappers.
    ///
    /// # Errors
    /// If no leaf has a field of that name, the value is of the wrong type or out of range, or the field decides the layout of the state.
    /// Nothing changes then.
    pub fn adjust_field(&mut self, field: &str, value: impl Into<FieldValue>) -> Result<()> {
        self.all().adjust_field(field, value)
    }

    /// All leaves.
    pub fn all(&mut self) -> Selection<'_> {
        Selection::new(self.leaves.iter_mut().collect())
    }

    /// The leaf at `path` and those below it: `encoder` selects `encoder.0.weight`, but not `encoder2.weight`.
    ///
    /// # Errors
    /// If there is none.
    pub fn at(&mut self, path: &str) -> Result<Selection<'_>> {
        self.select(|leaf| leaf.paths().any(|name| below(name, path).is_some()), || selected_path(path))
    }

    /// The leaves for which `choose` holds.
    ///
    /// # Errors
    /// If there is none.
    ///
    /// ```
    /// # use candle_core::{DType, Device, Var};
    /// # use optimisers::{Adam, setup};
    /// # let model = std::collections::BTreeMap::from([("norm.bias", Var::zeros(2, DType::F32, &Device::Cpu)?)]);
    /// # let mut state = setup(Adam::new(1e-3), &model)?;
    /// state.select_where(|leaf| leaf.path().ends_with("bias"))?.adjust(1e-4)?;
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn select_where(&mut self, choose: impl Fn(&Leaf) -> bool) -> Result<Selection<'_>> {
        self.select(choose, || "the predicate".to_string())
    }

    fn select(&mut self, choose: impl Fn(&Leaf) -> bool, what: impl Fn() -> String) -> Result<Selection<'_>> {
        if !self.leaves.iter().any(&choose) {
            return Err(Error::EmptySelection { selection: what(), available: self.listed() });
        }
        Ok(Selection::new(self.leaves.iter_mut().filter(|leaf| choose(leaf)).collect()))
    }

    /// Some paths, for errors.
    pub(crate) fn listed(&self) -> Vec<String> {
        listed(self.leaves.iter().map(Leaf::path))
    }

    /// Whether a gradient may have this name.
    pub(crate) fn knows(&self, path: &str) -> bool {
        self.by_path.contains_key(path)
    }

    /// The model's variables in the order of the leaves.
    ///
    /// # Errors
    /// If model and state do not belong together.
    pub(crate) fn parameters<M: Model + ?Sized>(&self, model: &M) -> Result<Vec<Tensor>> {
        let mut found: Vec<Option<Tensor>> = vec![None; self.leaves.len()];
        let mut unknown = None;
        // A look-up of thousands of variables is slow, so each is first compared with the one that was here the last time.
        let before = self.shown.get().map_or(&[][..], Vec::as_slice);
        before.iter().take(AHEAD).for_each(|shown| prefetch_line(shown.address));
        let mut shown = Vec::with_capacity(if before.is_empty() { self.leaves.len() } else { 0 });
        let mut place = 0;
        model.visit(&mut Visitor::new(&mut |path, tensor| {
            if !is_trainable(tensor) {
                return;
            }
            let expected = before.get(place);
            before.get(place + AHEAD).into_iter().for_each(|next| prefetch_line(next.address));
            let leaf = match expected {
                Some(shown) if shown.id == tensor.id() => Some(Some(shown.leaf)),
                _ => self.by_id.get(&tensor.id()).copied(),
            };
            match leaf {
                Some(Some(leaf)) => {
                    found[leaf] = Some(tensor.clone());
                    place += 1;
                    if before.is_empty() {
                        shown.push(Shown { id: tensor.id(), leaf, address: std::ptr::from_ref(&**tensor).addr() });
                    }
                }
                Some(None) => {}
                None if unknown.is_none() => unknown = Some(path.to_string()),
                None => {}
            }
        }));
        if before.is_empty() {
            let _ = self.shown.set(shown);
        }
        if let Some(path) = unknown {
            return Err(Error::UnknownParameter { path });
        }
        let missing = |leaf: &Leaf| Error::MissingParameter { path: leaf.path().to_string() };
        self.leaves.iter().zip(found).map(|(leaf, tensor)| tensor.ok_or_else(|| missing(leaf))).collect()
    }
}

impl Clone for StateTree {
    /// A copy with storage of its own.
    ///
    /// # Panics
    /// If a device has no memory left; [`StateTree::try_clone`] returns the error.
    fn clone(&self) -> Self {
        self.try_clone().unwrap_or_else(|error| panic!("cannot copy the optimiser state: {error}"))
    }
}

/// What remains of `name` after `path`, if it is at that path or below: empty, or beginning with a dot (or all of it, for the empty path).
fn below<'n>(name: &'n str, path: &str) -> Option<&'n str> {
    name.strip_prefix(path).filter(|rest| path.is_empty() || rest.is_empty() || rest.starts_with('.'))
}

/// A path in words, for errors.
fn selected_path(path: &str) -> String {
    format!("the path {path:?}")
}

/// Whether `setup` makes a leaf of a tensor.
pub(crate) fn is_trainable(tensor: &Tensor) -> bool {
    tensor.is_variable() && tensor.dtype().is_float()
}
