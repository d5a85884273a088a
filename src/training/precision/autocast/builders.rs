//! Two builders for the constructor of a layer. The recorder passes requests on and records the tensors. The
//! player returns the recorded tensors in another dtype.

use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use candle_core::{DType, Device, Shape, Tensor};
use candle_nn::{Init, VarBuilder, var_builder::SimpleBackend};

use crate::error::{Error, ErrorKind, first_names, one_of};

/// The tensors that a constructor has requested, by full path.
#[derive(Default)]
pub(super) struct LayerRecord {
    pub(super) tensors: BTreeMap<String, Tensor>,
    /// The answers to `contains_tensor`. A constructor repeats its requests only if it gets the same answers.
    contains: HashMap<String, bool>,
}

/// Runs a constructor with a builder that passes requests on and records them, with F32 for any float dtype.
pub(super) fn record_layer<L>(
    builder: VarBuilder<'_>,
    constructor: &impl Fn(VarBuilder<'_>) -> candle_core::Result<L>,
) -> candle_core::Result<(L, LayerRecord)> {
    let (prefix, device) = (builder.prefix(), builder.device().clone());
    let shared = Arc::new(Mutex::new(LayerRecord::default()));
    let recorder = Recorder {
        builder: builder.root(),
        record: shared.clone(),
    };
    let layer = constructor(with_prefix(
        &prefix,
        VarBuilder::from_backend(Box::new(recorder), DType::F32, device),
    ))?;
    let record = std::mem::take(&mut *lock(&shared));
    Ok((layer, record))
}

/// A builder that returns the recorded tensors, in the requested dtype. The default dtype is `dtype`.
pub(super) fn replay(
    record: &Arc<LayerRecord>,
    type_name: &'static str,
    prefix: &str,
    dtype: DType,
    device: &Device,
) -> VarBuilder<'static> {
    let player = Player {
        record: record.clone(),
        type_name,
    };
    with_prefix(
        prefix,
        VarBuilder::from_backend(Box::new(player), dtype, device.clone()),
    )
}

fn with_prefix<'b>(prefix: &str, builder: VarBuilder<'b>) -> VarBuilder<'b> {
    if prefix.is_empty() {
        builder
    } else {
        builder.set_prefix(prefix)
    }
}

fn lock(record: &Mutex<LayerRecord>) -> MutexGuard<'_, LayerRecord> {
    record.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The dtype in which the recorder makes a tensor.
fn recorded_dtype(requested: DType) -> DType {
    if requested.is_float() {
        DType::F32
    } else {
        requested
    }
}

struct Recorder<'b> {
    builder: VarBuilder<'b>,
    record: Arc<Mutex<LayerRecord>>,
}

impl Recorder<'_> {
    fn record_tensor(&self, path: &str, tensor: Tensor) -> Tensor {
        lock(&self.record)
            .tensors
            .insert(path.to_string(), tensor.clone());
        tensor
    }
}

impl SimpleBackend for Recorder<'_> {
    fn get(
        &self,
        shape: Shape,
        path: &str,
        init: Init,
        dtype: DType,
        _: &Device,
    ) -> candle_core::Result<Tensor> {
        Ok(self.record_tensor(
            path,
            self.builder
                .get_with_hints_dtype(shape, path, init, recorded_dtype(dtype))?,
        ))
    }

    fn get_unchecked(&self, path: &str, dtype: DType, _: &Device) -> candle_core::Result<Tensor> {
        Ok(self.record_tensor(
            path,
            self.builder.get_unchecked_dtype(path, recorded_dtype(dtype))?,
        ))
    }

    fn contains_tensor(&self, path: &str) -> bool {
        // The first answer for a path stays, because the player has one answer for each path.
        let contains = self.builder.contains_tensor(path);
        *lock(&self.record)
            .contains
            .entry(path.to_string())
            .or_insert(contains)
    }
}

struct Player {
    record: Arc<LayerRecord>,
    /// The name of the type that the constructor makes.
    type_name: &'static str,
}

impl SimpleBackend for Player {
    fn get(
        &self,
        shape: Shape,
        path: &str,
        _: Init,
        dtype: DType,
        device: &Device,
    ) -> candle_core::Result<Tensor> {
        let tensor = self.get_unchecked(path, dtype, device)?;
        if *tensor.shape() != shape {
            candle_core::bail!(
                "{path}: the constructor of {} requests the shape {shape:?}, but requested {:?} when the \
                 layer was made",
                self.type_name,
                tensor.shape()
            );
        }
        Ok(tensor)
    }

    fn get_unchecked(&self, path: &str, dtype: DType, _: &Device) -> candle_core::Result<Tensor> {
        let unforeseen_request = || {
            let recorded = one_of(&first_names(self.record.tensors.keys()));
            let problem = "requests this tensor in a forward pass, but did not when the layer was made";
            Error::new(
                ErrorKind::Contract,
                format!("the constructor of {} {problem}", self.type_name),
            )
            .with_expected(recorded)
            .with_remedy("let the constructor request the same tensors each time")
            .at(path)
        };
        self.record
            .tensors
            .get(path)
            .ok_or_else(unforeseen_request)?
            .to_dtype(dtype)
    }

    fn contains_tensor(&self, path: &str) -> bool {
        self.record
            .contains
            .get(path)
            .copied()
            .unwrap_or_else(|| self.record.tensors.contains_key(path))
    }
}
