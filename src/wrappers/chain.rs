use crate::error::Result;
use crate::rule::{Describe, Describer, Flow, Gradient, Kind, Parameter, Rule, State, state_of_another_rule};

/// Rules one after another: each gets the gradient that the rule before it returns.
///
/// The members are a tuple of up to 8 [`Rule`]s (chains may be nested, and `Option` and `Box<dyn Rule>` are
/// rules), or a `Vec<Box<dyn Rule>>` if they are chosen at run time. The empty chain is the identity. A chain
/// of elementwise rules is one pass over memory, however long the chain is.
///
/// The learning rate of a chain is the product of its members' `eta`, because each `eta` multiplies the
/// chain's steps. [Setting](crate::Adjust::adjust) this rate sets the last member that has an `eta`.
///
/// The order matters. [`WeightDecay`](crate::WeightDecay) before [`Adam`](crate::Adam) is L2 regularisation;
/// `WeightDecay` after `Adam` is decoupled decay (not multiplied by the learning rate). A clipping rule
/// limits the result of the rules before it. If the [roles](crate::Role) of members show that their order is
/// certainly a mistake, the state has a [warning](crate::Warning::WrongOrder).
///
/// ```
/// use candle_core::{Device, Tensor, Var};
/// use optimisers::{ClipGrad, Descent, OptimiserChain, Rule, WeightDecay, setup, update};
///
/// // The gradient of 30 is cut to 1, then 0.5·4 is added; the step is half of that.
/// let x = Var::new(&[4f32], &Device::Cpu)?;
/// let gradient = [("", Tensor::new(&[30f32], &Device::Cpu)?)];
/// let fixed = OptimiserChain::new((ClipGrad::new(1.0), WeightDecay::new(0.5), Descent::new(0.5)));
/// update(&mut setup(fixed, &x)?, &x, &gradient)?;
/// assert_eq!(x.to_vec1::<f32>()?, [2.5]);
///
/// let mut members: Vec<Box<dyn Rule>> = vec![Box::new(ClipGrad::new(1.0))];
/// members.push(Box::new(Descent::new(0.5)));
/// let chosen_at_run_time = OptimiserChain::new(members);
/// update(&mut setup(chosen_at_run_time, &x)?, &x, &gradient)?;
/// assert_eq!(x.to_vec1::<f32>()?, [2.0]);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// # Departures
/// Optimisers.jl sets every `eta` of a chain, which multiplies steps by the new rate several times.
#[must_use = "a rule does nothing by itself: pass it to `setup`"]
#[derive(Clone, Debug, Default, PartialEq)]
pub struct OptimiserChain<M>(pub(super) M);

impl<M: Members> OptimiserChain<M> {
    /// A chain of these rules.
    pub fn new(members: M) -> Self {
        OptimiserChain(members)
    }
}

/// The members of an [`OptimiserChain`]. Code of other crates cannot name the trait, so this crate has all
/// implementations.
#[diagnostic::on_unimplemented(
    message = "`{Self}` is not a tuple of up to 8 rules",
    label = "put the rules into one tuple: `OptimiserChain::new((a, b))`, or `((a,))` for one rule",
    note = "nest chains for more: `OptimiserChain::new((a, OptimiserChain::new((b, c))))`"
)]
// `Same` keeps the compiler from proposing `(a,)` for `a`, which is wrong if the parentheses around two rules
// were forgotten. The compiler proposes `(a,)` only if `(a,)` has the trait with the same parameters. But
// `(a,)` does not have the trait with `Same = a`.
pub trait Members<Same: ?Sized = Self>: Clone + std::fmt::Debug + Send + Sync + 'static {
    /// The rules in order.
    fn rules(&self) -> impl Iterator<Item = &dyn Rule>;
    /// The rules in order, mutable.
    fn rules_mut(&mut self) -> impl Iterator<Item = &mut dyn Rule>;
}

macro_rules! tuples {
    ($(($($Member:ident $index:tt),*))*) => {$(
        impl<$($Member: Rule + Clone),*> Members for ($($Member,)*) {
            fn rules(&self) -> impl Iterator<Item = &dyn Rule> {
                // The length is a sum of ones, because a macro cannot count its repetitions otherwise.
                let rules: [&dyn Rule; 0 $(+ { let _ = $index; 1 })*] = [$(&self.$index),*];
                rules.into_iter()
            }

            fn rules_mut(&mut self) -> impl Iterator<Item = &mut dyn Rule> {
                let rules: [&mut dyn Rule; 0 $(+ { let _ = $index; 1 })*] = [$(&mut self.$index),*];
                rules.into_iter()
            }
        }
    )*};
}

tuples! {
    ()
    (A 0)
    (A 0, B 1)
    (A 0, B 1, C 2)
    (A 0, B 1, C 2, D 3)
    (A 0, B 1, C 2, D 3, E 4)
    (A 0, B 1, C 2, D 3, E 4, F 5)
    (A 0, B 1, C 2, D 3, E 4, F 5, G 6)
    (A 0, B 1, C 2, D 3, E 4, F 5, G 6, H 7)
}

impl Members for Vec<Box<dyn Rule>> {
    fn rules(&self) -> impl Iterator<Item = &dyn Rule> {
        self.iter().map(|rule| &**rule)
    }

    fn rules_mut(&mut self) -> impl Iterator<Item = &mut dyn Rule> {
        self.iter_mut().map(|rule| &mut **rule)
    }
}

impl<M: Members> Describe for OptimiserChain<M> {
    fn describe(&mut self, rule: &mut Describer<'_>) {
        rule.kind("OptimiserChain");
        self.0.rules_mut().for_each(|member| rule.member(member));
    }
}

impl<M: Members> OptimiserChain<M> {
    /// Refuses a state with more or fewer members than this chain.
    fn check_members(&self, state: &State) -> Result<()> {
        if state.children.len() == self.0.rules().count() {
            Ok(())
        } else {
            state_of_another_rule(self)
        }
    }
}

impl<M: Members> Rule for OptimiserChain<M> {
    fn apply<'a>(&'a self, state: &'a mut State, x: Parameter<'a>, dx: Gradient<'a>) -> Result<Flow<'a>> {
        // `zip` below would skip members without a state.
        self.check_members(state)?;
        let mut flow = Flow::Step(dx);
        for (rule, member) in self.0.rules().zip(&mut state.children) {
            flow = match flow {
                Flow::Step(dx) => rule.apply(&mut member.state, x, dx)?,
                Flow::Hold(_) => break,
            };
        }
        Ok(flow)
    }

    fn kind(&self) -> Kind {
        self.0
            .rules()
            .map(|rule| rule.kind())
            .max()
            .unwrap_or(Kind::Elementwise)
    }
}
