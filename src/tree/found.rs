//! The parameters of a model, in the order of the leaves.

use candle_core::Tensor;

use super::{Leaf, StateTree, Twins, is_trainable};
use crate::error::{Error, MasterError, Result, SliceError};
use crate::lent::LentParameters;
use crate::model::{Model, show_pairs};
use crate::world::StateWorld;

impl StateTree {
    /// The model's variables in the order of the leaves.
    ///
    /// # Errors
    /// If model and state do not belong together.
    pub(crate) fn parameters<M: Model + ?Sized>(&self, model: &M) -> Result<Vec<Tensor>> {
        Ok(self.pairs(model)?.0)
    }

    /// The model's variables in the order of the leaves, and the twins of those that have one.
    ///
    /// # Errors
    /// As [`StateTree::parameters`], and if a variable has two.
    pub(crate) fn pairs<M: Model + ?Sized>(&self, model: &M) -> Result<(Vec<Tensor>, Twins)> {
        let (mut twins, mut with_two) = (Twins::default(), Vec::new());
        let mut see_twin = |precise: &Tensor, low: &Tensor| {
            if !twins.insert(precise, low) {
                with_two.push(precise.id());
            }
        };
        let mut found: Vec<Option<Tensor>> = vec![None; self.leaves.len()];
        let mut unknown = None;
        // A look-up of thousands of variables is slow, so each is first compared with the one that was here the last time.
        let before = self.visited.get().map_or(&[][..], Vec::as_slice);
        let mut visited = Vec::with_capacity(if before.is_empty() { self.leaves.len() } else { 0 });
        let mut expected = before.iter();
        let mut see = |path: &str, tensor: &Tensor| {
            if !is_trainable(tensor) {
                return;
            }
            let leaf = match expected.as_slice().first() {
                Some((id, leaf)) if *id == tensor.id() => Some(Some(*leaf)),
                _ => self.known(tensor, path),
            };
            match leaf {
                Some(Some(leaf)) => {
                    found[leaf] = Some(tensor.clone());
                    expected.next();
                    if before.is_empty() {
                        visited.push((tensor.id(), leaf));
                    }
                }
                Some(None) => {}
                None if unknown.is_none() => unknown = Some(path.to_string()),
                None => {}
            }
        };
        show_pairs(model, &mut see, &mut see_twin)?;
        if before.is_empty() && !self.of_memory {
            let _ = self.visited.set(visited);
        }
        if let Some(path) = unknown {
            return Err(Error::UnknownParameter { path });
        }
        let parameters = self.in_order(found)?;
        match self.leaves.iter().zip(&parameters).find(|(_, x)| with_two.contains(&x.id())) {
            Some((leaf, _)) => Err(MasterError::TwoTwins { path: leaf.path.clone() }.into()),
            None => Ok((parameters, twins)),
        }
    }

    /// The parameters of a model in memory that a caller owns, in the order of the leaves.
    pub(crate) fn lent_parameters(&self, lent: &LentParameters<'_>) -> Result<Vec<Tensor>> {
        if StateWorld::several(self.world.as_ref()).is_some() {
            return Err(SliceError::Ranks.into());
        }
        let found: Vec<_> = self.leaves.iter().map(|leaf| leaf.paths().find_map(|path| lent.tensor(path)).cloned()).collect();
        if found.iter().flatten().count() < lent.len()
            && let Some(path) = lent.paths().find(|path| !self.by_path.contains_key(*path))
        {
            return Err(Error::UnknownParameter { path: path.to_string() });
        }
        self.in_order(found)
    }

    /// The variables that were found for the leaves, if they are all there, and those of a model that comes and goes fit.
    fn in_order(&self, found: Vec<Option<Tensor>>) -> Result<Vec<Tensor>> {
        let parameter = |(leaf, x): (&Leaf, Option<Tensor>)| {
            let x = x.ok_or_else(|| Error::MissingParameter { path: leaf.path().to_string() })?;
            leaf.expect_like(&x)?;
            Ok(x)
        };
        self.leaves.iter().zip(found).map(parameter).collect()
    }

    /// The leaf of a variable, if the state knows it; none for one that was left out.
    pub(crate) fn known(&self, x: &Tensor, path: &str) -> Option<Option<usize>> {
        self.by_id.get(&x.id()).or_else(|| self.by_path.get(path).filter(|_| self.of_memory)).copied()
    }
}

impl Leaf {
    /// Refuses a variable of another shape or dtype than this leaf was made for.
    pub(super) fn expect_like(&self, x: &Tensor) -> Result<()> {
        if (x.shape(), x.dtype()) == (&self.shape, self.dtype) {
            return Ok(());
        }
        let (expected, got) = ((self.shape.clone(), self.dtype), (x.shape().clone(), x.dtype()));
        Err(Error::OtherParameter { path: self.path.clone(), expected, got })
    }
}
