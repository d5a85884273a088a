//! The dtypes in which gradients travel between ranks, compared with those in which layers of `Autocast`
//! compute.

use super::contribution::OwnLeaf;
use crate::error::warning::Warning;
use crate::error::{Error, ErrorKind, Result};
use crate::model::layer_dtypes::layer_dtypes;
use crate::numbers::{DType, is_wider};
use crate::tensors::dtype_of;
use crate::tree::{ChosenOptimisers, Leaf};

/// For each variable the dtype of its layer if that is narrower, otherwise `None`.
///
/// # Errors
/// If no layer has a variable of the model.
pub(super) fn wire_of_layers(choices: &ChosenOptimisers<'_>) -> Result<Vec<Option<DType>>> {
    let layers = layer_dtypes();
    let xs = || choices.iter().map(|(variable, _)| &*variable.x);
    let of_layer = xs().map(|x| layers.get(&x.tensor()?.id()).copied()).collect::<Vec<_>>();
    if of_layer.iter().all(Option::is_none) {
        let problem = "no layer that `Autocast` made has a variable of the model";
        let remedy = "make the layers by `Autocast::layer` before the state, and do not drop them; or leave \
                      `wire_as_computed` out";
        return Err(Error::new(ErrorKind::Model, problem).with_remedy(remedy));
    }
    Ok(xs().zip(of_layer).map(|(x, dtype)| dtype.filter(|dtype| is_wider(x.dtype(), *dtype))).collect())
}

/// The warning of gradients that travel in another dtype than that of their values: rounded by the wire, or,
/// if none is, in a wider dtype that the program has not chosen.
///
/// The gradients decide, because they may be narrower than their parameters.
pub(super) fn other_wire(own: &[OwnLeaf<'_>], leaves: &[Box<Leaf>]) -> Option<Warning> {
    let layers = layer_dtypes();
    let sent = own
        .iter()
        .zip(leaves)
        .filter(|(_, leaf)| !leaf.frozen)
        .filter_map(|(own, leaf)| Some((leaf, own, *layers.get(&leaf.id?)?, own.sent_dtype()?)));
    let (rounded, others): (Vec<_>, Vec<_>) = sent.partition(|(_, own, values, travels)| {
        let is_rounded = own.gradient.as_ref().is_some_and(|gradient| dtype_of(gradient) != *travels);
        is_rounded && values != travels && !is_wider(*travels, *values)
    });
    let is_wide = |(_, own, values, travels): &(_, &OwnLeaf<'_>, _, _)| {
        own.parts.wire.is_none() && is_wider(*travels, *values)
    };
    let loses_bits = !rounded.is_empty();
    let differing = if loses_bits { rounded } else { others.into_iter().filter(is_wide).collect() };
    let (leaf, _, values, travels) = differing.first()?;
    Some(Warning::WireDiffers {
        parameters: differing.len(),
        path: leaf.path().to_string(),
        values: format!("{values:?}"),
        travels: format!("{travels:?}"),
        loses_bits,
    })
}
