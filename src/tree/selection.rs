use std::sync::Arc;

use super::Leaf;
use crate::error::{Error, Result};
use crate::rule::{Adjust, FieldValue, Optimiser, names};

/// Some leaves of a [`StateTree`](crate::StateTree), to be adjusted, frozen or thawed together.
#[derive(Debug)]
pub struct Selection<'t> {
    pub(super) leaves: Vec<&'t mut Leaf>,
}

impl<'t> Selection<'t> {
    pub(super) fn new(leaves: Vec<&'t mut Leaf>) -> Self {
        Selection { leaves }
    }

    /// The selected leaves.
    pub fn leaves(&self) -> impl Iterator<Item = &Leaf> {
        self.leaves.iter().map(|leaf| &**leaf)
    }

    /// Updates pass these leaves over from now on: no state, no counter and no parameter moves.
    pub fn freeze(self) {
        for leaf in self.leaves {
            leaf.frozen = true;
        }
    }

    /// Updates move these leaves again, from the state they were frozen with.
    pub fn thaw(self) {
        for leaf in self.leaves.into_iter().filter(|leaf| leaf.frozen) {
            leaf.frozen = false;
            leaf.waiting.calls = 0;
        }
    }

    /// Declares that these leaves may be without a gradient, as experts are that no token was sent to: no warning speaks of them, and
    /// [`StateTree::require_all`](crate::StateTree::require_all) does not refuse them.
    ///
    /// ```
    /// use candle_core::{DType, Device, Var};
    /// use optimisers::{Descent, setup, update};
    ///
    /// let experts = [Var::ones(2, DType::F32, &Device::Cpu)?, Var::ones(2, DType::F32, &Device::Cpu)?];
    /// let mut state = setup(Descent::new(0.1), &experts)?;
    /// state.require_all();
    /// state.all().allow_missing();
    /// let outcome = update(&mut state, &experts, &experts[1].sqr()?.sum_all()?.backward()?)?;
    /// assert_eq!(outcome.missing, ["0"]);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn allow_missing(self) {
        for leaf in self.leaves {
            leaf.waiting.is_allowed = true;
        }
    }

    /// Takes [`allow_missing`](Selection::allow_missing) back.
    pub fn disallow_missing(self) {
        for leaf in self.leaves {
            leaf.waiting.is_allowed = false;
        }
    }

    /// Sets the learning rate.
    ///
    /// # Errors
    /// As [`Selection::adjust_field`].
    pub fn adjust(&mut self, eta: f64) -> Result<()> {
        self.adjust_field("eta", eta)
    }

    /// Sets a hyper-parameter of every leaf that has it, through chains and wrappers; a name that several members have is set in all.
    /// A whole number will do for a real one.
    ///
    /// # Errors
    /// If no leaf has a field of that name, the value is of the wrong type or out of range, or the field decides the layout of the state.
    /// Nothing changes then.
    pub fn adjust_field(&mut self, field: &str, value: impl Into<FieldValue>) -> Result<()> {
        let value = value.into();
        // Leaves that share an optimiser go on sharing it.
        let mut adjusted: Vec<(Arc<dyn Optimiser>, Arc<dyn Optimiser>)> = Vec::new();
        let mut found = false;
        for leaf in &self.leaves {
            if adjusted.iter().any(|(old, _)| Arc::ptr_eq(old, &leaf.optimiser)) {
                continue;
            }
            let mut optimiser = dyn_clone::clone_box(&*leaf.optimiser);
            found |= optimiser.set_field(field, value).map_err(|error| error.at(&leaf.path))?;
            optimiser.check().map_err(|error| error.at(&leaf.path))?;
            if !leaf.has_state_for(&*optimiser, value)? {
                let available = names(&*optimiser).into_iter().filter(|name| name != field).collect();
                return Err(Error::FixedField { rule: optimiser.rule_name(), field: field.to_string(), available }.at(&leaf.path));
            }
            adjusted.push((leaf.optimiser.clone(), Arc::from(optimiser)));
        }
        if !found {
            return Err(Error::UnknownField { name: field.to_string(), available: self.fields() });
        }
        for leaf in &mut self.leaves {
            if let Some((_, new)) = adjusted.iter().find(|(old, _)| Arc::ptr_eq(old, &leaf.optimiser)) {
                leaf.optimiser = new.clone();
            }
        }
        Ok(())
    }

    /// The names of all hyper-parameters in reach.
    fn fields(&self) -> Vec<String> {
        let mut all: Vec<String> = self.leaves.iter().flat_map(|leaf| names(&*leaf.optimiser)).collect();
        let mut seen = std::collections::HashSet::new();
        all.retain(|name| seen.insert(name.clone()));
        all
    }
}
