//! Giving schedules to a state, and the count of steps at which they are read.

use smallvec::SmallVec;

use super::acting::acting_optimisers;
use super::drives::{ScheduleAssignment, ScheduleResolver, check_equal_own_values, give_to_all};
use super::schedule::Schedule;
use super::{Leaf, Selection, StateTree, available_fields};
use crate::error::warning::Warning;
use crate::error::{Error, Result};
use crate::numbers::counts;

impl Selection<'_> {
    /// Lets a hyper-parameter of these leaves follow a schedule; see [`StateTree::schedule`].
    ///
    /// # Errors
    /// As [`StateTree::schedule`].
    pub fn schedule(&mut self, schedule: Schedule) -> Result<()> {
        self.check_leaves()?;
        schedule.check()?;
        let assignment = ScheduleAssignment::new(schedule, self.steps, false);
        let field = assignment.schedule.driven_field();
        let (mut resolver, mut has_field) = (ScheduleResolver::default(), false);
        let new_drives = |leaf: &Leaf| {
            let assignments = leaf.schedules().chain([&assignment]).cloned();
            let resolved = resolver
                .resolve(&leaf.optimiser, assignments)
                .map_err(|error| error.at(&leaf.path))?;
            has_field |= resolved.missing.is_empty();
            Ok(resolved.drives)
        };
        let drives = self.leaves().map(new_drives).collect::<Result<Vec<_>>>()?;
        if !has_field {
            return Err(Error::unknown(
                "field",
                field,
                &available_fields(self.leaves(), field),
            ));
        }
        check_equal_own_values(
            self.leaves()
                .map(Leaf::path)
                .zip(drives.iter().map(Option::as_deref)),
        )?;
        let leaves = self.leaves().zip(&drives);
        let with_drives = leaves.map(|(leaf, drives)| (leaf.path(), &leaf.optimiser, drives.as_ref()));
        let acting = acting_optimisers(with_drives, self.steps)?;
        for (leaf, (drives, acting)) in self.leaves.iter_mut().zip(drives.into_iter().zip(acting)) {
            (leaf.drives, leaf.acting) = (drives, acting);
        }
        if let Some(for_all) = &mut self.for_all {
            give_to_all(for_all, assignment);
        }
        Ok(())
    }
}

impl StateTree {
    /// Lets a hyper-parameter of all leaves, by default the learning rate, follow a [`Schedule`].
    ///
    /// From now on the state has the schedule's value in each step. The schedule replaces an earlier one of
    /// the same hyper-parameter. For a part of the model call [`Selection::schedule`].
    ///
    /// ```
    /// use candle_core::{Device, Var};
    /// use optimisers::{AdamW, Schedule, setup, update};
    ///
    /// let (x, steps) = (Var::new(&[1f32], &Device::Cpu)?, 10);
    /// let mut state = setup(AdamW::new(1e-3), &x)?;
    /// state.schedule(Schedule::cosine(1e-3, 0.0, steps))?;
    /// for _ in 0..steps {
    ///     update(&mut state, &x, &x.sqr()?.sum_all()?.backward()?)?;
    /// }
    /// assert_eq!(state.leaf("").and_then(|leaf| leaf.learning_rate()), Some(0.0));
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # The step
    /// The schedule is read at the [count](StateTree::steps) of applied steps. This method does not change
    /// the count, so a call before or after a restore gives the same run.
    ///
    /// Each applied step counts, whichever parameters it moves. If a critic and an actor are updated in
    /// turns, make [a state for each](crate::guide::recipes#several-networks), because in a common state all
    /// schedules and averages would count the steps of both networks.
    ///
    /// # Own values
    /// A leaf keeps the values that it was set up with. A [relative](Schedule::relative) schedule multiplies
    /// them, and [`adjust`](StateTree::adjust) sets them while the schedule runs. Any other schedule would
    /// make different own values equal, so it is refused if own values differ. While such a schedule runs, a
    /// new own value would have no effect and is refused. To end a schedule, give
    /// `Schedule::constant(1.0).relative()`. Files and configurations have the own values;
    /// [`Leaf::learning_rate`] and [`Leaf::acting`] have the values of the next step.
    ///
    /// # Which leaves
    /// A leaf without the field is passed over, even if it later gets an optimiser that has the field. Frozen
    /// leaves are driven like other leaves. A leaf that gets [another optimiser](Selection::replace) keeps
    /// its schedules. A leaf that is [added](StateTree::add) gets the schedules that were given to all
    /// leaves.
    ///
    /// # In a chain
    /// If a chain has several learning rates, its rate is their product. The schedule sets the last rate, so
    /// that the product is right. A relative schedule multiplies the last rate.
    ///
    /// # Checkpoints
    /// A [checkpoint](crate::Checkpoint) has the count and the schedules. If program and file have different
    /// schedules for a field, the program's schedule is used, and a [warning](Warning::ScheduleDiffers)
    /// reports the file's schedule.
    ///
    /// # Errors
    /// If no leaf has the field; if the field is no real number, or several members of a chain have a field
    /// that is not [the learning rate](crate::Adjust::adjust); if leaves have different values and the
    /// schedule is not relative; if no value of the last member of a chain makes the rate right; if a value
    /// of any step is out of range, or the factor of [restarts](Schedule::cosine_restarts) below 1. Nothing
    /// changes then.
    ///
    /// Two schedules on the two numbers of a field, such as `gamma1` and `gamma2` of [`Rprop`](crate::Rprop),
    /// are tried together in the steps of their extremes. If they cross between these steps, the update of
    /// that step is an error, and nothing moves.
    pub fn schedule(&mut self, schedule: Schedule) -> Result<()> {
        self.at("")?.schedule(schedule)
    }

