//! Parameters that get other rows: a larger vocabulary, pruned channels, points that come and go.
//!
//! Fresh state is made for the new shape, and takes over the rows that stay (`State::take_rows`). Then
//! masters and copies are compared with the new variable, because the caller has filled the variable and may
//! have used other rows than those in `rows`. All states are made and compared before the first leaf changes.

use std::collections::{HashMap, HashSet};

use super::leaf::{VariablePlace, check_count, fresh_state};
use super::parameters::IN_MODEL;
use super::{Leaf, StateChange, StateTree, is_trainable};
use crate::error::{Error, ErrorKind, Result};
use crate::model::lent::{Lend, Lent};
use crate::model::{Identity, Model, identity, select_variables};
use crate::numbers::Shape;
use crate::rule::{Extent, RowSources, State, Transfer};
use crate::tensors::Tensor;

impl StateTree {
    /// Gives the parameters at `path` and below other rows, and their state the same rows.
    ///
    /// This method is for a vocabulary that grows, channels that are pruned, or points of a scene that are
    /// split and removed (3D Gaussian splatting). `rows` has an entry for each row of the new variable: the
    /// index of the old row whose state this row gets, or `None` for a new row. An old row may move, be
    /// repeated, or be gone.
    ///
    /// `model` has the new variables under the paths of the old ones, and may have other variables, too. A
    /// new variable differs from the old one in dimension 0 only. The caller fills the new variables, and
    /// rows that stay need their old numbers. Returns an entry for each parameter.
    ///
    /// # What stays
    /// State with a number for each element or each row keeps the rows that stay, bit for bit: moments, sums
    /// of [open windows](crate::AccumGrad), averages, slow weights, masters. New rows start as in
    /// [`setup`](crate::setup): moments at zero, masters and copies as the new rows of the parameter. Tensors
    /// whose first dimension is 1, such as [`Adafactor`](crate::Adafactor)'s `column_v`, stay as they are,
    /// and so do counters, numbers, hyper-parameters and whether the leaf is frozen. All state of a rule
    /// starts anew if the rule has a tensor of any other shape, or a tensor that is [marked to
    /// restart](crate::State::restarted_by_new_rows).
    ///
    /// In [8 bits](crate::Q8) a record of 128 elements has one scale. If other elements come into a record,
    /// its numbers are rounded anew. A row whose length is a multiple of 128 keeps its bits wherever it goes.
    ///
    /// # The first steps of new rows
    /// Bias corrections have one step count for all rows, so a new row starts with longer steps than in a new
    /// training. With Adam the steps are at most (1 - β₁) / √(1 - β₂) times η long, 3.2 times for its
    /// defaults; with [`RMSProp`](crate::RMSProp) 1 / √(1 - α) times. In the code of 3D Gaussian splatting,
    /// which extends moments by zeros, the first steps are as long. In a mean over all steps
    /// ([`UniformAverage`](crate::UniformAverage), [`ScheduleFree`](crate::ScheduleFree)) the first numbers
    /// of a new row have the weight of all steps before. Random numbers ([`GradNoise`](crate::GradNoise),
    /// [`StochasticRounding`](crate::StochasticRounding)) belong to places of elements, not to rows.
    ///
    /// # Errors
    /// If nothing is at `path`; if `model` lacks a parameter there, or ties other parameters than the state;
    /// if a variable has another number of rows than `rows`, or else another shape, dtype or device than
    /// before; if `rows` has an index beyond the old parameter; if a row that stays is not its master
    /// rounded; if averages are in the model; if the state is [divided](crate::Setup::over) among several
    /// ranks (save a checkpoint, resize in one process, save again, and go on from the second checkpoint); if
    /// a device has no memory left. Nothing changes then.
    ///
    /// ```
    /// use candle_core::{DType, Device, Tensor, Var};
    /// use optimisers::{Adam, setup, update};
    ///
    /// let mut model = vec![Var::ones((2, 3), DType::F32, &Device::Cpu)?];
    /// let mut state = setup(Adam::new(1e-3), &model)?;
    /// update(&mut state, &model, &model[0].sqr()?.sum_all()?.backward()?)?;
    ///
    /// // The second row goes first, the first is gone, and two are new.
    /// let rows = [Some(1), None, None];
    /// let new = Tensor::cat(&[&model[0].narrow(0, 1, 1)?, &Tensor::ones((2, 3), DType::F32, &Device::Cpu)?], 0)?;
    /// model[0] = Var::from_tensor(&new)?;
    /// let resized = state.resize_rows("0", &model, &rows)?;
    /// assert_eq!(resized[0].kept, ["m", "v", "t"]);
    /// let m = state.leaf("0").expect("the leaf").tensor("m")?;
    /// assert_eq!(m.to_vec2::<f32>()?, [[0.2; 3], [0.0; 3], [0.0; 3]]);
    /// update(&mut state, &model, &model[0].sqr()?.sum_all()?.backward()?)?;
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn resize_rows<M: Model + ?Sized>(
        &mut self,
        path: &str,
        model: &M,
        rows: &[Option<usize>],
    ) -> Result<Vec<StateChange>> {
        self.check_whole("`resize_rows`")?;
        let places = self.leaf_indices_below(path);
        if places.is_empty() {
            return Err(self.no_leaf_error(Some(path)));
        }
        let paths: HashSet<&str> = places
            .iter()
            .flat_map(|&place| self.leaves[place].paths())
            .collect();
        let variables = select_variables(model, |path, x| {
            x.is_none_or(is_trainable) && paths.contains(path)
        })?;
        self.check_ties(&variables)?;
        let with_paths = variables.iter().flat_map(|variable| {
            variable
                .paths
                .iter()
                .map(move |path| (path.as_str(), &variable.x))
        });
        let by_path: HashMap<&str, &Lent<'_>> = with_paths.collect();
        let mut leaf_of: HashMap<Identity, usize> = HashMap::new();
        let with_variable = |&place: &usize| {
            let leaf = &self.leaves[place];
            let x = *leaf
                .paths()
                .find_map(|path| by_path.get(path))
                .ok_or_else(|| leaf.not_in_model_error())?;
            self.check_unshared(place, x, &mut leaf_of)?;
            Ok((leaf, x))
        };
        let leaves = places.iter().map(with_variable).collect::<Result<Vec<_>>>()?;
        let new_rows = leaves
            .into_iter()
            .map(|(leaf, x)| NewRows::new(leaf, &**x, rows))
            .collect::<Result<Vec<_>>>()?;
        let apply = |(place, new): (usize, NewRows)| {
            let leaf = &mut *self.leaves[place];
            self.targets.forget(leaf.written_storages());
            let change = new.apply(leaf);
            self.targets.add(leaf.written_storages());
            change
        };
        let changes: Vec<StateChange> = places.into_iter().zip(new_rows).map(apply).collect();
        // With other rows, a parameter no longer begins as in a restored file.
        self.saved_starts
            .retain(|(path, _)| changes.iter().all(|change| change.path != *path));
        self.drop_caches();
        Ok(changes)
    }

