//! The weights to evaluate a model with.

use std::fmt;

use super::{State, entry};
use crate::engine::{Buffer, Step, elements, erased};
use crate::error::Result;
use crate::numbers::DType;
use crate::numbers::value::Arithmetic;
use crate::tensors::Tensor;

/// The weights to evaluate a model with, instead of a parameter: a state tensor, or arithmetic on it.
///
/// [`Rule::evaluation`](crate::Rule::evaluation) returns an `Evaluation`.
/// [`StateTree::averages`](crate::StateTree::averages) and [`with_averages`](crate::StateTree::with_averages)
/// compute the weights. `averages` and `with_averages` refuse a state tensor of another shape than the
/// parameter's, or of a dtype that is no float.
///
/// ```
/// use candle_core::{Device, Var};
/// use optimisers::{
///     Arithmetic, Descent, Evaluation, Flow, Gradient, OptimiserChain, Parameter, Result, Rule, Slot, State,
///     hyper_parameters, range, setup, update, value::Value,
/// };
///
/// hyper_parameters! {
///     /// Keeps the first weights, and evaluates with weights between the first and the current ones.
///     pub struct TowardsStart {
///         /// How far back to the first weights: 0 is the current weights, 1 the first.
///         part: f64 = 0.5 => range::decay,
///     }
/// }
///
/// /// x + (start - x)·part
/// #[derive(Clone, Copy)]
/// struct Back(f64);
///
/// impl Arithmetic for Back {
///     type Slots<T> = [T; 0];
///
///     fn step<V: Value>(self, x: V, start: V, []: &mut [V; 0]) -> V {
///         x + (start - x) * self.0
///     }
/// }
///
/// impl Rule for TowardsStart {
///     fn init(&self, x: Parameter<'_>) -> Result<State> {
///         State::for_slots(x, &[Slot::parameter("start")])
///     }
///
///     fn apply<'a>(&'a self, _state: &'a mut State, _x: Parameter<'a>, dx: Gradient<'a>) -> Result<Flow<'a>> {
///         Ok(Flow::Step(dx))
///     }
///
///     fn evaluation<'s>(&self, state: &'s State) -> Result<Option<Evaluation<'s>>> {
///         Ok(Evaluation::slot(state, "start").map(|start| start.map(Back(self.part))))
///     }
/// }
///
/// let x = Var::new(&[4f32], &Device::Cpu)?;
/// let mut state = setup(OptimiserChain::new((Descent::new(1.0), TowardsStart::default())), &x)?;
/// update(&mut state, &x, &x.sum_all()?.backward()?)?;
/// assert_eq!(x.to_vec1::<f32>()?, [3.0]);
/// assert_eq!(state.averages(&x)?[""].to_vec1::<f32>()?, [3.5]);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[must_use = "it is what `Rule::evaluation` returns"]
pub struct Evaluation<'s> {
    slot: &'s Buffer,
    steps: Vec<Step<'static>>,
}

impl<'s> Evaluation<'s> {
    /// The rule's own state tensor with this name, if there is one. Held rules are not searched.
    pub fn slot(state: &'s State, name: &str) -> Option<Self> {
        Some(Evaluation {
            slot: entry(&state.tensors, name)?,
            steps: Vec::new(),
        })
    }

    /// Applies arithmetic, with these weights as dx and the parameter (or its master) as x.
    ///
    /// x is in full precision. The result is F64 if the parameter, its master or the state tensor is F64,
    /// otherwise F32.
    pub fn map<A: Arithmetic<Slots<f64> = [f64; 0]>>(mut self, arithmetic: A) -> Self {
        self.steps.push(Step::Map {
            kernel: erased(arithmetic),
            slots: &mut [],
        });
        self
    }

    pub(crate) fn shape(&self) -> &[usize] {
        self.slot.shape()
    }

    /// The dtype of the state tensor.
    pub(crate) fn dtype(&self) -> DType {
        self.slot.dtype()
    }

    /// Computes the weights. `x` makes the parameter in full precision.
    pub(crate) fn tensor(self, x: impl FnOnce() -> Result<Tensor>) -> Result<Tensor> {
        let slot = self.slot.tensor()?;
        // Without arithmetic `x` is not called, because it may copy the parameter.
        if self.steps.is_empty() {
            Ok(slot)
        } else {
            elements(&x()?, slot, self.steps)
        }
    }
}

impl fmt::Debug for Evaluation<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Evaluation")
            .field("slot", self.slot)
            .field("steps", &self.steps.len())
            .finish()
    }
}
