//! Messages that are computed, or long.

use std::fmt;

use crate::cuts::advice;

type Told<'f, 'b> = &'f mut fmt::Formatter<'b>;

pub(super) fn tied_choices(paths: &[String; 2], chosen: &[String; 2], f: Told<'_, '_>) -> fmt::Result {
    let ([path, other], [rule, second]) = (paths, chosen);
    write!(
        f,
        "parameter {path:?} is tied to {other:?}, and {rule} was chosen for the one, {second} for the other; choose the same for all paths of a parameter"
    )
}

pub(super) fn unknown_parameter(path: &str, f: Told<'_, '_>) -> fmt::Result {
    write!(
        f,
        "parameter {path:?} is not in this state: it belongs to another model, or was added after `setup`; set up a state for this model, or `add` the parameter"
    )
}

pub(super) fn untied(first: &str, second: &str, f: Told<'_, '_>) -> fmt::Result {
    write!(
        f,
        "{first:?} and {second:?} are one variable in this state and two in the model: tie them there, or `remove` the parameter and `add` both"
    )
}

pub(super) fn averages_in_model(path: &str, f: Told<'_, '_>) -> fmt::Result {
    write!(
        f,
        "the model has other weights in place of its parameters ({path:?} is the first), averages or those that `Sam` has moved to, as a `Climbed` was forgotten or a device has failed; the next `with_averages` or `Sam::ascend` puts the parameters back"
    )
}

pub(super) fn missing_gradients(missing: &usize, leaves: &usize, paths: &[String], f: Told<'_, '_>) -> fmt::Result {
    write!(
        f,
        "{missing} of {leaves} parameters have no gradient, and the state requires all: {}. Nothing was changed. {}; parameters that need none are to be frozen, left out with `setup_with`, or declared with `Selection::allow_missing`",
        paths.join(", "),
        advice()
    )
}

pub(super) fn non_finite_norm(path: &str, norm: &f64, p: &f64, f: Told<'_, '_>) -> fmt::Result {
    write!(
        f,
        "the {p}-norm of the gradient of {path:?} is {norm}; nothing was changed. To go on regardless set the clipping rule's `non_finite` to Pass or Skip"
    )
}

pub(super) fn unscaled_loss(f: Told<'_, '_>) -> fmt::Result {
    write!(
        f,
        "the gradients are of a loss that was not scaled: call `scale` on the loss before `backward`, once per update; several updates of one iteration go into `LossScaler::iteration`"
    )
}

pub(super) fn loss_scale_floor(path: &str, floor: &f64, f: Told<'_, '_>) -> fmt::Result {
    write!(
        f,
        "the gradient of {path:?} is not finite although the loss scale is at its floor of {floor}; nothing was changed. Look for infinities in the model, or make the floor lower"
    )
}

pub(super) fn no_gradients(leaves: &usize, f: Told<'_, '_>) -> fmt::Result {
    write!(
        f,
        "no gradient for any of the {leaves} parameters: does the loss depend on this model's variables? `audit` shows what it reaches"
    )
}