    /// Refuses a variable that also belongs to another parameter. `leaf_of` has the leaf of each variable
    /// that was checked before.
    fn check_unshared(
        &self,
        leaf: usize,
        x: &Lent<'_>,
        leaf_of: &mut HashMap<Identity, usize>,
    ) -> Result<()> {
        let id = x.tensor().map(Tensor::id);
        let place = id.and_then(|id| self.by_id().get(&id)).copied();
        let other = match (place, leaf_of.insert(identity(x), leaf)) {
            (_, Some(other)) => self.leaves[other].path.clone(),
            (Some(Some(other)), None) if other != leaf => self.leaves[other].path.clone(),
            (Some(None), None) => {
                let left_out = self.left_out.iter().find(|variable| variable.id == id);
                left_out
                    .and_then(|variable| variable.paths.first().cloned())
                    .unwrap_or_default()
            }
            _ => return Ok(()),
        };
        let path = &self.leaves[leaf].path;
        let problem = format!("{other:?} and {path:?} are two variables in this state and one in the model");
        Err(Error::new(ErrorKind::Model, problem)
            .at(path)
            .with_remedy("untie the two in the model, or `remove` one"))
    }
}

/// A leaf's variable with other rows, and the state for it.
struct NewRows {
    x: VariablePlace,
    shape: Shape,
    state: State,
    transfer: Transfer,
}

