//! Replacing the optimiser of parameters that have a state.
//!
//! All new states are made before the first leaf gets one, so that an error changes nothing. For each leaf:
//! 1. Make fresh state, and take over the tensors with the same name and shape (`State::take_over`).
//! 2. If the new store keeps the precise value in another form, convert it (`keep_precise`).
//! 3. Set those copies of the parameter that were not taken over (`renew`). Step 3 comes last, because
//!    a rule copies the master, which step 2 has set.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use super::acting::acting_optimisers;
use super::choices::ChoiceCache;
use super::drives::{Drives, ResolvedSchedules, ScheduleResolver};
use super::leaf::{fresh_state, optimiser_aspects};
use super::{Leaf, Selection, is_trainable};
use crate::error::Result;
use crate::model::lent::{Lend, Lent};
use crate::model::{Model, Variable, select_variables};
use crate::ranks::Call;
use crate::rule::{Adjust, Extent, IntoOptimiser, Optimiser, Parameter, State, Transfer};
use crate::tensors::{Tensor, TensorId};

/// Which entries of a parameter's state were kept: the names of tensors, counters and numbers.
///
/// Returned when a parameter gets [another optimiser](Selection::replace) or [other
/// rows](crate::StateTree::resize_rows).
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct StateChange {
    /// The path of the parameter.
    pub path: String,
    /// The entries that were taken over. A tensor with other rows keeps only the rows that stay.
    pub kept: Vec<String>,
    /// The entries that start anew.
    pub fresh: Vec<String>,
    /// The entries that the new optimiser does not have. A schedule is listed as `schedule of lambda`.
    pub dropped: Vec<String>,
}

