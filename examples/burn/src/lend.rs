//! The parameters of a module as memory, for the length of a call.

use std::collections::HashSet;
use std::iter::Peekable;
use std::vec::IntoIter;

use burn::module::{Module, ModuleMapper, Param};
use burn::optim::GradientsParams;
use burn::tensor::{Bytes, DType, Device, Shape, Tensor, TensorData};
use optimisers::{GradientSlices, MemoryMut, MemoryRef, ParameterSlices};

use crate::Error;

/// Runs a function on the parameters that require gradients or that are `known`, and their gradients.
///
/// Parameters move out of the module first and back at the end, whatever the function says. So their memory
/// has one owner.
pub(crate) fn lend<M: Module, T>(
    module: &mut M,
    gradients: Option<GradientsParams>,
    known: &HashSet<String>,
    run: impl FnOnce(&mut ParameterSlices<'_>, &GradientSlices<'_>) -> optimisers::Result<T>,
) -> Result<T, Error> {
    let mut parameters = take(module, gradients, known);
    let done = on_slices(&mut parameters, run);
    put_back(module, parameters);
    done
}

fn take<M: Module>(
    module: &mut M,
    gradients: Option<GradientsParams>,
    known: &HashSet<String>,
) -> Vec<Parameter> {
    let mut take = Take {
        at: Vec::new(),
        gradients: gradients.unwrap_or_default(),
        known,
        taken: Vec::new(),
    };
    // The module without its parameters takes the place of the one with them, whose handles would be others
    // of the same memory.
    *module = module.clone().map(&mut take);
    take.taken.into_iter().map(Taken::into_parameter).collect()
}

fn put_back<M: Module>(module: &mut M, parameters: Vec<Parameter>) {
    *module = module.clone().map(&mut Return {
        at: Vec::new(),
        parameters: parameters.into_iter().peekable(),
    });
}

fn on_slices<T>(
    parameters: &mut [Parameter],
    run: impl FnOnce(&mut ParameterSlices<'_>, &GradientSlices<'_>) -> optimisers::Result<T>,
) -> Result<T, Error> {
    let (mut slices, mut gradients) = (ParameterSlices::new(), GradientSlices::new());
    for Parameter {
        path,
        value,
        gradient,
        ..
    } in parameters
    {
        slices = slices.with(
            path,
            value.shape.to_vec(),
            MemoryMut::from_bytes(&mut value.bytes, dtype(path, value.dtype)?)?,
        )?;
        if let Some(gradient) = gradient {
            gradients = gradients.with(
                path,
                MemoryRef::from_bytes(&gradient.bytes, dtype(path, gradient.dtype)?)?,
            )?;
        }
    }
    Ok(run(&mut slices, &gradients)?)
}

fn dtype(path: &str, dtype: DType) -> Result<optimisers::DType, Error> {
    match dtype {
        DType::F64 => Ok(optimisers::DType::F64),
        DType::F32 => Ok(optimisers::DType::F32),
        DType::F16 => Ok(optimisers::DType::F16),
        DType::BF16 => Ok(optimisers::DType::BF16),
        _ => Err(Error::DType {
            path: path.to_string(),
            dtype,
        }),
    }
}

/// The elements of a tensor, in row-major order.
struct Elements {
    bytes: Bytes,
    shape: Shape,
    dtype: DType,
}

impl From<TensorData> for Elements {
    fn from(data: TensorData) -> Self {
        let (bytes, shape, dtype) = data.into_parts();
        Elements { bytes, shape, dtype }
    }
}

struct Parameter {
    path: String,
    value: Elements,
    gradient: Option<Elements>,
    /// Where it was, and whether it required gradients there.
    device: Device,
    requires_gradient: bool,
}

/// A parameter that is out of its module. Its elements can be had when the module has let go of it.
struct Taken {
    path: String,
    value: Box<dyn FnOnce() -> TensorData>,
    gradient: Option<TensorData>,
    device: Device,
    requires_gradient: bool,
}

