//! The dtypes in which layers of `Autocast` compute, by the variables of these layers.
//!
//! A state divided among ranks needs them for the wire, but its model may be a `VarMap`, which has no layers.
//! So each layer registers its variables here for as long as it lives.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, OnceLock, PoisonError, Weak};

use crate::numbers::DType;
use crate::tensors::TensorId;

/// The variables of a layer, and the dtype in which it computes.
pub(crate) struct Cast {
    variables: Vec<TensorId>,
    intended: DType,
    decided: OnceLock<DType>,
}

static CASTS: Mutex<Vec<Weak<Cast>>> = Mutex::new(Vec::new());

impl Cast {
    /// Registers a layer. The registration ends when the last handle is dropped.
    pub(crate) fn register(variables: Vec<TensorId>, intended: DType) -> Arc<Self> {
        let cast = Arc::new(Cast { variables, intended, decided: OnceLock::new() });
        let mut casts = CASTS.lock().unwrap_or_else(PoisonError::into_inner);
        casts.retain(|cast| cast.strong_count() > 0);
        casts.push(Arc::downgrade(&cast));
        cast
    }

    /// The dtype of the arithmetic: the decided one, before that the intended one.
    pub(crate) fn computes_in(&self) -> DType {
        self.decided.get().copied().unwrap_or(self.intended)
    }

    pub(crate) fn is_decided(&self) -> bool {
        self.decided.get().is_some()
    }

    /// Decides on the dtype. Returns whether this call is the first to do so.
    pub(crate) fn decide(&self, dtype: DType) -> bool {
        self.decided.set(dtype).is_ok()
    }
}

/// For each variable of a layer, the dtype of the values that its gradient has.
pub(crate) fn computed_in() -> HashMap<TensorId, DType> {
    let casts = CASTS.lock().unwrap_or_else(PoisonError::into_inner);
    let mut computed = HashMap::new();
    for cast in casts.iter().filter_map(Weak::upgrade) {
        for id in &cast.variables {
            // The sum of the gradients that several layers contribute is in F32.
            computed.entry(*id).and_modify(|dtype| *dtype = DType::F32).or_insert(cast.computes_in());
        }
    }
    computed
}
