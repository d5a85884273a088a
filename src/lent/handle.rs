//! A tensor's handle, or a reference to what somebody else lends.

use std::ops::Deref;

use candle_core::Tensor;

use super::Lend;

/// A parameter or gradient of a call.
#[derive(Clone)]
pub(crate) enum Handle<'a> {
    Tensor(Tensor),
    Lent(&'a dyn Lend),
}

impl<'a> Deref for Handle<'a> {
    type Target = dyn Lend + 'a;

    fn deref(&self) -> &Self::Target {
        match self {
            Handle::Tensor(tensor) => tensor,
            Handle::Lent(lender) => *lender,
        }
    }
}

impl std::fmt::Debug for Handle<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Handle").field("shape", self.shape()).field("dtype", &self.dtype()).finish()
    }
}

impl<'a> Handle<'a> {
    /// What is lent for a longer time than the handle.
    pub(crate) fn new(lender: &'a dyn Lend) -> Self {
        lender.tensor().map_or(Handle::Lent(lender), |tensor| Handle::Tensor(tensor.clone()))
    }
}
