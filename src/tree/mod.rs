//! The state of a whole model: a leaf per trainable parameter, by path.
//!
//! `leaves` is sorted by path, because sums over leaves and agreements of ranks need one order, whatever the
//! model visits first. So a path is found by bisection. All further indices are caches. Each edit drops the
//! caches (`drop_caches`) and does not make them anew, because a program may remove or rename each parameter
//! of a large model by a call of its own. Steps, which look up all parameters, make the caches.
//!
//! A streamed step takes the leaves out of `leaves` and puts them back when it ends. If the step is leaked,
//! the leaves are lost, and `check_leaves` refuses the state.

mod acting;
mod averages;
mod choices;
mod drives;
mod edit;
pub(crate) mod entries;
mod leaf;
mod masters;
mod norms;
mod parameters;
mod ranks;
mod replace;
mod rows;
pub(crate) mod schedule;
mod scheduled;
mod scratch;
mod selection;
mod table;
mod warnings;
mod weights;

use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, OnceLock};

pub(crate) use acting::{KeyedCache, acting_optimisers};
pub(crate) use choices::{ChoiceCache, ChosenOptimisers, check_patterns, choose_optimisers};
pub(crate) use drives::{
    DrivenNumber, Drives, NumberPlace, ScheduleAssignment, ScheduleResolver, check_equal_own_values,
    driven_numbers, fields_with, give_to_all,
};
pub use entries::StateValue;
pub use leaf::Leaf;
pub(crate) use leaf::{check_offload, optimiser_aspects};
pub use masters::MasterValues;
pub(crate) use masters::{WeightFiles, check_equal, values_aspect};
pub use norms::Outlier;
pub(crate) use norms::{LimitedNorms, NormHistories};
pub(crate) use parameters::not_in_state_error;
pub use replace::StateChange;
pub(crate) use scratch::ParameterExchange;
pub use selection::Selection;
pub(crate) use selection::{Adjustment, OptimiserEdit, SetField, available_fields};

use crate::engine::{JobPool, UpdateTargets};
use crate::error::warning::Warnings;
use crate::error::{Error, ErrorKind, Result, first_names, one_of, suggestion};
use crate::ranks::{KeptSums, StateWorld};
use crate::tensors::{Tensor, TensorId};

/// The optimiser state of a model: one [`Leaf`] per trainable parameter, in the order of their paths.
///
/// [`setup`](crate::setup) makes a state, [`update`](crate::update) applies a step. Adjusting, freezing and
/// reading need no model. [`at`](StateTree::at) and [`select_where`](StateTree::select_where) select some of
/// the leaves to adjust or freeze.
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
/// `Display` is a table of all parameters. `Debug` has [two lines](Leaf) for each, with its hyper-parameters
/// and the shapes of its state.
///
/// A [clone](StateTree::try_clone) has storage of its own. The clone belongs to the same model until
/// [`rebind`](StateTree::rebind) gives it to another model.
#[must_use = "a state trains nothing by itself: pass it to `update`"]
pub struct StateTree {
    /// Sorted by path.
    pub(crate) leaves: Leaves,
    /// The variables without a leaf, which updates pass over.
    pub(crate) left_out: Vec<LeftOut>,
    /// The paths that are not the first path of a leaf.
    other_paths: BTreeMap<String, OtherPath>,
    /// A cache: the index of each variable's leaf; `None` for a variable that was left out.
    by_id: OnceLock<HashMap<TensorId, Option<usize>>>,
    /// A cache: the index of the leaf of each path; `None` for a path of a variable that was left out.
    by_path: OnceLock<HashMap<String, Option<usize>>>,
    /// The storages that updates write, registered for all updates of the process.
    targets: UpdateTargets,
    /// The storages of parameters whose owner lends other memory than in `setup`, renewed in each call. They
    /// are not in `targets`, because the storages from `setup` must stay registered there: a detached view of
    /// a variable from `setup` may be a gradient of a later call.
    pub(crate) other_targets: UpdateTargets,
    /// The count of applied steps, at which schedules are read.
    pub(crate) steps: u64,
    /// The count that the program set before the first step.
    pub(crate) began_at: Option<u64>,
    /// The count of steps at which the schedules of the leaves were last read: see `acting.rs`.
    pub(crate) acting_at: u64,
    /// The schedules for all leaves, also for those that are added later, in the order of the calls.
    pub(crate) schedules: Vec<ScheduleAssignment>,
    /// The calls that open windows of accumulation have counted; 0 if no window is open.
    pub(crate) calls: u64,
    /// The calls that were skipped since the last step.
    pub(crate) skipped: u64,
    /// The norms of earlier calls, which decide on outliers.
    pub(crate) norms: NormHistories,
    /// The first elements of the parameters in a restored file, by path. The next update compares them with
    /// the model, and drops them.
    pub(crate) saved_starts: Vec<(String, Tensor)>,
    /// A cache: the variables in the order in which the model visits them, each with the index of its leaf.
    visited: OnceLock<Vec<(TensorId, usize)>>,
    /// A cache of the paths of the leaves.
    names: OnceLock<Arc<[String]>>,
    /// Whether it is an error if a leaf gets no gradient.
    pub(crate) requires_all: bool,
    /// Whether losses may reach variables of other states.
    pub(crate) allows_others: bool,
    pub(crate) warnings: Warnings,
    pub(crate) jobs: JobPool,
    pub(crate) sums: KeptSums,
    /// The ranks among which the state is divided.
    pub(crate) world: StateWorld,
}

