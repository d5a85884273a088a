//! What [`setup`](crate::setup) takes.

pub(crate) mod consistency;
pub(crate) mod parameter_store;
pub(crate) mod planned;
pub(crate) mod target;

use dyn_clone::DynClone;

use super::description::rates::Rates;
use super::state::ChildPlace;
use super::{
    Adjust, Child, Describe, Describer, Evaluation, Gradient, OwnState, Parameter, ParameterStore, Planned,
    Rule, State, StorageKind, StorageScheme, Target, state_of_another_rule,
};
use crate::engine::{Epilogue, Operand, set_lent};
use crate::error::Result;
use crate::model::lent::Lend;
use crate::numbers::DType;
use crate::tensors::Tensor;

/// What [`setup`](crate::setup) takes: a rule together with how the parameter is stored.
///
/// Every [`Rule`] is one: the parameter is `x - dx`, rounded to its own dtype.
/// [`MixedPrecision`](crate::MixedPrecision) keeps a high-precision copy. A `Box<dyn Optimiser>` is one too.
///
/// The trait is sealed, because the engines have to know every way in which a parameter is stored. What is of
/// one's own is a [`Rule`].
#[diagnostic::on_unimplemented(
    message = "`{Self}` is not an optimiser",
    label = "expected a rule, a chain of rules or `MixedPrecision`",
    note = "several rules one after another are a chain: `OptimiserChain::new((ClipGrad::new(1.0), \
            Adam::new(1e-3)))`"
)]
pub trait Optimiser: Describe + Adjust + DynClone + std::fmt::Debug + Send + Sync + 'static {
    /// The state for the parameter `x`.
    ///
    /// # Errors
    /// If a hyper-parameter is out of range, or the device has no memory left.
    fn make_state(&self, x: &dyn Lend) -> Result<State> {
        if let Some(inner) = self.stands_for() {
            return inner.make_state(x);
        }
        self.check()?;
        let state = match self.store_of(x.dtype())? {
            Some(store) => store.state(self.rule(), x)?,
            None => self.rule().init(Parameter::new(x))?,
        };
        of_rule(&state).check_layout(self.rule())?;
        Ok(state)
    }

    /// The rule without how the parameter is stored.
    #[doc(hidden)]
    fn rule(&self) -> &dyn Rule;

    /// How it stores the parameters that it treats specially, if any.
    #[doc(hidden)]
    fn store(&self) -> Option<&dyn ParameterStore> {
        self.stands_for().and_then(|inner| inner.store())
    }

    /// The optimiser that this one stands for, as a box does.
    #[doc(hidden)]
    fn stands_for(&self) -> Option<&dyn Optimiser> {
        None
    }

    /// How it stores parameters of this dtype, if it treats them specially.
    #[doc(hidden)]
    fn store_of(&self, dtype: DType) -> Result<Option<&dyn ParameterStore>> {
        let Some(store) = self.store() else { return Ok(None) };
        Ok(store.wraps(dtype)?.then_some(store))
    }

    /// How parameters are stored.
    #[doc(hidden)]
    fn storage(&self) -> StorageScheme {
        if let Some(inner) = self.stands_for() {
            return inner.storage();
        }
        StorageScheme::on_device(self.store().map_or(StorageKind::Rounded, |store| store.storage_kind()))
    }

    /// The most precise copy of the parameter `x` that there is. It may share storage with the state or the
    /// parameter.
    #[doc(hidden)]
    fn precise(&self, state: &State, x: &dyn Lend) -> Result<Tensor> {
        if let Some(inner) = self.stands_for() {
            return inner.precise(state, x);
        }
        self.store_of(x.dtype())?.map_or_else(|| x.to_tensor(), |store| store.whole(state, x))
    }

    /// Sets the most precise copy, and the parameter to it rounded.
    #[doc(hidden)]
    fn set_master(&self, state: &mut State, x: &dyn Lend, values: &Tensor) -> Result<()> {
        if let Some(inner) = self.stands_for() {
            return inner.set_master(state, x, values);
        }
        self.store_of(x.dtype())?
            .map_or_else(|| set_lent(x, values), |store| store.set_whole(state, x, values))
    }

    /// Sets the most precise copy alone, as near to `values` as it can be beside the parameter `x`. Says
    /// whether there is one.
    #[doc(hidden)]
    fn keep(&self, state: &mut State, x: &dyn Lend, values: &Tensor) -> Result<bool> {
        if let Some(inner) = self.stands_for() {
            return inner.keep(state, x, values);
        }
        self.store_of(x.dtype())?.map_or(Ok(false), |store| store.keep(state, x, values))
    }

    /// What the rule inside sees of the parameter `x`: its master, if it has one. It may share storage with
    /// the state or the parameter.
    #[doc(hidden)]
    fn seen(&self, state: &State, x: &dyn Lend) -> Result<Tensor> {
        if let Some(inner) = self.stands_for() {
            return inner.seen(state, x);
        }
        self.store_of(x.dtype())?.map_or_else(|| x.to_tensor(), |store| store.seen_by_rule(state, x))
    }

    /// Refuses a parameter that is not its master rounded.
    #[doc(hidden)]
    fn check_rounded(&self, state: &State, target: Target<'_>) -> Result<()> {
        if let Some(inner) = self.stands_for() {
            return inner.check_rounded(state, target);
        }
        self.store_of(target.x.dtype())?.map_or(Ok(()), |store| store.check_rounded(state, target))
    }

    /// A copy of the state for the parameter `x`, which is on another device than the one before.
    #[doc(hidden)]
    fn state_for(&self, state: &State, x: &dyn Lend) -> Result<State> {
        self.stands_for().map_or_else(|| state.to_device(x.device()), |inner| inner.state_for(state, x))
    }

    /// Plans a step for the parameter `x`.
    #[doc(hidden)]
    fn plan<'a>(&'a self, state: &'a mut State, target: Target<'a>, dx: Gradient<'a>) -> Result<Planned<'a>> {
        if let Some(inner) = self.stands_for() {
            return inner.plan(state, target, dx);
        }
        match self.store_of(target.x.dtype())? {
            Some(store) => match OwnState::of(state) {
                Some(own) => store.plan_stored(self.rule(), own, target, dx),
                None => state_of_another_rule(self),
            },
            None => {
                let flow = self.rule().apply(state, Parameter::new(target.x), dx)?;
                Ok(Planned::new(flow, target.path, Operand::Lent(target.x), Epilogue::Subtract))
            }
        }
    }
}

