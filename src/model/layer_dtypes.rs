//! The dtypes in which layers of `Autocast` compute, by the variables of these layers.
//!
//! A state that is divided among ranks needs these dtypes for the wire, but its model may be a `VarMap`,
//! which has no layers. So each layer registers its variables here for as long as it lives.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, OnceLock, PoisonError, Weak};

use crate::numbers::DType;
use crate::tensors::TensorId;

/// The variables of a layer, and the dtype in which the layer computes.
pub(crate) struct LayerDtype {
    variables: Vec<TensorId>,
    pub(crate) intended: DType,
    /// Set by a forward pass, which finds out whether the intended dtype works.
    pub(crate) decision: OnceLock<DType>,
}

static LAYERS: Mutex<Vec<Weak<LayerDtype>>> = Mutex::new(Vec::new());

impl LayerDtype {
    /// Registers a layer. The registration ends when the last `Arc` is dropped.
    pub(crate) fn register(variables: Vec<TensorId>, intended: DType) -> Arc<Self> {
        let layer = Arc::new(LayerDtype {
            variables,
            intended,
            decision: OnceLock::new(),
        });
        let mut layers = LAYERS.lock().unwrap_or_else(PoisonError::into_inner);
        layers.retain(|layer| layer.strong_count() > 0);
        layers.push(Arc::downgrade(&layer));
        layer
    }

    pub(crate) fn dtype(&self) -> DType {
        *self.decision.get().unwrap_or(&self.intended)
    }
}

/// For each variable of a registered layer, the dtype in which its gradient was computed.
pub(crate) fn layer_dtypes() -> HashMap<TensorId, DType> {
    let layers = LAYERS.lock().unwrap_or_else(PoisonError::into_inner);
    let mut dtypes = HashMap::new();
    for layer in layers.iter().filter_map(Weak::upgrade) {
        for variable in &layer.variables {
            // The sum of the gradients of several layers is in F32.
            dtypes
                .entry(*variable)
                .and_modify(|dtype| *dtype = DType::F32)
                .or_insert(layer.dtype());
        }
    }
    dtypes
}