/// Leaves in boxes, so that an edit moves pointers and not whole leaves.
type Leaves = Vec<Box<Leaf>>;

/// A variable of the model without a leaf.
#[derive(Clone, Debug)]
pub(crate) struct LeftOut {
    /// `None` for memory that is no tensor. Such a variable is found by its paths.
    pub(crate) id: Option<TensorId>,
    pub(crate) paths: Vec<String>,
}

/// The owner of a path that is not the first path of a leaf.
#[derive(Clone, Debug)]
enum OtherPath {
    /// A tied variable, with the first path of its leaf.
    Tied(String),
    /// A variable that was left out, with its id.
    LeftOut(Option<TensorId>),
}

impl LeftOut {
    fn names(&self) -> impl Iterator<Item = &str> {
        self.paths.iter().map(String::as_str)
    }
}

impl StateTree {
    pub(crate) fn new(leaves: Leaves, left_out: Vec<LeftOut>) -> Self {
        let mut tree = StateTree {
            other_paths: BTreeMap::new(),
            by_id: OnceLock::new(),
            by_path: OnceLock::new(),
            targets: UpdateTargets::default(),
            other_targets: UpdateTargets::default(),
            leaves: Vec::new(),
            left_out: Vec::new(),
            steps: 0,
            began_at: None,
            acting_at: 0,
            schedules: Vec::new(),
            calls: 0,
            skipped: 0,
            norms: NormHistories::default(),
            saved_starts: Vec::new(),
            visited: OnceLock::new(),
            names: OnceLock::new(),
            requires_all: false,
            allows_others: false,
            warnings: Warnings::default(),
            jobs: JobPool::default(),
            sums: KeptSums::default(),
            world: StateWorld::ALONE,
        };
        tree.insert_leaves(leaves);
        tree.leave_out(left_out);
        tree
    }

    /// Inserts leaves in the order of their paths.
    fn insert_leaves(&mut self, mut leaves: Leaves) {
        leaves.sort_by(|a, b| a.path.cmp(&b.path));
        self.targets
            .add(leaves.iter().flat_map(|leaf| leaf.written_storages()));
        for leaf in &leaves {
            let tied = |path: &String| (path.clone(), OtherPath::Tied(leaf.path.clone()));
            self.other_paths.extend(leaf.aliases.iter().map(tied));
        }
        // Only the leaves after the first new one move.
        let first = leaves.first().map_or(self.leaves.len(), |first| {
            self.leaf_index_of_first_path(&first.path)
        });
        let mut old_leaves = self.leaves.split_off(first).into_iter().peekable();
        for leaf in leaves {
            while let Some(old) = old_leaves.next_if(|old| old.path < leaf.path) {
                self.leaves.push(old);
            }
            self.leaves.push(leaf);
        }
        self.leaves.extend(old_leaves);
        self.drop_caches();
    }