impl NewRows {
    fn new(leaf: &Leaf, x: &dyn Lend, rows: &[Option<usize>]) -> Result<Self> {
        leaf.check_parameter()?;
        leaf.check_rows(x, rows)?;
        check_count(x.elem_count(), x.device().is_cpu()).map_err(|error| error.at(&leaf.path))?;
        let with_path = |error: Error| error.at(&leaf.path);
        let mut state = fresh_state(&leaf.optimiser, x, x.elem_count()).map_err(with_path)?;
        let sources = RowSources {
            rows,
            before: leaf.shape.dims(),
            after: x.shape(),
        };
        let transfer = state.take_rows(&leaf.state, sources).map_err(with_path)?;
        // A leaf that no gradient has reached follows its variable, so the leaf is not compared.
        if !leaf.is_unreached() {
            leaf.check_unchanged(&state, x, Extent::Whole)
                .map_err(|error| row_error(error, x, rows))?;
        }
        Ok(NewRows {
            x: VariablePlace::new(x),
            shape: x.shape().into(),
            state,
            transfer,
        })
    }

    fn apply(self, leaf: &mut Leaf) -> StateChange {
        leaf.shape = self.shape;
        // The old parts are ranges of the old shape. No parts are needed, because `check_whole` refuses a
        // state that is divided among several ranks.
        leaf.parts = None;
        leaf.state = self.state;
        leaf.set_variable(self.x);
        let Transfer { kept, fresh, dropped } = self.transfer;
        StateChange {
            path: leaf.path.clone(),
            kept,
            fresh,
            dropped,
        }
    }
}

impl Leaf {
    /// Refuses a variable that is not this parameter with other rows, which `rows` lists.
    fn check_rows(&self, x: &dyn Lend, rows: &[Option<usize>]) -> Result<()> {
        let (Some((before, row)), [_, ..]) = (self.shape().split_first(), x.shape()) else {
            let problem = format!(
                "a single number has no rows, but the shape is {:?} in the state and {:?} in the model",
                self.shape,
                x.shape()
            );
            let error = Error::new(ErrorKind::Unsupported, problem).at(&self.path);
            return Err(error.with_remedy("`remove` the leaf and `add` it again"));
        };
        let expected = [&[rows.len()], row].concat();
        if x.shape() != expected {
            let remedy = format!(
                "change rows only, and give an entry for each row (there are {} entries)",
                rows.len()
            );
            return Err(Error::shape(IN_MODEL, x.shape(), expected)
                .at(&self.path)
                .with_remedy(remedy));
        }
        if x.dtype() != self.dtype {
            let error = Error::dtype(IN_MODEL, x.dtype(), format_args!("{:?}", self.dtype)).at(&self.path);
            return Err(error.with_remedy("resize it in its own dtype"));
        }
        if !x.device().same_device(&self.device) {
            let error = Error::device(IN_MODEL, x.device().location(), self.device.location()).at(&self.path);
            return Err(error.with_remedy("resize it where it is, and move the state by `rebind`"));
        }
        match rows
            .iter()
            .enumerate()
            .find_map(|(row, old)| old.filter(|old| old >= before).map(|old| (row, old)))
        {
            Some((row, old)) => {
                let error = Error::new(ErrorKind::Argument, format!("row {row} is to be the old row"))
                    .with_got(old)
                    .at(&self.path);
                Err(error
                    .with_expected(format_args!(
                        "one below {before}, because there were {before} rows"
                    ))
                    .with_remedy("pass `None` for a new row"))
            }
            None => Ok(()),
        }
    }
}

/// Turns an error about a changed element into an error about the element's row.
fn row_error(error: Error, x: &dyn Lend, rows: &[Option<usize>]) -> Error {
    let (ErrorKind::Changed, Some(index), Some(got), Some(expected)) =
        (error.kind(), error.element(), error.got(), error.expected())
    else {
        return error;
    };
    let row = index * rows.len() / x.elem_count().max(1);
    let old = rows.get(row).copied().flatten().unwrap_or(row);
    let remedy = "copy the row as it was, or pass `None` for it, which makes it a new one. \
                  `StateTree::set_masters` changes parameters afterwards";
    let changed = Error::new(
        ErrorKind::Changed,
        format!("row {row} is to be the old row {old}, but its value is"),
    )
    .with_got(got);
    changed
        .at_element(index)
        .with_expected(expected)
        .with_remedy(remedy)
        .at(error.path().unwrap_or_default())
}
