//! The parts of a rule's own state, which the rule works on in one step.

use super::{Child, entry};
use crate::engine::StepSlots;
use crate::error::{Error, ErrorKind, Result};
use crate::rule::State;

/// The parts of a rule's own state, borrowed for one step, and the states of held rules.
///
/// A rule puts parts into the plan of a [`Gradient`](crate::Gradient). The commit of the step writes these
/// parts.
///
/// ```
/// use candle_core::{Device, Tensor, Var};
/// use optimisers::{
///     Arithmetic, Flow, Gradient, Parameter, Parts, Result, Rule, Slot, State, hyper_parameters, range, setup, update, value::Value,
/// };
///
/// hyper_parameters! {
///     /// Adds the last gradient to the current gradient, and multiplies the sum by η.
///     pub struct Pairwise {
///         /// η: the learning rate.
///         eta: f64 = 0.1 => range::non_negative,
///     }
/// }
///
/// /// dx' = η·(dx + last), last = dx.
/// #[derive(Clone, Copy)]
/// struct PairwiseStep(f64);
///
/// impl Arithmetic for PairwiseStep {
///     type Slots<T> = [T; 1];
///
///     fn step<V: Value>(self, _x: V, dx: V, [last]: &mut [V; 1]) -> V {
///         let both = dx + *last;
///         *last = dx;
///         both * self.0
///     }
/// }
///
/// impl Rule for Pairwise {
///     fn init(&self, x: Parameter<'_>) -> Result<State> {
///         State::for_slots(x, &[Slot::zeros("last")])
///     }
///
///     fn apply<'a>(&'a self, state: &'a mut State, _x: Parameter<'a>, dx: Gradient<'a>) -> Result<Flow<'a>> {
///         let Parts { slots, counters, .. } = state.parts();
///         let (dx, t) = dx.next_step(counters)?;
///         let step = if t == 1 { self.eta } else { self.eta / 2.0 };
///         Ok(Flow::Step(dx.map(PairwiseStep(step), slots)))
///     }
/// }
///
/// let x = Var::new(&[1f32], &Device::Cpu)?;
/// let mut state = setup(Pairwise::new(0.5), &x)?;
/// for expected in [0.5, 0.0] {
///     update(&mut state, &x, &x.sum_all()?.backward()?)?;
///     assert_eq!(x.to_vec1::<f32>()?, [expected]);
/// }
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct Parts<'a> {
    /// The tensors.
    pub slots: Slots<'a>,
    /// The counters. In a state [for slots](State::for_slots) the first counter is `t`, of applied steps.
    pub counters: Counters<'a>,
    /// The numbers that are not per element.
    pub numbers: Numbers<'a>,
    /// The states of held rules.
    pub held: HeldStates<'a>,
}

/// State tensors of a rule, in the order in which its [`init`](crate::Rule::init) added them.
#[derive(Debug, Default)]
pub struct Slots<'a>(pub(crate) StepSlots<'a>);