    /// Removes the leaves at `places`, which are sorted.
    fn remove_leaves(&mut self, places: &[usize]) -> Leaves {
        let (Some(&first), Some(&last)) = (places.first(), places.last()) else {
            return Vec::new();
        };
        let tail = self.leaves.split_off(last + 1);
        let mut places = places.iter().peekable();
        let mut is_removed = |place: usize| places.next_if_eq(&&place).is_some();
        let (removed, others): (Vec<_>, Vec<_>) = (first..)
            .zip(self.leaves.drain(first..))
            .partition(|(place, _)| is_removed(*place));
        self.leaves.extend(others.into_iter().map(|(_, leaf)| leaf));
        self.leaves.extend(tail);
        let leaves: Leaves = removed.into_iter().map(|(_, leaf)| leaf).collect();
        self.targets
            .forget(leaves.iter().flat_map(|leaf| leaf.written_storages()));
        for path in leaves.iter().flat_map(|leaf| &leaf.aliases) {
            self.other_paths.remove(path);
        }
        self.drop_caches();
        leaves
    }

    /// Adds variables without a leaf, which updates pass over.
    fn leave_out(&mut self, variables: Vec<LeftOut>) {
        for LeftOut { id, paths } in &variables {
            self.other_paths
                .extend(paths.iter().map(|path| (path.clone(), OtherPath::LeftOut(*id))));
        }
        self.left_out.extend(variables);
        self.drop_caches();
    }

    /// Removes the left-out variables for which `is_removed` holds.
    fn remove_left_out(&mut self, is_removed: impl Fn(&LeftOut) -> bool) -> Vec<LeftOut> {
        let removed: Vec<LeftOut> = self
            .left_out
            .extract_if(.., |variable| is_removed(variable))
            .collect();
        for name in removed.iter().flat_map(LeftOut::names) {
            self.other_paths.remove(name);
        }
        self.drop_caches();
        removed
    }

    /// The index that the leaf with this first path has, or would have.
    fn leaf_index_of_first_path(&self, path: &str) -> usize {
        self.leaves.partition_point(|leaf| *leaf.path < *path)
    }

    /// Drops all caches that depend on the set of leaves.
    fn drop_caches(&mut self) {
        self.warnings = self.warnings.for_other_leaves();
        (self.visited, self.names) = (OnceLock::new(), OnceLock::new());
        (self.by_id, self.by_path) = (OnceLock::new(), OnceLock::new());
        (self.jobs, self.sums) = (JobPool::default(), KeptSums::default());
    }

    /// The sorted indices of the leaves that have a path at `path` or below it.
    fn leaf_indices_below(&self, path: &str) -> Vec<usize> {
        if path.is_empty() {
            return (0..self.leaves.len()).collect();
        }
        // First paths below `path` are contiguous, so bisection finds their leaves. The leaf at `path` itself
        // is looked up, because other leaves can be between: `a`, `a-b`, `a.b`.
        let first = self.leaf_index_of_first_path(&format!("{path}."));
        let is_below = |leaf: &&Leaf| rest_below(leaf.path(), path).is_some();
        let below = self.leaves().skip(first).take_while(is_below).count();
        let tied = self
            .other_paths_below(path)
            .filter_map(|(name, owner)| match owner {
                OtherPath::Tied(_) => self.leaf_index(name).flatten(),
                OtherPath::LeftOut(_) => None,
            });
        let at = self.leaf_index(path).flatten();
        let mut places: Vec<usize> = at.into_iter().chain(first..first + below).chain(tied).collect();
        places.sort_unstable();
        // Several paths of one tied variable may be below `path`.
        places.dedup();
        places
    }

