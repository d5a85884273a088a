//! A model's parameters, each once, in the order of their paths.
//!
//! A model may show one parameter under several paths (tied weights), so [`in_path_order`] has to find out
//! whether two tensors are one. Tensors of candle's have an id. If the owner of lent memory reports too
//! little, an equal [`Identity`] is no proof. Such a model is refused, because a wrong guess would update one
//! parameter twice in a step, or leave the second of two parameters out.

use std::collections::{BTreeMap, HashMap};

use super::lent::{Lend, Lent};
use super::{Model, See, Visitor};
use crate::error::{Error, ErrorKind, Result};
use crate::tensors::{Tensor, TensorId};

/// A parameter and all its paths, sorted.
pub(crate) struct Variable<'m> {
    pub(crate) paths: Vec<String>,
    pub(crate) x: Lent<'m>,
}

impl<'m> Variable<'m> {
    pub(crate) fn named(self) -> (String, Lent<'m>) {
        (self.paths.into_iter().next().unwrap_or_default(), self.x)
    }

    pub(crate) fn path(&self) -> &str {
        self.paths.first().map_or("", String::as_str)
    }
}

/// A key for parameters. Parameters with different keys are different; the converse needs [`is_surely`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Identity {
    Tensor(TensorId),
    /// [`Lend::memory`] and [`Lend::offset`].
    Place(usize, Option<usize>),
    /// The address and the size of a lender that shares its memory with nobody.
    Object(usize, usize),
}

pub(crate) fn identity(x: &Lent<'_>) -> Identity {
    match x {
        Lent::Tensor(tensor) => Identity::Tensor(tensor.id()),
        Lent::Memory(known) => match known.memory() {
            Some(memory) => Identity::Place(memory, known.offset()),
            None => Identity::Object(known.object().0, known.object().1),
        },
        Lent::Part(part) => Identity::Object(std::ptr::from_ref(&**part).addr(), size_of_val(&**part)),
    }
}

/// Whether two handles of equal identity are certainly one parameter. Unless both are one object, that is
/// uncertain if the owner reports no offset, or if the handles differ in shape or dtype. Objects of size 0
/// are uncertain, too, because several of them can have one address.
fn is_surely(known: &Lent<'_>, x: &Lent<'_>) -> bool {
    x.tensor().is_some() || known.is(x) == Some(true)
}

/// Collects the parameters of a visit by path.
struct ByPath<'m, W> {
    wanted: W,
    found: BTreeMap<String, Lent<'m>>,
    duplicate: Option<String>,
}

impl<'m, W: Fn(&str, Option<&Tensor>) -> bool> ByPath<'m, W> {
    fn add(&mut self, path: &str, x: Lent<'m>) {
        if let Some(other) = self.found.insert(path.to_string(), x.clone())
            && (identity(&other) != identity(&x) || !is_surely(&other, &x))
        {
            self.duplicate = Some(path.to_string());
        }
    }
}

impl<'m, W: Fn(&str, Option<&Tensor>) -> bool> See<'m> for ByPath<'m, W> {
    fn tensor(&mut self, path: &str, tensor: &Tensor) {
        if (self.wanted)(path, Some(tensor)) {
            self.add(path, Lent::Tensor(tensor.clone()));
        }
    }

    fn lent(&mut self, path: &str, lender: &'m dyn Lend) {
        if (self.wanted)(path, None) {
            self.add(path, Lent::new(lender));
        }
    }
}

/// The wanted tensors of a model and all memory that it lends, each once, sorted by the first path.
///
/// # Errors
/// As [`selected`].
pub(crate) fn in_path_order<'m, M>(
    model: &'m M,
    wanted: impl Fn(&Tensor) -> bool,
) -> Result<Vec<Variable<'m>>>
where
    M: Model + ?Sized,
{
    selected(model, |_, tensor| tensor.is_none_or(&wanted))
}

/// What a model shows and is wanted, each once, sorted by the first path.
///
/// `wanted` gets each path and its tensor; `None` for memory that the model lends.
///
/// # Errors
/// If two parameters have one path, or if two handles of one memory cannot be told apart.
pub(crate) fn selected<'m, M>(
    model: &'m M,
    wanted: impl Fn(&str, Option<&Tensor>) -> bool,
) -> Result<Vec<Variable<'m>>>
where
    M: Model + ?Sized,
{
    let mut by_path = ByPath { wanted, found: BTreeMap::new(), duplicate: None };
    model.visit(&mut Visitor::seeing(&mut by_path));
    if let Some(path) = by_path.duplicate {
        return Err(duplicate_path(&path));
    }
    let mut places: HashMap<Identity, usize> = HashMap::new();
    let mut variables: Vec<Variable<'m>> = Vec::new();
    // In the order of paths, so that the paths of each variable are sorted as well.
    for (path, x) in by_path.found {
        let identity = identity(&x);
        match places.get(&identity) {
            Some(&place) => {
                let known = &mut variables[place];
                if !is_surely(&known.x, &x) {
                    let problem = format!("it shares memory with {path:?}, and may be the same parameter");
                    return Err(Error::new(ErrorKind::Memory, problem).at(known.path()).with_remedy(
                        "let `Lend::memory` and `Lend::offset` return where each tensor begins (one offset, \
                         shape and dtype for all handles of one tensor; different offsets for different \
                         tensors)",
                    ));
                }
                known.paths.push(path);
            }
            None => {
                places.insert(identity, variables.len());
                variables.push(Variable { paths: vec![path], x });
            }
        }
    }
    Ok(variables)
}

/// The error for two variables with one path.
pub(crate) fn duplicate_path(path: &str) -> Error {
    Error::new(ErrorKind::Model, "two variables of the model have this path")
        .with_remedy("rename one")
        .at(path)
}

/// The error for a model in which nothing can be trained.
pub(crate) fn empty_model() -> Error {
    Error::new(ErrorKind::Model, "the model has no trainable floating-point variable")
        .with_remedy("make its tensors `Var`s (a `VarMap` does)")
}