impl Selection<'_> {
    /// Gives these parameters another optimiser, which takes over the state that fits.
    ///
    /// Returns, for each parameter, which entries of its state were kept.
    ///
    /// A state tensor fits if it has the same name and shape, wherever the rule stands in a chain, and both
    /// rules declare alike whether it is a [copy](crate::Slot::parameter) or an
    /// [average](crate::Slot::average) of the parameter. For a tensor that is
    /// [never negative](crate::Slot::non_negative) the old one has to be that, too. A rule that finds all its
    /// tensors keeps them and its counters, such as Adam's step count for the bias correction. A rule that
    /// lacks a tensor starts anew. So `Adam` can become `AdamW` or move into a chain,
    /// and [`MixedPrecision`](crate::MixedPrecision) can be put around a rule in a running training, or taken
    /// off again. Values are converted to the dtype of the new state.
    ///
    /// [Schedules](crate::StateTree::schedule) go on in the new optimiser. A schedule whose field the new
    /// optimiser lacks is dropped and listed. Under a schedule that is not relative, the new optimiser must
    /// be made with the own rate of the old one, because another rate would have no effect.
    ///
    /// Over [ranks](crate::Setup::over) all ranks call this method, and what one rank refuses is an error on
    /// all. A parameter that is cut among ranks stays cut, and needs a [divisible](crate::Rule::is_divisible)
    /// rule.
    ///
    /// # Another store
    /// Between [`MixedPrecision`](crate::MixedPrecision), [`SplitMaster`](crate::SplitMaster) and
    /// [`Kahan`](crate::Kahan) the precise value is converted, and the parameter stays as it is. From F32
    /// masters to split masters and back no bit changes. Otherwise the new store keeps the nearest value that
    /// it can hold with this parameter: [24 bits](crate::SplitMaster::of_24_bits) are at most one unit in
    /// their last place away, and `Kahan` rounds the difference to the parameter's dtype. A master exactly
    /// between two numbers of the parameter's dtype rounds to the even number. If the parameter is the odd
    /// number, as it can be under 24 bits or `Kahan`, the new master is moved towards it by one unit in its
    /// last place.
    ///
    /// # Errors
    /// If a hyper-parameter is out of range; if a schedule does not go with the optimiser; if `model` is not
    /// the state's, or has averages instead of these parameters; if a master has to be converted, or goes
    /// while a copy, a norm or rounding errors of the parameter stay, although the parameter was changed
    /// outside of updates; if a device has no memory left. Nothing changes then.
    ///
    /// ```
    /// use candle_core::{DType, Device, Var};
    /// use optimisers::{Adam, AdamW, ClipGrad, MixedPrecision, OptimiserChain, setup, update};
    ///
    /// let x = Var::ones(2, DType::BF16, &Device::Cpu)?;
    /// let mut state = setup(Adam::new(1e-3), &x)?;
    /// update(&mut state, &x, &x.sqr()?.sum_all()?.backward()?)?;
    ///
    /// let rule = MixedPrecision::new(DType::F32, OptimiserChain::new((ClipGrad::new(1.0), AdamW::new(1e-3))));
    /// let replaced = state.all().replace(rule, &x)?;
    /// assert_eq!(replaced[0].kept, ["1.m", "1.v", "1.t"]);
    /// assert_eq!(replaced[0].fresh, ["master", "0.t"]);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn replace<O: IntoOptimiser, M: Model + ?Sized>(
        self,
        optimiser: O,
        model: &M,
    ) -> Result<Vec<StateChange>> {
        let plan = self.replacements(optimiser.into_optimiser(), model);
        let replacements = self.world.compare(Call::Replace, plan, |replacements| {
            let leaves = self.leaves().zip(replacements);
            let aspects = leaves.map(|(leaf, (new, _))| optimiser_aspects(leaf.path(), Some(&new.optimiser)));
            Ok(aspects.flatten().collect())
        })?;
        let apply = |(leaf, (replacement, acting)): (&mut Leaf, (Replacement, _))| {
            replacement.apply(leaf, acting, self.steps > 0)
        };
        Ok(self.leaves.into_iter().zip(replacements).map(apply).collect())
    }

    /// The replacement of each leaf, with the optimiser that acts in the next step.
    fn replacements<M: Model + ?Sized>(
        &self,
        optimiser: Optimiser,
        model: &M,
    ) -> Result<Vec<(Replacement, Option<Arc<Optimiser>>)>> {
        self.check_leaves()?;
        let optimiser = Arc::new(optimiser);
        optimiser.check()?;
        let variables = self.variables(model)?;
        let index = VariableIndex::new(&variables);
        // Leaves with equal choices and schedules share the results.
        let (mut choices, mut resolver) = (ChoiceCache::default(), ScheduleResolver::default());
        let replacements = self
            .leaves
            .iter()
            .map(|leaf| Replacement::new(leaf, index.find(leaf), &optimiser, &mut choices, &mut resolver))
            .collect::<Result<Vec<_>>>()?;
        let optimisers = self
            .leaves()
            .zip(&replacements)
            .map(|(leaf, new)| (leaf.path(), &new.optimiser, new.drives.as_ref()));
        let acting = acting_optimisers(optimisers, self.steps)?;
        Ok(replacements.into_iter().zip(acting).collect())
    }

    /// The variables of `model` with an id or a path of these leaves.
    fn variables<'m, M: Model + ?Sized>(&self, model: &'m M) -> Result<Vec<Variable<'m>>> {
        let ids: HashSet<TensorId> = self.leaves().filter_map(|leaf| leaf.id).collect();
        let paths: HashSet<&str> = self.leaves().flat_map(Leaf::paths).collect();
        let is_selected = |path: &str, x: Option<&Tensor>| {
            x.map_or_else(
                || paths.contains(path),
                |x| is_trainable(x) && (ids.contains(&x.id()) || paths.contains(path)),
            )
        };
        select_variables(model, is_selected)
    }
}

/// The variables of a model, to be found by their leaves.
struct VariableIndex<'v, 'm> {
    by_id: HashMap<TensorId, &'v Lent<'m>>,
    by_path: HashMap<&'v str, &'v Lent<'m>>,
}

impl<'v, 'm> VariableIndex<'v, 'm> {
    fn new(variables: &'v [Variable<'m>]) -> Self {
        let with_ids = variables
            .iter()
            .filter_map(|variable| Some((variable.x.tensor()?.id(), &variable.x)));
        let with_paths = variables.iter().flat_map(|variable| {
            variable
                .paths
                .iter()
                .map(move |path| (path.as_str(), &variable.x))
        });
        VariableIndex {
            by_id: with_ids.collect(),
            by_path: with_paths.collect(),
        }
    }

    /// The variable of a leaf. Memory that is no tensor is found by its paths.
    fn find(&self, leaf: &Leaf) -> Option<&'v Lent<'m>> {
        // A tensor with another id is another variable, even under the same path.
        let by_path = || {
            leaf.paths()
                .find_map(|path| self.by_path.get(path))
                .filter(|x| leaf.id.is_none() || x.tensor().is_none())
        };
        leaf.id
            .and_then(|id| self.by_id.get(&id))
            .or_else(by_path)
            .copied()
    }
}