    /// The paths below `path` that are not the first path of a leaf, with their owners.
    fn other_paths_below(&self, path: &str) -> impl Iterator<Item = (&str, &OtherPath)> {
        let prefix = if path.is_empty() {
            String::new()
        } else {
            format!("{path}.")
        };
        let below = self
            .other_paths
            .range(prefix.clone()..)
            .take_while(move |(name, _)| name.starts_with(&prefix));
        below.map(|(name, owner)| (name.as_str(), owner))
    }

    /// Whether a variable that was left out has a path at `path` or below it.
    fn has_left_out(&self, path: &str) -> bool {
        let at = self.other_paths.get(path).into_iter();
        let mut owners = at.chain(self.other_paths_below(path).map(|(_, owner)| owner));
        owners.any(|owner| matches!(owner, OtherPath::LeftOut(_)))
    }

    /// This tree with other leaves and empty caches.
    fn with_leaves(&self, leaves: Leaves, left_out: Vec<LeftOut>) -> Self {
        StateTree {
            steps: self.steps,
            began_at: self.began_at,
            acting_at: self.acting_at,
            schedules: self.schedules.clone(),
            calls: self.calls,
            skipped: self.skipped,
            norms: self.norms.clone(),
            saved_starts: self.saved_starts.clone(),
            requires_all: self.requires_all,
            allows_others: self.allows_others,
            warnings: self.warnings.for_other_leaves(),
            world: self.world.clone(),
            ..StateTree::new(leaves, left_out)
        }
    }

    /// Ends the open windows of all leaves that are not frozen: their rules drop what they have collected.
    pub(crate) fn end_windows(&mut self) -> Result<()> {
        self.calls = 0;
        let mut leaves = self.leaves.iter_mut().filter(|leaf| !leaf.frozen);
        leaves.try_for_each(|leaf| leaf.end_window().map_err(|error| error.at(&leaf.path)))
    }

    /// Counts a missed step in the averages of all leaves except those with the sorted indices `updated`.
    ///
    /// Without this count a model would be evaluated with averages of different times.
    pub(crate) fn count_missed_steps(&mut self, updated: &[usize]) {
        if updated.len() == self.leaves.len() {
            return;
        }
        let mut updated = updated.iter().peekable();
        for (index, leaf) in self.leaves.iter_mut().enumerate() {
            if updated.next_if_eq(&&index).is_none() {
                leaf.state.miss_step();
            }
        }
    }

    /// Copies the numbers of the whole model to all leaves. A step has set these numbers only in the leaves
    /// with the sorted indices `updated`: other leaves are frozen, wait in a window, or are new.
    pub(crate) fn share_numbers(&mut self, updated: &[usize]) {
        let (mut shared_numbers, mut updated) = (Vec::new(), updated.iter().peekable());
        if updated.peek().is_none() {
            return;
        }
        for (index, leaf) in self.leaves.iter().enumerate() {
            let is_updated = updated.next_if_eq(&&index).is_some();
            leaf.state
                .visit_shared(is_updated, &mut |numbers| numbers.merge_into(&mut shared_numbers));
        }
        if !shared_numbers.is_empty() {
            self.leaves
                .iter_mut()
                .for_each(|leaf| leaf.state.set_shared(&shared_numbers));
        }
    }

    /// The leaves in the order of their paths.
    pub fn leaves(&self) -> impl ExactSizeIterator<Item = &Leaf> + Clone {
        self.leaves.iter().map(|leaf| &**leaf)
    }

    /// The leaf of the parameter with this path, which may be any of its paths.
    pub fn leaf(&self, path: &str) -> Option<&Leaf> {
        self.leaf_index(path)
            .flatten()
            .and_then(|place| self.leaves.get(place))
            .map(|leaf| &**leaf)
    }

    /// Refuses a state whose leaves were lost with a streamed step that was leaked.
    pub(crate) fn check_leaves(&self) -> Result<()> {
        // A streamed step makes the cache `by_path` before it takes the leaves. An edit that removes leaves
        // drops this cache.
        let places = || self.by_path.get().into_iter().flat_map(HashMap::values);
        let is_leaked = self.leaves.is_empty() && places().any(Option::is_some);
        if is_leaked { Err(leaked_error()) } else { Ok(()) }
    }

