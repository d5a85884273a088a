//! The agreement before a state is divided: the same model, values and rules on all ranks.

use std::fmt;
use std::sync::Arc;

use crate::error::{Error, ErrorKind, FLOATS, Result};
use crate::model::Variable;
use crate::numbers::{DType, is_supported};
use crate::ranks::{Agreement, Aspect, Call, Divisible, LeafParts, StateWorld, divide};
use crate::rule::{Optimiser, Parameter};
use crate::tree::{ChosenOptimisers, values_of};

/// A variable with its optimiser and the parts (ranges of its elements) of all ranks. Without an optimiser it
/// is left out.
pub(super) type Divided<'m> = (Variable<'m>, Option<(Arc<Optimiser>, Option<LeafParts>)>);

type ChooseDtype = dyn Fn(&str, Parameter<'_>) -> Option<DType> + Send + Sync;

/// The choice of the dtype in which gradients travel; by default their own.
#[derive(Clone, Default)]
pub(super) struct Wire(Option<Arc<ChooseDtype>>);

impl Wire {
    pub(super) fn new(choose: impl Fn(&str, Parameter<'_>) -> Option<DType> + Send + Sync + 'static) -> Self {
        Wire(Some(Arc::new(choose)))
    }

    fn of(&self, variable: &Variable<'_>) -> Result<Option<DType>> {
        match self.0.as_ref().and_then(|choose| choose(variable.path(), Parameter::new(&*variable.x))) {
            Some(dtype) if !is_supported(dtype) => {
                Err(Error::new(ErrorKind::Argument, "the dtype that `Setup::wire` chose for its gradient is")
                    .with_got(format_args!("{dtype:?}"))
                    .with_expected(FLOATS)
                    .at(variable.path()))
            }
            chosen => Ok(chosen),
        }
    }
}

impl fmt::Debug for Wire {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Wire").field(&self.0.is_some()).finish()
    }
}

/// The aspects of a parameter that must be the same on all ranks.
fn aspects(
    (variable, optimiser): &(Variable<'_>, Option<Arc<Optimiser>>),
    wire: &Wire,
) -> Result<[Aspect; 8]> {
    let (x, path) = (&*variable.x, variable.path());
    let of = |what: &str| format!("{what} of {path:?}");
    let described = optimiser.as_ref().map(|optimiser| optimiser.description().record().words());
    Ok([
        Aspect::new("a parameter", format!("{path:?}")),
        Aspect::new(of("the paths"), format!("{:?}", variable.paths)),
        Aspect::new(of("the shape"), format!("{:?}", x.shape())),
        Aspect::new(of("the dtype"), format!("{:?}", x.dtype())),
        Aspect::of_words(of("the optimiser"), described.unwrap_or_else(|| vec!["none".to_string()])),
        // Compared as `Debug` text as well, which also has fields that a rule does not describe.
        Aspect::new(of("the optimiser"), format!("{optimiser:?}")),
        Aspect::new(
            of("the dtype on the wire"),
            wire.of(variable)?.map_or("its own".to_string(), |dtype| format!("{dtype:?}")),
        ),
        values_of(path, &x.tensor_or_copy()?)?,
    ])
}

/// Agrees on the choices, and adds the parts of all ranks.
///
/// # Errors
/// On all ranks, if the choices differ between ranks, or if one rank refuses.
pub(super) fn divided<'m>(
    world: &StateWorld,
    wire: &Wire,
    choices: Result<ChosenOptimisers<'m>>,
) -> Result<Vec<Divided<'m>>> {
    let prepared = choices.and_then(|choices| {
        agreement(world, &choices, wire).map(|agreement| (choices, agreement, Vec::new()))
    });
    let (choices, _) = world.agree_on(Call::Setup, prepared)?;

    let chosen = choices.iter().filter_map(|(variable, optimiser)| Some((variable, optimiser.as_ref()?)));
    let divisible = chosen.map(|(variable, optimiser)| Divisible {
        length: variable.x.elem_count(),
        can_be_cut: optimiser.is_divisible(),
    });
    let mut parts = divide(&divisible.collect::<Vec<_>>(), world.rank(), world.size()).into_iter();
    let with_parts = |(variable, optimiser): (Variable<'m>, Option<Arc<Optimiser>>)| {
        let Some(optimiser) = optimiser else { return Ok((variable, None)) };
        let wire = wire.of(&variable)?;
        Ok((variable, Some((optimiser, parts.next().map(|parts| parts.sent_as(wire))))))
    };
    choices.into_iter().map(with_parts).collect()
}

/// The agreement on the choices. Refuses what cannot be divided.
fn agreement(world: &StateWorld, choices: &ChosenOptimisers<'_>, wire: &Wire) -> Result<Agreement<'static>> {
    let is_offloaded =
        |optimiser: &Option<Arc<Optimiser>>| optimiser.as_ref().is_some_and(|own| own.is_offloaded());
    if let Some((variable, _)) = choices.iter().find(|(_, optimiser)| is_offloaded(optimiser)) {
        return Err(Error::new(
            ErrorKind::Unsupported,
            "it is offloaded, but a state that is divided among ranks does not support `Offload`",
        )
        .with_remedy("leave `Offload` out")
        .at(variable.path()));
    }
    choices
        .iter()
        .filter(|(_, optimiser)| optimiser.is_some())
        .try_for_each(|(variable, _)| world.check_device(variable.path(), variable.x.device()))?;
    let aspects = choices.iter().map(|choice| aspects(choice, wire)).collect::<Result<Vec<_>>>()?;
    Ok(Agreement::on(aspects.into_iter().flatten().collect()))
}