impl Taken {
    fn into_parameter(self) -> Parameter {
        let Taken {
            path,
            value,
            gradient,
            device,
            requires_gradient,
        } = self;
        Parameter {
            path,
            value: value().into(),
            gradient: gradient.map(Elements::from),
            device,
            requires_gradient,
        }
    }
}

/// Takes parameters out of a module, and gradients out of burn's.
struct Take<'a> {
    at: Vec<String>,
    gradients: GradientsParams,
    known: &'a HashSet<String>,
    taken: Vec<Taken>,
}

impl ModuleMapper for Take<'_> {
    fn enter_module(&mut self, name: &str, _: &str) {
        self.at.push(name.to_string());
    }

    fn exit_module(&mut self, _: &str, _: &str) {
        self.at.pop();
    }

    fn map_float<const D: usize>(&mut self, parameter: Param<Tensor<D>>) -> Param<Tensor<D>> {
        let path = self.at.join(".");
        let requires_gradient = parameter.is_require_grad();
        if !requires_gradient && !self.known.contains(&path) {
            return parameter;
        }
        let gradient = self.gradients.remove::<D>(parameter.id).map(Tensor::into_data);
        let (id, tensor, mapper) = parameter.consume();
        let device = tensor.device();
        let empty = Tensor::empty([0; D], (&device, tensor.dtype()));
        let value = Box::new(move || tensor.inner().into_data());
        self.taken.push(Taken {
            path,
            value,
            gradient,
            device,
            requires_gradient,
        });
        Param::from_mapped_value(id, empty, mapper)
    }
}

/// Puts parameters back where they were.
struct Return {
    at: Vec<String>,
    parameters: Peekable<IntoIter<Parameter>>,
}

impl ModuleMapper for Return {
    fn enter_module(&mut self, name: &str, _: &str) {
        self.at.push(name.to_string());
    }

    fn exit_module(&mut self, _: &str, _: &str) {
        self.at.pop();
    }

    fn map_float<const D: usize>(&mut self, parameter: Param<Tensor<D>>) -> Param<Tensor<D>> {
        let path = self.at.join(".");
        // The order is that in which they were taken.
        let Some(Parameter {
            value,
            device,
            requires_gradient,
            ..
        }) = self.parameters.next_if(|next| next.path == path)
        else {
            return parameter;
        };
        let Elements { bytes, shape, dtype } = value;
        let tensor = Tensor::from_data(TensorData::from_bytes(bytes, shape, dtype), (&device, dtype));
        parameter.map(|_| tensor.set_require_grad(requires_gradient))
    }
}

#[cfg(test)]
mod tests {
    use burn::nn::{Linear, LinearConfig};
    use optimisers::{AdamW, setup, update};

    use super::*;

    fn addresses(module: &mut Linear) -> Vec<*const u8> {
        let parameters = take(module, None, &HashSet::new());
        let addresses = parameters
            .iter()
            .map(|parameter| parameter.value.bytes.as_ptr())
            .collect();
        put_back(module, parameters);
        addresses
    }

    #[test]
    fn a_step_works_on_the_memory_of_the_module() {
        let device = Device::flex().autodiff();
        let mut module = LinearConfig::new(40, 30).init(&device).materialize();
        let before = addresses(&mut module);
        for _ in 0..3 {
            let loss = module.forward(Tensor::<2>::ones([2, 40], &device)).square().sum();
            let gradients = GradientsParams::from_grads(loss.backward(), &module);
            let step = |parameters: &mut ParameterSlices<'_>, gradients: &GradientSlices<'_>| {
                update(
                    &mut setup(AdamW::new(0.1), &*parameters)?,
                    &*parameters,
                    gradients,
                )
            };
            assert_eq!(
                lend(&mut module, Some(gradients), &HashSet::new(), step)
                    .unwrap()
                    .applied,
                2
            );
            assert_eq!(before, addresses(&mut module));
        }
    }
}
