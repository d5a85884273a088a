//! Steps that are next to nothing but a root and a quotient, which bound the arithmetic of Adam, and steps of
//! multiplications: whether both go on at the same time.

use optimisers::{
    Arithmetic, Describe, Describer, Flow, Gradient, Parameter, Parts, Result, Rule, State, value::Value,
};

/// How many multiplications there are. By themselves they take about half as long as a root and a quotient.
const PRODUCTS: usize = 8;

/// dx / √(x² + 1) + dx·c·c·…, or one of both terms.
#[derive(Clone, Copy, Debug)]
pub struct Terms<const DIVIDED: bool, const MULTIPLIED: bool>;

impl<const DIVIDED: bool, const MULTIPLIED: bool> Arithmetic for Terms<DIVIDED, MULTIPLIED> {
    type Slots<T> = [T; 0];

    #[inline(always)]
    fn step<V: Value>(self, x: V, dx: V, _: &mut [V; 0]) -> V {
        let quotient = if DIVIDED { dx / (x * x + 1.0).sqrt() } else { dx };
        if MULTIPLIED {
            (0..PRODUCTS).fold(dx, |product, _| product * 1.01) + quotient
        } else {
            quotient
        }
    }
}

impl<const DIVIDED: bool, const MULTIPLIED: bool> Describe for Terms<DIVIDED, MULTIPLIED> {
    fn describe(&mut self, rule: &mut Describer<'_>) {
        rule.kind("Terms");
    }
}

impl<const DIVIDED: bool, const MULTIPLIED: bool> Rule for Terms<DIVIDED, MULTIPLIED> {
    fn init(&self, x: Parameter<'_>) -> Result<State> {
        State::for_slots(x, &[])
    }

    fn apply<'a>(&'a self, state: &'a mut State, _x: Parameter<'a>, dx: Gradient<'a>) -> Result<Flow<'a>> {
        let Parts { slots, .. } = state.parts();
        Ok(Flow::Step(dx.map(*self, slots)))
    }
}
