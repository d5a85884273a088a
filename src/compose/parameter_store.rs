use candle_core::{DType, Tensor, Var};

use crate::error::Result;
use crate::rule::{Adjust, Gradient, OwnCounters, OwnTensors, Planned, Rule, State, StorageKind, Target};

/// How a wrapper around a rule stores the parameters of the dtypes that it treats specially. [`stores_parameters!`] makes an optimiser of it.
///
/// What it keeps of a parameter is in its own state, around the rule's.
pub(super) trait ParameterStore: Adjust {
    /// What it keeps.
    const KIND: StorageKind;

    /// Whether it treats parameters of this dtype specially. The rule runs on all others as if bare.
    fn wraps(&self, dtype: DType) -> Result<bool>;

    /// The state around that of `rule`.
    fn state(&self, rule: &impl Rule, x: &Tensor) -> Result<State>;

    /// The parameter with what is kept of it in the state, as one number.
    fn whole(&self, state: &State, x: &Tensor) -> Result<Tensor>;

    /// What of that number is x to the rule.
    fn seen_by_rule(&self, state: &State, x: &Tensor) -> Result<Tensor> {
        self.whole(state, x)
    }

    /// Sets parameter and state to that number.
    fn set_whole(&self, state: &mut State, x: &Tensor, values: &Tensor) -> Result<()>;

    /// Refuses a parameter that does not belong to its state.
    fn expect_rounded(&self, _state: &State, _target: Target<'_>) -> Result<()> {
        Ok(())
    }

    /// Plans a step of `rule`.
    fn plan_stored<'a>(&'a self, rule: &'a impl Rule, own: OwnState<'a>, target: Target<'a>, dx: Gradient<'a>) -> Result<Planned<'a>>;
}

/// The state of a wrapper, apart from that of its rule.
pub(super) struct OwnState<'a> {
    pub(super) master: Option<&'a Var>,
    pub(super) tensors: OwnTensors<'a>,
    pub(super) counters: OwnCounters<'a>,
    pub(super) of_rule: &'a mut State,
}

impl<'a> OwnState<'a> {
    /// `None` if there is no state of a rule inside.
    pub(super) fn of(state: &'a mut State) -> Option<Self> {
        let State { master, tensors, counters, children, .. } = state;
        let [inner] = &mut children[..] else { return None };
        Some(OwnState { master: master.as_ref(), tensors, counters, of_rule: &mut inner.state })
    }
}

/// Implements `Optimiser` for a struct with a rule `inner` that is a [`ParameterStore`].
macro_rules! stores_parameters {
    ($Wrapper:ident) => {
        impl<R: Rule + Clone> $crate::rule::Optimiser for $Wrapper<R> {
            fn make_state(&self, x: &Tensor) -> Result<State> {
                self.check()?;
                if self.wraps(x.dtype())? { self.state(&self.inner, x) } else { Rule::init(&self.inner, x) }
            }

            fn rule(&self) -> &dyn Rule {
                &self.inner
            }

            fn storage(&self) -> $crate::rule::Storage {
                $crate::rule::Storage::beside(Self::KIND)
            }

            fn precise(&self, state: &State, x: &Tensor) -> Result<Tensor> {
                if self.wraps(x.dtype())? { self.whole(state, x) } else { Ok(x.clone()) }
            }

            fn set_master(&self, state: &mut State, x: &Tensor, values: &Tensor) -> Result<()> {
                if self.wraps(x.dtype())? { self.set_whole(state, x, values) } else { Ok($crate::engine::set_tensor(x, values)?) }
            }

            fn seen(&self, state: &State, x: &Tensor) -> Result<Tensor> {
                if self.wraps(x.dtype())? { self.seen_by_rule(state, x) } else { Ok(x.clone()) }
            }

            fn expect_rounded(&self, state: &State, target: Target<'_>) -> Result<()> {
                if self.wraps(target.x.dtype())? { ParameterStore::expect_rounded(self, state, target) } else { Ok(()) }
            }

            fn plan<'a>(&'a self, state: &'a mut State, target: Target<'a>, dx: Gradient<'a>) -> Result<Planned<'a>> {
                if !self.wraps(target.x.dtype())? {
                    return $crate::rule::Optimiser::plan(&self.inner, state, target, dx);
                }
                match OwnState::of(state) {
                    Some(own) => self.plan_stored(&self.inner, own, target, dx),
                    None => $crate::rule::foreign(self),
                }
            }
        }
    };
}
pub(super) use stores_parameters;
