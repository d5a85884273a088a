//! The dtypes in which gradients travel between ranks, compared with those in which layers of `Autocast`
//! compute.

use super::contribution::OwnLeaf;
use crate::error::warning::Warning;
use crate::error::{Error, ErrorKind, Result};
use crate::model::layer_dtypes::layer_dtypes;
use crate::numbers::{DType, is_wider};
use crate::tensors::dtype_of;
use crate::tree::{ChosenOptimisers, Leaf};

/// For each variable the dtype of its layer, if this dtype is narrower than the variable's, otherwise `None`.
///
/// # Errors
/// If no layer has a variable of the model.
pub(super) fn wire_of_layers(choices: &ChosenOptimisers<'_>) -> Result<Vec<Option<DType>>> {
    let layers = layer_dtypes();
    let xs = || choices.iter().map(|(variable, _)| &*variable.x);
    let dtypes = xs()
        .map(|x| layers.get(&x.tensor()?.id()).copied())
        .collect::<Vec<_>>();
    if dtypes.iter().all(Option::is_none) {
        let problem = "no layer that `Autocast` made has a variable of the model";
        let remedy = "make the layers by `Autocast::layer` before the state, and do not drop them; or leave \
                      `wire_as_computed` out";
        return Err(Error::new(ErrorKind::Model, problem).with_remedy(remedy));
    }
    Ok(xs()
        .zip(dtypes)
        .map(|(x, dtype)| dtype.filter(|dtype| is_wider(x.dtype(), *dtype)))
        .collect())
}

/// The warning of gradients that travel in another dtype than that of their values.
///
/// If the wire rounds gradients, the warning is about these gradients. Otherwise the warning is about
/// gradients that travel in a wider dtype, which the program has not chosen. The dtypes of gradients are
/// compared, because gradients may be narrower than their parameters.
pub(super) fn wire_warning(own_leaves: &[OwnLeaf<'_>], leaves: &[Box<Leaf>]) -> Option<Warning> {
    let layers = layer_dtypes();
    // The leaf, this rank's share, the dtype of its layer and the dtype on the wire.
    let gradients = own_leaves
        .iter()
        .zip(leaves)
        .filter(|(_, leaf)| !leaf.frozen)
        .filter_map(|(own_leaf, leaf)| {
            Some((leaf, own_leaf, *layers.get(&leaf.id?)?, own_leaf.sent_dtype()?))
        });
    let (rounded, others): (Vec<_>, Vec<_>) =
        gradients.partition(|(_, own_leaf, layer_dtype, wire_dtype)| {
            let is_rounded = own_leaf
                .gradient
                .as_ref()
                .is_some_and(|gradient| dtype_of(gradient) != *wire_dtype);
            is_rounded && layer_dtype != wire_dtype && !is_wider(*wire_dtype, *layer_dtype)
        });
    let is_wide = |(_, own_leaf, layer_dtype, wire_dtype): &(_, &OwnLeaf<'_>, _, _)| {
        own_leaf.parts.wire.is_none() && is_wider(*wire_dtype, *layer_dtype)
    };
    let loses_bits = !rounded.is_empty();
    let reported = if loses_bits {
        rounded
    } else {
        others.into_iter().filter(is_wide).collect()
    };
    let (leaf, _, layer_dtype, wire_dtype) = reported.first()?;
    Some(Warning::WireDiffers {
        parameters: reported.len(),
        path: leaf.path().to_string(),
        values: format!("{layer_dtype:?}"),
        travels: format!("{wire_dtype:?}"),
        loses_bits,
    })
}
