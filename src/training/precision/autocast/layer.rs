//! A layer that converts its parameters in each forward pass.
//!
//! candle's layers own their tensors, so a program cannot exchange them. The layer is therefore made anew in
//! each forward pass: its constructor runs with a builder that returns the converted parameters
//! (`builders.rs`).

use std::any::type_name;
use std::sync::Arc;

use candle_core::{DType, Device, Module, Tensor};
use candle_nn::VarBuilder;
use log::warn;

use super::builders::{LayerRecord, record_layer, replay};
use crate::error::{Error, ErrorKind, Result};
use crate::model::cuts::is_running_statistic;
use crate::model::layer_dtypes::LayerDtype;
use crate::model::{Model, Visitor};
use crate::training::precision::run_in;

/// A layer made by [`Autocast::layer`](crate::Autocast::layer).
///
/// The parameters are in F32, and the arithmetic is in the dtype for the layer's type. The output has the
/// input's dtype (F32 for an input that is not floating-point).
///
/// # Where a kernel is missing
/// Some layers cannot compute in some dtypes on some devices, such as convolutions in BF16 on the CPU. So the
/// first forward pass begins with a trial, which runs the layer forward and backward on the input. If the
/// trial fails, and a trial in F32 gets further, the layer computes in F32 in all passes and logs the reason
/// once. [`computes_in`](AutocastLayer::computes_in) returns the dtype.
///
/// ```
/// use candle_core::{DType::{BF16, F32}, Device, Module, Tensor};
/// use candle_nn::{VarBuilder, VarMap, conv2d};
/// use optimisers::Autocast;
///
/// let variables = VarMap::new();
/// let builder = VarBuilder::from_varmap(&variables, F32, &Device::Cpu).pp("stem");
/// let layer = Autocast::new(BF16)?.layer(builder, |builder| conv2d(3, 8, 3, Default::default(), builder))?;
/// layer.forward(&Tensor::ones((1, 3, 8, 8), F32, &Device::Cpu)?)?;
/// assert_eq!(layer.computes_in(), F32);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub struct AutocastLayer {
    /// The name of the type that the constructor makes.
    type_name: &'static str,
    prefix: String,
    record: Arc<LayerRecord>,
    computation: Computation,
    dtype: Arc<LayerDtype>,
}

enum Computation {
    /// In F32, by a layer that was made once.
    Plain(Box<dyn Module + Send + Sync>),
    /// In another dtype, by a layer made anew in each forward pass.
    Cast {
        constructor: Constructor,
        device: Device,
    },
}

type Constructor = Box<dyn Fn(VarBuilder<'static>) -> candle_core::Result<Box<dyn Module>> + Send + Sync>;

impl std::fmt::Debug for AutocastLayer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let mut fields = f.debug_struct("AutocastLayer");
        fields
            .field("layer", &self.type_name)
            .field("prefix", &self.prefix)
            .field("computes_in", &self.computes_in())
            .finish()
    }
}