/// The new optimiser, schedules and state of a leaf.
struct Replacement {
    optimiser: Arc<Optimiser>,
    drives: Option<Arc<Drives>>,
    state: State,
    change: StateChange,
}

impl Replacement {
    fn new(
        leaf: &Leaf,
        variable: Option<&Lent<'_>>,
        optimiser: &Arc<Optimiser>,
        choices: &mut ChoiceCache,
        resolver: &mut ScheduleResolver,
    ) -> Result<Replacement> {
        leaf.check_parameter()?;
        let variable = variable.ok_or_else(|| leaf.not_in_model_error())?;
        leaf.check_like(&**variable)?;
        let paths: Vec<String> = leaf.paths().map(str::to_string).collect();
        let optimiser = choices.resolve(optimiser, &paths, Parameter::new(&**variable))?;
        let ResolvedSchedules { drives, missing } = leaf.drives_in(&optimiser, resolver)?;
        leaf.check_divisible(&optimiser)?;
        let x = &*leaf.own_part(&**variable)?;
        let (state, transfer) = leaf
            .transferred_state(&optimiser, x)
            .map_err(|error| error.at(&leaf.path))?;
        let Transfer {
            kept,
            fresh,
            mut dropped,
        } = transfer;
        dropped.extend(missing.into_iter().map(|field| format!("schedule of {field}")));
        let change = StateChange {
            path: leaf.path.clone(),
            kept,
            fresh,
            dropped,
        };
        Ok(Replacement {
            optimiser,
            drives,
            state,
            change,
        })
    }

    fn apply(self, leaf: &mut Leaf, acting: Option<Arc<Optimiser>>, has_begun: bool) -> StateChange {
        let Replacement {
            optimiser,
            drives,
            state,
            change,
        } = self;
        let has_same_rule = leaf.optimiser.name() == optimiser.name();
        leaf.set_optimiser(optimiser, leaf.frozen, has_begun);
        if !has_same_rule {
            // The values of another rule cannot be compared.
            (leaf.initial_optimiser, leaf.run_start) = (None, None);
        }
        (leaf.state, leaf.drives, leaf.acting) = (state, drives, acting);
        let last_checksum = leaf.last_checksum;
        leaf.unsettle();
        // What was taken over follows from the same values of the parameter as before.
        leaf.last_checksum =
            last_checksum.filter(|_| leaf.needs_checksum && leaf.state.moves_weights(&change.kept));
        change
    }
}

impl Leaf {
    /// The state of another optimiser for the parameter `x`, with all that fits of the leaf's state. If the
    /// new store keeps the precise value of `x` in another form, the value is converted.
    fn transferred_state(&self, optimiser: &Optimiser, x: &dyn Lend) -> Result<(State, Transfer)> {
        let mut state = fresh_state(optimiser, x, self.shape.elem_count())?;
        let mut transfer = state.take_over(&self.state)?;
        let (old, new) = (self.state.store_tensor_names(), state.store_tensor_names());
        let converts_master = self.optimiser.store().adds_precision()
            && optimiser.store().adds_precision()
            && !old.is_empty()
            && !new.iter().all(|name| transfer.kept.contains(name));
        // Without the old master nothing shows any more that the parameter was changed, and what was taken
        // over would lead a changed parameter back.
        let leads_back = state.outer_master().is_none() && state.moves_weights(&transfer.kept);
        // Before the first step a changed parameter is no error, because `master` then returns the parameter.
        if self.steps > 0 && (converts_master || leads_back) {
            self.check_unchanged(&self.state, x, Extent::Whole)
                .map_err(|error| error.counted_from(self.part().start))?;
        }
        if converts_master && optimiser.keep_precise(&mut state, x, &self.master(x)?)? {
            transfer.fresh.retain(|name| !new.contains(name));
            transfer.dropped.retain(|name| !old.contains(name));
            transfer.kept.splice(0..0, new);
        }
        // The rule copies the master, which may be more precise than the parameter.
        let x_of_rule = optimiser.x_of_rule(&state, x)?;
        state.renew(&x_of_rule, &transfer.kept)?;
        Ok((state, transfer))
    }
}
