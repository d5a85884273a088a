//! What a state has met that is no error and hurts a training all the same.

use candle_core::{DType, Tensor};

use super::{Leaf, StateTree};
use crate::consistency::not_finite;
use crate::error::listed;
use crate::warning::{Warning, Warnings};

/// At most as many parameters are looked at in a call.
const PARAMETERS: usize = 16;

impl StateTree {
    /// The [warnings](Warning) that this state has met, one of each kind, in the order in which it met them.
    ///
    /// What its parameters and optimisers show is here as soon as the state is: after
    /// [`setup`](crate::setup), [`add`](StateTree::add) or [`replace`](crate::Selection::replace). The log
    /// and the outcome have it from the first [`update`](crate::update) on, so that a program can say before
    /// that it is meant.
    ///
    /// A clone has met them too. A checkpoint does not keep them: a resumed program meets them again.
    pub fn warnings(&self) -> &[Warning] {
        self.warnings.with(|| low_precision(&self.leaves))
    }

    /// A state beside the training, whose warnings are the training's.
    pub(crate) fn without_warnings(self) -> Self {
        StateTree { warnings: Warnings::none(), ..self }
    }

    /// Warns once of parameters that lose steps.
    pub(crate) fn warn_of_low_precision(&mut self) -> Option<Warning> {
        self.warnings.meet_shown(|| low_precision(&self.leaves))
    }

    /// Warns once of a parameter with a number that is not finite, where an update has written it. It looks
    /// at a sample of some parameters, others in each call: such numbers stay and spread, so that it need not
    /// look at all of them, nor at once.
    pub(crate) fn warn_of_numbers(&mut self, parameters: &[Tensor]) -> Option<Warning> {
        if !self.warnings.would_meet(|met| matches!(met, Warning::ParameterNotFinite { .. })) {
            return None;
        }
        let leaves = self.leaves.len();
        let places = self.warnings.next(leaves.min(PARAMETERS), leaves).map(|place| place % leaves);
        let mut moved = places.map(|place| (&self.leaves[place], &parameters[place])).filter(|(leaf, _)| leaf.steps > 0);
        let (leaf, index) = moved.find_map(|(leaf, x)| Some((leaf, not_finite(x)?)))?;
        self.warnings.meet(Warning::ParameterNotFinite { path: leaf.path.clone(), index })
    }
}

/// What parameters show that lose steps.
fn low_precision(leaves: &[Leaf]) -> Option<Warning> {
    let losing = || leaves.iter().filter(|leaf| leaf.loses_steps());
    let of = |dtype: DType| losing().filter(|leaf| leaf.dtype == dtype).count();
    let paths = listed(losing().map(Leaf::path));
    (!paths.is_empty()).then(|| Warning::LowPrecision { bf16: of(DType::BF16), f16: of(DType::F16), paths })
}
