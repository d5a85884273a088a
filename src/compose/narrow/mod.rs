//! Optimisers that train a low-precision parameter without a whole high-precision copy.

mod kahan;
mod split;
mod stochastic;

pub use kahan::Kahan;
pub use split::SplitMaster;
pub use stochastic::StochasticRounding;

/// Implements `Adjust` and `Optimiser` for a struct with a rule `inner`, from its inherent functions `wraps` (whether it treats a parameter
/// of this dtype specially), `own_state`, `store`, `whole` and `set_whole` (parameter and own tensor as one number), and `seen_by_rule` (what of that
/// number is x to the rule).
macro_rules! wrapper {
    ($Wrapper:ident, own fields: [$($field:ident),*]) => {
        impl<R: Rule + Clone> $Wrapper<R> {
            /// The rule inside.
            pub fn inner(&self) -> &R {
                &self.inner
            }
        }

        impl<R: Rule + Clone> Adjust for $Wrapper<R> {
            fn name(&self) -> String {
                format!(concat!(stringify!($Wrapper), "({})"), self.inner.name())
            }

            fn fields(&self) -> Vec<(&'static str, FieldValue)> {
                let own: Vec<(&'static str, FieldValue)> = vec![$((stringify!($field), self.$field.into())),*];
                own.into_iter().chain(self.inner.fields()).collect()
            }

            fn places(&self) -> Vec<String> {
                let own: Vec<String> = vec![$(stringify!($field).to_string()),*];
                own.into_iter().chain(self.inner.places()).collect()
            }

            fn set_field(&mut self, field: &str, value: FieldValue) -> Result<bool> {
                $(if field == stringify!($field) {
                    set(&mut self.$field, value).map_err(|expected| wrong_type(self, field, expected, value))?;
                    self.inner.set_field(field, value)?;
                    return Ok(true);
                })*
                self.inner.set_field(field, value)
            }

            #[allow(unused_mut)]
            fn set_fields(&mut self, values: &[FieldValue]) -> Result<()> {
                let mut values = values;
                $(if let Some((value, rest)) = values.split_first() {
                    set(&mut self.$field, *value).map_err(|expected| wrong_type(self, stringify!($field), expected, *value))?;
                    values = rest;
                })*
                self.inner.set_fields(values)
            }

            fn defaults(&self) -> Vec<(String, Vec<(&'static str, FieldValue)>)> {
                // A seed has no default.
                let own: Vec<(&'static str, FieldValue)> = vec![$((stringify!($field), self.$field.into())),*];
                std::iter::once((stringify!($Wrapper).to_string(), own)).chain(self.inner.defaults()).collect()
            }

            fn check(&self) -> Result<()> {
                self.inner.check()
            }
        }

        impl<R: Rule + Clone> Optimiser for $Wrapper<R> {
            fn init(&self, x: &Tensor) -> Result<State> {
                self.check()?;
                if !Self::wraps(x.dtype())? {
                    return Rule::init(&self.inner, x);
                }
                Ok(Self::own_state(x)?.around(self.inner.init(x)?))
            }

            fn rule_name(&self) -> String {
                self.inner.name()
            }

            fn rule_kind(&self) -> Kind {
                self.inner.kind()
            }

            fn end_window(&self, state: &mut State) -> Result<()> {
                match &mut state.children[..] {
                    [Child { prefix: None, state: inner }] => Rule::end_window(&self.inner, inner),
                    _ => Rule::end_window(&self.inner, state),
                }
            }

            fn master(&self, state: &State, x: &Tensor) -> Result<Tensor> {
                match &state.tensors[..] {
                    [(_, own)] if Self::wraps(x.dtype())? => Self::whole(x, own),
                    _ => Ok(x.copy()?),
                }
            }

            fn evaluation(&self, state: &State, x: &Tensor) -> Result<Option<Tensor>> {
                match &state.children[..] {
                    [Child { prefix: None, state: inner }] => Rule::evaluation(&self.inner, inner, &self.master(state, x)?),
                    _ => Rule::evaluation(&self.inner, state, x),
                }
            }

            fn set_master(&self, state: &mut State, x: &Tensor, values: &Tensor) -> Result<()> {
                match &mut state.tensors[..] {
                    [(_, own)] if Self::wraps(x.dtype())? => Self::set_whole(x, own, values),
                    _ => Ok(set_tensor(x, values)?),
                }
            }

            fn seen(&self, state: &State, x: &Tensor) -> Result<Tensor> {
                match &state.tensors[..] {
                    [(_, own)] if Self::wraps(x.dtype())? => Self::seen_by_rule(x, own),
                    _ => Ok(x.clone()),
                }
            }

            fn plan<'a>(&'a self, state: &'a mut State, target: Target<'a>, dx: Gradient<'a>) -> Result<Planned<'a>> {
                if !Self::wraps(target.x.dtype())? {
                    return Optimiser::plan(&self.inner, state, target, dx);
                }
                let State { tensors, counters, children, .. } = state;
                let [inner] = &mut children[..] else {
                    return Err(Error::other(concat!("a state of ", stringify!($Wrapper), " without its rule's")));
                };
                let flow = self.inner.apply(&mut inner.state, target.x, dx)?;
                self.store(flow, target, tensors, counters)
            }
        }
    };
}
use wrapper;