    /// How many leaves there are.
    pub fn len(&self) -> usize {
        self.leaves.len()
    }

    /// Whether there are no leaves. `setup` makes no such tree, unless every parameter was left out.
    pub fn is_empty(&self) -> bool {
        self.leaves.is_empty()
    }

    /// How many elements the parameters of all leaves have together.
    pub fn elements(&self) -> usize {
        self.leaves.iter().map(|leaf| leaf.shape.elem_count()).sum()
    }

    /// The bytes that all state tensors take on their devices.
    pub fn bytes(&self) -> usize {
        self.leaves.iter().map(|leaf| leaf.bytes()).sum()
    }

    /// Sets the learning rate of every leaf; in a chain with several rates, [their
    /// product](crate::Adjust::adjust).
    ///
    /// # Errors
    /// As [`Selection::adjust_field`].
    pub fn adjust(&mut self, eta: f64) -> Result<()> {
        self.all().adjust(eta)
    }

    /// From now on refuses every update in which a parameter has no gradient.
    ///
    /// The error names the parameter, and nothing moves.
    ///
    /// Some operations of candle pass no gradient on, without an error: among them the usual `LayerNorm` and
    /// `RmsNorm` ([a page](crate::guide::cuts) lists all). Layers before such an operation do not train, and
    /// the loss still falls. Without this method a [warning](crate::Warning::WithoutGradient) names the
    /// parameters once, and [`Outcome::without_gradient`](crate::Outcome::without_gradient) has them in each
    /// call.
    ///
    /// These parameters need no gradient:
    /// - those that are [frozen](Selection::freeze);
    /// - those that [`setup_with`](crate::setup_with) left out, such as BatchNorm's running statistics in a
    ///   `VarMap`;
    /// - those declared with [`allow_missing`](Selection::allow_missing): experts that a batch may pass over,
    ///   or heads that take turns.
    ///
    /// In a window of [`AccumGrad`](crate::AccumGrad) one call with a gradient is enough; the error comes
    /// with the call that would end the window.
    ///
    /// # What this method cannot see
    /// Updates pass over the gradient of a variable that this state does not have, such as one of a layer
    /// that was made after `setup`. [`audit`](crate::audit) lists such variables, and a
    /// [`CandleOptimizer`](crate::CandleOptimizer) refuses a loss that reaches one.
    ///
    /// If the loss reaches a parameter by several ways and only some pass the gradient on, a part of the
    /// gradient is missing. This setting does not notice the missing part, but [`audit`](crate::audit) does:
    /// see [cuts](crate::guide::cuts#what-only-the-audit-finds).
    ///
    /// Over [ranks](crate::Setup::over) each rank needs the gradient, except ranks of weight 0. In a window
    /// of `AccumGrad` one rank is enough.
    ///
    /// The setting also holds for clones and for leaves that are added later. A checkpoint does not have the
    /// setting, which belongs to the program and its model.
    ///
    /// ```
    /// use candle_core::{DType, Device, Tensor};
    /// use candle_nn::{Module, VarBuilder, VarMap, layer_norm, linear};
    /// use optimisers::{AdamW, ErrorKind, setup, update};
    ///
    /// let variables = VarMap::new();
    /// let builder = VarBuilder::from_varmap(&variables, DType::F32, &Device::Cpu);
    /// let (hidden, norm) = (linear(4, 8, builder.pp("hidden"))?, layer_norm(8, 1e-5, builder.pp("norm"))?);
    /// let output = linear(8, 1, builder.pp("output"))?;
    ///
    /// let mut state = setup(AdamW::new(1e-3), &variables)?;
    /// state.require_all();
    /// let x = hidden.forward(&Tensor::ones((2, 4), DType::F32, &Device::Cpu)?)?;
    /// let loss = output.forward(&norm.forward(&x)?)?.sqr()?.mean_all()?; // `norm` cuts the graph
    /// let error = update(&mut state, &variables, &loss.backward()?).unwrap_err();
    /// assert_eq!(error.kind(), ErrorKind::NoGradient);
    /// assert!(error.got().is_some_and(|paths| paths.starts_with("hidden.bias, ")));
    ///
    /// let slow = |x: &Tensor| candle_nn::ops::layer_norm_slow(x, norm.weight(), norm.bias().unwrap(), 1e-5);
    /// let loss = output.forward(&slow(&x)?)?.sqr()?.mean_all()?;
    /// assert_eq!(update(&mut state, &variables, &loss.backward()?)?.applied, 6);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn require_all(&mut self) {
        self.requires_all = true;
    }

    /// Declares that losses also reach variables which other states train, as in a GAN.
    ///
    /// Otherwise a [`CandleOptimizer`](crate::CandleOptimizer) and
    /// [`Segments::train`](crate::Segments::train) [warn](crate::Warning::NotInState) of such variables, or
    /// refuse the step if the state [requires all](StateTree::require_all) gradients.
    pub fn allow_others(&mut self) {
        self.allows_others = true;
    }

    /// Whether [`require_all`](StateTree::require_all) was called.
    pub fn requires_all(&self) -> bool {
        self.requires_all
    }

    /// The paths of the leaves.
    pub(crate) fn paths(&self) -> &Arc<[String]> {
        self.names
            .get_or_init(|| self.leaves.iter().map(|leaf| leaf.path.clone()).collect())
    }

    /// All leaves.
    pub fn all(&mut self) -> Selection<'_> {
        // The caller may change leaves through the selection, and some warnings depend on them.
        self.warnings.clear_cache();
        let is_leaked = self.check_leaves().is_err();
        let leaves = self.leaves.iter_mut().map(|leaf| &mut **leaf).collect();
        let for_all = Some(&mut self.schedules);
        Selection {
            leaves,
            steps: self.steps,
            for_all,
            world: &self.world,
            is_leaked,
        }
    }

    /// The leaf at `path` and all leaves below it.
    ///
    /// `encoder` selects `encoder.0.weight`, but not `encoder2.weight`. For a pattern such as `*.bias` use
    /// [`select_where`](StateTree::select_where).
    ///
    /// # Errors
    /// If there is no such leaf.
    pub fn at(&mut self, path: &str) -> Result<Selection<'_>> {
        self.check_leaves()?;
        let places = self.leaf_indices_below(path);
        if places.is_empty() {
            return Err(self.no_leaf_error(Some(path)));
        }
        self.warnings.clear_cache();
        // Each leaf is split off by itself, so that a selection of few leaves does not read all leaves.
        let (mut rest, mut start) = (&mut self.leaves[..], 0);
        let mut leaves = Vec::with_capacity(places.len());
        for place in places {
            let Some((leaf, tail)) = rest.split_at_mut(place - start).1.split_first_mut() else {
                break;
            };
            leaves.push(&mut **leaf);
            (rest, start) = (tail, place + 1);
        }
        let for_all = path.is_empty().then_some(&mut self.schedules);
        Ok(Selection {
            leaves,
            steps: self.steps,
            for_all,
            world: &self.world,
            is_leaked: false,
        })
    }

    /// The leaves for which `choose` holds.
    ///
    /// # Errors
    /// If `choose` holds for no leaf.
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
        if !self.leaves().any(&choose) {
            return Err(self.no_leaf_error(None));
        }
        self.warnings.clear_cache();
        Ok(Selection {
            leaves: self
                .leaves
                .iter_mut()
                .map(|leaf| &mut **leaf)
                .filter(|leaf| choose(leaf))
                .collect(),
            steps: self.steps,
            for_all: None,
            world: &self.world,
            is_leaked: false,
        })
    }

    /// Refuses leaves without a name. Calls that save, restore or rebind need names.
    ///
    /// The path of such a leaf is only an index in a list. If the list had another order, a parameter would
    /// get the state of another parameter of its shape.
    pub(crate) fn check_names(&self) -> Result<()> {
        self.leaves().try_for_each(Leaf::check_name)
    }

    /// The error that a selection has no leaf. `path` is `None` if a predicate selects.
    pub(crate) fn no_leaf_error(&self, path: Option<&str>) -> Error {
        if let Err(error) = self.check_leaves() {
            return error;
        }
        let problem = match path {
            Some(path) => format!(
                "the path {path:?} selects no leaf{}",
                suggestion(path, self.paths())
            ),
            None => "the predicate selects no leaf".to_string(),
        };
        let error = Error::new(ErrorKind::UnknownName, problem);
        if self.is_empty() {
            return error.with_remedy("`add` parameters to the state first");
        }
        let error = error.with_expected(one_of(&first_names(self.leaves().map(Leaf::path))));
        match path.is_some_and(|path| path.contains(['*', '?', '['])) {
            true => error.with_remedy("a path is no pattern: choose by pattern with `select_where`"),
            false => error,
        }
    }

    /// The error for a gradient whose path no variable has, not even one that was left out.
    pub(crate) fn unknown_gradient_error(&self, path: &str) -> Error {
        let mut paths: Vec<&str> = self.by_path().keys().map(String::as_str).collect();
        paths.sort_unstable();
        Error::unknown_path("parameter for the gradient of", path, paths.into_iter())
    }

    /// The index of the leaf with this path; `Some(None)` for a path that was left out.
    pub(crate) fn leaf_index(&self, path: &str) -> Option<Option<usize>> {
        if let Some(by_path) = self.by_path.get() {
            return by_path.get(path).copied();
        }
        let first = match self.other_paths.get(path) {
            Some(OtherPath::LeftOut(_)) => return Some(None),
            Some(OtherPath::Tied(first)) => first,
            None => path,
        };
        let place = self.leaf_index_of_first_path(first);
        self.leaves
            .get(place)
            .filter(|leaf| leaf.path == first)
            .map(|_| Some(place))
    }

    /// The [`leaf_index`](StateTree::leaf_index) of each path. Steps make this cache, because they look up many paths,
    /// and a streamed step takes the leaves out of the tree.
    pub(crate) fn by_path(&self) -> &HashMap<String, Option<usize>> {
        self.by_path.get_or_init(|| {
            let mut by_path = HashMap::with_capacity(self.leaves.len() + self.other_paths.len());
            for (place, leaf) in self.leaves().enumerate() {
                by_path.extend(leaf.paths().map(|path| (path.to_string(), Some(place))));
            }
            let left_out = self.left_out.iter().flat_map(LeftOut::names);
            by_path.extend(left_out.map(|name| (name.to_string(), None)));
            by_path
        })
    }

    /// The index of each variable's leaf; `None` for a variable that was left out.
    pub(crate) fn by_id(&self) -> &HashMap<TensorId, Option<usize>> {
        self.by_id.get_or_init(|| {
            let places = self
                .leaves
                .iter()
                .enumerate()
                .map(|(place, leaf)| (leaf.id, Some(place)));
            let left_out = self.left_out.iter().map(|variable| (variable.id, None));
            places
                .chain(left_out)
                .filter_map(|(id, place)| Some((id?, place)))
                .collect()
        })
    }
}

/// The rest of `name` after `path`, if `name` is `path` or below it. The rest is empty or begins with a dot;
/// for the empty path the rest is all of `name`.
pub(crate) fn rest_below<'n>(name: &'n str, path: &str) -> Option<&'n str> {
    name.strip_prefix(path)
        .filter(|rest| path.is_empty() || rest.is_empty() || rest.starts_with('.'))
}

/// The error of a state that has lost its leaves.
fn leaked_error() -> Error {
    Error::new(
        ErrorKind::Unsupported,
        "the state has lost its leaves with a `StreamedStep` that was leaked",
    )
    .with_remedy("set up a state, and restore a checkpoint; end a step with `finish`, or drop it")
}

/// Whether `setup` makes a leaf for a tensor.
pub(crate) fn is_trainable(tensor: &Tensor) -> bool {
    tensor.is_variable() && tensor.dtype().is_float()
}
