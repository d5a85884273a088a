//! Replacing the optimiser of parameters that have a state.
//!
//! All new states are made before the first leaf gets one, so that an error changes nothing. For each leaf:
//! 1. Make fresh state, and take over the tensors with the same name and shape (`State::take_over`).
//! 2. If the new store keeps the precise value in another form, convert it (`convert_master`).
//! 3. Set the copies of the parameter that were not taken over (`renew_fresh`). This comes last, because a
//!    rule copies the master, which step 2 has set.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use super::acting::acting;
use super::choices::ChoiceCache;
use super::drives::{ResolvedSchedules, ScheduleResolver};
use super::leaf::fresh_state;
use super::{Leaf, Selection, is_trainable};
use crate::error::{Error, Result};
use crate::model::lent::{Lend, Lent};
use crate::model::{Model, selected};
use crate::rule::{Adjust, Extent, IntoOptimiser, Optimiser, Parameter, State, Transfer};
use crate::tensors::{Tensor, TensorId};

/// What was kept of a parameter's state, by the names of tensors, counters and numbers.
///
/// Returned when a parameter gets [another optimiser](Selection::replace) or [other
/// rows](crate::StateTree::resize_rows).
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct StateChange {
    /// The parameter.
    pub path: String,
    /// What was taken over; of a tensor with other rows, the rows that stay.
    pub kept: Vec<String>,
    /// What starts anew.
    pub fresh: Vec<String>,
    /// What the new optimiser does not have. A schedule is listed as `schedule of lambda`.
    pub dropped: Vec<String>,
}

