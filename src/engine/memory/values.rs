//! Makes, rounds, copies and writes the values of tensors.

use super::variables::{UpdateTargets, unshared};
use crate::error::Result;
use crate::model::lent::{Lend, defect, read, write};
use crate::numbers::{DType, compute_dtype, round_to_odd};
use crate::tensors::{Device, Shape, Tensor, Var, WithDType, allocate, dtype_of, failure, in_dtype};

/// A number as a tensor of a compute dtype.
///
/// The number is rounded on the host, because Metal has no F64, not even to convert from.
pub(in crate::engine) fn scalar(
    value: f64,
    compute: impl Into<DType>,
    device: &Device,
) -> crate::tensors::Result<Tensor> {
    match compute.into() {
        DType::F64 => Tensor::from_vec(vec![value], (), device),
        _ => Tensor::from_vec(vec![value as f32], (), device),
    }
}

/// A tensor of elements `value`, in storage of its own. `value` is rounded on the host, see [`scalar`].
pub(crate) fn filled(
    value: f64,
    shape: impl Into<Shape>,
    dtype: impl Into<DType>,
    device: &Device,
) -> Result<Tensor> {
    let (shape, dtype) = (shape.into(), dtype.into());
    let number = rounded(&scalar(value, compute_dtype(dtype), &Device::Cpu)?, dtype)?.to_device(device)?;
    allocate(shape.elem_count(), dtype, device, || {
        number.broadcast_as(&shape)?.force_contiguous()
    })
}

/// The values on a device. They are copied before a transfer, because a transfer takes a whole storage.
pub(crate) fn on_device(values: &Tensor, device: &Device) -> crate::tensors::Result<Tensor> {
    if device.same_device(values.device()) {
        Ok(values.clone())
    } else {
        values.force_contiguous()?.to_device(device)
    }
}

/// The values on a device, in storage that nothing else shares.
pub(crate) fn owned_on(device: &Device, values: &Tensor) -> Result<Tensor> {
    let values = values.detach();
    allocate(values.elem_count(), dtype_of(&values), device, || {
        if device.same_device(values.device()) {
            values.copy()
        } else {
            values.to_device(device)
        }
    })
}

/// Overwrites a variable's values, rounded to its dtype.
///
/// If the caller holds no lock, this function waits for a lock only while it holds none that others may need.
pub(crate) fn set_tensor(variable: &Tensor, next: &Tensor) -> crate::tensors::Result<()> {
    if variable.elem_count() == 0 {
        return Ok(());
    }
    let values = rounded(next, variable.dtype())?.to_device(variable.device())?;
    // `Var::set` locks both tensors. Another thread that can see the new values might hold their lock while
    // it waits for the variable. So shared values are copied.
    let values = unshared("new value", values, &UpdateTargets::all_registered(), &[])?;
    match variable.is_variable() {
        true => Var::from_tensor(variable)?.set(&values),
        // The tensor is a view of a variable, of which `Var::from_tensor` would make a copy.
        false => set_part(variable, 0, &values),
    }
}

/// Overwrites lent memory with `next`, rounded to the dtype of the memory.
pub(crate) fn set_lent(lender: &dyn Lend, next: &Tensor) -> Result<()> {
    set_lent_and(lender, next, &mut || Ok(()))
}

/// Overwrites lent memory as [`set_lent`] does, and then runs `then`.
///
/// Memory that is not a tensor stays lent while `then` runs. If its owner refuses to lend it, `then` does not
/// run. An error of the owner after the loan comes too late to stop `then`.
pub(crate) fn set_lent_and(
    lender: &dyn Lend,
    next: &Tensor,
    then: &mut dyn FnMut() -> Result<()>,
) -> Result<()> {
    if let Some(variable) = lender.tensor() {
        set_tensor(variable, next)?;
        return then();
    }
    set_memory(lender, 0, &rounded(next, lender.dtype())?.contiguous()?, then)
}

/// Overwrites elements of lent memory from `start` on with `values`, rounded to the memory's dtype.
pub(crate) fn set_lent_part(lender: &dyn Lend, start: usize, values: &Tensor) -> Result<()> {
    if let Some(variable) = lender.tensor() {
        return Ok(set_part(variable, start, values)?);
    }
    set_memory(lender, start, &rounded(values, lender.dtype())?, &mut || Ok(()))
}

/// Overwrites elements of memory that is not a tensor, and runs `then` while the memory is lent.
fn set_memory(
    lender: &dyn Lend,
    start: usize,
    next: &Tensor,
    then: &mut dyn FnMut() -> Result<()>,
) -> Result<()> {
    let next = next.to_device(&Device::Cpu)?.flatten_all()?;
    write("parameter", lender, &mut |mut memory| {
        read("new value", &next, &mut |view| {
            let fits = view.in_order().is_some_and(|next| memory.set(start, next));
            let misfit_error = || {
                defect(format!(
                    "{} values from element {start} on do not fit a parameter",
                    next.elem_count()
                ))
            };
            if fits { Ok(()) } else { Err(misfit_error()) }
        })?;
        then()
    })
}

/// Overwrites elements of a variable from `start` on, in row-major order, with rounded `values`.
pub(crate) fn set_part(variable: &Tensor, start: usize, values: &Tensor) -> crate::tensors::Result<()> {
    if values.elem_count() == 0 {
        return Ok(());
    }
    if !variable.is_contiguous() {
        // `flatten_all` would copy the variable, and the values would be written to the copy.
        return Err(failure("cannot set a part of a variable that is not contiguous"));
    }
    let values = on_device(&rounded(values, variable.dtype())?, variable.device())?;
    variable
        .detach()
        .flatten_all()?
        .slice_set(&values.flatten_all()?.contiguous()?, 0, start)
}

/// Rounds values once, to nearest even.
///
/// candle's own conversion from F64 to 16 bits rounds twice, or drops low bits.
pub(crate) fn rounded(values: &Tensor, dtype: impl Into<DType>) -> crate::tensors::Result<Tensor> {
    let dtype = dtype.into();
    if values.dtype() != DType::F64 || !matches!(dtype, DType::F16 | DType::BF16) {
        return in_dtype(values, dtype);
    }
    let odd: Vec<f32> = on_host(values)?.into_iter().map(round_to_odd).collect();
    in_dtype(&Tensor::from_vec(odd, values.shape(), &Device::Cpu)?, dtype)?.to_device(values.device())
}

/// The numbers in row-major order.
pub(in crate::engine) fn on_host<T: WithDType>(tensor: &Tensor) -> crate::tensors::Result<Vec<T>> {
    tensor.to_device(&Device::Cpu)?.flatten_all()?.to_vec1()
}

#[cfg(test)]
mod tests {
    use candle_core::DType;

    use super::*;

    #[test]
    fn numbers_are_rounded_once() -> candle_core::Result<()> {
        for (dtype, expected) in [
            (DType::F32, f64::from(0.1f32)),
            (DType::F64, 0.1),
            (DType::BF16, 0.100_097_656_25),
        ] {
            let filled = filled(0.1, (2, 3), dtype, &Device::Cpu)?;
            assert_eq!((filled.dtype(), filled.dims()), (dtype, &[2, 3][..]));
            assert!(filled.is_contiguous());
            assert_eq!(
                filled.to_dtype(DType::F64)?.flatten_all()?.to_vec1::<f64>()?,
                [expected; 6]
            );
        }
        assert_eq!(scalar(0.1, DType::F32, &Device::Cpu)?.dtype(), DType::F32);
        Ok(())
    }
}
