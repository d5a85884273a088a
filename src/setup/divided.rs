//! What the ranks of a job agree on before they divide a state: that they have the same model, with the same values, and the same rules.

use std::fmt;
use std::sync::Arc;

use candle_core::{DType, Tensor};
use serde::{Deserialize, Serialize};

use crate::error::{Error, PrecisionError, RanksError, Result};
use crate::model::Variable;
use crate::numbers::is_supported;
use crate::rule::Optimiser;
use crate::tree::{Divisible, LeafParts, can_be_cut, checksum, divide};
use crate::world::{Call, StateWorld};

/// Variables with their optimisers; those without one are to be left out.
pub(crate) type OptimiserChoices = Vec<(Variable, Option<Arc<dyn Optimiser>>)>;

/// A variable with its optimiser and which rank has what of it; without one it is to be left out.
pub(super) type Divided = (Variable, Option<(Arc<dyn Optimiser>, Option<LeafParts>)>);

type ChooseDtype = dyn Fn(&str, &Tensor) -> Option<DType> + Send + Sync;

/// In which dtype the gradients of a parameter travel, if not in their own.
#[derive(Clone, Default)]
pub(super) struct Wire(Option<Arc<ChooseDtype>>);

impl Wire {
    pub(super) fn new(choose: impl Fn(&str, &Tensor) -> Option<DType> + Send + Sync + 'static) -> Self {
        Wire(Some(Arc::new(choose)))
    }

    fn of(&self, variable: &Variable) -> Result<Option<DType>> {
        match self.0.as_ref().and_then(|choose| choose(variable.path(), &variable.tensor)) {
            Some(dtype) if !is_supported(dtype) => {
                Err(PrecisionError::unsupported(format!("`Setup::wire` for the gradient of {:?}", variable.path()), dtype).into())
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

/// A parameter as a rank has it, for comparison.
#[derive(Debug, PartialEq, Serialize, Deserialize)]
struct Described {
    path: String,
    /// What it is, and how it is told.
    aspects: [(String, String); 6],
}

impl Described {
    fn new((variable, optimiser): &(Variable, Option<Arc<dyn Optimiser>>), wire: &Wire) -> Result<Self> {
        let x = &variable.tensor;
        let optimiser = optimiser.as_ref().map_or_else(|| "none".to_string(), |optimiser| format!("{optimiser:?}"));
        let aspect = |name: &str, value: String| (name.to_string(), value);
        Ok(Described {
            path: variable.path().to_string(),
            aspects: [
                aspect("paths", format!("{:?}", variable.paths)),
                aspect("shape", format!("{:?}", x.shape())),
                aspect("dtype", format!("{:?}", x.dtype())),
                aspect("optimiser", optimiser),
                aspect("dtype on the wire", format!("{:?}", wire.of(variable)?)),
                aspect("values (give all ranks the same weights, see `broadcast`)", format!("checksum {:08x}", checksum(x)?)),
            ],
        })
    }

    /// In what this differs from what rank 0 has.
    fn difference(&self, first: &Described) -> Option<String> {
        if self.path != first.path {
            return Some(format!("the parameter {:?} where rank 0 has {:?}", self.path, first.path));
        }
        let (own, others) = self.aspects.iter().zip(&first.aspects).find(|(own, first)| own != first)?;
        Some(format!("other {} of {:?} than rank 0: {} for {}", own.0, self.path, own.1, others.1))
    }
}

/// The choices with the parts of all ranks.
///
/// # Errors
/// On all ranks, if they are not the same on all, or if one has none.
pub(super) fn divided(world: &StateWorld, wire: &Wire, choices: Result<OptimiserChoices>) -> Result<Vec<Divided>> {
    let prepared = choices.and_then(|choices| described(world, &choices, wire).map(|said| (choices, said)));
    let (choices, said) = world.agree_with(Call::Setup, prepared)?;
    compare(&said)?;

    let chosen = choices.iter().filter_map(|(variable, optimiser)| Some((variable, optimiser.as_ref()?)));
    let divisible =
        chosen.map(|(variable, optimiser)| Divisible { length: variable.tensor.elem_count(), can_be_cut: can_be_cut(&**optimiser) });
    let mut parts = divide(&divisible.collect::<Vec<_>>(), world.rank(), world.size()).into_iter();
    let with_parts = |(variable, optimiser): (Variable, Option<Arc<dyn Optimiser>>)| {
        let Some(optimiser) = optimiser else { return Ok((variable, None)) };
        let wire = wire.of(&variable)?;
        Ok((variable, Some((optimiser, parts.next().map(|parts| parts.sent_as(wire))))))
    };
    choices.into_iter().map(with_parts).collect()
}

/// The choices for comparison, if they can be divided.
fn described(world: &StateWorld, choices: &OptimiserChoices, wire: &Wire) -> Result<Vec<u8>> {
    let is_offloaded = |optimiser: &Option<Arc<dyn Optimiser>>| optimiser.as_ref().is_some_and(|own| own.storage().offloaded);
    if let Some((variable, _)) = choices.iter().find(|(_, optimiser)| is_offloaded(optimiser)) {
        let path = variable.path();
        return Err(Error::other(format!("{path:?} is offloaded, which a state that is divided among ranks cannot be yet")));
    }
    choices
        .iter()
        .filter(|(_, optimiser)| optimiser.is_some())
        .try_for_each(|(variable, _)| world.expect_device(variable.path(), variable.tensor.device()))?;
    let described = choices.iter().map(|choice| Described::new(choice, wire)).collect::<Result<Vec<_>>>()?;
    serde_json::to_vec(&described).map_err(Error::other)
}

/// Compares what all ranks have with what rank 0 has, so that all come to the same conclusion.
fn compare(said: &[Vec<u8>]) -> Result<()> {
    let [first, others @ ..] = said else { return Ok(()) };
    if others.iter().all(|other| other == first) {
        return Ok(());
    }
    let read = |said: &[u8]| serde_json::from_slice::<Vec<Described>>(said).map_err(Error::other);
    let first = read(first)?;
    for (rank, said) in (1..).zip(others) {
        let own = read(said)?;
        let what = own.iter().zip(&first).find_map(|(own, first)| own.difference(first));
        let what =
            what.or_else(|| (own.len() != first.len()).then(|| format!("{} parameters where rank 0 has {}", own.len(), first.len())));
        if let Some(what) = what {
            return Err(RanksError::Differ { rank, what }.into());
        }
    }
    Ok(())
}
