//! What acts in a leaf: its own optimiser, or a copy with the values of its schedules.
//!
//! A schedule never writes the own optimiser, because edits and files need the own values. Still a step of
//! thousands of leaves has to be fast. So leaves with the same own optimiser and the same schedules share one
//! copy, and a new one is made only if a value has changed. If a leaf shares its schedules with no other, its
//! copy is written in place.

use std::sync::Arc;

use super::Leaf;
use super::drives::{GivenSchedule, ResolvedSchedules, ScheduleResolver, check_same_own};
use super::once::Once;
use crate::error::Result;
use crate::rule::Optimiser;

/// Gives leaves acting optimisers with the values of a step.
///
/// `before` is the step of the values that they have so far; `None` if optimisers or schedules have changed.
pub(crate) fn act<'l>(leaves: impl Iterator<Item = &'l mut Leaf>, step: u64, before: Option<u64>) {
    let mut made = Once::default();
    for leaf in leaves {
        let Some(drives) = &leaf.drives else {
            leaf.acting = None;
            continue;
        };
        if before.is_some()
            && Arc::strong_count(drives) == 1
            && let Some(acting) = leaf.acting.as_mut().and_then(Arc::get_mut)
        {
            // Nobody shares the copy, so a new one would only take time.
            drives.set(acting, step);
            continue;
        }
        let own = &*leaf.optimiser;
        let key = (Arc::as_ptr(&leaf.optimiser).cast::<()>(), Arc::as_ptr(drives));
        let acting = made.get(key, || {
            let has_changed = before.is_none_or(|before| drives.differ(before, step));
            Ok(has_changed.then(|| {
                let mut acting = own.clone();
                drives.set(&mut acting, step);
                Arc::new(acting)
            }))
        });
        if let Ok(Some(acting)) = acting {
            leaf.acting = Some(acting);
        }
    }
}

impl Leaf {
    /// The optimiser that acts in the next step, with the values that schedules give it.
    ///
    /// ```
    /// use candle_core::{Device, Var};
    /// use optimisers::{AdamW, Schedule, setup};
    ///
    /// let x = Var::new(&[1f32], &Device::Cpu)?;
    /// let mut state = setup(AdamW { lambda: 0.1, ..AdamW::new(1e-3) }, &x)?;
    /// state.schedule(Schedule::linear(0.5, 0.0, 100).relative().field("lambda"))?;
    /// let leaf = state.leaf("").expect("the leaf");
    /// assert_eq!(leaf.acting().field("lambda"), Some(0.05.into()));
    /// assert_eq!(leaf.optimiser().field("lambda"), Some(0.1.into()));
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn acting(&self) -> &Optimiser {
        self.acting.as_deref().unwrap_or(&self.optimiser)
    }

    /// The schedules of this leaf, in the order in which they were given.
    pub(crate) fn schedules(&self) -> impl Iterator<Item = &GivenSchedule> {
        self.drives.iter().flat_map(|drives| drives.given())
    }

    /// The leaf's schedules resolved in another optimiser.
    ///
    /// # Errors
    /// As [`ScheduleResolver::of`]; if an own value differs under a schedule that is not relative.
    pub(super) fn drives_in(
        &self,
        optimiser: &Arc<Optimiser>,
        resolver: &mut ScheduleResolver,
    ) -> Result<ResolvedSchedules> {
        let resolved = resolver.of(optimiser, self.schedules().cloned()).and_then(|resolved| {
            check_same_own(self.drives.as_deref(), resolved.drives.as_deref()).map(|()| resolved)
        });
        resolved.map_err(|error| error.at(&self.path))
    }
}
