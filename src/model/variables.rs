//! A model's variables in the order of their paths.

use std::collections::{BTreeMap, HashMap};

use candle_core::{Tensor, TensorId};

use super::{Model, show};
use crate::error::{Error, Result};
use crate::lent::INSIDE;

/// A variable and all its paths, sorted.
pub(crate) struct Variable {
    pub(crate) paths: Vec<String>,
    pub(crate) tensor: Tensor,
}

impl Variable {
    /// The first path.
    pub(crate) fn path(&self) -> &str {
        self.paths.first().map_or("", String::as_str)
    }
}

/// The tensors of a model that are wanted, each once, sorted by their first path.
pub(crate) fn in_path_order<M: Model + ?Sized>(model: &M, wanted: impl Fn(&Tensor) -> bool) -> Result<Vec<Variable>> {
    let mut by_path: BTreeMap<String, Tensor> = BTreeMap::new();
    let mut duplicate = None;
    show(model, &mut |path, tensor| {
        if !wanted(tensor) {
            return;
        }
        if let Some(other) = by_path.insert(path.to_string(), tensor.clone())
            && other.id() != tensor.id()
        {
            duplicate = Some(path.to_string());
        }
    })?;
    if let Some(path) = duplicate {
        return Err(Error::DuplicatePath { path });
    }
    let mut places: HashMap<TensorId, usize> = HashMap::new();
    let mut variables: Vec<Variable> = Vec::new();
    for (path, tensor) in by_path {
        match places.get(&tensor.id()) {
            Some(&place) => variables[place].paths.push(path),
            None => {
                places.insert(tensor.id(), variables.len());
                variables.push(Variable { paths: vec![path], tensor });
            }
        }
    }
    Ok(variables)
}

/// The same for functions that only read: of memory that a caller owns they get copies.
pub(crate) fn to_read<M: Model + ?Sized>(model: &M, wanted: impl Fn(&Tensor) -> bool) -> Result<Vec<Variable>> {
    let Some(lent) = model.lent(INSIDE) else { return in_path_order(model, wanted) };
    let variable = |(path, tensor): (&str, Tensor)| Ok(Variable { paths: vec![path.to_string()], tensor });
    let mut variables = lent.copies()?.into_iter().map(variable).collect::<Result<Vec<_>>>()?;
    variables.sort_by(|a, b| a.paths.cmp(&b.paths));
    Ok(variables)
}

/// The tensors of a model that are wanted, each under the first of its paths.
pub(crate) fn by_first_path<M: Model + ?Sized>(model: &M, wanted: impl Fn(&Tensor) -> bool) -> Result<BTreeMap<String, Tensor>> {
    let variables = in_path_order(model, wanted)?.into_iter();
    Ok(variables.filter_map(|Variable { paths, tensor }| Some((paths.into_iter().next()?, tensor))).collect())
}
