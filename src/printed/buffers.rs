//! The buffers that a runtime has to keep, derived from the state of a probe. The probe is a parameter of two
//! different elements.
//!
//! A tensor that starts with one number in both places is a constant, and a tensor that starts with the
//! probe's elements is a copy of the parameter. Any other start is refused, because [`BufferStart`] cannot
//! describe it.

use super::kernel::{BufferRole, BufferStart, StateBuffer};
use crate::engine::Buffer;
use crate::error::{Error, ErrorKind, Result};
use crate::numbers::DType;
use crate::rule::{Optimiser, SlotFormat, State, Store};
use crate::tensors::{Device, Tensor, dtype_of, in_dtype};

/// A parameter with two different elements, so that a copy of the parameter is no constant.
pub(super) fn probe(dtype: DType) -> Result<Tensor> {
    Ok(in_dtype(
        &Tensor::from_vec(vec![1f32, 2.0], 2, &Device::Cpu)?,
        dtype,
    )?)
}

/// The buffers of a state for [`probe`].
pub(super) fn buffers(optimiser: &Optimiser, state: &State, x: &Tensor) -> Result<Vec<StateBuffer>> {
    let parameter_values = in_dtype(x, DType::F64)?.to_vec1::<f64>()?;
    let describe = |(index, (name, buffer)): (usize, (String, &Buffer))| {
        let is_like_parameter = buffer.shape() == x.dims();
        let values = in_dtype(&buffer.tensor()?, DType::F64)?
            .flatten_all()?
            .to_vec1::<f64>()?;
        let start = match values[..] {
            _ if !is_like_parameter => None,
            // In 8 bits only 0 can be described, because other numbers come with a scale.
            [first, second] if first == second && (first == 0.0 || buffer.code().is_none()) => {
                Some(BufferStart::Number(first))
            }
            _ if values == parameter_values && buffer.code().is_none() => Some(BufferStart::Parameter),
            _ => None,
        };
        // Buffers of the store come first, so a later `rest` or `compensation` is a slot of a rule.
        let role = match (optimiser.store(), index, name.as_str()) {
            _ if state.is_outer_master(buffer) => BufferRole::Master,
            (Store::Split(_), 0, "rest") => BufferRole::LowBits,
            (Store::Compensated, 0, "compensation") => BufferRole::Compensation,
            _ => BufferRole::Slot(name.clone()),
        };
        let refusal = || {
            let rule = optimiser.name();
            let problem = format!(
                "{rule}: the start of the state tensor {name:?} cannot be described: it is neither one number nor a \
                 copy of the parameter, or in 8 bits not 0"
            );
            Error::new(ErrorKind::Unsupported, problem).with_remedy("use another rule, or `update`")
        };
        let start = start.ok_or_else(refusal)?;
        Ok(StateBuffer {
            role,
            format: SlotFormat::from_buffer(buffer),
            start,
            parameter: dtype_of(x),
        })
    };
    state.tensors().into_iter().enumerate().map(describe).collect()
}

/// The full names of slots by the addresses of their buffers, because a plan has only references to buffers.
pub(super) fn slot_names(state: &State) -> Vec<(usize, String)> {
    let named_address = |(name, buffer): (String, &Buffer)| {
        (!state.is_outer_master(buffer)).then(|| (std::ptr::from_ref(buffer).addr(), name))
    };
    state.tensors().into_iter().filter_map(named_address).collect()
}
