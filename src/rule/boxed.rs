//! Rules and optimisers that are chosen at run time.

use candle_core::Tensor;

use super::{Adjust, FieldValue, Flow, Gradient, Kind, Optimiser, Planned, Rule, State, Target};
use crate::error::Result;

macro_rules! forward_adjust {
    ($T:ty) => {
        impl Adjust for $T {
            fn name(&self) -> String {
                (**self).name()
            }

            fn fields(&self) -> Vec<(&'static str, FieldValue)> {
                (**self).fields()
            }

            fn places(&self) -> Vec<String> {
                (**self).places()
            }

            fn set_field(&mut self, field: &str, value: FieldValue) -> Result<bool> {
                (**self).set_field(field, value)
            }

            fn set_fields(&mut self, values: &[FieldValue]) -> Result<()> {
                (**self).set_fields(values)
            }

            fn defaults(&self) -> Vec<(String, Vec<(&'static str, FieldValue)>)> {
                (**self).defaults()
            }

            fn check(&self) -> Result<()> {
                (**self).check()
            }
        }
    };
}

forward_adjust!(Box<dyn Optimiser>);
forward_adjust!(Box<dyn Rule>);

impl Optimiser for Box<dyn Optimiser> {
    fn init(&self, x: &Tensor) -> Result<State> {
        (**self).init(x)
    }

    fn rule_name(&self) -> String {
        (**self).rule_name()
    }

    fn rule_kind(&self) -> Kind {
        (**self).rule_kind()
    }

    fn master(&self, state: &State, x: &Tensor) -> Result<Tensor> {
        (**self).master(state, x)
    }

    fn set_master(&self, state: &mut State, x: &Tensor, values: &Tensor) -> Result<()> {
        (**self).set_master(state, x, values)
    }

    fn seen(&self, state: &State, x: &Tensor) -> Result<Tensor> {
        (**self).seen(state, x)
    }

    fn expect_rounded(&self, state: &State, target: Target<'_>) -> Result<()> {
        (**self).expect_rounded(state, target)
    }

    fn state_for(&self, state: &State, x: &Tensor) -> Result<State> {
        (**self).state_for(state, x)
    }

    fn end_window(&self, state: &mut State) -> Result<()> {
        (**self).end_window(state)
    }

    fn evaluation(&self, state: &State, x: &Tensor) -> Result<Option<Tensor>> {
        (**self).evaluation(state, x)
    }

    fn plan<'a>(&'a self, state: &'a mut State, target: Target<'a>, dx: Gradient<'a>) -> Result<Planned<'a>> {
        (**self).plan(state, target, dx)
    }
}

impl Rule for Box<dyn Rule> {
    fn init(&self, x: &Tensor) -> Result<State> {
        (**self).init(x)
    }

    fn apply<'a>(&'a self, state: &'a mut State, x: &'a Tensor, dx: Gradient<'a>) -> Result<Flow<'a>> {
        (**self).apply(state, x, dx)
    }

    fn kind(&self) -> Kind {
        (**self).kind()
    }

    fn end_window(&self, state: &mut State) -> Result<()> {
        (**self).end_window(state)
    }

    fn evaluation(&self, state: &State, x: &Tensor) -> Result<Option<Tensor>> {
        (**self).evaluation(state, x)
    }
}
