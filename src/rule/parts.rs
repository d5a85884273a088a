//! What a rule works on in one step: the parts of its own state.

use super::State;
use super::state::{OwnCounters, OwnNumbers, OwnTensors};

/// The parts of a rule's own state, lent for one step; those of rules that it holds are not among them.
///
/// They go into the plan of a [`Gradient`](crate::Gradient), and are written when the step is committed.
///
/// ```
/// use candle_core::{Device, Tensor, Var};
/// use optimisers::{Arithmetic, Flow, Gradient, Parts, Result, Rule, Slot, State, hyper_parameters, range, setup, update, value::Value};
///
/// hyper_parameters! {
///     /// Adds the last gradient to this one, and walks η of it.
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
///     fn init(&self, x: &Tensor) -> Result<State> {
///         State::for_slots(x, &[Slot::zeros("last")])
///     }
///
///     fn apply<'a>(&'a self, state: &'a mut State, _x: &'a Tensor, dx: Gradient<'a>) -> Result<Flow<'a>> {
///         let Parts { slots, counters, .. } = state.parts();
///         let (dx, t) = dx.next_step(counters);
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
    /// The counters: `t`, the number of applied steps, is the first where the state is one [for slots](State::for_slots).
    pub counters: Counters<'a>,
    /// The numbers that are not per element.
    pub numbers: Numbers<'a>,
}

/// State tensors of a rule, in the order in which its [`init`](crate::Rule::init) added them.
#[derive(Debug, Default)]
pub struct Slots<'a>(pub(crate) OwnTensors<'a>);

/// Counters of a rule, in the order in which its [`init`](crate::Rule::init) added them.
#[derive(Debug, Default)]
pub struct Counters<'a>(pub(crate) OwnCounters<'a>);

/// Numbers of a rule, in the order in which its [`init`](crate::Rule::init) added them.
#[derive(Debug, Default)]
pub struct Numbers<'a>(pub(crate) OwnNumbers<'a>);

impl State {
    /// What a step of this state's own rule works on.
    pub fn parts(&mut self) -> Parts<'_> {
        let State { tensors, counters, numbers, .. } = self;
        Parts { slots: Slots(tensors), counters: Counters(counters), numbers: Numbers(numbers) }
    }
}

impl<'a> Slots<'a> {
    /// No state tensor, for arithmetic without state.
    pub fn none() -> Self {
        Self::default()
    }

    /// How many there are.
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// The first `mid` and the others, for arithmetic in several steps; `None` if there are fewer.
    pub fn split_at(self, mid: usize) -> Option<(Self, Self)> {
        let (first, others) = self.0.split_at_mut_checked(mid)?;
        Some((Slots(first), Slots(others)))
    }
}

impl<'a> Counters<'a> {
    /// All of them, to be set by [`Gradient::set_counter`](crate::Gradient::set_counter); `None` if there are not N.
    pub fn array<const N: usize>(self) -> Option<[&'a mut u64; N]> {
        all(self.0)
    }
}

impl<'a> Numbers<'a> {
    /// All of them, to be set by [`Gradient::set_number`](crate::Gradient::set_number); `None` if there are not N.
    pub fn array<const N: usize>(self) -> Option<[&'a mut f64; N]> {
        all(self.0)
    }
}

fn all<'a, T, const N: usize>(named: &'a mut [(&'static str, T)]) -> Option<[&'a mut T; N]> {
    let named: &mut [_; N] = named.try_into().ok()?;
    Some(named.each_mut().map(|(_, value)| value))
}
