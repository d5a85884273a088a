//! The state of a parameter that gets other rows: entries follow the rows, stay, or start anew.
//!
//! Rows are indices in dimension 0. A state tensor with the parameter's rows follows them, and a tensor with
//! a single row for all rows stays as it is. If a tensor has any other shape, or is marked by
//! [`State::restarted_by_new_rows`], all own entries of its rule start anew, because they belong together. A
//! master follows in any case.

use super::transfer::Transfer;
use crate::error::Result;
use crate::numbers::elem_count;
use crate::rule::State;
use crate::tensors::{Device, Tensor, rows_of};

/// The new rows of a parameter, each with the old row that it comes from.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RowSources<'r> {
    /// For each new row the index of its old row, or `None` for an added row.
    pub(crate) rows: &'r [Option<usize>],
    /// The old shape of the parameter.
    pub(crate) before: &'r [usize],
    /// The new shape of the parameter.
    pub(crate) after: &'r [usize],
}

/// What becomes of a state tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Fate {
    /// The tensor has the parameter's rows, which are gathered.
    Follows,
    /// The tensor has no rows, or no row moves.
    Stays,
    /// The tensor depends on rows in another way, so its rule starts anew.
    Anew,
}

impl RowSources<'_> {
    /// Whether all rows are where they were.
    fn is_identity(&self) -> bool {
        self.before == self.after && self.rows.iter().enumerate().all(|(row, old)| *old == Some(row))
    }

    fn fate(&self, old: &[usize], new: &[usize]) -> Fate {
        // Whether each dimension of the tensor is the parameter's, or 1.
        let lies_along = |tensor: &[usize], x: &[usize]| {
            tensor.len() <= x.len()
                && tensor
                    .iter()
                    .zip(x)
                    .all(|(length, of_x)| *length == 1 || length == of_x)
        };
        match (old, new) {
            // If no row moves, or the tensor has no elements, a tensor of any shape stays.
            _ if old == new && (self.is_identity() || elem_count(old) == 0) => Fate::Stays,
            _ if !lies_along(old, self.before) || !lies_along(new, self.after) => Fate::Anew,
            ([old_rows, old_rest @ ..], [new_rows, new_rest @ ..])
                if *old_rows == self.before[0] && *new_rows == self.after[0] && old_rest == new_rest =>
            {
                Fate::Follows
            }
            _ if old == new => Fate::Stays,
            _ => Fate::Anew,
        }
    }

    /// The rows of `old` in their new places. `start` makes the tensor that has the values of added rows.
    fn gather(
        &self,
        old: &Tensor,
        start: impl FnOnce() -> crate::tensors::Result<Tensor>,
    ) -> crate::tensors::Result<Tensor> {
        // An added row is row 0 until `start` overwrites it below. There is a row 0: see `any_stays`.
        let rows = self.rows.iter().map(|row| row.unwrap_or(0)).collect();
        let gathered = rows_of(&old.to_device(&Device::Cpu)?, rows)?;
        if self.rows.iter().all(Option::is_some) {
            return Ok(gathered);
        }
        let (start_values, mut first_row) = (start()?.to_device(&Device::Cpu)?, 0);
        for run in self.rows.chunk_by(|a, b| a.is_some() == b.is_some()) {
            if run[0].is_none() {
                let added = start_values.narrow(0, first_row, run.len())?.contiguous()?;
                gathered.slice_set(&added, 0, first_row)?;
            }
            first_row += run.len();
        }
        Ok(gathered)
    }

    /// Whether an old row goes into a tensor of this shape.
    fn any_stays(&self, tensor: &[usize]) -> bool {
        elem_count(tensor) > 0 && self.rows.iter().any(Option::is_some)
    }
}

impl State {
    /// Lets the rule start anew when the parameter gets [other rows](crate::StateTree::resize_rows).
    /// [`setup`](crate::setup) refuses a name that no entry has.
    ///
    /// This is for an entry `name` whose shape looks like the parameter's rows but has another meaning, such
    /// as the square statistics of a preconditioner. A tensor needs no mark if one of its dimensions is
    /// neither 1 nor the parameter's dimension at the same position.
    ///
    /// ```
    /// use candle_core::{Device, Tensor};
    /// use optimisers::{Parameter, State};
    ///
    /// fn init(x: Parameter<'_>) -> optimisers::Result<State> {
    ///     let rows = x.shape()[0];
    ///     let products = Tensor::zeros((rows, rows), x.dtype().into(), x.device())?;
    ///     Ok(State::empty().with_tensor("products", &products)?.restarted_by_new_rows("products"))
    /// }
    /// # init(Parameter::from(&Tensor::ones((2, 2), candle_core::DType::F32, &Device::Cpu)?))?;
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn restarted_by_new_rows(mut self, name: &'static str) -> Self {
        self.traits_mut(name).restarts_with_rows = true;
        self
    }

    /// Takes over entries of `old`, the state for the old rows, into this fresh state for the new rows.
    pub(crate) fn take_rows(&mut self, old: &State, sources: RowSources<'_>) -> Result<Transfer> {
        let mut transfer = Transfer::default();
        self.take_rows_from("", old, sources, &mut transfer)?;
        Ok(transfer)
    }

    fn take_rows_from(
        &mut self,
        prefix: &str,
        old: &State,
        sources: RowSources<'_>,
        transfer: &mut Transfer,
    ) -> Result<()> {
        let keeps_own_entries = self.own_entries_go_on(old, sources);
        let mut taken_over: Vec<&str> = Vec::new();
        if let (Some(new), Some(old)) = (&mut self.master, &old.master)
            && sources.any_stays(new.shape())
        {
            let rows = sources.gather(&old.tensor()?, || new.tensor())?;
            new.set(&rows)?;
            taken_over.push("master");
        }
        if keeps_own_entries {
            taken_over.extend(self.take_entries(old, |_, new, old| {
                match sources.fate(old.shape(), new.shape()) {
                    Fate::Stays => old.tensor().map(Some),
                    Fate::Follows if sources.any_stays(new.shape()) => {
                        sources.gather(&old.tensor()?, || new.tensor()).map(Some)
                    }
                    Fate::Follows | Fate::Anew => Ok(None),
                }
            })?);
        }
        for name in self.own_names() {
            let list = if taken_over.contains(&name) {
                &mut transfer.kept
            } else {
                &mut transfer.fresh
            };
            list.push(format!("{prefix}{name}"));
        }
        for (new, old) in self.children.iter_mut().zip(&old.children) {
            let prefix = new.prefix(prefix);
            new.state.take_rows_from(&prefix, &old.state, sources, transfer)?;
        }
        Ok(())
    }

    /// Whether own entries go on. If one tensor starts anew, all entries do, because they belong together.
    fn own_entries_go_on(&self, old: &State, sources: RowSources<'_>) -> bool {
        let restarts_with_rows = self.traits.iter().any(|(_, traits)| traits.restarts_with_rows);
        let mut tensors = self.tensors.iter().zip(&old.tensors);
        self.own_names().eq(old.own_names())
            && (!restarts_with_rows || sources.is_identity())
            && tensors.all(|((_, new), (_, old))| sources.fate(old.shape(), new.shape()) != Fate::Anew)
    }
}
