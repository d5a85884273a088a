use std::collections::HashSet;
use std::sync::Arc;

use super::Leaf;
use super::once::Once;
use crate::error::{Error, Result};
use crate::rule::{FieldValue, Optimiser, available};

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

    /// Sets a hyper-parameter of every leaf that has it, through chains and wrappers; a name that several members have is set in all, one with a
    /// place before it (`1.eta`) in that member. A whole number will do for a real one.
    ///
    /// # Errors
    /// If no leaf has a field of that name, the value is of the wrong type or out of range, or the field decides the layout of the state.
    /// Nothing changes then.
    pub fn adjust_field(&mut self, field: &str, value: impl Into<FieldValue>) -> Result<()> {
        self.adjust_fields([(field, value.into())])
    }

    /// Sets several hyper-parameters in their order, all or none. Ranges are checked when all are set.
    ///
    /// # Errors
    /// As [`Selection::adjust_field`], for any of them.
    pub fn adjust_fields<'f>(&mut self, values: impl IntoIterator<Item = (&'f str, FieldValue)>) -> Result<()> {
        let values: Vec<_> = values.into_iter().collect();
        let (adjusted, reached) = adjusted(self.leaves(), &[&values], |_| Some(0))?;
        if let Some(((name, _), _)) = values.iter().zip(&reached[0]).find(|(_, reached)| !**reached) {
            return Err(Error::UnknownField { name: name.to_string(), available: available_in(self.leaves(), name) });
        }
        commit(self.leaves.iter_mut().map(|leaf| &mut **leaf), adjusted);
        Ok(())
    }
}

/// The hyper-parameters in reach, where one of this name is missing.
pub(crate) fn available_in<'l>(leaves: impl Iterator<Item = &'l Leaf>, name: &str) -> Vec<String> {
    let mut seen = HashSet::new();
    let mut all: Vec<String> = leaves.flat_map(|leaf| available(&*leaf.optimiser, name)).collect();
    all.retain(|name| seen.insert(name.clone()));
    all
}

/// Fields that are set together.
pub(crate) type Setting<'f> = [(&'f str, FieldValue)];

/// The optimisers that leaves get; `None` for those that keep theirs.
pub(crate) type Adjusted = Vec<Option<Arc<dyn Optimiser>>>;

/// The optimisers with other fields: for each leaf with those of the setting that `which` says. Also which fields of each setting were found at
/// all. Leaves that share an optimiser and have the same setting go on sharing one.
///
/// # Errors
/// If a value is of the wrong type or out of range, or its field decides the layout of the state.
pub(crate) fn adjusted<'l>(
    leaves: impl Iterator<Item = &'l Leaf>,
    settings: &[&Setting<'_>],
    which: impl Fn(usize) -> Option<usize>,
) -> Result<(Adjusted, Vec<Vec<bool>>)> {
    let mut reached: Vec<Vec<bool>> = settings.iter().map(|setting| vec![false; setting.len()]).collect();
    let mut shared = Once::default();
    let mut adjust = |(i, leaf): (usize, &Leaf)| {
        let Some(setting) = which(i) else { return Ok(None) };
        let mut make = || with_fields(leaf, settings[setting], &mut reached[setting]);
        let optimiser = match Arc::strong_count(&leaf.optimiser) {
            1 => make(),
            _ => shared.get((Arc::as_ptr(&leaf.optimiser).cast::<()>(), setting), make),
        };
        optimiser.map(Some).map_err(|error| error.at(&leaf.path))
    };
    let optimisers = leaves.enumerate().map(&mut adjust).collect::<Result<_>>()?;
    Ok((optimisers, reached))
}

/// The leaf's optimiser with these values; marks which were found.
fn with_fields(leaf: &Leaf, setting: &Setting<'_>, reached: &mut [bool]) -> Result<Arc<dyn Optimiser>> {
    let mut optimiser = dyn_clone::clone_box(&*leaf.optimiser);
    for ((field, value), reached) in setting.iter().zip(reached) {
        *reached |= optimiser.set_field(field, *value)?;
        if !leaf.has_state_for(&*optimiser, *value)? {
            let available = available(&*optimiser, field).into_iter().filter(|name| name != field).collect();
            return Err(Error::FixedField { rule: optimiser.rule_name(), field: field.to_string(), available });
        }
    }
    optimiser.check()?;
    Ok(Arc::from(optimiser))
}

/// Gives leaves their new optimisers.
pub(crate) fn commit<'l>(leaves: impl IntoIterator<Item = &'l mut Leaf>, adjusted: Adjusted) {
    for (leaf, optimiser) in leaves.into_iter().zip(adjusted) {
        if let Some(optimiser) = optimiser {
            leaf.optimiser = optimiser;
        }
    }
}
