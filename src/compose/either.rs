use candle_core::Tensor;

use crate::error::Result;
use crate::rule::{Adjust, FieldValue, Flow, Gradient, Kind, Rule, State};

/// One of two rules, decided at run time, without a box.
///
/// ```
/// use candle_core::{Device, Tensor, Var};
/// use optimisers::{ClipGrad, Descent, Either, Lion, OptimiserChain, setup, update};
///
/// for (by_sign, moved) in [(true, -0.5), (false, -2.0)] {
///     let x = Var::new(&[0f32], &Device::Cpu)?;
///     let rule = if by_sign { Either::Left(Lion::new(0.5)) } else { Either::Right(Descent::new(0.5)) };
///     let mut state = setup(OptimiserChain::new((ClipGrad::new(4.0), rule)), &x)?;
///     update(&mut state, &x, &[("", Tensor::new(&[30f32], &Device::Cpu)?)])?;
///     assert_eq!(x.to_vec1::<f32>()?, [moved]);
/// }
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Debug, PartialEq)]
pub enum Either<A, B> {
    /// The first.
    Left(A),
    /// The second.
    Right(B),
}

impl<A: Rule + Clone, B: Rule + Clone> Either<A, B> {
    fn rule(&self) -> &dyn Rule {
        match self {
            Either::Left(rule) => rule,
            Either::Right(rule) => rule,
        }
    }

    fn rule_mut(&mut self) -> &mut dyn Rule {
        match self {
            Either::Left(rule) => rule,
            Either::Right(rule) => rule,
        }
    }
}

impl<A: Rule + Clone, B: Rule + Clone> Adjust for Either<A, B> {
    fn name(&self) -> String {
        self.rule().name()
    }

    fn fields(&self) -> Vec<(&'static str, FieldValue)> {
        self.rule().fields()
    }

    fn places(&self) -> Vec<String> {
        self.rule().places()
    }

    fn set_field(&mut self, field: &str, value: FieldValue) -> Result<bool> {
        self.rule_mut().set_field(field, value)
    }

    fn set_fields(&mut self, values: &[FieldValue]) -> Result<()> {
        self.rule_mut().set_fields(values)
    }

    fn defaults(&self) -> Vec<(String, Vec<(&'static str, FieldValue)>)> {
        self.rule().defaults()
    }

    fn check(&self) -> Result<()> {
        self.rule().check()
    }
}

impl<A: Rule + Clone, B: Rule + Clone> Rule for Either<A, B> {
    fn init(&self, x: &Tensor) -> Result<State> {
        self.rule().init(x)
    }

    fn apply<'a>(&'a self, state: &'a mut State, x: &'a Tensor, dx: Gradient<'a>) -> Result<Flow<'a>> {
        self.rule().apply(state, x, dx)
    }

    fn kind(&self) -> Kind {
        self.rule().kind()
    }

    fn end_window(&self, state: &mut State) -> Result<()> {
        self.rule().end_window(state)
    }

    fn evaluation(&self, state: &State, x: &Tensor) -> Result<Option<Tensor>> {
        self.rule().evaluation(state, x)
    }
}

impl<R: Rule + Clone> Adjust for Option<R> {
    fn name(&self) -> String {
        self.as_ref().map_or("None".to_string(), Adjust::name)
    }

    fn fields(&self) -> Vec<(&'static str, FieldValue)> {
        self.as_ref().map_or(Vec::new(), Adjust::fields)
    }

    fn places(&self) -> Vec<String> {
        self.as_ref().map_or(Vec::new(), Adjust::places)
    }

    fn set_field(&mut self, field: &str, value: FieldValue) -> Result<bool> {
        self.as_mut().map_or(Ok(false), |rule| rule.set_field(field, value))
    }

    fn set_fields(&mut self, values: &[FieldValue]) -> Result<()> {
        self.as_mut().map_or(Ok(()), |rule| rule.set_fields(values))
    }

    fn defaults(&self) -> Vec<(String, Vec<(&'static str, FieldValue)>)> {
        self.as_ref().map_or(Vec::new(), Adjust::defaults)
    }

    fn check(&self) -> Result<()> {
        self.as_ref().map_or(Ok(()), Adjust::check)
    }
}

/// `None` is the identity.
impl<R: Rule + Clone> Rule for Option<R> {
    fn init(&self, x: &Tensor) -> Result<State> {
        self.as_ref().map_or(Ok(State::empty()), |rule| rule.init(x))
    }

    fn apply<'a>(&'a self, state: &'a mut State, x: &'a Tensor, dx: Gradient<'a>) -> Result<Flow<'a>> {
        match self {
            None => Ok(Flow::Step(dx)),
            Some(rule) => rule.apply(state, x, dx),
        }
    }

    fn kind(&self) -> Kind {
        self.as_ref().map_or(Kind::Elementwise, |rule| rule.kind())
    }

    fn end_window(&self, state: &mut State) -> Result<()> {
        self.as_ref().map_or(Ok(()), |rule| rule.end_window(state))
    }

    fn evaluation(&self, state: &State, x: &Tensor) -> Result<Option<Tensor>> {
        self.as_ref().map_or(Ok(None), |rule| rule.evaluation(state, x))
    }
}
