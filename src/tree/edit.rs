//! Adding, removing, renaming and rebinding leaves, as the model changes.
//!
//! Each edit checks everything and makes all new state before it changes a leaf, so that an error leaves the
//! state as it was. A program may edit each parameter of a large model by a call of its own, so edits change
//! the tree in place. Only `rebind` and a clone, which need all leaves anyway, make a new tree.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use super::choices::{ChoiceCache, ChosenOptimisers};
use super::leaf::{VariablePlace, check_count};
use super::{
    Leaf, LeftOut, OtherPath, StateTree, choose_optimisers, is_trainable, not_in_state_error, rest_below,
    values_aspect,
};
use crate::error::{Error, ErrorKind, Result};
use crate::model::cuts::is_running_statistic;
use crate::model::lent::Lent;
use crate::model::{Model, Variable, in_path_order, select_variables};
use crate::ranks::{Call, LeafParts};
use crate::rule::{Adjust, IntoOptimiser, Parameter, State};
use crate::tensors::Tensor;

impl StateTree {
    /// Makes leaves for the variables of `model` that are new to this state, and returns their paths.
    ///
    /// Other variables keep their leaves. New leaves get the [schedules](StateTree::schedule) that were given
    /// to all leaves.
    ///
    /// # Errors
    /// If a hyper-parameter is out of range, a new variable has a path of the state, or a schedule that is
    /// not relative would make different rates equal. Nothing changes then.
    ///
    /// ```
    /// use candle_core::{DType, Device, Var};
    /// use optimisers::{Adam, setup};
    ///
    /// let variable = || Var::zeros(2, DType::F32, &Device::Cpu);
    /// let mut model = vec![variable()?];
    /// let mut state = setup(Adam::new(1e-3), &model)?;
    /// model.push(variable()?);
    /// assert_eq!(state.add(Adam::new(1e-2), &model)?, ["1"]);
    /// assert_eq!(state.leaves().map(|leaf| leaf.learning_rate()).collect::<Vec<_>>(), [Some(1e-3), Some(1e-2)]);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn add<O: IntoOptimiser, M: Model + ?Sized>(
        &mut self,
        optimiser: O,
        model: &M,
    ) -> Result<Vec<String>> {
        self.check_whole("`add`")?;
        let optimiser = Arc::new(optimiser.into_optimiser());
        optimiser.check()?;
        let is_new = |path: &str, x: &Tensor| is_trainable(x) && self.leaf_index_of_tensor(x, path).is_none();
        let mut new_variables = select_variables(model, |path, x| x.is_none_or(|x| is_new(path, x)))?;
        new_variables.retain(|variable| {
            self.leaf_index_of_parameter(&*variable.x, variable.path())
                .is_none()
        });
        let choices = new_variables
            .into_iter()
            .map(|variable| (variable, Some(optimiser.clone())));
        self.extend_whole(choices.collect())
    }

    /// Makes leaves for variables of `model` that have none, with the optimisers that `choose` returns.
    ///
    /// `choose` is also called for variables that were left out. If `choose` returns `None`, updates pass the
    /// variable over from now on. Returns the paths of the new leaves.
    ///
    /// # Errors
    /// As [`StateTree::add`], and as [`setup_with`](crate::setup_with) if the answers for the paths of one
    /// variable differ.
    pub fn add_with<O, M>(
        &mut self,
        model: &M,
        mut choose: impl FnMut(&str, Parameter<'_>) -> Option<O>,
    ) -> Result<Vec<String>>
    where
        O: IntoOptimiser,
        M: Model + ?Sized,
    {
        self.check_whole("`add_with`")?;
        let has_leaf = |place| matches!(place, Some(Some(_)));
        let lacks_leaf =
            |path: &str, x: &Tensor| is_trainable(x) && !has_leaf(self.leaf_index_of_tensor(x, path));
        let mut variables = select_variables(model, |path, x| x.is_none_or(|x| lacks_leaf(path, x)))?;
        variables.retain(|variable| !has_leaf(self.leaf_index_of_parameter(&*variable.x, variable.path())));
        self.extend_whole(choose_optimisers(variables, &mut choose)?)
    }

    /// [`StateTree::extend`] with parameters that are not divided.
    fn extend_whole(&mut self, choices: ChosenOptimisers<'_>) -> Result<Vec<String>> {
        self.extend(ChoiceCache::resolve_all(choices)?, Vec::new())
    }

    /// Makes leaves for variables that have none. A variable with `None` is left out. `parts` has the parts
    /// of each leaf, if the state is divided.
    pub(crate) fn extend(
        &mut self,
        choices: ChosenOptimisers<'_>,
        parts: Vec<LeafParts>,
    ) -> Result<Vec<String>> {
        let (mut leaves, mut left_out, mut parts) = (Vec::new(), Vec::new(), parts.into_iter());
        for (Variable { paths, x }, optimiser) in choices {
            let id = x.tensor().map(Tensor::id);
            // A variable that was left out may get a leaf under its old path. No other variable may take this
            // path. Memory that is no tensor has no id and is the variable of its path.
            let is_other = |path: &str| match id {
                Some(id) => !self.by_id().contains_key(&id),
                None => matches!(self.other_paths.get(path), Some(OtherPath::LeftOut(Some(_)))),
            };
            let is_taken = |path: &&String| {
                self.leaf_index(path)
                    .is_some_and(|place| place.is_some() || is_other(path))
            };
            if let Some(path) = paths.iter().find(is_taken) {
                return Err(path_taken_error(path));
            }
            match optimiser {
                Some(optimiser) => {
                    leaves.push(Box::new(Leaf::new(paths, &*x, optimiser, parts.next())?));
                }
                None => left_out.push(LeftOut { id, paths }),
            }
        }
        self.give_schedules(&mut leaves)?;
        let new_paths = leaves.iter().map(|leaf| leaf.path.clone()).collect();
        if !self.left_out.is_empty() {
            let leaf_ids = leaves.iter().map(|leaf| leaf.id);
            let ids: HashSet<_> = leaf_ids
                .chain(left_out.iter().map(|variable| variable.id))
                .flatten()
                .collect();
            let leaf_paths = leaves.iter().flat_map(|leaf| leaf.paths());
            let paths: HashSet<_> = leaf_paths
                .chain(left_out.iter().flat_map(LeftOut::names))
                .collect();
            self.remove_left_out(|variable| match variable.id {
                Some(id) => ids.contains(&id),
                None => variable.names().any(|name| paths.contains(name)),
            });
        }
        self.insert_leaves(leaves);
        self.leave_out(left_out);
        Ok(new_paths)
    }

    /// Removes the parameters at `path` and below from the state, and returns the paths of their leaves.
    ///
    /// The model of the next update must not have these parameters. For a parameter that stays in the model
    /// without being trained there are two ways. [`freeze`](crate::Selection::freeze) keeps its state.
    /// `state.add_with(&model, |_, _| None::<Descent>)`, called after the removal, lets updates pass the
    /// parameter over.
    ///
    /// # Errors
    /// If there is no such parameter, or the model has an average instead of such a parameter. Nothing
    /// changes then.
    ///
    /// ```
    /// use candle_core::{DType, Device, Var};
    /// use optimisers::{Adam, setup};
    ///
    /// let variable = || Var::zeros(2, DType::F32, &Device::Cpu);
    /// let mut model = vec![variable()?, variable()?];
    /// let mut state = setup(Adam::new(1e-3), &model)?;
    /// model.pop();
    /// assert_eq!(state.remove("1")?, ["1"]);
    /// assert_eq!(state.len(), 1);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn remove(&mut self, path: &str) -> Result<Vec<String>> {
        self.check_leaves()?;
        let (places, has_left_out) = (self.leaf_indices_below(path), self.has_left_out(path));
        if places.is_empty() && !has_left_out {
            return Err(self.no_leaf_error(Some(path)));
        }
        places
            .iter()
            .try_for_each(|&place| self.leaves[place].check_parameter())?;
        let removed = self.remove_leaves(&places);
        if has_left_out {
            self.remove_left_out(|variable| variable.names().any(|name| rest_below(name, path).is_some()));
        }
        let removed: Vec<String> = removed.into_iter().map(|leaf| leaf.path).collect();
        // A parameter that is added under one of these paths is not that of a restored file.
        self.saved_starts.retain(|(path, _)| !removed.contains(path));
        Ok(removed)
    }

    /// Renames the path `from` and all paths below it.
    ///
    /// `rename("encoder", "backbone.encoder")` makes `backbone.encoder.0.weight` of `encoder.0.weight`. The
    /// empty path stands for the root.
    ///
    /// # Errors
    /// If there is no such path, or a new path exists already. Nothing changes then.
    ///
    /// ```
    /// # use candle_core::{DType, Device, Var};
    /// # use optimisers::{Adam, setup};
    /// let model = vec![Var::zeros(2, DType::F32, &Device::Cpu)?];
    /// let mut state = setup(Adam::new(1e-3), &model)?;
    /// state.rename("", "layers")?;
    /// state.rename("layers.0", "embedding")?;
    /// assert!(state.leaf("embedding").is_some());
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn rename(&mut self, from: &str, to: &str) -> Result<()> {
        self.check_leaves()?;
        let new_name = |name: &str| {
            rest_below(name, from).map(|rest| match (to, rest.strip_prefix('.').unwrap_or(rest)) {
                ("", rest) => rest.to_string(),
                (to, "") => to.to_string(),
                (to, rest) => format!("{to}.{rest}"),
            })
        };
        let is_below = |variable: &LeftOut| variable.names().any(|name| new_name(name).is_some());
        let (places, has_left_out) = (self.leaf_indices_below(from), self.has_left_out(from));
        if places.is_empty() && !has_left_out {
            return Err(self.no_leaf_error(Some(from)));
        }
        let left_out = self
            .left_out
            .iter()
            .filter(|variable| has_left_out && is_below(variable));
        let old_paths = places
            .iter()
            .flat_map(|&place| self.leaves[place].paths())
            .chain(left_out.flat_map(LeftOut::names));
        // A path that is renamed itself becomes free, for example `a.b` if `a` is renamed to `a.b`.
        let is_taken = |name: &String| self.leaf_index(name).is_some() && new_name(name).is_none();
        if let Some(path) = old_paths.filter_map(new_name).find(is_taken) {
            return Err(path_taken_error(&path));
        }
        let rename_all = |paths: &mut Vec<String>| {
            for path in paths.iter_mut() {
                *path = new_name(path).unwrap_or_else(|| std::mem::take(path));
            }
            paths.sort();
        };
        for (path, _) in &mut self.saved_starts {
            *path = new_name(path).unwrap_or_else(|| std::mem::take(path));
        }
        let mut leaves = self.remove_leaves(&places);
        for leaf in &mut leaves {
            let mut paths: Vec<String> = leaf.paths().map(str::to_string).collect();
            rename_all(&mut paths);
            // If `from` is the full path of a leaf, the new path is a name. If `from` is only a prefix, the
            // rest of the path is still an index in a list.
            leaf.is_unnamed &= leaf.path != from;
            leaf.aliases = paths.split_off(1);
            leaf.path = paths.swap_remove(0);
        }
        let mut variables = if has_left_out {
            self.remove_left_out(is_below)
        } else {
            Vec::new()
        };
        variables
            .iter_mut()
            .for_each(|variable| rename_all(&mut variable.paths));
        self.insert_leaves(leaves);
        self.leave_out(variables);
        Ok(())
    }

    /// Gives the state to another model with variables of the same paths, shapes and dtypes.
    ///
    /// State tensors move to the devices of these variables. Use this method to move a training between
    /// devices, or to give a clone of the state to a copy of the model. Over [ranks](crate::Setup::over) all
    /// ranks call this method, with parameters of the same values (running statistics may differ).
    ///
    /// # Errors
    /// If the model lacks a parameter of this state, has a parameter that is not in the state, or has two
    /// variables for one leaf with two paths; if the parameters have [no names](crate::CandleOptimizer); if a
    /// shape or dtype differs; if the old model has averages instead of its parameters; if a device has no
    /// memory left. Over ranks also if their values differ, or if the transport has a
    /// [device](crate::Communicator::device) and a parameter is on another device. Nothing changes then.
    ///
    /// ```
    /// use candle_core::{DType, Device, Var};
    /// use optimisers::{Adam, setup, update};
    ///
    /// let (first, second) = (vec![Var::ones(2, DType::F32, &Device::Cpu)?], vec![Var::ones(2, DType::F32, &Device::Cpu)?]);
    /// let state = setup(Adam::new(1e-3), &first)?;
    /// let mut copy = state.try_clone()?;
    /// copy.rebind(&second)?;
    /// update(&mut copy, &second, &second[0].sqr()?.sum_all()?.backward()?)?;
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn rebind<M: Model + ?Sized>(&mut self, model: &M) -> Result<()> {
        let variables = self
            .check_names()
            .and_then(|()| self.check_parameters())
            .and_then(|()| in_path_order(model, is_trainable));
        let plan = variables.and_then(|variables| Ok((self.rebindings(&variables)?, variables)));
        // Each rank goes on with its own parts, so the values have to be the same on all ranks.
        let ((rebindings, left_out), _) = self.world.compare(Call::Rebind, plan, |(_, variables)| {
            let has_leaf =
                |variable: &&Variable<'_>| variable.paths.iter().any(|path| self.leaf(path).is_some());
            variables
                .iter()
                .filter(has_leaf)
                .filter(|variable| !is_running_statistic(variable.path()))
                .map(|variable| values_aspect(variable.path(), &*variable.x))
                .collect()
        })?;
        // From here on nothing can fail, because the state for other devices is already made.
        let mut leaves = std::mem::take(&mut self.leaves);
        leaves
            .iter_mut()
            .zip(rebindings)
            .for_each(|(leaf, rebinding)| rebinding.apply(leaf));
        *self = self.with_leaves(leaves, left_out);
        Ok(())
    }

    /// What each leaf gets by [`rebind`](StateTree::rebind), and the variables that are left out.
    fn rebindings(&self, variables: &[Variable<'_>]) -> Result<(Vec<Rebinding>, Vec<LeftOut>)> {
        self.check_ties(variables)?;
        let mut rebindings: Vec<Option<Rebinding>> = self.leaves.iter().map(|_| None).collect();
        let mut left_out = self.left_out.clone();
        for Variable { paths, x } in variables {
            match paths.iter().find_map(|path| self.by_path().get(path)) {
                None => return Err(not_in_state_error(paths.first().map_or("", String::as_str))),
                Some(None) => {
                    let has_path =
                        |variable: &&mut LeftOut| variable.paths.iter().any(|path| paths.contains(path));
                    let id = x.tensor().map(Tensor::id);
                    left_out
                        .iter_mut()
                        .filter(has_path)
                        .for_each(|variable| variable.id = id);
                }
                Some(&Some(i)) => {
                    self.world.check_device(&self.leaves[i].path, x.device())?;
                    rebindings[i] = Some(Rebinding::new(&self.leaves[i], x)?);
                }
            }
        }
        let required = self
            .leaves
            .iter()
            .zip(rebindings)
            .map(|(leaf, rebinding)| rebinding.ok_or_else(|| leaf.not_in_model_error()));
        Ok((required.collect::<Result<_>>()?, left_out))
    }

    /// Refuses a model in which the paths of one leaf belong to two variables.
    pub(super) fn check_ties(&self, variables: &[Variable<'_>]) -> Result<()> {
        let places = variables
            .iter()
            .enumerate()
            .flat_map(|(i, variable)| variable.paths.iter().map(move |path| (path.as_str(), i)));
        let place_by_path: HashMap<&str, usize> = places.collect();
        let tied_leaves = self.other_paths.values().filter_map(|owner| match owner {
            OtherPath::Tied(first) => self.leaf(first),
            OtherPath::LeftOut(_) => None,
        });
        let leaf_paths = tied_leaves.map(|leaf| leaf.paths().collect::<Vec<_>>());
        let left_out_paths = self.left_out.iter().map(|variable| variable.names().collect());
        for paths in leaf_paths.chain(left_out_paths).filter(|paths| paths.len() > 1) {
            let mut in_model = paths
                .into_iter()
                .filter_map(|path| Some((path, place_by_path.get(path)?)));
            let Some((first, place)) = in_model.next() else {
                continue;
            };
            if let Some((second, _)) = in_model.find(|(_, other)| *other != place) {
                let problem =
                    format!("{first:?} and {second:?} are one variable in this state and two in the model");
                let remedy = "tie the two in the model, or `remove` the parameter and `add` both";
                return Err(Error::new(ErrorKind::Model, problem)
                    .at(first)
                    .with_remedy(remedy));
            }
        }
        Ok(())
    }

    /// A copy with storage of its own.
    ///
    /// # Errors
    /// If a device has no memory left, or the state has lost its leaves.
    pub fn try_clone(&self) -> Result<Self> {
        self.check_leaves()?;
        let copies = self
            .leaves
            .iter()
            .map(|leaf| leaf.try_clone().map(Box::new))
            .collect::<Result<_>>()?;
        Ok(self.with_leaves(copies, self.left_out.clone()))
    }
}

fn path_taken_error(path: &str) -> Error {
    let remedy = "rename or remove the old parameter first (or `rebind` the state to a new model)";
    Error::new(ErrorKind::Model, "the state has this path already")
        .at(path)
        .with_remedy(remedy)
}

/// A leaf's new variable, and a copy of the leaf's state if the variable is on another device.
struct Rebinding {
    x: VariablePlace,
    new_state: Option<State>,
}

impl Rebinding {
    fn new(leaf: &Leaf, x: &Lent<'_>) -> Result<Self> {
        leaf.check_like(&**x)?;
        check_count(x.elem_count(), x.device().is_cpu()).map_err(|error| error.at(&leaf.path))?;
        let is_elsewhere = !x.device().same_device(&leaf.device);
        let new_state = is_elsewhere
            .then(|| {
                leaf.optimiser
                    .state_for(&leaf.state, &*leaf.own_part(&**x)?)
                    .map_err(|error| error.at(&leaf.path))
            })
            .transpose()?;
        Ok(Rebinding {
            x: VariablePlace::new(&**x),
            new_state,
        })
    }

    fn apply(self, leaf: &mut Leaf) {
        if let Some(state) = self.new_state {
            leaf.state = state;
        }
        leaf.set_variable(self.x);
    }
}
