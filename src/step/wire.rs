//! The dtypes in which gradients travel between ranks, compared with those in which layers of `Autocast`
//! compute.

use super::contribution::OwnLeaf;
use crate::error::warning::Warning;
use crate::error::{Error, ErrorKind, Result};
use crate::model::layer_dtypes::layer_dtypes;
use crate::numbers::{DType, is_wider};
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

/// The warning of gradients that travel in another dtype than their layers compute in: in a narrower one, or
/// in a wider one that the program has not chosen.
///
/// The gradients decide, because they may be narrower than their parameters.
pub(super) fn other_wire(own: &[OwnLeaf<'_>], leaves: &[Box<Leaf>]) -> Option<Warning> {
    let layers = layer_dtypes();
    let mut differing = own.iter().zip(leaves).filter(|(_, leaf)| !leaf.frozen).filter_map(|(own, leaf)| {
        let (computes, travels) = (*layers.get(&leaf.id?)?, own.sent_dtype()?);
        let is_wide = is_wider(travels, computes) && own.parts.wire.is_none();
        (is_wide || is_wider(computes, travels)).then_some((leaf, computes, travels))
    });
    let (leaf, computes, travels) = differing.next()?;
    Some(Warning::WireDiffers {
        parameters: 1 + differing.count(),
        path: leaf.path().to_string(),
        computes: format!("{computes:?}"),
        travels: format!("{travels:?}"),
    })
}
