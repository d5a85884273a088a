//! A field that is not in the list of `model!` would not be trained.

use candle_core::Var;
use optimisers::{Model, model};

pub struct Net {
    pub hidden: Var,
    pub forgotten: Var,
}
model!(Net { hidden });

pub struct Classifier<E> {
    pub encoder: E,
    pub head: E,
}
model!([E: Model] Classifier<E> { encoder });
