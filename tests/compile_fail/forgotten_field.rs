//! A field that is not in the list of `model!` would not be trained.

use candle_core::Var;
use optimisers::model;

pub struct Net {
    pub hidden: Var,
    pub forgotten: Var,
}
model!(Net { hidden });