impl AutocastLayer {
    pub(super) fn new<L, F>(dtype: DType, builder: VarBuilder<'_>, constructor: F) -> Result<Self>
    where
        L: Module + Send + Sync + 'static,
        F: Fn(VarBuilder<'_>) -> candle_core::Result<L> + Send + Sync + 'static,
    {
        let (type_name, prefix, device) = (type_name::<L>(), builder.prefix(), builder.device().clone());
        let (plain_layer, record) = record_layer(builder, &constructor)?;
        for (path, tensor) in &record.tensors {
            if dtype != DType::F32 && is_running_statistic(path) {
                let problem = "it is a running statistic, which would be forgotten: a layer with automatic \
                               casts is made anew in each forward pass";
                let error = Error::new(ErrorKind::Unsupported, problem).at(path);
                return Err(error.with_remedy(format!("leave {type_name} out of the list")));
            }
            if tensor.dtype().is_float() && tensor.dtype() != DType::F32 {
                let got = tensor.dtype();
                let error =
                    Error::dtype("the parameter of a layer with automatic casts", got, "F32").at(path);
                let remedy = format!(
                    "make the parameter with a builder of F32; for parameters of {got:?} use `InDtype`"
                );
                return Err(error.with_remedy(remedy));
            }
        }
        let computation = if dtype == DType::F32 {
            Computation::Plain(Box::new(plain_layer))
        } else {
            let constructor: Constructor = Box::new(move |builder| Ok(Box::new(constructor(builder)?)));
            Computation::Cast { constructor, device }
        };
        let dtype = LayerDtype::register(record.tensors.values().map(Tensor::id).collect(), dtype.into());
        Ok(AutocastLayer {
            type_name,
            prefix,
            record: Arc::new(record),
            computation,
            dtype,
        })
    }

    /// The dtype in which the layer computes.
    ///
    /// Before the first forward pass this is the intended dtype, even if a kernel
    /// [is missing](AutocastLayer#where-a-kernel-is-missing).
    pub fn computes_in(&self) -> DType {
        self.dtype.dtype().into()
    }

    /// Runs the layer in `dtype`.
    fn run(&self, dtype: DType, input: &Tensor) -> candle_core::Result<Tensor> {
        let output_dtype = if input.dtype().is_float() {
            input.dtype()
        } else {
            DType::F32
        };
        match &self.computation {
            Computation::Plain(module) => run_in(dtype, &**module, input, output_dtype),
            Computation::Cast { constructor, device } => {
                let module = constructor(replay(&self.record, self.type_name, &self.prefix, dtype, device))?;
                run_in(dtype, &*module, input, output_dtype)
            }
        }
    }

    /// The dtype in which to compute. The first input with which either dtype works decides for all later
    /// inputs.
    fn choose_dtype(&self, input: &Tensor) -> DType {
        let LayerDtype {
            intended, decision, ..
        } = &*self.dtype;
        if let Some(dtype) = decision.get() {
            return (*dtype).into();
        }
        let intended: DType = (*intended).into();
        if intended == DType::F32 {
            return intended;
        }
        let (low, obstacle) = self.supported_passes(intended, input);
        if let Some(obstacle) = obstacle {
            let (high, _) = self.supported_passes(DType::F32, input);
            if high > low {
                if decision.set(DType::F32.into()).is_ok() {
                    warn!(
                        "{:?} ({}) computes in F32, because {intended:?} does not work here: {obstacle}",
                        self.prefix, self.type_name
                    );
                }
                return DType::F32;
            }
            if low == SupportedPasses::Nothing {
                // Nothing is decided, because F32 fails as well, for example on an input of a wrong shape,
                // which is no reason against the dtype.
                return intended;
            }
        }
        (*decision.get_or_init(|| intended.into())).into()
    }

    /// The passes that succeed with this input, and the error of the first pass that fails. The input is
    /// detached, so that the backward pass ends at this layer.
    fn supported_passes(
        &self,
        dtype: DType,
        input: &Tensor,
    ) -> (SupportedPasses, Option<candle_core::Error>) {
        let output = match self.run(dtype, &input.detach()) {
            Ok(output) => output,
            Err(error) => return (SupportedPasses::Nothing, Some(error)),
        };
        match output.sum_all().and_then(|sum| sum.backward()) {
            Ok(_) => (SupportedPasses::Backward, None),
            Err(error) => (SupportedPasses::Forward, Some(error)),
        }
    }
}

/// The passes that succeed in a dtype.
#[derive(PartialEq, PartialOrd)]
enum SupportedPasses {
    Nothing,
    Forward,
    Backward,
}

impl Module for AutocastLayer {
    fn forward(&self, input: &Tensor) -> candle_core::Result<Tensor> {
        self.run(self.choose_dtype(input), input)
    }
}

/// Visits the F32 parameters, under the names that the constructor has requested, without running statistics.
impl Model for AutocastLayer {
    fn visit<'m>(&'m self, visitor: &mut Visitor<'m, '_>) {
        for (path, tensor) in self
            .record
            .tensors
            .iter()
            .filter(|(path, _)| !is_running_statistic(path))
        {
            let relative_path = path
                .strip_prefix(&self.prefix)
                .and_then(|name| name.strip_prefix('.'));
            visitor.child(relative_path.unwrap_or(path), tensor);
        }
    }
}