    /// How many steps were applied: calls in which at least one parameter had its step, also at a rate of 0.
    ///
    /// Skipped calls, errors, and calls that only collect gradients do not count.
    pub fn steps(&self) -> u64 {
        self.steps
    }

    /// Sets the count of applied steps, from which [schedules](StateTree::schedule) go on.
    ///
    /// For a second phase with schedules of its own, set the count to 0. If the program has not called
    /// `set_steps`, a restore of [torch's state](crate::guide::coming_from#torch) sets the count to the
    /// largest `step` of the file. For a file without `step`, set the count before.
    ///
    /// # Errors
    /// If the count is above `u64::MAX / 2`, or two schedules on numbers of one field cross there.
    ///
    /// ```
    /// use candle_core::{Device, Var};
    /// use optimisers::{Descent, Schedule, setup};
    ///
    /// let mut state = setup(Descent::new(1.0), &Var::new(1f32, &Device::Cpu)?)?;
    /// state.schedule(Schedule::linear(1.0, 0.0, 4))?;
    /// state.set_steps(3)?;
    /// assert_eq!(state.leaf("").and_then(|leaf| leaf.learning_rate()), Some(0.25));
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn set_steps(&mut self, steps: u64) -> Result<()> {
        counts::check("the count for `set_steps` is", steps)?;
        self.go_to_step(steps)?;
        if self.leaves().all(|leaf| leaf.steps == 0) {
            self.began_at = Some(steps);
        }
        Ok(())
    }

    /// Gives new leaves the schedules of all leaves, as far as the new leaves have the fields.
    ///
    /// # Errors
    /// As [`StateTree::schedule`].
    pub(super) fn give_schedules(&self, new_leaves: &mut [Box<Leaf>]) -> Result<()> {
        let mut resolver = ScheduleResolver::default();
        for leaf in &mut *new_leaves {
            let resolved = resolver.resolve(&leaf.optimiser, self.schedules.iter().cloned());
            leaf.drives = resolved.map_err(|error| error.at(&leaf.path))?.drives;
        }
        check_equal_own_values(
            self.leaves
                .iter()
                .chain(&*new_leaves)
                .map(|leaf| (leaf.path(), leaf.drives.as_deref())),
        )?;
        let with_drives = new_leaves
            .iter()
            .map(|leaf| (leaf.path(), &leaf.optimiser, leaf.drives.as_ref()));
        let acting = acting_optimisers(with_drives, self.steps)?;
        new_leaves
            .iter_mut()
            .zip(acting)
            .for_each(|(leaf, acting)| leaf.acting = acting);
        Ok(())
    }

    /// Warns once of a step at a learning rate of 0 that a schedule gives.
    pub(crate) fn warn_of_rate_of_zero(&mut self) -> Option<Warning> {
        if !self
            .warnings
            .would_record(|warning| matches!(warning, Warning::ScheduledRateOfZero { .. }))
        {
            return None;
        }
        let (step, mut checked) = (self.acting_at, SmallVec::new());
        let mut has_zero_rate = |leaf: &Leaf| {
            leaf.drives
                .as_ref()
                .is_some_and(|drives| drives.has_zero_rate(step, &mut checked))
        };
        let path = self
            .leaves()
            .find(|leaf| !leaf.frozen && has_zero_rate(leaf))?
            .path
            .clone();
        self.warnings.record(Warning::ScheduledRateOfZero { path, step })
    }
}