/// Counters of a rule, in the order in which its [`init`](crate::Rule::init) added them.
#[derive(Debug, Default)]
pub struct Counters<'a>(pub(crate) &'a mut [(&'static str, u64)]);

/// Numbers of a rule, in the order in which its [`init`](crate::Rule::init) added them.
#[derive(Debug, Default)]
pub struct Numbers<'a>(pub(crate) &'a mut [(&'static str, f64)]);

/// The states of held rules, in the order in which the rule [describes](crate::Describe) them.
#[derive(Debug)]
pub struct HeldStates<'a>(&'a mut [Child]);

impl<'a> HeldStates<'a> {
    /// The state of the one rule that this rule is around.
    ///
    /// # Errors
    /// If the rule [holds](crate::Describer::holds) no rule, or several rules.
    pub fn inner(self) -> Result<&'a mut State> {
        self.members().map(|[state]| state)
    }

    /// The states of all held rules.
    ///
    /// # Errors
    /// If there are not N held rules.
    pub fn members<const N: usize>(self) -> Result<[&'a mut State; N]> {
        Ok(as_array::<_, N>(self.0, HELD)?
            .each_mut()
            .map(|child| &mut child.state))
    }
}

/// The name of the states of held rules in errors.
const HELD: &str = "states of held rules";

impl State {
    /// The value of an own counter.
    ///
    /// # Errors
    /// If no own counter has this name.
    pub fn counter(&self, name: &str) -> Result<u64> {
        value_of(&self.counters, name, "counter")
    }

    /// The value of an own number.
    ///
    /// # Errors
    /// If no own number has this name.
    pub fn number(&self, name: &str) -> Result<f64> {
        value_of(&self.numbers, name, "number")
    }

    /// The states of held rules, for reading. [`Parts::held`] has the states for writing.
    ///
    /// # Errors
    /// If there are not N held rules.
    pub fn held<const N: usize>(&self) -> Result<[&State; N]> {
        let count = self.children.len();
        let children: Option<&[Child; N]> = self.children.as_slice().try_into().ok();
        let wrong_count_error = || count_error(HELD, N, count);
        Ok(children
            .ok_or_else(wrong_count_error)?
            .each_ref()
            .map(|child| &child.state))
    }

    /// The parts that a step of the rule works on.
    pub fn parts(&mut self) -> Parts<'_> {
        let State {
            tensors,
            counters,
            numbers,
            children,
            ..
        } = self;
        Parts {
            slots: Slots(tensors),
            counters: Counters(counters),
            numbers: Numbers(numbers),
            held: HeldStates(children),
        }
    }
}

impl<'a> Slots<'a> {
    /// No state tensor, for arithmetic without state.
    pub fn none() -> Self {
        Self::default()
    }

    /// The number of tensors.
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// Whether there are no tensors.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// The first `mid` tensors and the other tensors, for arithmetic in several steps.
    ///
    /// `None` if there are fewer than `mid` tensors.
    pub fn split_at(self, mid: usize) -> Option<(Self, Self)> {
        let (first, others) = self.0.split_at_mut_checked(mid)?;
        Some((Slots(first), Slots(others)))
    }
}

impl<'a> Counters<'a> {
    /// All counters, to be set by [`Gradient::set_counter`](crate::Gradient::set_counter).
    ///
    /// # Errors
    /// If there are not N counters.
    pub fn array<const N: usize>(self) -> Result<[&'a mut u64; N]> {
        Ok(as_array::<_, N>(self.0, "counters")?
            .each_mut()
            .map(|(_, count)| count))
    }
}

impl<'a> Numbers<'a> {
    /// All numbers, to be set by [`Gradient::set_number`](crate::Gradient::set_number).
    ///
    /// # Errors
    /// If there are not N numbers.
    pub fn array<const N: usize>(self) -> Result<[&'a mut f64; N]> {
        Ok(as_array::<_, N>(self.0, "numbers")?
            .each_mut()
            .map(|(_, number)| number))
    }
}

/// The value of the entry with this name. `kind` is the kind of entry, for errors.
fn value_of<T: Copy>(entries: &[(&'static str, T)], name: &str, kind: &'static str) -> Result<T> {
    let absent_error = || {
        let available: Vec<String> = entries.iter().map(|(name, _)| name.to_string()).collect();
        Error::unknown(
            format_args!("{kind} in the state with the name"),
            name,
            &available,
        )
        .with_remedy(format!(
            "add the {kind} in `Rule::init` with `State::with_{kind}`"
        ))
    };
    entry(entries, name).copied().ok_or_else(absent_error)
}

/// The error for a state with more or fewer parts of a kind than its rule works on.
pub(crate) fn count_error(part: &str, expected: usize, count: usize) -> Error {
    Error::new(
        ErrorKind::Contract,
        format!("the number of {part} in the state of a rule is"),
    )
    .with_got(count)
    .with_expected(expected)
    .with_remedy(
        "in `Rule::init`, add everything that `apply` uses: counters with `State::for_slots` or \
             `with_counter`, numbers with `with_number`, and the states of held rules with `with_held`",
    )
}

fn as_array<'a, T, const N: usize>(parts: &'a mut [T], part: &'static str) -> Result<&'a mut [T; N]> {
    let count = parts.len();
    parts.try_into().map_err(|_| count_error(part, N, count))
}
