//! Which optimiser each variable gets.

use std::sync::Arc;

use candle_core::Tensor;

use crate::error::{Error, Result};
use crate::model::Variable;
use crate::rule::Optimiser;

/// Variables with what was chosen for each.
pub(crate) type ChosenOptimisers = Vec<(Variable, Option<Arc<dyn Optimiser>>)>;

/// Asks `choose` for every path of every variable.
///
/// # Errors
/// If the answers for the paths of one variable are not the same.
pub(crate) fn chosen<O: Optimiser>(
    variables: Vec<Variable>,
    choose: &mut impl FnMut(&str, &Tensor) -> Option<O>,
) -> Result<ChosenOptimisers> {
    let answer = |variable: Variable| {
        let optimiser = choose(variable.path(), &variable.tensor);
        for other in variable.paths.iter().skip(1) {
            let chosen = [described(optimiser.as_ref()), described(choose(other, &variable.tensor).as_ref())];
            if chosen[0] != chosen[1] {
                let paths = [variable.path().to_string(), other.clone()];
                return Err(Error::TiedChoices { paths, chosen });
            }
        }
        Ok((variable, optimiser.map(|optimiser| Arc::new(optimiser) as Arc<dyn Optimiser>)))
    };
    variables.into_iter().map(answer).collect()
}

/// The name and the hyper-parameters.
fn described(optimiser: Option<&impl Optimiser>) -> String {
    let Some(optimiser) = optimiser else { return "no optimiser".to_string() };
    let fields: Vec<String> = optimiser.fields().iter().map(|(name, value)| format!("{name}: {value}")).collect();
    format!("{} {{ {} }}", optimiser.name(), fields.join(", "))
}