impl Selection<'_> {
    /// Gives these parameters another optimiser, which takes over the state that fits.
    ///
    /// Returns what was kept of each parameter's state, and what was not.
    ///
    /// A state tensor fits if it has the same name and shape, wherever the rule stands in a chain. A rule
    /// that finds all its tensors keeps them and its counters, such as Adam's step count for the bias
    /// correction; a rule that lacks any starts anew. So `Adam` can become `AdamW` or move into a chain, and
    /// [`MixedPrecision`](crate::MixedPrecision) can be put around a rule in a running training, or taken off
    /// again. Values are converted to the dtype of the new state.
    ///
    /// Between [`MixedPrecision`](crate::MixedPrecision), [`SplitMaster`](crate::SplitMaster) and
    /// [`Kahan`](crate::Kahan) the precise value of each parameter is converted, and the parameter stays as
    /// it is. From F32 masters to split ones and back no bit changes. Any other store keeps the nearest value
    /// that it can hold with this parameter: [24 bits](crate::SplitMaster::of_24_bits) are at most one unit
    /// in their last place away, and `Kahan` rounds the difference to the parameter's dtype. If a value of 24
    /// bits or of `Kahan` is exactly between two numbers of the parameter's dtype, the parameter can be
    /// either. Other masters are rounded to the even number; if the parameter is the odd one, the new master
    /// is one unit in its last place nearer to it.
    ///
    /// [Schedules](crate::StateTree::schedule) go on in the new optimiser. If it lacks a schedule's field,
    /// the schedule is dropped, and the answer names it. Under a schedule that is not relative, the new
    /// optimiser must be made with the own rate of the old one, because another rate would have no effect.
    ///
    /// Over [ranks](crate::Setup::over) all have to do the same, otherwise the next update fails. A parameter
    /// that is cut among ranks stays so, and needs a [divisible](crate::Rule::is_divisible) rule.
    ///
    /// # Errors
    /// If a hyper-parameter is out of range, a schedule does not go with the optimiser, `model` is not the
    /// state's or has averages instead of these parameters, a master has to be converted although its
    /// parameter was changed outside of updates, or a device has no memory left. Nothing changes then.
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
        self.check_leaves()?;
        let optimiser = Arc::new(optimiser.into_optimiser());
        optimiser.check()?;
        let ids: HashSet<TensorId> = self.leaves().filter_map(|leaf| leaf.id).collect();
        let paths: HashSet<&str> = self.leaves().flat_map(Leaf::paths).collect();
        let is_selected = |path: &str, x: Option<&Tensor>| {
            x.map_or_else(
                || paths.contains(path),
                |x| is_trainable(x) && (ids.contains(&x.id()) || paths.contains(path)),
            )
        };
        let variables = selected(model, is_selected)?;
        let with_ids = variables.iter().filter_map(|variable| Some((variable.x.tensor()?.id(), &variable.x)));
        let by_id: HashMap<TensorId, &Lent<'_>> = with_ids.collect();
        // Memory that is no tensor is found by its paths.
        let of_paths = variables
            .iter()
            .flat_map(|variable| variable.paths.iter().map(move |path| (path.as_str(), &variable.x)));
        let by_path: HashMap<&str, &Lent<'_>> = of_paths.collect();
        let (mut states, mut settled) = (Vec::with_capacity(self.leaves.len()), ChoiceCache::default());
        let mut resolver = ScheduleResolver::default();
        let mut answer = Vec::with_capacity(self.leaves.len());
        for leaf in &self.leaves {
            leaf.check_parameter()?;
            // A tensor with another id is another variable, even under the same path.
            let of_path = || {
                leaf.paths()
                    .find_map(|path| by_path.get(path))
                    .filter(|x| leaf.id.is_none() || x.tensor().is_none())
            };
            let x = leaf.id.and_then(|id| by_id.get(&id)).or_else(of_path);
            let x = *x.ok_or_else(|| leaf.not_in_model())?;
            leaf.check_like(&**x)?;
            let paths: Vec<String> = leaf.paths().map(str::to_string).collect();
            let optimiser = settled.of(&optimiser, &paths, Parameter::new(&**x))?;
            let ResolvedSchedules { drives, missing } = leaf.drives_in(&optimiser, &mut resolver)?;
            leaf.check_divisible(&optimiser)?;
            let x = &*leaf.own_part(&**x)?;
            let with_path = |error: Error| error.at(&leaf.path);
            let mut state = fresh_state(&optimiser, x, leaf.shape.elem_count()).map_err(with_path)?;
            let mut transfer = state.take_over(&leaf.state).map_err(with_path)?;
            leaf.convert_master(&optimiser, &mut state, x, &mut transfer).map_err(with_path)?;
            let Transfer { kept, fresh, mut dropped } = transfer;
            dropped.extend(missing.into_iter().map(|field| format!("schedule of {field}")));
            // From the master, which may be more precise than the parameter.
            optimiser
                .seen_by_rule(&state, x)
                .and_then(|seen| state.renew_fresh(&seen, &kept))
                .map_err(with_path)?;
            answer.push(StateChange { path: leaf.path.clone(), kept, fresh, dropped });
            states.push((state, optimiser, drives));
        }
        let own = self.leaves().zip(&states);
        let own = own.map(|(leaf, (_, optimiser, drives))| (leaf.path(), optimiser, drives.as_ref()));
        let acting = acting(own, self.steps)?;
        for ((leaf, change), ((state, optimiser, drives), acting)) in
            self.leaves.into_iter().zip(&answer).zip(states.into_iter().zip(acting))
        {
            let is_like = leaf.optimiser.name() == optimiser.name();
            leaf.set(optimiser, leaf.frozen, self.steps > 0);
            if !is_like {
                // The values of another rule cannot be compared.
                (leaf.set_up, leaf.begun) = (None, None);
            }
            (leaf.state, leaf.drives, leaf.acting) = (state, drives, acting);
            let left = leaf.left;
            leaf.unsettle();
            // A state that was taken over follows from the same values of the parameter as before.
            leaf.left = left.filter(|_| leaf.is_led_back && !change.kept.is_empty());
        }
        Ok(answer)
    }
}

impl Leaf {
    /// Converts the precise value of the parameter `x`, if the new store keeps it in another form.
    fn convert_master(
        &self,
        optimiser: &Optimiser,
        state: &mut State,
        x: &dyn Lend,
        transfer: &mut Transfer,
    ) -> Result<()> {
        let (old, new) = (self.state.names_of_store(), state.names_of_store());
        let is_kept = new.iter().all(|name| transfer.kept.contains(name));
        if is_kept
            || old.is_empty()
            || !self.optimiser.store().keeps_precise()
            || !optimiser.store().keeps_precise()
        {
            return Ok(());
        }
        // Before the first step a changed parameter is no error, because `master` then returns the parameter.
        if self.steps > 0 {
            self.check_unchanged(x, Extent::Whole).map_err(|error| error.counted_from(self.part().start))?;
        }
        if optimiser.keep_precise(state, x, &self.master(x)?)? {
            transfer.fresh.retain(|name| !new.contains(name));
            transfer.dropped.retain(|name| !old.contains(name));
            transfer.kept.splice(0..0, new);
        }
        Ok(())
    }
}