dyn_clone::clone_trait_object!(Optimiser);

/// What follows from the rule, however the parameter is stored.
impl dyn Optimiser {
    /// The learning rates that a name reaches; `None` if it names none or reaches none.
    pub(crate) fn rates(&self, name: &str) -> Option<Rates> {
        Rates::named(&mut *dyn_clone::clone_box(self), name)
    }

    /// See [`Rule::end_window`].
    pub(crate) fn end_window(&self, state: &mut State) -> Result<()> {
        self.rule().end_window(of_rule_mut(state))
    }

    /// See [`Rule::evaluation`].
    pub(crate) fn evaluation<'s>(&self, state: &'s State) -> Result<Option<Evaluation<'s>>> {
        self.rule().evaluation(of_rule(state))
    }

    /// A copy of [`Optimiser::precise`] with storage of its own.
    pub(crate) fn master(&self, state: &State, x: &dyn Lend) -> Result<Tensor> {
        Ok(self.precise(state, x)?.detach().copy()?)
    }
}

/// The state of the rule in the state of an optimiser.
fn of_rule(state: &State) -> &State {
    match &state.children[..] {
        [Child { place: ChildPlace::Stored, state }] => of_rule(state),
        _ => state,
    }
}

fn of_rule_mut(mut state: &mut State) -> &mut State {
    while let [Child { place: ChildPlace::Stored, .. }] = &state.children[..] {
        state = &mut state.children[0].state;
    }
    state
}

#[diagnostic::do_not_recommend]
// Hidden: on the page of every rule the documentation would link a hidden method.
#[doc(hidden)]
impl<R: Rule> Optimiser for R {
    fn rule(&self) -> &dyn Rule {
        self
    }
}

impl Optimiser for Box<dyn Optimiser> {
    fn rule(&self) -> &dyn Rule {
        (**self).rule()
    }

    fn stands_for(&self) -> Option<&dyn Optimiser> {
        Some(&**self)
    }
}

impl Describe for Box<dyn Optimiser> {
    fn describe(&mut self, rule: &mut Describer<'_>) {
        (**self).describe(rule);
    }
}
