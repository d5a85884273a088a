//! The state of a rule: named tensors and counters, nothing else.

use std::io::{self, Write};

use candle_core::{DType, Device, Shape, Tensor, Var};

use crate::engine::{Buffer, compute_dtype, is_supported, owned_on, set_tensor, write_tensor};
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

/// A tensor somewhere in a state, to be written. A master can be written through its variable.
#[derive(Debug)]
pub(crate) enum StateTensorMut<'s> {
    Master(&'s Var),
    Slot(&'s mut Buffer),
}

impl StateTensor<'_> {
    /// A copy of the values.
    pub(crate) fn tensor(self) -> Result<Tensor> {
        Ok(match self {
            StateTensor::Master(variable) => variable.as_detached_tensor().copy()?,
            StateTensor::Slot(buffer) => buffer.tensor()?,
        })
    }

    pub(crate) fn shape(&self) -> &Shape {
        match self {
            StateTensor::Master(variable) => variable.shape(),
            StateTensor::Slot(buffer) => buffer.shape(),
        }
    }

    pub(crate) fn dtype(self) -> DType {
        match self {
            StateTensor::Master(variable) => variable.dtype(),
            StateTensor::Slot(buffer) => buffer.dtype(),
        }
    }

    pub(crate) fn bytes(self) -> usize {
        self.shape().elem_count() * self.dtype().size_in_bytes()
    }

    /// Writes the values as little-endian bytes.
    pub(crate) fn write_to(self, out: &mut dyn Write) -> io::Result<()> {
        match self {
            StateTensor::Master(variable) => write_tensor(variable, out),
            StateTensor::Slot(buffer) => buffer.write_to(out),
        }
    }
}

impl StateTensorMut<'_> {
    /// Overwrites the values with those of a tensor of the same shape, rounded to the dtype of the state.
    pub(crate) fn set(self, values: &Tensor) -> candle_core::Result<()> {
        match self {
            StateTensorMut::Master(variable) => set_tensor(variable, values),
            StateTensorMut::Slot(buffer) => buffer.set(values),
        }
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

    /// The states that hold tensors and counters themselves, with the prefix of their names: this one, then those of held rules in order.
    fn walk<'s>(&'s self, prefix: &str, visit: &mut dyn FnMut(&str, &'s State)) {
        visit(prefix, self);
        for child in &self.children {
            child.state.walk(&child.prefixed(prefix), visit);
        }
    }

    /// Every tensor under its full name, the rule's own first.
    pub(crate) fn tensors(&self) -> Vec<(String, StateTensor<'_>)> {
        let mut tensors = Vec::new();
        self.walk("", &mut |prefix, state| {
            let master = state.master.iter().map(|master| ("master", StateTensor::Master(master)));
            let slots = state.tensors.iter().map(|(name, buffer)| (*name, StateTensor::Slot(buffer)));
            tensors.extend(master.chain(slots).map(|(name, tensor)| (format!("{prefix}{name}"), tensor)));
        });
        tensors
    }

    /// Every counter under its full name.
    pub(crate) fn counters(&self) -> Vec<(String, u64)> {
        let mut counters = Vec::new();
        self.walk("", &mut |prefix, state| counters.extend(state.counters.iter().map(|(name, count)| (format!("{prefix}{name}"), *count))));
        counters
    }

    /// Every tensor and every counter, in the order of [`State::tensors`] and [`State::counters`].
    pub(crate) fn parts_mut(&mut self) -> (Vec<StateTensorMut<'_>>, Vec<&mut u64>) {
        let (mut tensors, mut counters) = (Vec::new(), Vec::new());
        self.collect_mut(&mut tensors, &mut counters);
        (tensors, counters)
    }

    fn collect_mut<'s>(&'s mut self, tensors: &mut Vec<StateTensorMut<'s>>, counters: &mut Vec<&'s mut u64>) {
        tensors.extend(self.master.as_ref().map(StateTensorMut::Master));
        tensors.extend(self.tensors.iter_mut().map(|(_, buffer)| StateTensorMut::Slot(buffer)));
        counters.extend(self.counters.iter_mut().map(|(_, count)| count));
        for child in &mut self.children {
            child.state.collect_mut(tensors, counters);
        }
    }

    /// A copy on a device, with storage of its own.
    pub(crate) fn copy_to(&self, device: &Device) -> Result<Self> {
        let master = self.master.as_ref().map(|master| Var::from_tensor(&owned_on(device, &master.as_detached_tensor())?));
        let tensors = self.tensors.iter().map(|(name, buffer)| Ok((*name, buffer.copy_to(device)?)));
        let children = self.children.iter().map(|child| Ok(Child { prefix: child.prefix, state: child.state.copy_to(device)? }));
        Ok(State {
            master: master.transpose()?,
            tensors: tensors.collect::<Result<_>>()?,
            counters: self.counters.clone(),
            children: children.collect::<Result<_>>()?,
        })
    }
}

impl Child {
    fn prefixed(&self, outer: &str) -> String {
        self.prefix.map_or(outer.to_string(), |i| format!("{outer}{i}."))
    }
}
