//! The state of a rule: named tensors and counters, nothing else.

use candle_core::{DType, Tensor, Var};

use crate::engine::{Buffer, compute_dtype, is_supported};
use crate::error::{Error, Result};

/// How a state tensor starts out.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Slot {
    pub(crate) name: &'static str,
    pub(crate) initial: f64,
    pub(crate) dtype: Option<DType>,
}

impl Slot {
    /// A tensor of the parameter's shape that starts at zero, in the compute dtype: F64 for an F64 parameter, else F32.
    pub fn zeros(name: &'static str) -> Self {
        Slot::full(name, 0.0)
    }

    /// A tensor of the parameter's shape that starts at `initial`.
    pub fn full(name: &'static str, initial: f64) -> Self {
        Slot { name, initial, dtype: None }
    }

    /// The same slot stored in `dtype`; arithmetic is done in the compute dtype all the same.
    pub fn stored_as(self, dtype: DType) -> Self {
        Slot { dtype: Some(dtype), ..self }
    }
}

/// The state of one rule for one parameter: named tensors, named counters, and the states of the rules it holds.
///
/// A rule's [`init`](crate::Rule::init) makes it; the engines update the tensors in place.
#[derive(Debug, Default)]
pub struct State {
    /// A high-precision copy of the parameter.
    pub(crate) master: Option<Var>,
    pub(crate) tensors: Vec<(&'static str, Buffer)>,
    pub(crate) counters: Vec<(&'static str, u64)>,
    pub(crate) children: Vec<Child>,
}

/// The state of a held rule, under a prefix (none for a wrapper's only rule).
#[derive(Debug)]
pub(crate) struct Child {
    pub(crate) prefix: Option<usize>,
    pub(crate) state: State,
}

/// A tensor somewhere in a state.
#[derive(Clone, Copy, Debug)]
pub(crate) enum StateTensor<'s> {
    Master(&'s Var),
    Slot(&'s Buffer),
}

impl StateTensor<'_> {
    /// A copy of the values.
    pub(crate) fn tensor(self) -> Result<Tensor> {
        Ok(match self {
            StateTensor::Master(variable) => variable.as_detached_tensor().copy()?,
            StateTensor::Slot(buffer) => buffer.tensor()?,
        })
    }

    pub(crate) fn bytes(self) -> usize {
        let (shape, dtype) = match self {
            StateTensor::Master(variable) => (variable.shape(), variable.dtype()),
            StateTensor::Slot(buffer) => (buffer.shape(), buffer.dtype()),
        };
        shape.elem_count() * dtype.size_in_bytes()
    }
}

impl State {
    /// No state at all.
    pub fn empty() -> Self {
        Self::default()
    }

    /// Tensors of the shape and on the device of `x`, and one counter `t` of applied steps.
    ///
    /// # Errors
    /// If a slot's dtype is none of F16, BF16, F32 and F64, or the device has no memory left.
    pub fn for_slots(x: &Tensor, slots: &[Slot]) -> Result<Self> {
        let mut state = State::empty().with_counter("t");
        for slot in slots {
            let dtype = slot.dtype.unwrap_or(compute_dtype(x.dtype()));
            if !is_supported(dtype) {
                return Err(Error::SlotDtype { slot: slot.name.to_string(), dtype });
            }
            let values = match slot.initial {
                0.0 => Tensor::zeros(x.shape(), dtype, x.device())?,
                initial => Tensor::full(initial, x.shape(), x.device())?.to_dtype(dtype)?,
            };
            state = state.with_tensor(slot.name, &values)?;
        }
        Ok(state)
    }

    /// Adds a tensor of any shape; its values are copied.
    ///
    /// # Errors
    /// If the device has no memory left.
    pub fn with_tensor(mut self, name: &'static str, values: &Tensor) -> Result<Self> {
        self.tensors.push((name, Buffer::new(values)?));
        Ok(self)
    }

    /// Adds a counter that starts at 0.
    pub fn with_counter(mut self, name: &'static str) -> Self {
        self.counters.push((name, 0));
        self
    }

    /// The state of a rule that holds others, one by one.
    pub(crate) fn of_members(states: Vec<State>) -> Self {
        let children = states.into_iter().enumerate().map(|(i, state)| Child { prefix: Some(i), state }).collect();
        State { children, ..State::default() }
    }

    /// The state of a rule that works on a copy of the parameter.
    pub(crate) fn with_master(master: &Tensor, inner: State) -> Result<Self> {
        let master = Some(Var::from_tensor(&master.detach())?);
        Ok(State { master, children: vec![Child { prefix: None, state: inner }], ..State::default() })
    }

    /// Every tensor under its full name, the rule's own first.
    pub(crate) fn visit_tensors<'s>(&'s self, prefix: &str, visit: &mut dyn FnMut(String, StateTensor<'s>)) {
        if let Some(master) = &self.master {
            visit(format!("{prefix}master"), StateTensor::Master(master));
        }
        for (name, buffer) in &self.tensors {
            visit(format!("{prefix}{name}"), StateTensor::Slot(buffer));
        }
        for child in &self.children {
            child.state.visit_tensors(&child.prefixed(prefix), visit);
        }
    }

    /// Every counter under its full name.
    pub(crate) fn visit_counters(&self, prefix: &str, visit: &mut dyn FnMut(String, u64)) {
        for (name, count) in &self.counters {
            visit(format!("{prefix}{name}"), *count);
        }
        for child in &self.children {
            child.state.visit_counters(&child.prefixed(prefix), visit);
        }
    }
}

impl Child {
    fn prefixed(&self, outer: &str) -> String {
        self.prefix.map_or(outer.to_string(), |i| format!("{outer}{i}."))
    }
}
