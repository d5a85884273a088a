//! Special ways to store a parameter.

use crate::engine::Buffer;
use crate::error::Result;
use crate::model::lent::Lend;
use crate::numbers::DType;
use crate::rule::state::{OwnCounters, OwnTensors};
use crate::rule::{Gradient, Planned, Rule, State, StorageKind, Target};
use crate::tensors::Tensor;

/// How an optimiser stores the parameters of the dtypes that it treats specially.
///
/// What it keeps of a parameter is in its own state, around the rule's.
#[doc(hidden)]
pub trait ParameterStore {
    /// What it keeps.
    fn storage_kind(&self) -> StorageKind;

    /// Whether it treats parameters of this dtype specially. The rule runs on all others as if bare.
    fn wraps(&self, dtype: DType) -> Result<bool>;

    /// The state around that of `rule`.
    fn state(&self, rule: &dyn Rule, x: &dyn Lend) -> Result<State>;

    /// The precise value: the parameter with what the state keeps of it.
    fn whole(&self, state: &State, x: &dyn Lend) -> Result<Tensor>;

    /// What the rule sees of the precise value as its x.
    fn seen_by_rule(&self, state: &State, x: &dyn Lend) -> Result<Tensor> {
        self.whole(state, x)
    }

    /// Sets parameter and state to a precise value.
    fn set_whole(&self, state: &mut State, x: &dyn Lend, values: &Tensor) -> Result<()>;

    /// Sets the state alone, so that it has the nearest precise value to `values` of which the parameter `x`
    /// can be the rounding. Says whether it keeps any.
    fn keep(&self, state: &mut State, x: &dyn Lend, values: &Tensor) -> Result<bool>;

    /// Refuses a parameter that does not belong to its state.
    fn check_rounded(&self, _state: &State, _target: Target<'_>) -> Result<()> {
        Ok(())
    }

    /// Plans a step of `rule`.
    fn plan_stored<'a>(
        &'a self,
        rule: &'a dyn Rule,
        own: OwnState<'a>,
        target: Target<'a>,
        dx: Gradient<'a>,
    ) -> Result<Planned<'a>>;
}

/// The state of a store, apart from that of its rule.
#[doc(hidden)]
#[derive(Debug)]
pub struct OwnState<'a> {
    pub(crate) master: Option<&'a mut Buffer>,
    pub(crate) tensors: OwnTensors<'a>,
    pub(crate) counters: OwnCounters<'a>,
    pub(crate) of_rule: &'a mut State,
}

impl<'a> OwnState<'a> {
    /// `None` if there is no state of a rule inside.
    pub(crate) fn of(state: &'a mut State) -> Option<Self> {
        let State { master, tensors, counters, children, .. } = state;
        let [inner] = &mut children[..] else { return None };
        Some(OwnState { master: master.as_mut(), tensors, counters, of_rule: &mut inner.state })
    }
}
