//! The parameters of a model, in the order of the leaves.

use super::{Leaf, OtherPath, StateTree, is_trainable};
use crate::error::{Error, ErrorKind, Result};
use crate::model::lent::{Lend, Lent};
use crate::model::{Model, TensorReceiver, Visitor};
use crate::tensors::{Tensor, TensorId};

/// A visit of a model that finds the variable of each leaf.
struct ParameterSearch<'s, 'm> {
    state: &'s StateTree,
    /// By the index of the leaf.
    parameters: Vec<Option<Lent<'m>>>,
    /// The first path of the model that is not in the state.
    unknown_path: Option<String>,
    /// The variables in the order of an earlier visit, because thousands of look-ups are slow.
    expected: std::slice::Iter<'s, (TensorId, usize)>,
    /// The order of this visit, if no earlier order is known.
    visited: Option<Vec<(TensorId, usize)>>,
}

impl<'m> ParameterSearch<'_, 'm> {
    fn add(&mut self, leaf: Option<Option<usize>>, path: &str, x: Lent<'m>) {
        match leaf {
            Some(Some(leaf)) => self.parameters[leaf] = Some(x),
            Some(None) => {}
            None if self.unknown_path.is_none() => self.unknown_path = Some(path.to_string()),
            None => {}
        }
    }
}

impl<'m> TensorReceiver<'m> for ParameterSearch<'_, 'm> {
    fn tensor(&mut self, path: &str, tensor: &Tensor) {
        if !is_trainable(tensor) {
            return;
        }
        let leaf = match self.expected.as_slice().first() {
            Some((id, leaf)) if *id == tensor.id() => Some(Some(*leaf)),
            _ => self.state.leaf_index_of_tensor(tensor, path),
        };
        if let Some(Some(leaf)) = leaf {
            self.expected.next();
            self.visited
                .iter_mut()
                .for_each(|visited| visited.push((tensor.id(), leaf)));
        }
        self.add(leaf, path, Lent::Tensor(tensor.clone()));
    }

    fn lent(&mut self, path: &str, lender: &'m dyn Lend) {
        self.add(self.state.leaf_index(path), path, Lent::new(lender));
    }
}

impl StateTree {
    /// The model's parameters in the order of the leaves.
    ///
    /// # Errors
    /// If model and state do not belong together.
    pub(crate) fn parameters<'m, M: Model + ?Sized>(&self, model: &'m M) -> Result<Vec<Lent<'m>>> {
        self.check_leaves()?;
        // The cache is for this search, for gradients by path, and for a streamed step, which takes the
        // leaves.
        self.by_path();
        let earlier_visit = self.visited.get().map_or(&[][..], Vec::as_slice);
        let mut search = ParameterSearch {
            state: self,
            parameters: vec![None; self.leaves.len()],
            unknown_path: None,
            expected: earlier_visit.iter(),
            visited: earlier_visit
                .is_empty()
                .then(|| Vec::with_capacity(self.leaves.len())),
        };
        model.visit(&mut Visitor::with_receiver(&mut search));
        let ParameterSearch {
            parameters,
            unknown_path,
            visited,
            ..
        } = search;
        // The order is kept only if all variables are tensors, because other memory has no id to compare in
        // the next visit.
        if let Some(visited) = visited
            && visited.len() >= self.leaves.len()
            && self.leaves.iter().all(|leaf| leaf.id.is_some())
        {
            let _ = self.visited.set(visited);
        }
        if let Some(path) = unknown_path {
            return Err(not_in_state_error(&path));
        }
        self.checked_parameters(parameters)
    }

    /// Refuses a leaf without a parameter, and a parameter of another shape or dtype.
    fn checked_parameters<'m>(&self, parameters: Vec<Option<Lent<'m>>>) -> Result<Vec<Lent<'m>>> {
        let parameter = |(leaf, x): (&Leaf, Option<Lent<'m>>)| {
            let x = x.ok_or_else(|| leaf.not_in_model_error())?;
            leaf.check_like(&*x)?;
            Ok(x)
        };
        self.leaves().zip(parameters).map(parameter).collect()
    }

    /// The index of a variable's leaf; `Some(None)` if the variable was left out, `None` if it is not in the
    /// state.
    pub(super) fn leaf_index_of_tensor(&self, x: &Tensor, path: &str) -> Option<Option<usize>> {
        let is_lent = |place: &Option<usize>| match place {
            Some(place) => self.leaves[*place].id.is_none(),
            None => matches!(self.other_paths.get(path), Some(OtherPath::LeftOut(None))),
        };
        let by_path = || self.leaf_index(path).filter(is_lent);
        self.by_id().get(&x.id()).copied().or_else(by_path)
    }

    /// [`StateTree::leaf_index_of_tensor`] for a parameter, which may be memory that is no tensor.
    pub(super) fn leaf_index_of_parameter(&self, x: &dyn Lend, path: &str) -> Option<Option<usize>> {
        x.tensor()
            .map_or_else(|| self.leaf_index(path), |x| self.leaf_index_of_tensor(x, path))
    }
}

impl Leaf {
    /// Refuses a parameter of another shape or dtype than this leaf was made for.
    pub(super) fn check_like(&self, x: &dyn Lend) -> Result<()> {
        let error = if x.shape() != self.shape() {
            Error::shape(IN_MODEL, x.shape(), self.shape())
        } else if x.dtype() != self.dtype {
            Error::dtype(IN_MODEL, x.dtype(), format_args!("{:?}", self.dtype))
        } else {
            return Ok(());
        };
        Err(error
            .at(&self.path)
            .with_remedy("pass the model that `setup` saw, or set up a state for this model"))
    }

    /// The error that the model has no variable for this leaf.
    pub(crate) fn not_in_model_error(&self) -> Error {
        let problem = "the state has this parameter, but the model does not";
        Error::new(ErrorKind::Model, problem)
            .at(&self.path)
            .with_remedy("pass the model that `setup` saw, or `remove` the leaf")
    }
}

/// The name of a leaf's variable in errors.
pub(super) const IN_MODEL: &str = "its variable in the model";

/// The error that a variable of the model is not in the state.
pub(crate) fn not_in_state_error(path: &str) -> Error {
    let problem = "it is not in this state: it belongs to another model, or was added after `setup`";
    Error::new(ErrorKind::Model, problem)
        .at(path)
        .with_remedy("set up a state for this model, or `add` the parameter")
}
