//! The model in a checkpoint: the sources of the variables' new values, and the comparison of saved
//! parameters with their saved masters.

use std::collections::{BTreeMap, HashSet};
use std::ops::Range;

use super::file::CheckpointFile;
use super::layout::entry_name;
use super::record::LeafRecord;
use super::restoration::{EntryPart, extra_error, missing_error};
use crate::error::{Error, ErrorKind, Result};
use crate::files::tensor_file::read_error;
use crate::model::lent::{Lent, check_parameter};
use crate::numbers::ranges_to_read;
use crate::rule::{Difference, Extent, difference};
use crate::tensors::Tensor;
use crate::tree::{Leaf, StateTree};

/// The number of saved parameters that the next update compares with the model.
const COMPARED_PARAMETERS: usize = 16;
/// The number of elements of each of these parameters that are compared.
const COMPARED_ELEMENTS: usize = 64;

impl CheckpointFile {
    /// The source of each variable, checked.
    pub(super) fn check_model(
        &self,
        state: &StateTree,
        variables: &BTreeMap<String, Lent<'_>>,
    ) -> Result<Vec<EntryPart>> {
        let saved_paths = self.record.model.as_ref().ok_or_else(|| {
            Error::new(ErrorKind::File, "the file has no model, only optimiser state").with_remedy(
                "save the checkpoint with `Checkpoint::model`, or load the parameters from elsewhere and use \
                 `restore`",
            )
        })?;
        let is_extra = |path: &&String| !self.is_excepted(state, path) && !variables.contains_key(*path);
        if let Some(path) = saved_paths.iter().find(is_extra) {
            return Err(extra_error(path, "model"));
        }
        let known_paths: HashSet<&String> = saved_paths.iter().collect();
        let source = |(path, variable): (&String, &Lent<'_>)| {
            if !known_paths.contains(path) {
                return Err(missing_error(path, saved_paths.iter()));
            }
            check_parameter("variable", &**variable, true).map_err(|error| error.at(path))?;
            let entry = if self.convert {
                self.precise_entry(path)?
            } else {
                path.to_string()
            };
            let source = EntryPart {
                entry,
                elements: 0..variable.elem_count(),
            };
            self.check_entry(&source, Some(variable.shape()), variable.dtype(), None)
                .map_err(|error| error.at(path))?;
            Ok(source)
        };
        variables.iter().map(source).collect()
    }

    /// Refuses a saved parameter that is not its saved master rounded, unless the file is converted. Each
    /// rank compares its part.
    pub(super) fn check_masters(&self, state: &StateTree) -> Result<()> {
        // Leaves that have had no gradient are not compared, because until the first gradient a program may
        // move the parameter.
        let leaves = self
            .record
            .leaves
            .iter()
            .filter(|(_, leaf)| !self.convert && !leaf.is_unreached());
        for (path, leaf) in leaves.filter(|(path, _)| !self.is_excepted(state, path)) {
            let part = state.leaf(path).map_or(0..0, Leaf::part);
            if let Some(difference) = self.stale_element(path, leaf, part)? {
                let problem =
                    "it was changed outside of `update` before it was saved: its value in the file is";
                let remedy = "use `restore`, load the parameters separately, and call `refresh_masters` or \
                              `Update::keep_masters`";
                let expected = format_args!("that of its master, {}", difference.master);
                return Err(difference.error(problem, expected).with_remedy(remedy).at(path));
            }
        }
        Ok(())
    }

    /// The first element of `part` in which a parameter in the file is not its master rounded.
    fn stale_element(&self, path: &str, leaf: &LeafRecord, part: Range<usize>) -> Result<Option<Difference>> {
        let Some(name) = self.record.tensors(leaf).0 else {
            return Ok(None);
        };
        let (Some(master), Some(parameter)) = (self.entry(&entry_name(path, name)), self.entry(path)) else {
            return Ok(None);
        };
        [&master, &parameter]
            .into_iter()
            .try_for_each(|entry| crate::tensors::dtype_from_file(entry.dtype).map(drop))?;
        // Only the common elements are compared, because other checks report a difference of lengths.
        let elements = master.elements().min(parameter.elements());
        for range in ranges_to_read(part.start..part.end.min(elements)) {
            let start = range.start;
            let master_part = master.part(range.clone()).map_err(read_error)?;
            let parameter_part = parameter.part(range).map_err(read_error)?;
            if let Some(first) = difference(&master_part, &parameter_part, Extent::Whole)? {
                return Ok(Some(Difference {
                    index: start + first.index,
                    ..first
                }));
            }
        }
        Ok(None)
    }

    /// The entry with the most precise copy of a parameter: its master, if there is one.
    ///
    /// If the program moved the parameter before the first gradient, the master is out of date, and a
    /// conversion takes the parameter itself.
    pub(super) fn precise_entry(&self, path: &str) -> Result<String> {
        let mut leaf = self.record.leaves.get(path);
        if let Some(unreached) = leaf.filter(|leaf| self.convert && leaf.is_unreached()) {
            // Each rank compares the whole parameter and not its part, because all have to choose the same
            // entry.
            match self.stale_element(path, unreached, 0..usize::MAX) {
                Err(error) if error.kind() == ErrorKind::Io => return Err(error),
                Ok(Some(_)) => leaf = None,
                _ => {}
            }
        }
        let master = leaf.and_then(|leaf| self.record.tensors(leaf).0);
        Ok(master.map_or_else(|| path.to_string(), |master| entry_name(path, master)))
    }

    /// The first elements of some parameters in the file, which the next update compares with the model.
    ///
    /// Parameters that have made no step are left out, because such a parameter may be a running statistic,
    /// which a forward pass moves.
    pub(super) fn saved_starts(&self, state: &StateTree) -> Result<Vec<(String, Tensor)>> {
        let has_moved = |path: &String| self.record.leaves.get(path).is_some_and(|leaf| leaf.steps > 0);
        let is_restored = |path: &&String| !self.convert && has_moved(path) && !self.is_excepted(state, path);
        let paths: Vec<&String> = self.record.model.iter().flatten().filter(is_restored).collect();
        let compared_paths = paths
            .iter()
            .step_by(paths.len().div_ceil(COMPARED_PARAMETERS).max(1));
        let first_elements = |path: &&String| {
            let entry = self.entry(path).filter(|_| state.leaf(path).is_some())?;
            let elements = entry.part(0..entry.elements().min(COMPARED_ELEMENTS));
            Some(
                elements
                    .map(|elements| (path.to_string(), elements))
                    .map_err(read_error),
            )
        };
        compared_paths.filter_map(first_elements).collect()
    }
}
