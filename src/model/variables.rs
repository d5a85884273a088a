//! A model's parameters, each once, in the order of their paths.
//!
//! A model may show one parameter under several paths (tied weights), so [`in_path_order`] has to find out
//! whether two tensors are one. A tensor of candle's has an id, which decides. For lent memory an equal
//! [`Identity`] is no proof if the owner reports too little. A model with such memory is refused, because a
//! wrong guess would update one parameter twice in a step, or leave the second of two parameters out.

use std::collections::{BTreeMap, HashMap};

use super::lent::{Lend, Lent};
use super::{Model, TensorReceiver, Visitor};
use crate::error::{Error, ErrorKind, Result};
use crate::tensors::{Tensor, TensorId};

/// A parameter and all its paths, sorted.
pub(crate) struct Variable<'m> {
    pub(crate) paths: Vec<String>,
    pub(crate) x: Lent<'m>,
}

impl<'m> Variable<'m> {
    /// The first path and the handle.
    pub(crate) fn into_path_and_handle(self) -> (String, Lent<'m>) {
        (self.paths.into_iter().next().unwrap_or_default(), self.x)
    }

    pub(crate) fn path(&self) -> &str {
        self.paths.first().map_or("", String::as_str)
    }
}

/// A key for parameters. Different keys mean different parameters. Equal keys mean one parameter only if
/// [`are_surely_one`] agrees.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Identity {
    Tensor(TensorId),
    /// [`Lend::memory`] and [`Lend::offset`].
    Memory(usize, Option<usize>),
    /// The address and the size of a lender that shares its memory with nobody.
    Object(usize, usize),
}

pub(crate) fn identity(x: &Lent<'_>) -> Identity {
    match x {
        Lent::Tensor(tensor) => Identity::Tensor(tensor.id()),
        Lent::Memory(lender) => match lender.memory() {
            Some(memory) => Identity::Memory(memory, lender.offset()),
            None => Identity::Object(lender.object().0, lender.object().1),
        },
        Lent::Part(part) => Identity::Object(std::ptr::from_ref(&**part).addr(), size_of_val(&**part)),
    }
}

/// Whether two handles of equal identity are certainly one parameter. Two handles of one object are one
/// parameter. Handles of two objects are one parameter only if the owners report an offset, and shape and
/// dtype agree. Objects of size 0 prove nothing, because several such objects can have one address.
fn are_surely_one(a: &Lent<'_>, b: &Lent<'_>) -> bool {
    b.tensor().is_some() || a.has_same_elements(b) == Some(true)
}

/// Collects the parameters of a visit by path.
struct ByPath<'m, Select> {
    is_selected: Select,
    parameters: BTreeMap<String, Lent<'m>>,
    /// A path that the model has shown with two different parameters.
    duplicate_path: Option<String>,
}

impl<'m, Select: Fn(&str, Option<&Tensor>) -> bool> ByPath<'m, Select> {
    fn add(&mut self, path: &str, x: Lent<'m>) {
        if let Some(other) = self.parameters.insert(path.to_string(), x.clone())
            && (identity(&other) != identity(&x) || !are_surely_one(&other, &x))
        {
            self.duplicate_path = Some(path.to_string());
        }
    }
}

impl<'m, Select: Fn(&str, Option<&Tensor>) -> bool> TensorReceiver<'m> for ByPath<'m, Select> {
    fn tensor(&mut self, path: &str, tensor: &Tensor) {
        if (self.is_selected)(path, Some(tensor)) {
            self.add(path, Lent::Tensor(tensor.clone()));
        }
    }

    fn lent(&mut self, path: &str, lender: &'m dyn Lend) {
        if (self.is_selected)(path, None) {
            self.add(path, Lent::new(lender));
        }
    }
}

/// The parameters of a model, each once, sorted by the first path: all memory that the model lends, and those
/// tensors that `is_selected` accepts.
///
/// # Errors
/// As [`select_variables`].
pub(crate) fn in_path_order<'m, M>(
    model: &'m M,
    is_selected: impl Fn(&Tensor) -> bool,
) -> Result<Vec<Variable<'m>>>
where
    M: Model + ?Sized,
{
    select_variables(model, |_, tensor| tensor.is_none_or(&is_selected))
}

/// Those parameters of a model that `is_selected` accepts, each once, sorted by the first path.
///
/// `is_selected` gets each path and its tensor, or `None` for memory that the model lends.
///
/// # Errors
/// If two parameters have one path, or if two handles of one memory cannot be told apart.
pub(crate) fn select_variables<'m, M>(
    model: &'m M,
    is_selected: impl Fn(&str, Option<&Tensor>) -> bool,
) -> Result<Vec<Variable<'m>>>
where
    M: Model + ?Sized,
{
    let mut by_path = ByPath {
        is_selected,
        parameters: BTreeMap::new(),
        duplicate_path: None,
    };
    model.visit(&mut Visitor::with_receiver(&mut by_path));
    if let Some(path) = by_path.duplicate_path {
        return Err(duplicate_path_error(&path));
    }
    let mut indices: HashMap<Identity, usize> = HashMap::new();
    let mut variables: Vec<Variable<'m>> = Vec::new();
    // The map returns its entries in the order of paths, so the paths of each variable are sorted as well.
    for (path, x) in by_path.parameters {
        let key = identity(&x);
        match indices.get(&key) {
            Some(&index) => {
                let earlier = &mut variables[index];
                if !are_surely_one(&earlier.x, &x) {
                    let problem = format!("it shares memory with {path:?}, and may be the same parameter");
                    return Err(Error::new(ErrorKind::Memory, problem).at(earlier.path()).with_remedy(
                        "let `Lend::memory` and `Lend::offset` return where each tensor begins (one offset, \
                         shape and dtype for all handles of one tensor; different offsets for different \
                         tensors)",
                    ));
                }
                earlier.paths.push(path);
            }
            None => {
                indices.insert(key, variables.len());
                variables.push(Variable { paths: vec![path], x });
            }
        }
    }
    Ok(variables)
}

/// The error for two variables with one path.
pub(crate) fn duplicate_path_error(path: &str) -> Error {
    Error::new(ErrorKind::Model, "two variables of the model have this path")
        .with_remedy("rename one")
        .at(path)
}

/// The error for a model in which nothing can be trained.
pub(crate) fn empty_model_error() -> Error {
    Error::new(
        ErrorKind::Model,
        "the model has no trainable floating-point variable",
    )
    .with_remedy("make its tensors `Var`s (a `VarMap` does)")
}
