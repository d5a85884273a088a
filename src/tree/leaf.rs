use std::sync::Arc;

use candle_core::{DType, Device, Shape, Tensor, TensorId};

use super::History;
use crate::engine::{Addresses, is_supported};
use crate::error::{Error, Result};
use crate::rule::{FieldValue, Optimiser, State, StateTensor};

/// One parameter's optimiser, state and bookkeeping.
#[derive(Debug)]
pub struct Leaf {
    pub(crate) path: String,
    pub(crate) aliases: Vec<String>,
    pub(crate) id: TensorId,
    /// Where the parameter is.
    pub(crate) addresses: Addresses,
    pub(crate) device: Device,
    pub(crate) shape: Shape,
    pub(crate) dtype: DType,
    pub(crate) optimiser: Arc<dyn Optimiser>,
    pub(crate) state: State,
    pub(crate) frozen: bool,
    pub(crate) steps: u64,
    pub(crate) history: History,
    /// The parameter, while its average is in the model.
    pub(crate) aside: Option<Tensor>,
}

impl Leaf {
    /// A fresh leaf for the variable `x`.
    pub(crate) fn new(paths: Vec<String>, x: &Tensor, optimiser: Arc<dyn Optimiser>) -> Result<Self> {
        let mut paths = paths.into_iter();
        let path = paths.next().unwrap_or_default();
        if !is_supported(x.dtype()) {
            return Err(Error::UnsupportedDtype { path, dtype: x.dtype() });
        }
        Ok(Leaf {
            state: optimiser.init(x).map_err(|error| error.at(&path))?,
            path,
            aliases: paths.collect(),
            id: x.id(),
            addresses: Addresses::of(x),
            device: x.device().clone(),
            shape: x.shape().clone(),
            dtype: x.dtype(),
            optimiser,
            frozen: false,
            steps: 0,
            history: History::default(),
            aside: None,
        })
    }

    /// Whether the leaf's state has the tensors that this optimiser works with, after one of its fields was set to `value`.
    pub(crate) fn has_state_for(&self, optimiser: &dyn Optimiser, value: FieldValue) -> Result<bool> {
        // Learning rates are adjusted often, and no real number decides on tensors.
        if matches!(value, FieldValue::Real(_)) {
            return Ok(true);
        }
        let empty = Tensor::zeros(vec![0; self.shape.rank()], self.dtype, &Device::Cpu)?;
        let needed = optimiser.init(&empty).map_err(|error| error.at(&self.path))?;
        // Whether there is a master depends on the parameter alone.
        let is_slot = |tensor: &StateTensor<'_>| matches!(tensor, StateTensor::Slot(_));
        let names =
            |state: &State| state.tensors().into_iter().filter(|(_, tensor)| is_slot(tensor)).map(|(name, _)| name).collect::<Vec<_>>();
        Ok(names(&needed) == names(&self.state))
    }

    /// A copy with storage of its own.
    pub(crate) fn try_clone(&self) -> Result<Self> {
        Ok(Leaf {
            state: self.state.copy().map_err(|error| error.at(&self.path))?,
            path: self.path.clone(),
            aliases: self.aliases.clone(),
            device: self.device.clone(),
            shape: self.shape.clone(),
            optimiser: self.optimiser.clone(),
            aside: self.aside.clone(),
            ..*self
        })
    }

    /// The parameter's path; the first in sorted order, if it has several.
    pub fn path(&self) -> &str {
        &self.path
    }

    /// All paths of the parameter: more than one where a variable is tied to several places of the model.
    pub fn paths(&self) -> impl Iterator<Item = &str> {
        std::iter::once(self.path.as_str()).chain(self.aliases.iter().map(String::as_str))
    }

    /// The parameter's shape.
    pub fn shape(&self) -> &Shape {
        &self.shape
    }

    /// The parameter's dtype.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// The optimiser, with its hyper-parameters as they are now.
    pub fn optimiser(&self) -> &dyn Optimiser {
        &*self.optimiser
    }

    /// The first hyper-parameter of that name.
    pub fn field(&self, name: &str) -> Option<FieldValue> {
        self.optimiser.field(name)
    }

    /// The learning rate, if the optimiser has one.
    pub fn learning_rate(&self) -> Option<f64> {
        match self.field("eta") {
            Some(FieldValue::Real(eta)) => Some(eta),
            _ => None,
        }
    }

    /// How many steps have been applied to the parameter.
    pub fn steps(&self) -> u64 {
        self.steps
    }

    /// Whether updates pass this parameter over.
    pub fn is_frozen(&self) -> bool {
        self.frozen
    }

    /// The names of the state tensors, such as `master` or `1.m` (the position in a chain goes before).
    pub fn tensor_names(&self) -> Vec<String> {
        self.state.tensors().into_iter().map(|(name, _)| name).collect()
    }

    /// A copy of the state tensor of that name. A copy, because updates write the original in place.
    ///
    /// # Errors
    /// If the device fails.
    pub fn tensor(&self, name: &str) -> Result<Option<Tensor>> {
        let found = self.state.tensors().into_iter().find(|(candidate, _)| candidate == name);
        found.map(|(_, tensor)| tensor.tensor()).transpose()
    }

    /// The counters of the state: applied steps of each rule (`t`), calls of an accumulation window.
    pub fn counters(&self) -> Vec<(String, u64)> {
        self.state.counters()
    }

    /// Numbers of the state that are not per element, such as the sum of weights of [`ScheduleFree`](crate::ScheduleFree).
    pub fn numbers(&self) -> Vec<(String, f64)> {
        self.state.numbers()
    }

    /// The bytes that the state tensors take.
    pub fn bytes(&self) -> usize {
        self.state.tensors().into_iter().map(|(_, tensor)| tensor.bytes()).sum()
    }
}
