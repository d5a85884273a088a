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
        for leaf in self.leaves {
            leaf.frozen = false;
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
